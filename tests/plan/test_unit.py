"""Flat layouts: offsets, padding, cuts."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.unit import ALIGNMENT_BYTES, Bucket, BucketKey, Unit, lay_out

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=6)
dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])


def bucket(given_shapes: list[tuple[int, ...]], shards: int, dtype: torch.dtype = torch.float32) -> Bucket:
    return lay_out(
        BucketKey(dtype, True, 0), [(f"p{i}", shape, ()) for i, shape in enumerate(given_shapes)], shards
    )


@given(shapes, st.integers(1, 9), dtypes)
def test_cuts_cover_each_element_once(
    given_shapes: list[tuple[int, ...]], shards: int, dtype: torch.dtype
) -> None:
    laid = bucket(given_shapes, shards, dtype)
    seen: dict[str, list[int]] = {slot.name: [] for slot in laid.slots}
    for index in range(shards):
        for slot, start, stop, local in laid.overlaps(index):
            assert 0 <= start < stop <= slot.elements
            assert local >= 0 and local + stop - start <= laid.shard_elements
            assert index * laid.shard_elements + local == slot.offset + start
            seen[slot.name] += range(start, stop)
    assert seen == {slot.name: list(range(slot.elements)) for slot in laid.slots}


@given(shapes, st.integers(1, 9), dtypes)
def test_padding_is_bounded_and_parameters_are_aligned(
    given_shapes: list[tuple[int, ...]], shards: int, dtype: torch.dtype
) -> None:
    laid = bucket(given_shapes, shards, dtype)
    end = 0
    for slot, shape in zip(laid.slots, given_shapes, strict=True):
        assert slot.offset * dtype.itemsize % ALIGNMENT_BYTES == 0
        assert slot.elements == math.prod(shape)
        assert slot.offset >= end
        end = slot.offset + slot.elements
    assert laid.elements % shards == 0
    assert laid.shard_elements * dtype.itemsize % ALIGNMENT_BYTES == 0
    padding = (laid.elements - laid.used_elements) * dtype.itemsize
    assert padding <= ALIGNMENT_BYTES * (len(given_shapes) + shards)
    assert laid.elements > 0, "an empty bucket still makes collectives that do not fail"


@given(shapes, st.integers(1, 9))
def test_whole_ranges_for_those_who_keep_all(given_shapes: list[tuple[int, ...]], shards: int) -> None:
    laid = bucket(given_shapes, shards)
    assert [(o.slot, o.start, o.stop, o.local) for o in laid.overlaps(0, 1)] == [
        (slot, 0, slot.elements, slot.offset) for slot in laid.slots if slot.elements
    ]


def test_a_unit_sums_its_buckets() -> None:
    unit = Unit(1, "", (bucket([(3,), (5,)], 2), bucket([(2, 2)], 2)))
    assert unit.parameters == 3 + 5 + 4
    assert unit.elements == sum(b.elements for b in unit.buckets)
    assert unit.title == "(root)" and Unit(2, "blocks.0", ()).title == "blocks.0"


@pytest.mark.parametrize("shards", [1, 2, 1024])
def test_large_layouts_are_cheap(shards: int) -> None:
    laid = bucket([(4096, 4096)] * 9, shards)
    assert laid.elements == 9 * 4096 * 4096
