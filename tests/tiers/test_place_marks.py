"""Marks of places: the compiled loops and numpy note the same."""

from unittest.mock import patch

import numpy as np

from shardwise.tiers import place_marks
from shardwise.tiers.place_marks import PlaceMarks


def noted(seed: int) -> dict[str, np.ndarray]:
    """Return the marks after drawn calls."""
    draw, marks = np.random.default_rng(seed), PlaceMarks(40)
    for call in range(60):
        places = draw.integers(-1, 40, 12)
        marks.loading[:] = draw.random(40) < 0.05
        held = marks.held.copy()
        if not marks.hold(places, call):
            assert marks.loading[places[places >= 0]].any() and (marks.held == held).all()
            continue
        assert not marks.loading[places[places >= 0]].any()
        changes, learns, is_new = draw.random(3) < 0.5
        marks.use(places[places >= 0], call // 4, changes=changes, learns=learns, is_new=is_new)
    return dict(vars(marks))


def test_loops_note_what_numpy_notes() -> None:
    compiled = noted(0)
    with patch.object(place_marks, "has_numba", lambda: False):
        plain = noted(0)
    assert compiled["recent"].any() and compiled["dirty"].any() and (compiled["step"] >= 0).any()
    for name, marks in compiled.items():
        assert np.array_equal(marks, plain[name]), name


def test_bytes_are_those_of_the_marks() -> None:
    assert PlaceMarks(7).nbytes == 7 * PlaceMarks.BYTES
