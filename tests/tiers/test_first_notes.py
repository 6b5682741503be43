"""Numbers noted of rows: the first number of each row, whatever is added, taken and sorted in between."""

import numpy as np

from shardwise.tiers.first_notes import NO_NUMBER, FirstNotes


def test_the_first_number_counts() -> None:
    draw, notes, first = np.random.default_rng(0), FirstNotes(), {}
    for turn in range(300):
        rows = draw.integers(0, 2000, int(draw.integers(0, 30)))
        numbers = np.arange(rows.size) + 100 * turn
        notes.add(rows, numbers)
        for row, number in zip(rows.tolist(), numbers.tolist(), strict=True):
            first.setdefault(row, number)
        if draw.random() < 0.3:
            notes.sort(notes.take())
            asked = draw.integers(0, 2500, 50)
            assert notes.find(asked).tolist() == [first.get(row, NO_NUMBER) for row in asked.tolist()]
    assert 1 < len(notes._runs) < 12, "runs are merged, and not all of them each time"
    notes.sort(notes.take())
    assert notes.nbytes < 16 * 2 * len(first), "a row is kept once in a run"


def test_nothing_is_found_before_it_is_sorted() -> None:
    notes = FirstNotes()
    notes.add(np.array([4]), np.array([9]))
    assert notes.find(np.array([4])).tolist() == [NO_NUMBER]
    notes.sort(notes.take())
    assert notes.find(np.array([4, 5])).tolist() == [9, NO_NUMBER]
    assert notes.find(np.empty(0, np.int64)).size == 0
