"""What microbatches weigh: those of one weight have their losses multiplied by powers of two."""

from typing import Any

import torch

from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.engine.parts.accumulation import Accumulation
from shardwise.plan.mesh import Mesh

CPU = torch.device("cpu")


def accumulation(world: World, microbatches: int) -> Accumulation:
    group = world.group(Mesh(dp_shard=world.size), "dp", CommPolicy(), StepClock(30.0), Traffic())
    return Accumulation(microbatches, group, None, CPU)


def test_plain_losses_become_means() -> None:
    step = accumulation(World(0, 1), 4)
    assert [step.scale_of(15.0) for _ in range(4)] == [0.25] * 4 and step.divisor_of(60.0) == 1.0
    for i in range(4):
        assert not step.is_complete
        step.count(torch.tensor(float(i)), 1.0)
        assert step.is_complete == step.is_last == (i == 3)
        if i < 3:
            step.end_microbatch()
    assert (step.weight, float(step.loss)) == (4.0, 6.0)
    assert step.end_step() == 4
    assert (step.done, step.weight, float(step.loss), step.reference) == (0, 0.0, 0.0, 60.0)


def test_a_loss_that_does_not_count_is_not_looked_at() -> None:
    step = accumulation(World(0, 1), 2)
    step.count(torch.tensor(float("nan")), 0.0)
    step.end_microbatch()
    step.count(None, 3.0)
    assert step.is_complete and (step.weight, float(step.loss)) == (3.0, 0.0)


def references(world: World) -> list[float]:
    step = accumulation(world, 2)
    return [step.scale_of(100.0 + 56.0 * world.rank), step.scale_of(1.0) * step.reference, step.reference]


def test_ranks_agree_on_the_first_weight_times_a_power_of_two_near_a_global_batch(ranks: Any) -> None:
    first, second = ranks(2).run(references)
    assert first == [1 / 4, 1.0, 400.0]  # of 512
    assert second == [156 / 400, 1.0, 400.0]


def without_labels(world: World) -> float:
    step = accumulation(world, 1)
    step.agree(40.0 * world.rank)
    return step.reference


def test_a_first_microbatch_that_weighs_nothing_leaves_a_power_of_two(ranks: Any) -> None:
    assert ranks(2).run(without_labels) == [32.0, 32.0]
