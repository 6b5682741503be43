"""Counts of what was sent: calls, elements and bytes by operation, purpose and axis.

The count is the ring algorithms' lower bound per rank, from the sizes of the tensors that were really passed in, so a
missing, doubled or unpadded collective shows as a difference from the plan's closed form:

    all-gather, reduce-scatter   P (N-1)/N      all-reduce  2P (N-1)/N      broadcast  P (N-1)/N
    send  P      all-to-all  what goes to other ranks

Ranks whose collectives differ in kind but not in size would take each other's bytes for their own, and a transport may
not detect it. Ranks therefore compare ``sequence``.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from shardwise.plan.exchange_calls import (
    LEVELS,
    Operation,
    Purpose,
    elements_sent_by,
)

_FLAT_AXES = ("dp", "dp_shard", "dp_replicate", "edp", "expert_dp")
_STATE_AXES = frozenset((*_FLAT_AXES, *(f"{axis} {level}" for axis in _FLAT_AXES for level in LEVELS)))
"""Names of the groups over which model state moves."""


@lru_cache(4096)
def _word(operation: Operation, what: str, size: int) -> bytes:
    """Return what a collective adds to ``Traffic.sequence``; to write it again would take longer than to hash it."""
    return f"{operation} {what} {size}".encode()


class TrafficCount(NamedTuple):
    """Totals of one kind of traffic."""

    calls: int = 0
    elements: int = 0
    bytes: int = 0


_NOTHING = TrafficCount()


@dataclass
class Traffic:
    """Running totals by (operation, purpose, axis)."""

    counts: dict[tuple[Operation, Purpose, str], TrafficCount] = field(default_factory=dict)
    """Totals since the last ``clear``, by operation, purpose, and axis of the group."""
    bytes: int = 0
    """Bytes sent so far."""
    sequence: int = 0
    """Hash (32 bits) of the collectives over the data-parallel axes, including those of experts, in their order: equal
    on ranks that made the same calls.

    On other axes sizes differ from one data-parallel rank to another, with its batch and with its shard.
    """
    listener: Callable[[Operation, str, str], None] | None = None
    """Function that is called with the operation, the tensor's name and the axis of each call, or None."""

    def add(
        self,
        operation: Operation,
        purpose: Purpose,
        elements: int,
        itemsize: int,
        ranks: int,
        what: str = "",
        axis: str = "dp",
    ) -> None:
        """Count one collective.

        Args:
            operation: Operation.
            purpose: Kind of traffic.
            elements: Elements of the full tensor; for a send and an all-to-all, the elements that leave this rank.
            itemsize: Bytes of an element.
            ranks: Ranks of the group.
            what: Name of the tensor.
            axis: Axis of the group.
        """
        if self.listener is not None:
            self.listener(operation, what, axis)
        if axis in _STATE_AXES:
            size = -1 if operation == "all_to_all" else elements  # each rank sends as much as its data needs
            self.sequence = zlib.crc32(_word(operation, what, size), self.sequence)
        sent = elements_sent_by(operation, elements, ranks)
        self.bytes += sent * itemsize
        kind = operation, purpose, axis
        calls, counted, nbytes = self.counts.get(kind, _NOTHING)
        self.counts[kind] = TrafficCount(calls + 1, counted + sent, nbytes + sent * itemsize)

    def total(self, *purposes: Purpose) -> TrafficCount:
        """Return the sum over the given purposes, or over all if none is given."""
        rows = [
            count for (_, purpose, _), count in self.counts.items() if not purposes or purpose in purposes
        ]
        return TrafficCount(*(sum(column) for column in zip(*rows, strict=True))) if rows else TrafficCount()

    def clear(self) -> None:
        """Reset the counts."""
        self.counts.clear()
