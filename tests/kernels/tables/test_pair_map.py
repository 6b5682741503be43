"""The map from keys to rows against a dictionary, while it grows, shrinks and is copied."""

import numpy as np
import pytest

from shardwise.kernels.tables.pair_map import PairMap

pytest.importorskip("numba")


@pytest.mark.parametrize("room", [16, 4096], ids=["copied", "reserved"])
def test_it_holds_what_a_dictionary_holds(room: int) -> None:
    rng = np.random.default_rng(room)
    pairs, known, row = PairMap(room, 8), dict[int, int](), 0
    for _ in range(60):
        keys = np.unique(rng.integers(-500, 500, 40))
        new = np.array([key for key in keys.tolist() if key not in known], np.int64)
        rows = np.arange(row, row + new.size)
        row += new.size
        pairs.insert(new, rows)
        known.update(zip(new.tolist(), rows.tolist(), strict=True))
        gone = np.unique(rng.integers(-500, 500, 25))
        assert pairs.remove(gone).tolist() == [known.pop(key, -1) for key in gone.tolist()]
        asked = np.arange(-500, 500)
        assert pairs.find(asked).tolist() == [known.get(key, -1) for key in asked.tolist()]


def test_the_smallest_and_the_largest_key_and_zero_are_keys() -> None:
    ends = np.array([np.iinfo(np.int64).min, 0, np.iinfo(np.int64).max])
    pairs = PairMap(64, 8)
    assert pairs.find(ends).tolist() == [-1, -1, -1]
    pairs.insert(ends, np.arange(3))
    assert pairs.find(ends).tolist() == [0, 1, 2]
