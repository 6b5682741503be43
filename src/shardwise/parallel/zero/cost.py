"""Bytes that one rank sends for each gather and each reduction of a Unit, from its strategy and its buckets."""

from typing import NamedTuple

from shardwise.plan.lists import Strategy
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Partial, Replicate, Shard, elements_sent
from shardwise.plan.unit import Unit


class UnitBytes(NamedTuple):
    """Bytes that one rank sends for one Unit."""

    gather: int
    """Bytes of one UNSHARD."""
    reduce: int
    """Bytes of one REDUCE."""


def unit_bytes(unit: Unit, strategy: Strategy, mesh: Mesh) -> UnitBytes:
    """Return the bytes that one rank sends for each UNSHARD and each REDUCE of a Unit."""
    gather = reduce = 0
    replicas, shards = (mesh.size(axis) for axis in strategy.axes)
    for bucket in unit.buckets:
        key = bucket.key
        if strategy.cuts_weight or (strategy.cuts_master and key.trained):
            gather += elements_sent(Shard(), Replicate(), bucket.elements, shards) * key.dtype.itemsize
        if not key.trained:
            continue
        if strategy.cuts_master:
            elements = elements_sent(Partial(), Shard(), bucket.elements, shards)
            elements += elements_sent(Partial(), Replicate(), bucket.shard_elements, replicas)
        else:
            elements = elements_sent(Partial(), Replicate(), bucket.elements, shards * replicas)
        wire = (key.reduce_dtype or key.dtype).itemsize
        # A gradient that is reduced as autograd made it travels in no more bits than autograd's dtype has.
        reduce += elements * (min(wire, key.dtype.itemsize) if strategy.cuts_grad else wire)
    return UnitBytes(gather, reduce)
