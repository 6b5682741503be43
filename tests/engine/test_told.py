"""An error of one stage is an error on every rank, at once and in the same words; and the next call begins afresh.

An evaluation whose last stage refused once left the stages before waiting until the deadline: nothing comes back to
them in a pass without gradients. A user's own exception was told in no pass at all.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import NonFiniteError, ShardwiseError, UsageError

X = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).tanh()
        return x


def mean(net: Any, x: Tensor) -> Tensor:
    return net(x).square().mean()


def uses_absent(net: Any, x: Tensor) -> Tensor:
    return net(x).square().mean() + 0.1 * (net.first.weight > 0).sum()


def divides(net: Any, x: Tensor) -> Tensor:
    return net(x).mean() / (1 // int(x[0, 0] < 0))


def in_the_middle(net: Any, x: Tensor) -> Tensor:
    def look(module: nn.Module, args: Any) -> None:
        raise KeyError("the user's own")

    handle = net.blocks[len(net.blocks) // 2].register_forward_pre_hook(look)
    try:
        return net(x).mean()
    finally:
        handle.remove()


def not_a_number(net: Any, x: Tensor) -> Any:
    net(x)
    return 3.0


def detached(net: Any, x: Tensor) -> Tensor:
    return mean(net, x).detach()


def without_grad(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return mean(net, x)


def from_item(net: Any, x: Tensor) -> Tensor:
    return torch.tensor(mean(net, x).item(), dtype=x.dtype)


def nan_beside(net: Any, x: Tensor) -> Tensor:
    return mean(net, x) + torch.tensor(float("nan"))


NO_GRAPH = "without a graph"
BAD: dict[str, tuple[Callable[..., Any], str]] = {
    "absent value": (uses_absent, "parameter 'first.weight', which lives on another stage"),
    "exception": (divides, "ZeroDivisionError"),
    "exception in the middle": (in_the_middle, "the user's own"),
    "no loss": (not_a_number, "there is no loss of one number"),
    "detached": (detached, NO_GRAPH),
    "no_grad": (without_grad, NO_GRAPH),
    "item": (from_item, NO_GRAPH),
    "nan": (nan_beside, "the loss is nan while every gradient is finite"),
}
TRAINING = ("detached", "no_grad", "item", "nan")
"""Of training alone."""

GOOD = [X * i for i in range(1, 5)]
FAILS = [X, X, X, -X]


def told(world: Any, pipeline: dict[str, Any]) -> dict[str, list[str]]:
    """What each call says on this rank; after them steps that must be those of an engine that met no error."""
    config = {
        "precision": "fp64",
        "mesh": {"pp": world.size},
        "pipeline": pipeline,
        "batch": {"accumulation": len(GOOD)},
        "optimizer": {"type": "sgd", "lr": 0.1},
    }
    current = mean

    def begin() -> Any:
        torch.manual_seed(0)
        net = Net(world.size * pipeline.get("virtual_stages", 1)).double()
        return shardwise.initialize(net, config, loss=lambda root, x: current(root, x), world=world)

    engine = begin()
    wanted = [engine.train_step(GOOD).loss for _ in range(2)]
    engine.close()
    engine = begin()
    texts = {}
    for name, (bad, _) in BAD.items():
        current = bad
        texts[name] = []
        calls: list[Callable[..., Any]] = [engine.train_step]
        if name not in TRAINING:
            calls.append(lambda batches: engine.evaluate([(each, 1.0) for each in batches]))
        for call in calls:
            with pytest.raises((ShardwiseError, ZeroDivisionError, KeyError)) as caught:
                call(FAILS)
            texts[name].append(f"{caught.type.__name__}: {caught.value}")
    current = mean
    assert [engine.train_step(GOOD).loss for _ in range(2)] == wanted
    # A branch that the watched passes did not take: NaN, and the second look says whence.
    takes = False
    current = lambda root, x: mean(root, x) + (root.first.bias.sum() if takes else 0)  # noqa: E731
    engine.train_step(GOOD)
    takes = True
    with pytest.raises(NonFiniteError) as nan:
        engine.train_step(GOOD)
    texts["branch"] = [str(nan.value)]
    engine.close()
    return texts


@pytest.mark.parametrize(
    ("size", "pipeline"),
    [(2, {}), (2, {"schedule": "interleaved_1f1b", "virtual_stages": 2}), (3, {"schedule": "gpipe"})],
)
def test_an_error_of_one_stage_is_one_on_all(ranks: Any, size: int, pipeline: dict[str, Any]) -> None:
    by_rank = ranks(size).run(told, pipeline)
    assert len({each["branch"][0] for each in by_rank}) == 1
    assert (
        "parameter 'first.bias', which lives on another stage, reaches the result" in by_rank[0]["branch"][0]
    )
    for name, (_, says) in BAD.items():
        for texts in zip(*(each[name] for each in by_rank), strict=True):
            assert all(says in text for text in texts), texts
            if "exception" in name:  # it stays what it is where it was met
                kinds = {text.partition(":")[0] for text in texts}
                assert UsageError.__name__ in kinds and kinds & {"ZeroDivisionError", "KeyError"}, texts
            else:
                assert len(set(texts)) == 1, texts
