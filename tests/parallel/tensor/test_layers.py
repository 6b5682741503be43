"""Cut layers in nets of the user's own: what they keep of the layer that they replace, and where they are not whole."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from shardwise.comm.world import World
from shardwise.models.gpt import Gpt
from shardwise.parallel.tensor.apply import make_parallel, table_of
from shardwise.parallel.tensor.layout import StyleTable
from shardwise.parallel.tensor.region import ParallelRegion
from tests.engine.nets import Language, seeded
from tests.models.shapes import LLAMA, restless, tokens
from tests.parallel.tensor.test_layout import NET
from tests.parallel.tensor.whole import TOLERANCE, differences, tensor_group, worst


class Net(nn.Module):
    """Embedding with a padding token, two kinds of linear layers, attributes that count, a head with a bias."""

    def __init__(self, vocabulary: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 6, padding_idx=vocabulary - 1)
        self.fused = Conv1D(3 * 8, 6)
        self.widths = (8, 8, 8)
        self.out = Conv1D(6, 8)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10, bias=False)
        self.down = nn.Linear(10, 6)
        self.head = nn.Linear(6, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        a, b, c = self.fused(x).split(self.widths, -1)
        x = x + self.out(torch.tanh(a) * b + c)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


ROWS = {
    "": "widths",
    "embed": "vocabulary",
    "fused": "column 8+8+8",
    "out": "row",
    "norm": "sequence",
    "up": "column",
    "down": "row",
    "head": "head",
}


def net_gradients(world: World, frozen: str, sequence: bool, pieces: int = 1) -> dict[str, float]:
    given = torch.arange(16).view(2, 8) * 7 % 11

    def build() -> nn.Module:
        model: nn.Module = seeded(Net)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (frozen and name.startswith(frozen)))
        return model

    return differences(world, build, lambda model: model(given, given.flip(0)), sequence, ROWS, pieces)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("frozen", ["", "fused", "down", "up", "embed", "head"])
def test_a_net_of_the_users_own(ranks: Any, frozen: str, sequence: bool) -> None:
    """Transposed and fused layers, a padding token on the last rank, a vocabulary of 11, frozen layers."""
    distance, where = worst(ranks(2).run(net_gradients, frozen, sequence))
    assert distance <= TOLERANCE, where


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_the_same_net_in_pieces(ranks: Any, sequence: bool) -> None:
    """3 pieces of 4 tokens a rank, also of transposed weights; the ranks hold 6 and 5 rows of the vocabulary."""
    distance, where = worst(ranks(2).run(net_gradients, "", sequence, 3))
    assert distance <= TOLERANCE, where


def language_gradients(world: World, sequence: bool) -> dict[str, float]:
    given = torch.arange(16).view(2, 8) * 7 % 11
    rows = NET | {"blocks.0": "enter", "norm": "sequence leave"}
    return differences(
        world, lambda: seeded(Language, 2, width=7), lambda model: model(given, given.flip(0)), sequence, rows
    )


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_the_sequence_is_cut_between_enter_and_leave(ranks: Any, sequence: bool) -> None:
    distance, where = worst(ranks(2).run(language_gradients, sequence))
    assert distance <= TOLERANCE, where


def checkpointed(world: World, sequence: bool) -> dict[str, float]:
    """Blocks computed again in a backward pass, with a pass without gradients in between."""

    def wrapped(module: nn.Module) -> Callable[..., Any]:
        forward = module.forward
        return lambda *args: checkpoint(forward, *args, use_reentrant=False)

    def loss_of(model: nn.Module) -> Tensor:
        assert isinstance(model, Gpt)
        for block in model.blocks:
            block.forward = wrapped(block)
        loss: Tensor = model(tokens(2, 8), tokens(2, 8))
        with torch.no_grad():
            model(tokens(2, 7))
        return loss

    return differences(world, lambda: restless(LLAMA, torch.float64), loss_of, sequence)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_blocks_may_be_computed_again(ranks: Any, sequence: bool) -> None:
    distance, where = worst(ranks(2).run(checkpointed, sequence))
    assert distance <= TOLERANCE, where


def kept(world: World) -> None:
    model, calls = Net(), []
    model.up.register_forward_hook(lambda *args: calls.append("after"))
    model.up.register_forward_pre_hook(lambda *args: calls.append("before"))
    model.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    group = tensor_group(world)
    region = ParallelRegion(group, True)
    make_parallel(model, table_of(model, ROWS), group, True, region)
    given = torch.arange(16).view(2, 8) % 11
    with torch.no_grad():
        model(given, given)
        assert not region.cut, "past the model's forward and without gradients"
    assert calls == ["before", "after"]
    assert not model.up.training
    model(given, given).backward()
    optimizer.step()  # of the same Parameter objects
    assert model.widths == (4, 4, 4)
    assert "[5, 6], 1 of 2" in repr(model.up)


def test_hooks_mode_and_parameter_objects_survive(ranks: Any) -> None:
    ranks(2).run(kept)


def autocasting(world: World) -> list[Any]:
    model = seeded(Net, dtype=torch.float32)
    make_parallel(model, table_of(model, ROWS), tensor_group(world), True)
    given = torch.arange(16).view(2, 8) % 11
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(given, given)
    loss.backward()
    return [float(loss.detach()), {str(p.grad.dtype) for p in model.parameters() if p.grad is not None}]


def test_autocast(ranks: Any) -> None:
    whole = seeded(Net, dtype=torch.float32)
    given = torch.arange(16).view(2, 8) % 11
    with torch.autocast("cpu", torch.bfloat16):
        expected = float(whole(given, given).detach())
    for loss, dtypes in ranks(2).run(autocasting):
        assert loss == pytest.approx(expected, rel=2e-2)
        assert dtypes == {"torch.float32"}


def alone(world: World) -> bool:
    model = Net()
    before = dict(model.named_modules())
    make_parallel(model, StyleTable(ROWS), world_of_one(world), True)
    return all(module is before[name] for name, module in model.named_modules())


def world_of_one(world: World) -> Any:
    group = tensor_group(world)
    return type(group)(group.axis, group.ranks[:1], 0, None, group.clock, group.traffic)


def test_one_rank_changes_nothing(ranks: Any) -> None:
    assert ranks(2).run(alone) == [True, True]


def compiled(world: World) -> list[float]:
    losses = []
    for compiles in (False, True):
        model = restless(LLAMA)
        make_parallel(model, table_of(model), tensor_group(world), True)
        if compiles:
            for block in model.blocks:
                block.forward = torch.compile(block.forward, backend="aot_eager")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            loss = model(tokens(2, 8), tokens(2, 8))
        loss.backward()
        losses += [
            float(loss.detach()),
            float(sum(p.grad.norm() for p in model.parameters() if p.grad is not None)),
        ]
    return losses


def test_the_compiler_goes_round_the_collectives(ranks: Any) -> None:
    """Traced into, they fail in the middle of an exchange."""
    for loss, norm, compiled_loss, compiled_norm in ranks(2).run(compiled):
        assert compiled_loss == pytest.approx(loss, rel=1e-5)
        assert compiled_norm == pytest.approx(norm, rel=1e-5)
