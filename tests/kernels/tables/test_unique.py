"""Distinct keys in the order of their first occurrence; a stable order by owner."""

import numpy as np
import pytest
import torch

from shardwise.kernels.tables.compiled import is_installed
from shardwise.kernels.tables.hash_index import HashIndex
from shardwise.kernels.tables.keys import FACTORS
from shardwise.kernels.tables.unique import (
    DistinctKeys,
    UniqueScratch,
    dealt,
    grouped,
    plain_dealt,
    plain_grouped,
    plain_unique,
    unique,
)


@pytest.mark.parametrize("form", [unique, plain_unique])
def test_the_example(form) -> None:  # type: ignore[no-untyped-def]
    distinct = form(torch.tensor([7, 3, 7, 9, 3]))
    assert distinct.keys.tolist() == [7, 3, 9]
    assert distinct.inverse.tolist() == [0, 1, 0, 2, 1]


@pytest.mark.parametrize("count", [0, 1, 2, 8, 9, 1000, 5000])
@pytest.mark.parametrize("span", [1, 50, 2**62])
def test_both_forms_agree(count: int, span: int) -> None:
    keys = torch.randint(-span, span, (count,))
    ours, plain = unique(keys), plain_unique(keys)
    assert torch.equal(ours.keys, plain.keys)
    assert torch.equal(ours.inverse, plain.inverse)
    assert torch.equal(ours.keys[ours.inverse], keys)


def test_extreme_keys_are_keys() -> None:
    keys = torch.tensor([2**63 - 1, -(2**63), -1, 0, -1, -(2**63)])
    assert unique(keys).keys.tolist() == [2**63 - 1, -(2**63), -1, 0]


def test_keys_without_a_stride_of_one() -> None:
    keys = torch.tensor([[1, 2], [1, 3], [4, 5]])[:, 0]
    assert unique(keys).keys.tolist() == [1, 4]


def test_scratch_leaves_nothing_behind() -> None:
    scratch = UniqueScratch()
    first = unique(torch.arange(1000), scratch)
    second = unique(torch.tensor([5, 5, 6]), scratch)
    assert second.keys.tolist() == [5, 6]
    assert torch.equal(first.keys, torch.arange(1000)), "results are not views of the scratch"


def unmixed(mixes: list[int]) -> torch.Tensor:
    """Return the keys that have these mixes: the inverse of ``mix``, which is a bijection."""
    keys, bits = np.array(mixes, np.uint64), np.uint64(33)
    for factor in reversed(FACTORS):
        keys = (keys ^ (keys >> bits)) * np.uint64(pow(factor, -1, 1 << 64))
    return torch.from_numpy((keys ^ (keys >> bits)).view(np.int64))


def longest_run(is_taken: np.ndarray) -> int:
    """Return the most taken slots in a row: the most that one key may have to pass over."""
    free = np.flatnonzero(~is_taken)
    return int(np.diff(np.r_[-1, free, is_taken.size]).max()) - 1


def test_keys_of_one_slot_spread_over_all() -> None:
    """Keys whose mixes have equal lower bits would lie one behind the other, found in time that grows with their
    square."""
    if not is_installed():
        pytest.skip("without numba there are no slots")
    keys = unmixed([place << 32 for place in range(1, 4001)])
    scratch, index = UniqueScratch(), HashIndex()
    assert unique(keys, scratch).keys.equal(keys)
    assert longest_run(scratch.slots >= 0) < 400, "at most half of the slots are taken"
    assert index.find_or_insert(keys)[0].equal(torch.arange(4000))
    assert longest_run(index._places._pairs[:, 1] > 0) < 400  # type: ignore[attr-defined]


def test_keys_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match=r"keys are torch.int32 \[2\]; expected torch.int64 \[N\]"):
        unique(torch.tensor([1, 2], dtype=torch.int32))


@pytest.mark.parametrize("form", [grouped, plain_grouped])
def test_groups_are_stable(form) -> None:  # type: ignore[no-untyped-def]
    labels = torch.tensor([2, 0, 2, 1, 0, 2])
    order, counts = form(labels, 4)
    assert order.tolist() == [1, 4, 3, 0, 2, 5]
    assert counts.tolist() == [2, 1, 3, 0]


def test_groups_of_many() -> None:
    labels = torch.randint(0, 7, (3000,))
    for ours, plain in zip(grouped(labels, 7), plain_grouped(labels, 7), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("form", [grouped, plain_grouped])
@pytest.mark.parametrize("bad", [-1, 3])
def test_a_label_outside(form, bad: int) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(IndexError, match=f"label {bad} at 1; expected 0 to 2"):
        form(torch.tensor([0, bad, 2]), 3)


@pytest.mark.parametrize("form", [dealt, plain_dealt])
def test_distinct_keys_by_owner(form) -> None:  # type: ignore[no-untyped-def]
    distinct = DistinctKeys(torch.tensor([7, 3, 9, 4]), torch.tensor([0, 1, 0, 2, 3]))
    keys, inverse, counts = form(distinct, torch.tensor([1, 0, 1, 0]), 3)
    assert keys.tolist() == [3, 4, 7, 9]
    assert keys[inverse].tolist() == [7, 3, 7, 9, 4]
    assert counts.tolist() == [2, 2, 0]
    with pytest.raises(IndexError, match="3 at 1; expected 0 to 2"):
        form(distinct, torch.tensor([1, 3, 1, 0]), 3)


@pytest.mark.parametrize("span", [1, 50, 4000])
def test_a_map_of_all_keys_finds_what_a_hash_table_finds(span: int) -> None:
    scratch = UniqueScratch()
    for count in (0, 1, 3, 1000, 500):  # what an earlier batch has left in the map does not count
        keys = torch.randint(0, span, (count,))
        ours, plain = unique(keys, scratch, below=span), plain_unique(keys)
        assert torch.equal(ours.keys, plain.keys)
        assert torch.equal(ours.inverse, plain.inverse)


def test_a_map_refuses_a_key_outside() -> None:
    if not is_installed():
        pytest.skip("without numba there is no map")
    for bad in (-1, 3):
        with pytest.raises(IndexError, match=f"key {bad} at 2; expected 0 to 2"):
            unique(torch.tensor([0, 2, bad, 1]), below=3)
