"""Bytes that one rank sends for each gather and each reduction of a Unit, from its strategy and its buckets."""

from typing import NamedTuple

from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Partial, Replicate, Shard, elements_sent
from shardwise.plan.strategy import Strategy
from shardwise.plan.unit import Unit


class UnitBytes(NamedTuple):
    """Bytes that one rank sends for one Unit."""

    gather: int
    """Bytes of one UNSHARD."""
    reduce: int
    """Bytes of one REDUCE, with the ARRIVE that waits for it."""
    replicas: int = 0
    """Bytes of the sum over replicas of the shards, once per step, before NORM."""


def unit_bytes(unit: Unit, strategy: Strategy, mesh: Mesh) -> UnitBytes:
    """Return the bytes that one rank sends for each UNSHARD and each REDUCE of a Unit."""
    gather = reduce = over_replicas = 0
    replicas, shards = (mesh.size(axis) for axis in strategy.axes)
    for bucket in unit.buckets:
        key = bucket.key
        if strategy.cuts_weight or (strategy.cuts_master and key.trained):
            sent = elements_sent(Shard(), Replicate(), bucket.elements, shards)
            gather += sent * key.gathered_dtype.itemsize
        if not key.trained:
            continue
        if strategy.cuts_master:
            elements = elements_sent(Partial(), Shard(), bucket.elements, shards)
        else:
            elements = elements_sent(Partial(), Replicate(), bucket.elements, shards * replicas)
        wire = (key.reduce_dtype or key.dtype).itemsize
        # A gradient that is reduced as autograd made it travels in no more bits than autograd's dtype has.
        reduce += elements * (min(wire, key.dtype.itemsize) if strategy.cuts_grad else wire)
        if strategy.cuts_master:
            over_replicas += elements_sent(Partial(), Replicate(), bucket.shard_elements, replicas) * wire
    return UnitBytes(gather, reduce, over_replicas)
