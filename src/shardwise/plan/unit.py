"""Unit: the parameters that move together, laid out in flat buckets.

A Unit (a transformer block, say) has one bucket per group of parameters that share dtype, whether they are trained,
and their optimizer group. In a bucket the parameters lie one after another, each at a 64-byte offset, and the end is
padded so that N ranks own equal ranges:

    |--- wq ---|.|--- wk ---|.|-- norm --|....|        P elements, P a multiple of N
    |  rank 0        |  rank 1        |  rank 2 ...    cuts fall on elements, not on parameters

The layout is a pure function of shapes and N, so every rank computes the same one, and a gather or a reduction of a
Unit is one collective on one buffer, without a copy in or out.

Source: flat parameters as in ZeRO (arXiv:1910.02054) and FSDP (arXiv:2304.11277).
Cost:   padding of at most 63 bytes per parameter and N·64 bytes per bucket.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from shardwise.plan.mesh import DENSE, StateAxes

ALIGNMENT_BYTES = 64


class Slot(NamedTuple):
    """One parameter's place in a bucket, in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    elements: int
    aliases: tuple[str, ...] = ()


class Overlap(NamedTuple):
    """The part of a slot that one shard owns."""

    slot: Slot
    start: int
    """First element, counted inside the parameter."""
    stop: int
    local: int
    """Where that element lies inside the shard."""


class BucketKey(NamedTuple):
    """What the parameters of one bucket have in common."""

    dtype: torch.dtype
    """Compute dtype."""
    trained: bool
    optimizer_group: int
    tie: str = ""
    """Name of the parameter whose copies on other pipeline stages are summed with it: alone in its bucket, so that the
    layout is the same on every stage that holds it."""
    reduce_dtype: torch.dtype | None = None
    """Of gradients between ranks; None: as it follows from the compute dtype."""
    axes: StateAxes = DENSE
    """Over which its state is copied and cut; the same for all buckets of a Unit, which is reduced at one time."""


@dataclass(frozen=True)
class Bucket:
    """Flat layout of one group of parameters, cut in ``shards`` equal ranges."""

    key: BucketKey
    slots: tuple[Slot, ...]
    elements: int
    """Elements with padding: a multiple of ``shards``."""
    shards: int

    @property
    def shard_elements(self) -> int:
        """Elements that one rank owns."""
        return self.elements // self.shards

    @property
    def used_elements(self) -> int:
        """Elements without padding."""
        return sum(slot.elements for slot in self.slots)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges [start, stop) that belong to no parameter."""
        ends = (0, *(slot.offset + slot.elements for slot in self.slots))
        starts = (*(slot.offset for slot in self.slots), self.elements)
        return tuple((stop, start) for stop, start in zip(ends, starts, strict=True) if stop < start)

    def overlaps(self, index: int, shards: int | None = None) -> Iterator[Overlap]:
        """The parts of parameters inside range ``index`` of ``shards`` (default: as the bucket is cut)."""
        size = self.elements // (self.shards if shards is None else shards)
        first, last = index * size, (index + 1) * size
        for slot in self.slots:
            start, stop = max(first, slot.offset), min(last, slot.offset + slot.elements)
            if start < stop:
                yield Overlap(slot, start - slot.offset, stop - slot.offset, start - first)


@dataclass(frozen=True)
class Unit:
    """Parameters that move together, or a collection of embedding tables, whose rows do."""

    index: int
    """Place in the order of registration."""
    name: str
    """Name of the module; "" is the root of the model."""
    buckets: tuple[Bucket, ...]
    has_rows: bool = False
    """Whether it is a collection of embedding tables: without buckets, for rows lie in the tables' own stores."""

    def __post_init__(self) -> None:
        assert len({bucket.key.axes for bucket in self.buckets}) <= 1, f"{self.title}: state on several axes"

    @property
    def axes(self) -> StateAxes:
        """Over which its state is copied and cut."""
        return self.buckets[0].key.axes if self.buckets else DENSE

    @property
    def elements(self) -> int:
        """Elements with padding, over all buckets."""
        return sum(bucket.elements for bucket in self.buckets)

    @property
    def weight_bytes(self) -> int:
        """Of its whole weights as they are computed with."""
        return sum(bucket.elements * bucket.key.dtype.itemsize for bucket in self.buckets)

    @property
    def parameters(self) -> int:
        """Elements without padding."""
        return sum(bucket.used_elements for bucket in self.buckets)

    def title_of(self, place: int) -> str:
        """Of one of its buckets."""
        return f"Unit {self.title}" + (f" bucket {place}" if len(self.buckets) > 1 else "")

    @property
    def title(self) -> str:
        """Name for people."""
        return self.name or "(root)"


def lay_out(
    key: BucketKey, parameters: Sequence[tuple[str, tuple[int, ...], tuple[str, ...]]], shards: int
) -> Bucket:
    """Place ``(name, shape, aliases)`` one after another at 64-byte offsets and pad to ``shards`` equal ranges."""
    alignment = ALIGNMENT_BYTES // key.dtype.itemsize
    slots, offset = [], 0
    for name, shape, aliases in parameters:
        elements = math.prod(shape)
        slots.append(Slot(name, shape, offset, elements, aliases))
        offset += -(-elements // alignment) * alignment
    step = alignment * shards
    return Bucket(key, tuple(slots), max(-(-offset // step), 1) * step, shards)
