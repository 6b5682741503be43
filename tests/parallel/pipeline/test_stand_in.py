"""Nets that use what is absent, in many ways: each is an error that names it; none trains on wrong numbers."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.base.errors import PlanError
from shardwise.parallel.pipeline.cut import cut
from tests.parallel.pipeline.absent_nets import TOKENS, WIDTH, Net
from tests.parallel.pipeline.chain import forward_backward
from tests.parallel.pipeline.ordinary import Doubled


class NormFirst(Net):
    """BART's way: a norm that is registered behind the blocks and used before them."""

    def __init__(self) -> None:
        super().__init__()
        self.front_norm = nn.LayerNorm(WIDTH)

    def begin(self, tokens: Tensor) -> Tensor:
        return self.front_norm(self.embed(tokens))


class HeadFirst(Net):
    """CamemBERT's way: the head is registered before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        blocks = self.blocks
        del self.blocks
        self.head = nn.Linear(WIDTH, 3)
        self.blocks = blocks

    def end(self, x: Tensor) -> Tensor:
        return self.head(x).logsumexp(-1).mean()


class Looped(Net):
    """The blocks run twice."""

    def walk(self, x: Tensor) -> Tensor:
        return super().walk(super().walk(x))


class EachTwice(Net):
    def walk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(block(x))
        return x


class Backwards(Net):
    def walk(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Skips(Net):
    """A block is left out."""

    def walk(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = x if i == 0 else block(x)
        return x


class Attributes(Net):
    """Side losses kept on blocks, in a number that becomes a tensor."""

    def end(self, x: Tensor) -> Tensor:
        return super().end(x) + sum(block.aux for block in self.blocks)


class Tensors(Net):
    """The same in an attribute that begins as None."""

    def end(self, x: Tensor) -> Tensor:
        return super().end(x) + sum(b.kept.mean() for b in self.blocks if b.kept is not None)

    def walk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.kept = x = block(x)
        return x


class Sink(Net):
    """Side losses in a list that every block is given."""

    def walk(self, x: Tensor) -> Tensor:
        self.sink: list[Tensor] = []
        for block in self.blocks:
            x = block(x, self.sink)
        return x

    def end(self, x: Tensor) -> Tensor:
        return super().end(x) + torch.stack([each.square().mean() for each in self.sink]).mean()


class Hooked(Net):
    """Side losses kept by hooks on what is inside the blocks: how transformers collects router logits."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        for block in self.blocks:
            block.inner.register_forward_hook(lambda m, a, o: self.kept.append(o))

    def forward(self, tokens: Tensor) -> Any:
        self.kept.clear()
        return super().forward(tokens) + sum(each.square().mean() for each in self.kept)


class HookedLate(Net):
    """The same, with hooks that the first pass installs."""

    def forward(self, tokens: Tensor) -> Any:
        kept: list[Tensor] = []
        handles = [
            m.register_forward_hook(lambda m, a, o: kept.append(o))
            for m in self.modules()
            if isinstance(m, nn.Linear)
        ]
        try:
            return super().forward(tokens) + sum(each.square().mean() for each in kept)
        finally:
            for handle in handles:
                handle.remove()


class Compiled(Net):
    """The embedding goes past the blocks through a compiled function."""

    def end(self, x: Tensor) -> Tensor:
        return torch.compile(lambda a, b: (a * b).mean(), backend="eager")(x, self.begin(TOKENS) > 0)


class States(Net):
    """The mean over what every block returned."""

    def walk(self, x: Tensor) -> Tensor:
        states = []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return torch.stack(states).mean(0)


class Catches(Net):
    """The model's own handler takes the error for something else."""

    def end(self, x: Tensor) -> Tensor:
        try:
            return super().end(x) * float(self.embed(TOKENS).max())
        except Exception:
            return super().end(x)


def penalty(net: Net, first: Tensor, x: Tensor) -> Tensor:
    return x + 1e-3 * torch.stack([p.square().sum() for p in net.parameters()]).sum()


def masked(net: Net, first: Tensor, x: Tensor) -> Tensor:
    y = x.clone()
    y[first > 0] = 0
    return y


def scratch(net: Net, first: Tensor, x: Tensor) -> Tensor:
    room = torch.zeros_like(x)
    room[:, 1:] = first[:, 1:]
    return x + room.nan_to_num()


def remembers(net: Net, first: Tensor, x: Tensor) -> Tensor:
    net.moving.mul_(0.9).add_(0.1 * first.detach().nan_to_num().mean((0, 1)))
    return x * net.moving


def sorts(net: Net, first: Tensor, x: Tensor) -> Tensor:
    return x.gather(1, first.argsort(1))


def branch(net: Net, first: Tensor, x: Tensor) -> Tensor:
    return x * 2 if bool((first > 0).any()) else x


def through_numpy(net: Net, first: Tensor, x: Tensor) -> Tensor:
    return x * torch.from_numpy(first.detach().numpy() > 0)


def inside_a_block(net: Net, first: Tensor, x: Tensor) -> Tensor:
    return x * net.blocks[0].inner.weight.gt(0).sum()


def state_dict(net: Net, first: Tensor, x: Tensor) -> Tensor:
    return x + sum((v > 0).sum() for v in net.state_dict().values())


USES: dict[str, Callable[[], nn.Module]] = {
    name: (lambda use=use: Net(use))
    for name, use in {
        "sum": lambda net, first, x: x + first,
        "comparison": lambda net, first, x: x * (first > 0),
        "argmax": lambda net, first, x: x + first.argmax(-1, keepdim=True),
        "nan_to_num": lambda net, first, x: x + first.nan_to_num(),
        "where": lambda net, first, x: torch.where(first > 0, x, -x),
        "masked_fill": lambda net, first, x: x.masked_fill(first > 0, 0),
        "norm": lambda net, first, x: x * first.norm().nan_to_num(),
        "isnan": lambda net, first, x: x * first.isnan(),
        "sort": sorts,
        "topk": lambda net, first, x: x.gather(-1, first.topk(2).indices),
        "clamp": lambda net, first, x: x + first.clamp(0, 1).nan_to_num(0.5),
        "maximum": lambda net, first, x: torch.fmax(x, first),
        "nansum": lambda net, first, x: x + first.nansum(),
        "round to integers": lambda net, first, x: x + first.sign().long(),
        "custom function": lambda net, first, x: x + Doubled.apply(first).nan_to_num(),
        "checkpoint": lambda net, first, x: checkpoint(torch.fmax, x, first, use_reentrant=False),
        "vmap": lambda net, first, x: torch.func.vmap(lambda a, b: a * (b > 0))(x, first),
        "item": lambda net, first, x: x * float(first.max() > 0),
        "branch": branch,
        "tolist": lambda net, first, x: x * (sum(first[0, 0].tolist()) > 0),
        "numpy": through_numpy,
        "index of a list": lambda net, first, x: x * [1.0, 2.0][int(first.flatten().argmax() > 3)],
        "shape of a mask": lambda net, first, x: x * len(first[first > 0]),
        "write into a tensor": scratch,
        "write through a mask": masked,
        "moving average": remembers,
        "scatter": lambda net, first, x: x.scatter(1, first.argsort(1), 0.5),
        "parameter": lambda net, first, x: x * (net.embed.weight > 0).sum(),
        "parameter by name": lambda net, first, x: x + (net.get_parameter("embed.weight") > 0).sum(),
        "parameter inside a block": inside_a_block,
        "penalty": penalty,
        "state_dict": state_dict,
        "module again": lambda net, first, x: x + (net.embed(TOKENS) > 0),
        "block past its forward": lambda net, first, x: x + (net.blocks[0].inner(x) > 0),
        "text": lambda net, first, x: x * float(f"{first.mean():.3f}"),
    }.items()
} | {
    cls.__name__: cls  # type: ignore[dict-item]
    for cls in (NormFirst, HeadFirst, Looped, EachTwice, Backwards, Skips, Attributes, Tensors, Sink, Hooked,
                HookedLate, Compiled, States, Catches)
}  # fmt: skip


def test_there_are_forty() -> None:
    assert len(USES) >= 40


@pytest.mark.parametrize(
    ("name", "starts"), list(itertools.product(USES, [("blocks.2",), ("blocks.1", "blocks.2", "blocks.3")]))
)
def test_every_use_of_what_is_absent_is_an_error_that_names_it(name: str, starts: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    net = USES[name]().double()
    stages = cut(net, starts, range(len(starts) + 1))
    with pytest.raises(PlanError) as caught:
        forward_backward(stages, lambda model: model(TOKENS))
    said = str(caught.value)
    named = ("embed", "blocks.", "norm", "head", "aux", "parameter")
    assert "stage" in said and "list of layers" in said and any(f"{each}" in said for each in named), said


def test_the_error_names_module_and_line() -> None:
    net = Net(lambda net, first, x: x + first.nan_to_num()).double()
    stages = cut(net, ("blocks.2",), [0, 1])
    with pytest.raises(PlanError) as caught:
        forward_backward(stages, lambda model: model(TOKENS))
    said = str(caught.value)
    assert "the output of 'embed', which lives on another stage, reaches the result" in said
    assert "in the forward pass of 'the model' (Net), at " in said and "test_stand_in.py:" in said


def test_later_passes_of_a_kind_are_plain_and_other_shapes_are_watched() -> None:
    """No subclass of Tensor, no hook in a pass whose kind was seen."""
    seen: list[type] = []
    net = Net(lambda net, first, x: (seen.append(type(first)), x)[1]).double()
    (stage,) = cut(net, ("blocks.2",), [1]).values()
    received = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    for tokens in (TOKENS, TOKENS, TOKENS[:, :3]):
        stage.run(lambda model, tokens=tokens: model(tokens), received[:, : tokens.shape[1]])
    assert [kind.__name__ for kind in seen] == ["AbsentTensor", "Tensor", "AbsentTensor"]
    assert not stage.module.blocks[2]._forward_hooks and not stage.module.blocks[2]._forward_pre_hooks


def test_the_exceptions_of_a_model_itself_stay_what_they_are() -> None:
    def fails(net: Net, first: Tensor, x: Tensor) -> Tensor:
        raise ZeroDivisionError("the user's own")

    stages = cut(Net(fails).double(), ("blocks.2",), [0, 1])
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        forward_backward(stages, lambda model: model(TOKENS))


def test_a_model_that_writes_into_outputs_of_blocks_keeps_what_was_received() -> None:
    class InPlace(Net):
        def walk(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                x *= 2
            return x

    torch.manual_seed(0)
    net = InPlace().double()
    wanted = float(net(TOKENS).detach())
    stages = cut(net, ("blocks.1", "blocks.3"), range(3))
    for _ in range(3):
        assert float(forward_backward(stages, lambda model: model(TOKENS))) == pytest.approx(
            wanted, rel=1e-12
        )


def test_loss_functions_may_ask_for_shapes_of_foreign_weights() -> None:
    net = Net(lambda net, first, x: x / sum(p.numel() for p in net.parameters())).double()
    stages = cut(net, ("blocks.2",), [0, 1])
    wanted = net(TOKENS).detach()
    assert float(forward_backward(stages, lambda model: model(TOKENS))) == pytest.approx(
        float(wanted), rel=1e-12
    )
    assert F.mse_loss(wanted, wanted) == 0
