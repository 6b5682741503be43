"""The index against a dictionary: insertion, removal, growth, limits, collisions, scores and eviction."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.base.errors import TableFullError
from shardwise.kernels.tables import hash_index, pair_map
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


def pairs_of(index: HashIndex) -> pair_map.PairMap:
    if not isinstance(index._places, pair_map.PairMap):
        pytest.skip("without numba there are no slots")
    return index._places


def test_growth_moves_the_slots_of_its_own_keys_and_no_more() -> None:
    """Every lookup is right while half of a round's pairs have moved, also after removals; and nothing is copied."""
    index = HashIndex(limit=1 << 15)
    places = pairs_of(index)
    memory, keys = places._pairs, torch.randint(-(2**62), 2**62, (20_000,)).unique()
    halfway, expected = 0, {}
    for number, part in enumerate(keys[torch.randperm(len(keys))].split(100)):
        before = places._slots + places._moved
        rows, _ = index.find_or_insert(part)
        expected.update(zip(part.tolist(), rows.tolist(), strict=True))
        moved = places._slots + places._moved - before
        assert moved <= 8 * len(part) + 300, "300 for the end of a run"
        halfway += 0 < places._moved < places._slots
        if number % 7 == 6:
            index.remove(part[::2])
            for key in part[::2].tolist():
                del expected[key]
        if number % 10 == 9:
            assert index.find(keys).tolist() == [expected.get(key, -1) for key in keys.tolist()]
    assert halfway > 50 and places._pairs is memory
    assert places._taken == len(index) <= 5 / 8 * (places._slots + places._moved)


def test_a_map_that_outgrows_its_room_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    index = HashIndex(room=10)
    memory = pairs_of(index)._pairs
    keys = torch.arange(5000) * 17
    for part in keys.split(333):
        index.find_or_insert(part)
    assert pairs_of(index)._pairs is not memory
    assert index.find(keys).tolist() == list(range(5000)) and index.keys_of(torch.arange(5000)).equal(keys)


CALLS = ["insert", "remove", "evict", "add", "set", "pin", "unpin", "look", "look_below", "below"]


@given(
    st.sampled_from([None, 4096]),
    st.lists(
        st.tuples(
            st.sampled_from(CALLS),
            st.lists(st.integers(0, 119), max_size=60),
            st.integers(0, 9),
        ),
        max_size=30,
    ),
)
@settings(max_examples=100, deadline=None)
def test_any_sequence_of_calls_is_as_with_a_dictionary(
    room: int | None, calls: list[tuple[str, list[int], int]]
) -> None:
    """Searched ahead or not, in a map that is copied and in one that grows in place."""
    # four slots next to each other at the end of the array: long runs that wrap around
    pool = [key for slot in (61, 62, 63, 0) for key in colliding(30, slot)]
    with pytest.MonkeyPatch.context() as patch:
        plain = without_numba(patch)
        patch.setattr(pair_map.secrets, "randbits", lambda bits: 0)
        patch.setattr(hash_index, "_FEWEST_ROWS", 7)
        patch.setattr(hash_index, "_WANTED_SHARE", 3)
        ours = HashIndex(room=room)
        for name, picks, score in calls:
            keys = as_keys(*[pool[pick] for pick in picks])
            act(name, keys, score, ours, plain)
            everything = as_keys(*pool)
            assert torch.equal(ours.find(everything), plain.find(everything))
            assert len(ours) == len(plain)
        for score in range(12):
            assert torch.equal(ours.below(score), plain.below(score))
        assert torch.equal(ours.lowest(70), plain.lowest(70))


def act(name: str, keys: Tensor, score: int, ours: HashIndex, plain: HashIndex) -> None:
    """Make the same call on both and compare what comes."""
    rows = plain.find(keys).unique()
    rows = rows[rows >= 0]
    calls = {
        "insert": lambda index: index.find_or_insert(keys, score),
        "remove": lambda index: (index.remove(keys),),
        "evict": lambda index: (index.remove(index.keys_of(index.lowest(score))),),
        "add": lambda index: index.add_scores(rows, score - 3),
        "set": lambda index: index.set_scores(rows, torch.arange(len(rows)) % (score + 1)),
        "pin": lambda index: index.pin(rows[:score]),
        "unpin": lambda index: index.pin(rows[:score], False),
        "look": lambda index: index.look_ahead(),
        "look_below": lambda index: index.look_ahead_below(score, 4),
        "below": lambda index: (index.below(score),),
    }
    for one, other in zip(calls[name](ours) or (), calls[name](plain) or (), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("kind", ["lru", "lfu", "age"])
def test_the_rows_that_leave_are_found_ahead(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 steps of a table that turns over: the rows of a scan of all rows, without one after the first rounds."""
    monkeypatch.setattr(hash_index, "_FEWEST_ROWS", 16)
    ours, plain = HashIndex(room=4096), without_numba(monkeypatch)
    pairs_of(ours)
    scans = 0
    for step in range(1, 301):
        generator = torch.Generator().manual_seed(step)
        keys = ((torch.rand(30, generator=generator) ** 2 * 900).long() + 3 * step).unique()
        for index in (ours, plain):
            rows, _ = index.find_or_insert(keys, 0 if kind == "lfu" else step)
            if kind == "lfu":
                index.add_scores(rows)
            else:
                index.set_scores(rows, step)
        if kind == "age":
            scans += step > 40 and ours._ahead is not None and ours._ahead.below(step - 40 + 1) is None
            leaving = [index.below(step - 40 + 1) for index in (ours, plain)]
            ours.look_ahead_below(step - 40 + 2, 40)
        else:
            surplus = max(len(plain) - 400, 0)
            scans += step > 40 and ours._ahead is not None and ours._ahead.lowest(surplus) is None
            leaving = [index.lowest(surplus) for index in (ours, plain)]
            ours.look_ahead()
        assert torch.equal(*leaving)
        for index in (ours, plain):
            index.remove(index.keys_of(leaving[0]))
    assert scans == 0 and ours._ahead is not None and len(ours) > 200


def test_no_scan_of_all_rows_follows_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 steps of few new keys behind one of many, which has used up the rows that were known and wants more ahead."""
    monkeypatch.setattr(hash_index, "_FEWEST_ROWS", 4)
    index, most, seen, scans = HashIndex(room=1 << 13), 4000, 0, 0
    for step in range(1, 320):
        count = 1000 if step < 5 else 800 if step == 5 else 10
        rows, _ = index.find_or_insert(torch.arange(seen, seen + count), step)
        seen += count
        surplus = max(len(index) - most, 0)
        scans += step > 5 and index._ahead is not None and index._ahead.lowest(surplus) is None
        index.remove(index.keys_of(index.lowest(surplus)))
        index.look_ahead()
    assert scans == 0 and len(index) == most


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
