"""FirstNotes: numbers noted of rows, of which the first number of each row counts.

    add     a step appends rows with numbers, which may repeat rows of earlier steps       no search, no sorting
    find    a reader sorts what was added since it last looked, and searches in sorted runs

    runs    | oldest | ... | newest |     sorted by row, each row once; neighbours of about one length are merged

A step would have to search for its rows to note each of them once. Here the thread that reads does all of that work,
and a row that is noted again costs memory and nothing else.

Cost:   16 bytes for each number; n log M steps of a search in each of about log(M) runs for n rows.
Shapes: n rows of one call, M numbers.
"""

import numpy as np
import numpy.typing as npt

__all__ = ["NO_NUMBER", "FirstNotes", "Numbers"]

Numbers = npt.NDArray[np.int64]

NO_NUMBER = np.iinfo(np.int64).min
"""Result for rows of which nothing was noted."""


class FirstNotes:
    """The first number that was noted of each row. One thread adds; one other thread takes, sorts and finds."""

    def __init__(self) -> None:
        self._added: list[tuple[Numbers, Numbers]] = []
        self._runs: list[tuple[Numbers, Numbers]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and numbers."""
        return sum(rows.nbytes + numbers.nbytes for rows, numbers in (*self._added, *self._runs))

    def add(self, rows: Numbers, numbers: Numbers) -> None:
        """Note numbers of rows, behind all that were noted before: [n], [n]."""
        if rows.size:
            self._added.append((rows, numbers))

    def take(self) -> list[tuple[Numbers, Numbers]]:
        """Return what was added since the last call, for ``sort``; the caller excludes calls of ``add`` meanwhile."""
        added, self._added = self._added, []
        return added

    def sort(self, added: list[tuple[Numbers, Numbers]]) -> None:
        """Make what ``take`` has returned a run, and merge it with runs that are about as long."""
        if not added:
            return
        self._runs.append(_run([rows for rows, _ in added], [numbers for _, numbers in added]))
        while len(self._runs) > 1 and self._runs[-2][0].size < 2 * self._runs[-1][0].size:
            newer, older = self._runs.pop(), self._runs.pop()
            self._runs.append(_run([older[0], newer[0]], [older[1], newer[1]]))

    def find(self, rows: Numbers) -> Numbers:
        """Return the first number of each row, ``NO_NUMBER`` without one: [n] -> [n].

        What ``sort`` was not given is left out.
        """
        found = np.full(rows.size, NO_NUMBER)
        for known, numbers in reversed(self._runs):
            at = np.minimum(np.searchsorted(known, rows), known.size - 1)
            is_known = known[at] == rows
            found[is_known] = numbers[at[is_known]]
        return found


def _run(rows: list[Numbers], numbers: list[Numbers]) -> tuple[Numbers, Numbers]:
    """Return rows in rising order, each with its first number."""
    joined, values = np.concatenate(rows), np.concatenate(numbers)
    order = joined.argsort(kind="stable")
    joined = joined[order]
    is_first = np.ones(joined.size, np.bool_)
    is_first[1:] = joined[1:] != joined[:-1]
    return joined[is_first], values[order[is_first]]
