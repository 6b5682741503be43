"""The index against a dictionary: insertion, removal, growth, limits, collisions, scores and eviction."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.base.errors import TableFullError
from shardwise.kernels.tables import hash_index
from shardwise.kernels.tables.hash_index import HashIndex
from shardwise.kernels.tables.keys import mix


def as_keys(*keys: int) -> Tensor:
    return torch.tensor(keys, dtype=torch.int64)


def without_numba(patch: pytest.MonkeyPatch, limit: int | None = None) -> HashIndex:
    with patch.context() as here:
        here.setattr(hash_index, "is_installed", lambda: False)
        return HashIndex(limit)


@pytest.fixture(params=["pairs", "dictionary"])
def index(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HashIndex:
    return HashIndex() if request.param == "pairs" else without_numba(monkeypatch)


def colliding(count: int, slot: int) -> list[int]:
    """Keys that all belong in one slot of the smallest index."""
    keys = torch.arange(1 << 14)
    return keys[mix(keys) & 63 == slot][:count].tolist()


def test_rows_come_in_the_order_of_keys(index: HashIndex) -> None:
    rows, new = index.find_or_insert(as_keys(30, 10, 30, 20))
    assert rows.tolist() == [0, 1, 0, 2]
    assert new.tolist() == [0, 1, 2]
    assert index.keys_of(new).tolist() == [30, 10, 20]
    rows, new = index.find_or_insert(as_keys(20, 40))
    assert rows.tolist() == [2, 3]
    assert new.tolist() == [3]
    assert index.find(as_keys(10, 11, 40)).tolist() == [1, -1, 3]
    assert len(index) == index.rows == 4


def test_freed_rows_are_used_again_the_last_first(index: HashIndex) -> None:
    index.find_or_insert(as_keys(1, 2, 3, 4))
    assert index.remove(as_keys(2, 9, 4, 2)).tolist() == [1, 3]
    assert len(index) == 2
    assert index.rows == 4
    assert index.find(as_keys(1, 2, 3, 4)).tolist() == [0, -1, 2, -1]
    rows, _ = index.find_or_insert(as_keys(5, 6, 7))
    assert rows.tolist() == [3, 1, 4]
    keys, rows = index.items()
    assert keys.tolist() == [1, 6, 3, 5, 7]
    assert rows.tolist() == [0, 1, 2, 3, 4]


def test_every_int64_is_a_key(index: HashIndex) -> None:
    keys = as_keys(0, -1, 2**63 - 1, -(2**63), 1)
    rows, _ = index.find_or_insert(keys)
    assert rows.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(index.find(keys), rows)


def test_growth_keeps_every_row() -> None:
    index = HashIndex()
    keys = torch.randint(-(2**62), 2**62, (20_000,))
    seen = 0
    for part in keys.split(777):
        index.find_or_insert(part)
        seen += len(part)
        assert index.find(keys[:seen]).tolist() == list(range(seen))
    assert index.nbytes > 16 * 20_000


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["insert", "remove", "evict"]),
            st.lists(st.integers(0, 119), max_size=60),
            st.integers(0, 9),
        ),
        max_size=25,
    )
)
@settings(max_examples=60, deadline=None)
def test_any_sequence_of_calls_is_as_with_a_dictionary(calls: list[tuple[str, list[int], int]]) -> None:
    # four slots next to each other at the end of the array: long runs that wrap around
    pool = [key for slot in (61, 62, 63, 0) for key in colliding(30, slot)]
    with pytest.MonkeyPatch.context() as patch:
        plain = without_numba(patch)
    ours = HashIndex()
    for name, picks, score in calls:
        keys = as_keys(*[pool[pick] for pick in picks])
        if name == "insert":
            for one, other in zip(
                ours.find_or_insert(keys, score), plain.find_or_insert(keys, score), strict=True
            ):
                assert torch.equal(one, other)
        elif name == "remove":
            assert torch.equal(ours.remove(keys), plain.remove(keys))
        else:
            rows = ours.lowest(score)
            assert torch.equal(rows, plain.lowest(score))
            keys = ours.keys_of(rows)
            assert torch.equal(ours.remove(keys), plain.remove(keys))
        everything = as_keys(*pool)
        assert torch.equal(ours.find(everything), plain.find(everything))
        assert len(ours) == len(plain)


def test_a_full_table_refuses_the_call_and_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for index in (HashIndex(limit=3), without_numba(monkeypatch, limit=3)):
        index.find_or_insert(as_keys(1, 2))
        with pytest.raises(
            TableFullError, match="2 new keys for a table with 2 of at most 3 rows .* evict 1 rows"
        ):
            index.find_or_insert(as_keys(3, 1, 4, 3))
        assert index.find(as_keys(1, 2, 3, 4)).tolist() == [0, 1, -1, -1]
        assert index.find_or_insert(as_keys(3, 3, 1))[0].tolist() == [2, 2, 0]
        index.remove(as_keys(1))
        assert index.find_or_insert(as_keys(4))[0].tolist() == [0]


def test_the_lowest_by_score_then_by_key_whatever_the_row() -> None:
    keys = torch.randperm(500)
    scores = keys % 7
    for order in (torch.arange(500), torch.randperm(500)):
        index = HashIndex()
        rows, _ = index.find_or_insert(keys[order])
        index.set_scores(rows, scores[order])
        expected = sorted(keys.tolist(), key=lambda key: (key % 7, key))
        for count in (-1, 0, 1, 2, 7, 30, 31, 32, 71, 72, 100, 499, 500, 800):
            assert index.keys_of(index.lowest(count)).tolist() == expected[: max(count, 0)]


def test_a_few_of_many_rows_some_free_some_pinned() -> None:
    keys = torch.randint(-(2**62), 2**62, (5000,))
    for scores in (torch.randint(0, 4, (5000,)), torch.arange(5000), -torch.arange(5000)):
        index = HashIndex()
        rows, _ = index.find_or_insert(keys)
        index.set_scores(rows, scores)
        index.pin(rows[::3])
        index.remove(keys[1::7])
        left = set(range(5000)) - set(range(0, 5000, 3)) - set(range(1, 5000, 7))
        expected = sorted(left, key=lambda row: (int(scores[row]), int(keys[row])))
        for count in (1, 2, 3, 64, 250):
            assert index.lowest(count).tolist() == expected[:count]


def test_pinned_rows_stay(index: HashIndex) -> None:
    rows, _ = index.find_or_insert(as_keys(1, 2, 3), score=5)
    index.set_scores(rows[2:], 9)
    index.pin(rows[:1])
    assert index.pinned().tolist() == [0]
    assert index.lowest(3).tolist() == [1, 2]
    assert index.below(9).tolist() == [1]
    index.pin(rows[:1], False)
    assert index.lowest(3).tolist() == [0, 1, 2]
    index.pin(rows[:1])
    index.remove(as_keys(1))
    index.find_or_insert(as_keys(8))
    assert index.pinned().tolist() == [], "a row's next key is not pinned"


def test_scores(index: HashIndex) -> None:
    rows, _ = index.find_or_insert(as_keys(1, 2, 3), score=4)
    index.add_scores(rows[:2], as_keys(10, 20))
    index.add_scores(rows[2:])
    assert index.scores_of(rows).tolist() == [14, 24, 5]
    index.set_scores(rows[:1], 0)
    assert index.scores_of(rows).tolist() == [0, 24, 5]


def test_rows_without_a_key_are_refused(index: HashIndex) -> None:
    index.find_or_insert(as_keys(1, 2))
    index.remove(as_keys(1))
    with pytest.raises(IndexError, match="row 0 has no key"):
        index.set_scores(as_keys(0), 1)
    with pytest.raises(IndexError, match="rows 2 to 2 of an index with 2 rows"):
        index.keys_of(as_keys(2))


def test_keys_of_another_kind_are_refused(index: HashIndex) -> None:
    with pytest.raises(ValueError, match=r"keys are torch.float32 \[2\] on cpu; expected int64"):
        index.find(torch.zeros(2))


def test_nothing_asked_nothing_done(index: HashIndex) -> None:
    assert index.find(as_keys()).numel() == 0
    rows, new = index.find_or_insert(as_keys())
    assert rows.numel() == new.numel() == index.lowest(5).numel() == index.remove(as_keys()).numel() == 0
