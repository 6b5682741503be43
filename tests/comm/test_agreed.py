"""Messages without headers, as between devices, on host tensors over gloo: what is agreed, what changes, what fails."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import CommError, PlanError, ShardwiseError
from shardwise.comm import peers
from shardwise.comm.agreed import MessageHeaders
from shardwise.comm.collectives import Group
from shardwise.comm.peers import TorchWire
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.watching import watch
from shardwise.comm.world import World
from shardwise.parallel.expert.module import MixtureOfExperts
from shardwise.parallel.expert.policy import RouterPolicy
from shardwise.parallel.pipeline.messages import is_lasting, likeness, pack
from tests.ranks import RankPool

INTERLEAVED = {
    "mesh": {"pp": 2},
    "pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2},
    "batch": {"accumulation": 4},
    "comm": {"transport": "torch"},
    "precision": "fp64",
}


def net_of(hook: Callable[[Tensor], Tensor] | None = None, has_experts: bool = False) -> nn.Module:
    class Block(nn.Module):
        def __init__(self, last: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.last = last
            policy = RouterPolicy(top_k=1, balance="loss", balance_weight=1.0)
            self.mixture = MixtureOfExperts(3, 2, 2, policy) if has_experts else None

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.linear(x))
            x = x if self.mixture is None else x + self.mixture(x[None])[0]
            return hook(x) if hook is not None and self.last else x

    torch.manual_seed(0)
    return nn.Sequential(*(Block(i == 1) for i in range(4))).double()


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()


def batches(step: int, rows: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(rows + i % 2, 3, generator=generator, dtype=torch.float64) for i in range(4)]


def headers_in(
    world: World, config: dict[str, Any], agrees: bool
) -> tuple[list[int], list[float], list[int]]:
    """Headers sent in each step, norms of the steps, how many receives stood posted at a time."""
    counts, norms, posted = [], [], [0]
    with pytest.MonkeyPatch.context() as patch:
        build = TorchWire.__init__
        patch.setattr(TorchWire, "__init__", lambda self, *a, **k: build(self, *a, agrees=agrees))
        seen = [0]
        send, expect = TorchWire.send, peers.PointToPoint.expect

        def counted(self: TorchWire, *args: Any) -> Any:
            seen[0] += 1
            return send(self, *args)

        def expected(self: peers.PointToPoint, *args: Any) -> bool:
            found = expect(self, *args)
            posted[0] = max(posted[0], len(self._ahead))
            return found

        patch.setattr(TorchWire, "send", counted)
        patch.setattr(peers.PointToPoint, "expect", expected)
        model = net_of(has_experts=True)
        engine = shardwise.initialize(model, config, loss=loss_of, world=world.among((0, 1)))
        for step, rows in enumerate((2, 2, 5, 2, 5)):
            seen[0] = 0
            norms.append(engine.train_step(batches(step, rows)).grad_norm)
            counts.append(seen[0])
            engine.evaluate([(batch, 1.0) for batch in batches(9)])
        engine.close()
    return counts, norms, posted


def test_shapes_are_told_once(ranks: Callable[[int], RankPool]) -> None:
    """From the second step on only the end of a walk is told by a header; other shapes are told when they come. What
    stages with experts tell one another of the loss is a number in the message."""
    known = ranks(2).run(headers_in, INTERLEAVED, True)
    described = ranks(2).run(headers_in, INTERLEAVED, False)
    for (counts, norms, posted), (usual, expected, none) in zip(known, described, strict=True):
        assert norms == expected
        first, second, wider, again, wider_again = counts
        assert first == wider == usual[0] and usual == [usual[0]] * 5
        assert second == again == wider_again and second <= 1
        assert posted[0] >= 2 and none == [0]


def failing(world: World, what: str) -> tuple[str, str]:
    """What this rank's third step raised, and its fourth."""
    has_begun = False

    def hook(x: Tensor) -> Tensor:
        if not has_begun:
            return x
        if what == "shapes":
            return torch.cat([x, x])
        raise ValueError("no more")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "_TICK_S", 0.1)
        build = TorchWire.__init__
        patch.setattr(TorchWire, "__init__", lambda self, *a, **k: build(self, *a, agrees=True))
        engine = shardwise.initialize(net_of(hook), INTERLEAVED, loss=loss_of, world=world)
        for step in range(2):
            engine.train_step(batches(step))
        told, has_begun = [], True
        for step in (2, 3):
            try:
                engine.train_step(batches(step))
                told.append("nothing")
            except (ShardwiseError, ValueError) as error:
                told.append(f"{type(error).__name__}: {error}")
    return told[0], told[1]


@pytest.mark.parametrize(
    ("what", "own", "others"),
    [
        (
            "shapes",
            "PlanError: activation of stage 1, microbatch 0 is float64[4, 3]",
            "PlanError: activation of stage 1",
        ),
        ("an error", "ValueError: no more", "UsageError: rank 0 ended the pass with ValueError: no more"),
    ],
)
def test_an_error_is_told_to_ranks_that_wait_for_numbers(what: str, own: str, others: str) -> None:
    """Never a mismatch in silence, and no rank waits for ever; the exchange has ended, as a device's has."""
    pool = RankPool(2)
    try:
        told = pool.run(failing, what)
    finally:
        pool.close()
    culprit = next(i for i, (third, _) in enumerate(told) if third.startswith(own))
    third, fourth = told[1 - culprit]
    assert others.replace("rank 0", f"rank {culprit}") in third
    for _, later in told:
        assert later != "nothing"


def test_what_both_ends_know() -> None:
    one, two = MessageHeaders(), MessageHeaders()
    a, b = b'["a","",[["float32",[2],"cpu"]],true]', b'["a","",[["float32",[3],"cpu"]],true]'
    assert not one.is_known("a", 5, a) and two.find("a", 5) is None
    two.agree("a", 5, a)
    assert one.is_known("a", 5, a) and two.find("a", 5) == a and one.hash == two.hash
    assert one.is_known("a", 5, a) and one.hash != two.hash, "a message more is seen"
    with pytest.raises(PlanError, match=r"a is float32\[3\], and was float32\[2\]"):
        one.is_known("a", 5, b)
    passing = b'["c","0.5",[],false]'
    assert not one.is_known("c", 5, passing) and not one.is_known("c", 5, passing)
    assert not one.is_known("a", None, b) and two.find("a", None) is None


def test_other_messages_are_seen_at_the_end_of_a_walk() -> None:
    one, two = (
        peers.PointToPoint(
            Group("pp", (0, 1), i, None, StepClock(0.0), Traffic()),
            {1 - i: TorchWire(1 - i, agrees=True)},
            torch.device("cpu"),
        )
        for i in range(2)
    )
    header = b'["a","",[["float32",[2],"cpu"]],true]'
    one._agreed[1].outward.agree("a", 5, header)
    two._agreed[0].inward.agree("a", 5, header)
    two.check_tally(one.tally(""))
    one.check_tally(two.tally(one.tally("")))
    two._agreed[0].inward.find("a", 5)
    with pytest.raises(
        CommError, match=r"rank 0, step 0: ranks 0>1 of axis 'pp' do not agree on the messages"
    ):
        one.check_tally(two.tally(""))


def test_texts_that_last() -> None:
    x = torch.ones(2)
    assert all(is_lasting(pack(value).text) for value in (x, (x, None), {"tensor": [x, x]}))
    assert is_lasting("") and not any(
        is_lasting(pack(value).text) for value in ((x, 3), {"tensor": 2.5}, [x, "text"], True)
    )


def test_likeness() -> None:
    x, y = torch.ones(2, 3), torch.zeros(2, 3)
    assert likeness((x, {"y": 1})) == likeness((y, {"y": 1})) != likeness((y, {"y": 2}))
    assert likeness(x) != likeness(x.double()) != likeness(x, "train") and likeness(x.T) != likeness(x)
    assert likeness((x, object())) is None
