"""A bucket of two weights, without ranks."""

from typing import Any

import torch
from torch import nn

from shardwise.comm.collectives import Group
from shardwise.memory.gradient_memory import GradientMemory
from shardwise.memory.ledger import Ledger
from shardwise.memory.slots import SlotPool
from shardwise.parallel.zero.bucket import BucketState
from shardwise.parallel.zero.context import BucketContext
from shardwise.plan.placement import Partial, Replicate, Shard
from shardwise.plan.strategy import Strategy
from shardwise.plan.unit import BucketKey, lay_out
from shardwise.precision.policy import BucketDtypes

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
    made = BucketState(layout, BucketDtypes(F32, F32, F32, F32), parameters, "the bucket", around)
    made.fill(lambda slot, start, stop, dtype: torch.arange(start, stop, dtype=dtype) + 1)
    return made
