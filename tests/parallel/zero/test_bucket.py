"""The lives of a weight and a gradient: which state may follow which, and what the parameters show in each."""

from dataclasses import replace
from typing import Any

import torch

from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.plan.mesh import Mesh
from tests.parallel.zero.buckets import CUT, WHOLE, bucket


def test_views_of_two_buffers_without_an_address_are_two() -> None:
    views = bucket(WHOLE).views
    one, other = (torch.empty(32, device="meta") for _ in range(2))  # data_ptr() is 0, as of fake tensors
    assert views.of(one) is views.of(one)
    assert views.of(one) is not views.of(other)


def sums_by_bucket(world: World) -> list[list[float]]:
    """The reduced gradient of "b" in two buckets: one over both ranks, the other, as of experts, over one."""
    mesh, clock, traffic = Mesh(dp_shard=2), StepClock(20.0), Traffic()
    policy = CommPolicy()
    groups = {
        axis: world.group(mesh, axis, policy, clock, traffic)
        for axis in ("dp", "dp_replicate", "dp_shard", "cp", "tp")
    }
    found = []
    for strategy in (CUT, replace(CUT, axes=("cp", "tp"))):
        axes = strategy.axes
        over = dict(zip(((axes[0],), (axes[1],)), (groups[axis] for axis in axes), strict=True))
        over[axes] = groups["dp" if axes == CUT.axes else "tp"]
        here = bucket(strategy, over.__getitem__, groups[axes[1]].size)
        here.weight.attach()
        here.parameters[1].grad = torch.full((5,), world.rank + 1.0)
        here.gradient.accumulate(1, here.parameters[1])
        here.gradient.reduce()
        here.gradient.finish_reduce()
        full = here.weight.gathered_copy(here.gradient.owned)
        found.append(here.views.fresh(full)[1].tolist())
    return found


def test_a_bucket_reduces_over_the_axes_that_it_is_placed_on(ranks: Any) -> None:
    for rank, (dense, expert) in enumerate(ranks(2).run(sums_by_bucket)):
        assert (dense, expert) == ([3.0] * 5, [rank + 1.0] * 5)
