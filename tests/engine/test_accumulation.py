"""What microbatches weigh: factors of their losses are powers of two apart from the weights given."""

from typing import Any

import pytest
import torch

from shardwise.comm.collectives import Clock
from shardwise.comm.policy import CommPolicy
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.engine.accumulation import Accumulation
from shardwise.plan.mesh import Mesh

CPU = torch.device("cpu")


def accumulation(world: World, microbatches: int) -> Accumulation:
    group = world.group(Mesh(dp_shard=world.size), "dp", CommPolicy(), Clock(30.0), Traffic())
    return Accumulation(microbatches, group, None, CPU)


def test_plain_losses_become_means() -> None:
    step = accumulation(World(0, 1), 4)
    assert [step.scale_of(1.0) for _ in range(4)] == [0.25] * 4 and step.scale == 0.25
    for i in range(4):
        assert not step.is_complete
        step.count(torch.tensor(float(i)), 1.0)
    assert step.is_complete and (step.weight, float(step.loss)) == (4.0, 6.0)
    step.clear()
    assert (step.done, step.weight, float(step.loss), step.reference) == (0, 0.0, 0.0, 4.0)


def test_a_loss_that_does_not_count_is_not_looked_at() -> None:
    step = accumulation(World(0, 1), 2)
    step.count(torch.tensor(float("nan")), 0.0)
    step.count(None, 3.0)
    assert step.is_complete and (step.weight, float(step.loss)) == (3.0, 0.0)


def references(world: World) -> list[float]:
    step = accumulation(world, 2)
    own = 100.0 + 56.0 * world.rank
    return [step.scale_of(own) / own, step.scale_of(1.0), step.reference]


def test_ranks_agree_on_a_power_of_two_near_the_weight_of_a_global_batch(ranks: Any) -> None:
    for found in ranks(2).run(references):
        assert found == pytest.approx([1 / 512, 1 / 512, 512.0], rel=1e-15)
