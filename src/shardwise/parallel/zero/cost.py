"""Bytes that one rank sends for each gather and each reduction of a Unit, from its strategy and its buckets.

Over several hosts a reduction may go in two levels; ``plan/exchange.py`` has the formulas.
"""

from typing import NamedTuple

from shardwise.plan.exchange import Widths
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Partial, Replicate, Shard, elements_sent
from shardwise.plan.strategy import Strategy
from shardwise.plan.unit import BucketKey, Unit


class UnitBytes(NamedTuple):
    """Bytes that one rank sends for one Unit."""

    gather: int
    """Bytes of one UNSHARD."""
    reduce: int
    """Bytes of one REDUCE, with the ARRIVE that waits for it."""
    replicas: int = 0
    """Bytes of the sum over replicas of the shards, once per step, before NORM."""
    crossing: int = 0
    """Bytes that leave one host for one REDUCE, if the ranks of the inner axis lie on several hosts."""


def unit_bytes(unit: Unit, strategy: Strategy, mesh: Mesh) -> UnitBytes:
    """Return the bytes that one rank sends for each UNSHARD and each REDUCE of a Unit."""
    gather = reduce = over_replicas = crossing = 0
    replicas, shards = (mesh.size(axis) for axis in strategy.axes)
    for bucket in unit.buckets:
        key = bucket.key
        if strategy.cuts_weight or (strategy.cuts_master and key.trained):
            sent = elements_sent(Shard(), Replicate(), bucket.elements, shards)
            gather += sent * bucket.gathered_dtype.itemsize
        if not key.trained:
            continue
        wire = (key.reduce_dtype or key.dtype).itemsize
        if not strategy.cuts_master:
            reduce += elements_sent(Partial(), Replicate(), bucket.elements, shards * replicas) * wire
            continue
        widths = widths_of(key, strategy)
        reduce += strategy.exchange.sent_bytes(bucket.elements, widths)
        crossing += strategy.exchange.crossing_bytes(bucket.elements, widths)
        over_replicas += elements_sent(Partial(), Replicate(), bucket.shard_elements, replicas) * wire
    return UnitBytes(gather, reduce, over_replicas, crossing)


def widths_of(key: BucketKey, strategy: Strategy) -> Widths:
    """Return the bytes of an element of a bucket's gradient where it is sent and where it is added."""
    reduce, total = (key.reduce_dtype or key.dtype).itemsize, (key.grad_dtype or key.dtype).itemsize
    # A gradient that is reduced as autograd made it travels in no more bits than autograd's dtype has.
    wire = min(reduce, key.dtype.itemsize) if strategy.cuts_grad else reduce
    return Widths(wire, max(reduce, wire), total)
