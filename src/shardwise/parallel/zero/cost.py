"""What one rank sends for each gather and each reduction of a Unit, from its strategy and its buckets.

    gather     of one UNSHARD: all buckets of a cut weight, or those that were updated in pieces
    reduce     of one REDUCE
    arrive     of the ARRIVE that waits for a REDUCE
    replicas   of the sum over replicas of the shards, once per step, after the last REDUCE

The calls are those of zero/weight.py and zero/gradient.py, with the sizes that ``Traffic`` counts. Over several hosts a
reduction may go in two levels; ``plan/exchange.py`` has the formulas.
"""

from collections.abc import Iterable
from typing import NamedTuple

from shardwise.plan.exchange import PIECE_BYTES, Widths
from shardwise.plan.exchange_calls import LEVELS, ExchangeCall, collective
from shardwise.plan.mesh import Mesh
from shardwise.plan.strategy import Strategy
from shardwise.plan.unit import Bucket, BucketKey, Unit

Calls = tuple[ExchangeCall, ...]


class UnitExchanges(NamedTuple):
    """Exchanges of one rank for one Unit."""

    gather: Calls
    """Of one UNSHARD."""
    reduce: Calls
    """Of one REDUCE."""
    arrive: Calls = ()
    """Of the ARRIVE that waits for a REDUCE."""
    replicas: Calls = ()
    """Of the sum over replicas of the shards, once per step, before NORM."""


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


def unit_bytes(unit: Unit, strategy: Strategy, mesh: Mesh, is_alone: bool = False) -> UnitBytes:
    """Return the bytes that one rank sends for each UNSHARD and each REDUCE of a Unit.

    Args:
        unit: The Unit.
        strategy: Its strategy.
        mesh: The mesh.
        is_alone: True if one microbatch makes a step.
    """
    sent = unit_exchanges(unit, strategy, mesh, is_alone)
    crossing = sum(
        strategy.exchange.crossing_bytes(bucket.elements, widths_of(bucket.key, strategy))
        for bucket in unit.buckets
        if bucket.key.trained and strategy.cuts_master
    )
    return UnitBytes(
        _bytes_of(sent.gather), _bytes_of(sent.reduce + sent.arrive), _bytes_of(sent.replicas), crossing
    )


def _bytes_of(calls: Iterable[ExchangeCall]) -> int:
    return sum(call.bytes for call in calls)


def unit_exchanges(unit: Unit, strategy: Strategy, mesh: Mesh, is_alone: bool = False) -> UnitExchanges:
    """Return the exchanges of one rank for each UNSHARD and each REDUCE of a Unit.

    Args:
        unit: The Unit.
        strategy: Its strategy.
        mesh: The mesh.
        is_alone: True if one microbatch makes a step: no later gradient is then added to a reduced one.
    """
    gather: Calls = ()
    reduce: Calls = ()
    arrive: Calls = ()
    over_replicas: Calls = ()
    outer, inner = strategy.axes
    replicas, shards, both = mesh.size(outer), mesh.size(inner), mesh.name_of(strategy.axes)
    for bucket in unit.buckets:
        key, elements = bucket.key, bucket.elements
        if strategy.cuts_weight or (strategy.cuts_master and key.trained):
            gather += collective(
                "all_gather", "weights", inner, elements, bucket.gathered_dtype.itemsize, shards
            )
        if not key.trained:
            continue
        wire = (key.reduce_dtype or key.dtype).itemsize
        if strategy.cuts_master:
            reduce += _scattered(bucket, strategy, shards)
            part = bucket.shard_elements
            over_replicas += collective("all_reduce", "gradients", outer, part, wire, replicas)
        elif is_alone and is_summed_in_ranges(key, strategy, mesh):
            # Each rank sums one range of the narrow gradients, and gets the others' sums in full width.
            reduce += collective("reduce_scatter", "gradients", inner, elements, key.dtype.itemsize, shards)
            total = (key.grad_dtype or key.dtype).itemsize
            arrive += collective("all_gather", "gradients", inner, elements, total, shards)
        else:
            reduce += collective("all_reduce", "gradients", both, elements, wire, shards * replicas)
    return UnitExchanges(gather, reduce, arrive, over_replicas)


def is_summed_in_ranges(key: BucketKey, strategy: Strategy, mesh: Mesh) -> bool:
    """Return whether gradients in fewer bits than their sum, which every rank keeps whole, are summed in ranges.

    They arrive in a slot then, if one microbatch makes a step. ``Gradient._is_staged`` in zero/gradient.py is the same
    condition.
    """
    replicas, shards = (mesh.size(axis) for axis in strategy.axes)
    if strategy.cuts_master:
        return False
    reduce, total = key.reduce_dtype or key.dtype, key.grad_dtype or key.dtype
    is_narrow = min(reduce.itemsize, key.dtype.itemsize) < total.itemsize
    return shards > 1 and replicas == 1 and is_narrow and reduce == total


def _scattered(bucket: Bucket, strategy: Strategy, shards: int) -> Calls:
    """Return the exchanges by which each rank gets its range of the sum of a bucket's gradients."""
    axis, lying, widths = strategy.axes[1], strategy.exchange, widths_of(bucket.key, strategy)
    way = lying.way(widths)
    if way != "two_level":
        itemsize = widths.total if way == "sum" else widths.wire
        return collective("reduce_scatter", "gradients", axis, bucket.elements, itemsize, shards)
    across, within = (f"{axis} {level}" for level in LEVELS)
    per_host, shard = shards // lying.hosts, bucket.shard_elements
    # Hosts exchange in pieces, so that a piece's memory stays in their caches.
    piece = shard if lying.is_native else max(PIECE_BYTES // (widths.wire * shards), 1)
    found: Calls = ()
    for start in range(0, shard, piece):
        part = min(piece, shard - start)
        leaving, crossing = (per_host - 1) * lying.hosts * part, (lying.hosts - 1) * part
        found += collective("all_to_all", "gradients", within, leaving, widths.wire, per_host)
        found += collective("all_to_all", "gradients", across, crossing, widths.between, lying.hosts)
    return found


def widths_of(key: BucketKey, strategy: Strategy) -> Widths:
    """Return the bytes of an element of a bucket's gradient where it is sent and where it is added."""
    reduce, total = (key.reduce_dtype or key.dtype).itemsize, (key.grad_dtype or key.dtype).itemsize
    # A gradient that is reduced as autograd made it travels in no more bits than autograd's dtype has.
    wire = min(reduce, key.dtype.itemsize) if strategy.cuts_grad else reduce
    return Widths(wire, max(reduce, wire), total)
