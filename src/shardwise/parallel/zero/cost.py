"""What a strategy costs, in elements and bytes. Held to the counted traffic and the allocated buffers by tests.

With P elements (padding counted, frozen Units gathered but not reduced), N shard ranks, a microbatches:

    stage      elements sent per rank and step
    0, 1       2 P (N-1)/N
    2          (a+1) P (N-1)/N
    3          3 a P (N-1)/N

Paper: arXiv:1910.02054, section 7.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.plan.lists import Strategy
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Partial, Replicate, Shard, elements_sent
from shardwise.plan.unit import Unit


def elements_sent_per_step(
    units: Sequence[Unit], strategies: Sequence[Strategy], mesh: Mesh, accumulation: int
) -> int:
    """Elements of weights and gradients that one rank sends in one optimizer step. ``strategies``: by Unit."""
    total = 0
    for unit, strategy in zip(units, strategies, strict=True):
        replicas, shards = (mesh.size(axis) for axis in strategy.axes)
        for bucket in unit.buckets:
            gather = elements_sent(Shard(), Replicate(), bucket.elements, shards)
            if strategy.cuts_weight:
                total += 2 * accumulation * gather
            if not bucket.key.trained:
                continue
            if not strategy.cuts_master:
                total += elements_sent(Partial(), Replicate(), bucket.elements, shards * replicas)
                continue
            if not strategy.cuts_weight:
                total += gather
            reductions = accumulation if strategy.cuts_grad else 1
            total += reductions * elements_sent(Partial(), Shard(), bucket.elements, shards)
            total += elements_sent(Partial(), Replicate(), bucket.shard_elements, replicas)
    return total


class UnitBytes(NamedTuple):
    """What one rank sends of a Unit."""

    gather: int
    """For an UNSHARD."""
    reduce: int
    """For a REDUCE."""


def unit_bytes(unit: Unit, strategy: Strategy, mesh: Mesh) -> UnitBytes:
    """Bytes that one rank sends for each UNSHARD and REDUCE of a Unit."""
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
        # What is reduced as it comes from autograd has no more bits than autograd gave it.
        reduce += elements * (min(wire, key.dtype.itemsize) if strategy.cuts_grad else wire)
    return UnitBytes(gather, reduce)
