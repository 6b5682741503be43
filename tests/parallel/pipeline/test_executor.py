"""The walk over one rank's list, with stages that are one multiplication each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import UsageError
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic, TrafficCount
from shardwise.comm.world import World
from shardwise.parallel.pipeline.executor import ScheduleExecutor
from shardwise.parallel.pipeline.passes import add_communication
from shardwise.parallel.pipeline.schedules import schedule
from shardwise.plan.action import Action, Kind
from shardwise.plan.mesh import Mesh
from shardwise.plan.trace import Trace
from shardwise.plan.walker import Walker
from tests.parallel.pipeline.closed_forms import messages

MICROBATCHES, ELEMENTS = 5, 3


class Product:
    """Multiplies by the stage's number + 2; the loss is the sum."""

    def __init__(self, stages: int):
        self.stages = stages
        self.weights = {stage: torch.tensor(stage + 2.0, requires_grad=True) for stage in range(stages)}
        self.said: set[tuple[int, int, float | None]] = set()

    def forward(self, stage: int, microbatch: int, received: Any) -> Any:
        x = torch.full((ELEMENTS,), float(microbatch)) if stage == 0 else received
        y = self.weights[stage] * x
        return y.sum() if stage == self.stages - 1 else y

    def backward(
        self, stage: int, microbatch: int, run: Callable[[Tensor | None], None], said: Tensor | None
    ) -> Tensor:
        self.said.add((stage, microbatch, None if said is None else float(said)))
        run(torch.ones(()) if stage == self.stages - 1 else None)
        return torch.tensor(microbatch / 3, dtype=torch.float64) if said is None else said


def walker_of(stages: ScheduleExecutor, actions: list[Action]) -> Walker:
    handlers = {
        Kind.F: stages.forward,
        Kind.B: stages.backward,
        Kind.SEND: stages.send,
        Kind.RECV: stages.receive,
    }
    walker = Walker(handlers, Trace())
    walker.begin(actions)
    return walker


def walked(world: World) -> tuple[dict[int, float], dict[int, float], dict[Any, TrafficCount], set[Any]]:
    traffic, policy = Traffic(), CommPolicy(timeout_s=30)
    group = world.group(Mesh(pp=world.size), "pp", policy, StepClock(30.0), traffic)
    lists = add_communication(schedule("interleaved_1f1b", world.size, MICROBATCHES, 2), world.size)
    runner = Product(2 * world.size)
    stages = ScheduleExecutor(world.peers(group, policy), 2 * world.size)
    walker = walker_of(stages, lists[world.rank])
    losses = stages.run(walker, runner)
    assert walker.trace.actions == lists[world.rank]
    gradients = {s: float(w.grad) for s, w in runner.weights.items() if w.grad is not None}
    return {i: float(loss) for i, loss in losses.items()}, gradients, dict(traffic.counts), runner.said


@pytest.mark.parametrize("size", [2, 3])
def test_losses_gradients_and_messages(ranks: Any, size: int) -> None:
    """As many messages as the closed form says, one half of them activations, the other gradients."""
    results = ranks(size).run(walked)
    product = float(torch.arange(2, 2 * size + 2).prod())
    assert results[-1][0] == {i: product * i * ELEMENTS for i in range(MICROBATCHES)}
    found = {stage: gradient for _, gradients, *_ in results for stage, gradient in gradients.items()}
    total = product * sum(range(MICROBATCHES)) * ELEMENTS
    assert found == pytest.approx({stage: total / (stage + 2) for stage in range(2 * size)})
    said = {
        (s, i, None if s == 2 * size - 1 else i / 3) for s in range(2 * size) for i in range(MICROBATCHES)
    }
    assert (
        set().union(*(said for *_, said in results)) == said
    )  # what the last stage says, on every one before it
    for purpose in ("activations", "gradients"):
        sent = [counts.get(("send", purpose, "pp"), TrafficCount()) for _, _, counts, _ in results]
        kinds = 1 + (purpose == "gradients")  # a number beside them, of another dtype, is counted by itself
        number = messages(size, MICROBATCHES, 2) / 2
        assert sum(count.calls for count in sent) == number * kinds
        assert sum(count.elements for count in sent) == number * (ELEMENTS + kinds - 1)


class Fails(Product):
    """Ends the last backward pass of one stage with an error."""

    def __init__(self, stages: int, culprit: int):
        super().__init__(stages)
        self.culprit = culprit

    def backward(
        self, stage: int, microbatch: int, run: Callable[[Tensor | None], None], said: Tensor | None
    ) -> Tensor:
        if (stage, microbatch) == (self.culprit, MICROBATCHES - 1):
            raise UsageError(f"stage {stage} cannot")
        return super().backward(stage, microbatch, run, said)


def failed_at_the_end(world: World, culprit: int) -> str:
    policy = CommPolicy(timeout_s=30)
    group = world.group(Mesh(pp=world.size), "pp", policy, StepClock(30.0), Traffic())
    lists = add_communication(schedule("1f1b", world.size, MICROBATCHES, 1), world.size)
    executor = ScheduleExecutor(world.peers(group, policy), world.size)
    with pytest.raises(UsageError) as caught:
        executor.run(walker_of(executor, lists[world.rank]), Fails(world.size, culprit))
    executor.run(walker_of(executor, lists[world.rank]), Product(world.size))  # with nothing left in between
    return str(caught.value)


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_error_in_the_last_backward_reaches_ranks_that_expect_no_message(ranks: Any, culprit: int) -> None:
    """The stages behind it have sent and received all of theirs; they would wait in the step's sums."""
    assert ranks(3).run(failed_at_the_end, culprit) == [f"stage {culprit} cannot"] * 3
