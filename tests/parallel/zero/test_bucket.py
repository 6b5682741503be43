"""The lives of a weight and a gradient: which state may follow which, and what the parameters show in each."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.base.errors import UsageError
from shardwise.comm.collectives import Clock, Group
from shardwise.comm.policy import CommPolicy
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.memory.gradient_memory import GradientMemory
from shardwise.memory.ledger import Ledger
from shardwise.memory.slots import SlotPool
from shardwise.parallel.zero.bucket import BucketState
from shardwise.parallel.zero.context import BucketContext
from shardwise.parallel.zero.gradient import GradientState
from shardwise.parallel.zero.weight import WeightState
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Partial, Replicate, Shard
from shardwise.plan.strategy import Strategy
from shardwise.plan.unit import BucketKey, lay_out
from shardwise.precision.policy import Dtypes

R, S, P = Replicate(), Shard(), Partial()
F32 = torch.float32
WHOLE, CUT = Strategy((R, R), (P, P), (R, R)), Strategy((R, S), (P, S), (R, S))
WINDOWS = replace(WHOLE, windows=True)


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


@pytest.mark.parametrize("strategy", [CUT, WINDOWS], ids=["cut", "windows"])
def test_a_weight_with_windows_is_there_in_them_alone(strategy: Strategy) -> None:
    """Cut, or whole on one rank."""
    here = bucket(strategy)
    weight, seen = here.weight, []
    assert weight.state is WeightState.SUMMONED
    weight.attach()
    for _ in range(2):
        seen.append((weight.state, weight.in_the_way))
        weight.start_unshard()
        seen.append((weight.state, weight.in_the_way))
        with pytest.raises(UsageError, match="'a' of the bucket"):
            _ = here.parameters[0] + 1
        weight.finish_unshard()
        seen.append((weight.state, weight.in_the_way))
        assert here.parameters[1].tolist() == [1, 2, 3, 4, 5]
        weight.reshard()
    in_turn = [
        (WeightState.SHARDED, None),
        (WeightState.GATHERING, None),
        (WeightState.UNSHARDED, None),
    ]
    assert seen == in_turn * 2


@pytest.mark.parametrize("strategy", [WHOLE, CUT], ids=["whole", "cut"])
def test_a_summoned_weight_stays_until_it_is_restored(strategy: Strategy) -> None:
    here = bucket(strategy)
    weight = here.weight
    weight.attach()
    at_rest = weight.state
    for keep in (False, True):
        assert weight.summon([0, 1]) == [0, 1] and weight.is_whole
        weight.start_unshard()
        weight.finish_unshard()
        weight.reshard()
        assert weight.is_summoned
        with torch.no_grad():
            here.parameters[0].fill_(7.0)
        assert weight.restore([0, 1], keep) == ["a"]
        assert weight.state is at_rest
        assert weight.shard[:3].tolist() == [7.0] * 3  # one rank: what is shown is the shard itself


@pytest.mark.parametrize(
    "wrong",
    [
        lambda weight: weight.attach(),  # shown already
        lambda weight: weight.restore([0], keep=False),  # never summoned
    ],
    ids=["attached twice", "restored without a summon"],
)
@pytest.mark.parametrize("strategy", [WHOLE, CUT], ids=["whole", "cut"])
def test_a_weight_refuses_a_step_out_of_turn(strategy: Strategy, wrong: Any) -> None:
    weight = bucket(strategy).weight
    weight.attach()
    with pytest.raises(AssertionError, match="does not become"):
        wrong(weight)


def test_a_gradient_is_accumulated_reduced_finished_and_dropped() -> None:
    here = bucket(CUT)
    here.weight.attach()
    gradient, seen = here.gradient, []
    for microbatch in range(2):
        here.weight.start_unshard()
        here.weight.finish_unshard()
        here.parameters[1].grad = torch.full((5,), 2.0)
        assert gradient.accumulate(1, here.parameters[1])
        seen.append(gradient.state)
        gradient.reduce()
        seen.append(gradient.state)
        here.weight.reshard()
        assert gradient.owned[16:21].tolist() == [2.0 * (microbatch + 1)] * 5
        assert not gradient.owned[:16].any(), (
            "what got no gradient counts as zero, the slot's old values do not"
        )
    gradient.finish_reduce()
    seen.append(gradient.state)
    assert gradient.used == [False, True]
    gradient.drop_gradients()
    seen.append(gradient.state)
    added, reduced = GradientState.ACCUMULATING, GradientState.REDUCED
    assert seen == [added, reduced, added, reduced, GradientState.FINISHED, GradientState.EMPTY]
    assert gradient.used == [False, False]


def test_a_gradient_that_is_finished_takes_no_more() -> None:
    here = bucket(CUT)
    here.weight.attach()
    here.gradient.reduce()
    here.gradient.finish_reduce()
    with pytest.raises(AssertionError, match="finished does not become accumulating"):
        here.gradient.reduce()


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
