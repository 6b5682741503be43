"""The gradient of a bucket: accumulated, reduced, finished, dropped."""

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.comm.collectives import Group
from shardwise.memory.gradient_memory import GradientMemory
from shardwise.memory.ledger import Ledger
from shardwise.memory.slots import SlotPool
from shardwise.parallel.zero.bucket import BucketState
from shardwise.parallel.zero.context import BucketContext
from shardwise.parallel.zero.gradient import GradientState
from shardwise.plan.lists import Strategy
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
