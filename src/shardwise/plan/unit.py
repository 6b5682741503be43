"""Unit: the parameters that are gathered, reduced and updated together, laid out in flat buckets.

A Unit (a transformer block, for example) has one bucket for each group of parameters that share their dtype, whether
they are trained, and their optimizer group. In a bucket the parameters follow one another, each at a 64-byte offset,
and the end is padded so that N ranks own equal ranges:

    |--- wq ---|.|--- wk ---|.|-- norm --|....|        P elements, P a multiple of N
    |  rank 0        |  rank 1        |  rank 2 ...    cuts fall on elements, not on parameters

The layout is a pure function of shapes and N, so every rank computes the same layout. A gather or a reduction of a
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


class ParameterSlot(NamedTuple):
    """The range of one parameter in a bucket, in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    elements: int
    aliases: tuple[str, ...] = ()


class SlotOverlap(NamedTuple):
    """The part of a slot that one shard owns."""

    slot: ParameterSlot
    start: int
    """First element, counted inside the parameter."""
    stop: int
    local: int
    """Offset of that element inside the shard."""


class BucketKey(NamedTuple):
    """Properties that the parameters of one bucket have in common."""

    dtype: torch.dtype
    """Compute dtype."""
    trained: bool
    optimizer_group: int
    tie: str = ""
    """Name of the parameter whose copies on other pipeline stages are summed with this one; "" if there are none. A
    tied parameter has a bucket of its own, so that the layout is the same on every stage that holds it.
    """
    reduce_dtype: torch.dtype | None = None
    """Dtype in which ranks reduce the gradients; None: derived from the compute dtype."""
    axes: StateAxes = DENSE
    """Mesh axes over which the state is copied and cut. All buckets of a Unit have the same, because a Unit is reduced
    at one time.
    """
    grad_dtype: torch.dtype | None = None
    """Dtype in which gradients are added up; None: derived from the compute dtype."""
    gather_dtype: torch.dtype | None = None
    """Dtype in which a cut weight is sent to the ranks that gather it, and lies there; None: the compute dtype."""


@dataclass(frozen=True)
class Bucket:
    """Flat layout of one group of parameters, cut into ``shards`` equal ranges."""

    key: BucketKey
    slots: tuple[ParameterSlot, ...]
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
    def gathered_dtype(self) -> torch.dtype:
        """Dtype of the gathered weight."""
        return self.key.gather_dtype or self.key.dtype

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges [start, stop) that belong to no parameter."""
        ends = (0, *(slot.offset + slot.elements for slot in self.slots))
        starts = (*(slot.offset for slot in self.slots), self.elements)
        return tuple((stop, start) for stop, start in zip(ends, starts, strict=True) if stop < start)

    def overlaps(self, index: int, shards: int | None = None) -> Iterator[SlotOverlap]:
        """Yield the parts of parameters inside one range of the bucket.

        Args:
            index: Number of the range.
            shards: Number of equal ranges; None: as the bucket is cut.
        """
        size = self.elements // (self.shards if shards is None else shards)
        first, last = index * size, (index + 1) * size
        for slot in self.slots:
            start, stop = max(first, slot.offset), min(last, slot.offset + slot.elements)
            if start < stop:
                yield SlotOverlap(slot, start - slot.offset, stop - slot.offset, start - first)


@dataclass(frozen=True)
class Unit:
    """Parameters that move together, or a collection of embedding tables, whose rows move together."""

    index: int
    """Number of the Unit in the order of registration."""
    name: str
    """Name of the module; "" is the root of the model."""
    buckets: tuple[Bucket, ...]
    has_rows: bool = False
    """True if the Unit is a collection of embedding tables. Such a Unit has no buckets, because rows lie in the tables'
    own stores.
    """

    def __post_init__(self) -> None:
        assert len({bucket.key.axes for bucket in self.buckets}) <= 1, f"{self.title}: state on several axes"

    @property
    def axes(self) -> StateAxes:
        """Mesh axes over which the Unit's state is copied and cut."""
        return self.buckets[0].key.axes if self.buckets else DENSE

    @property
    def elements(self) -> int:
        """Elements with padding, over all buckets."""
        return sum(bucket.elements for bucket in self.buckets)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the full weights in the dtypes in which they are gathered."""
        return sum(bucket.elements * bucket.gathered_dtype.itemsize for bucket in self.buckets)

    @property
    def parameters(self) -> int:
        """Elements without padding."""
        return sum(bucket.used_elements for bucket in self.buckets)

    def title_of(self, place: int) -> str:
        """Return the title of bucket number ``place`` for messages."""
        return f"Unit {self.title}" + (f" bucket {place}" if len(self.buckets) > 1 else "")

    @property
    def title(self) -> str:
        """Name of the Unit for messages: ``(root)`` for the root of the model."""
        return self.name or "(root)"


def lay_out(
    key: BucketKey, parameters: Sequence[tuple[str, tuple[int, ...], tuple[str, ...]]], shards: int
) -> Bucket:
    """Place parameters one after another at 64-byte offsets and pad the end to ``shards`` equal ranges.

    Args:
        key: Properties that the parameters share.
        parameters: (name, shape, aliases) of each parameter.
        shards: Number of equal ranges.
    """
    alignment = ALIGNMENT_BYTES // key.dtype.itemsize
    slots, offset = [], 0
    for name, shape, aliases in parameters:
        elements = math.prod(shape)
        slots.append(ParameterSlot(name, shape, offset, elements, aliases))
        offset += -(-elements // alignment) * alignment
    step = alignment * shards
    return Bucket(key, tuple(slots), max(-(-offset // step), 1) * step, shards)
