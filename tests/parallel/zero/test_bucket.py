"""The lives of a weight and a gradient: which state may follow which, and what the parameters show in each."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.comm.collectives import Clock, Group
from shardwise.comm.policy import CommPolicy
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.memory.gradient_memory import GradientMemory
from shardwise.memory.ledger import Ledger
from shardwise.memory.slots import SlotPool
from shardwise.parallel.zero.bucket import BucketState
from shardwise.parallel.zero.context import BucketContext
from shardwise.plan.lists import Strategy
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Partial, Replicate, Shard
from shardwise.plan.unit import BucketKey, lay_out
from shardwise.precision.policy import Dtypes

R, S, P = Replicate(), Shard(), Partial()
F32 = torch.float32
WHOLE, CUT = Strategy((R, R), (P, P), (R, R)), Strategy((R, S), (P, S), (R, S))


def bucket(
    strategy: Strategy, group_over: Any = lambda axes: Group.alone("+".join(axes)), shards: int = 1
) -> BucketState:
    """One weight of three elements and one of five."""
    layout = lay_out(BucketKey(F32, True, 0), [("a", (3,), ()), ("b", (5,), ())], shards)
    device = torch.device("cpu")
    pools = (*(SlotPool(device, poison=True) for _ in range(3)), GradientMemory(device))
    around = BucketContext.of(strategy, group_over, *pools, Ledger(), device)
    parameters = [nn.Parameter(torch.zeros(slot.shape)) for slot in layout.slots]
    made = BucketState(layout, Dtypes(F32, F32, F32, F32), parameters, "the bucket", around)
    made.fill(lambda slot, start, stop, dtype: torch.arange(start, stop, dtype=dtype) + 1)
    return made


def test_views_of_two_buffers_without_an_address_are_two() -> None:
    views = bucket(WHOLE).views
    one, other = (torch.empty(32, device="meta") for _ in range(2))  # data_ptr() is 0, as of fake tensors
    assert views.of(one) is views.of(one)
    assert views.of(one) is not views.of(other)


def sums_by_bucket(world: World) -> list[list[float]]:
    """The reduced gradient of "b" in two buckets: one over both ranks, the other, as of experts, over one."""
    mesh, clock, traffic = Mesh(dp_shard=2), Clock(20.0), Traffic()
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
