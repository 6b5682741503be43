"""Marks of the places of a cache of rows: what is at each place, who needs it, and whether it was changed.

A pass notes five things of each of its rows, and the marks of a row lie where its place is, so each costs an access to
memory. One compiled loop goes over the places once; numpy, which serves without numba, goes over them once a mark.

Cost:   20 bytes a place.
Shapes: N places of one call, P places.
"""

import numpy as np
import numpy.typing as npt

from shardwise.kernels.tables.compiled import has_numba, loop

__all__ = ["PlaceMarks"]

Places = npt.NDArray[np.int64]


class PlaceMarks:
    """Marks of the places of a cache.

    Args:
        places: Number of places.
    """

    BYTES = 20
    """Bytes of the marks of one place."""

    def __init__(self, places: int) -> None:
        self.live = np.zeros(places, np.bool_)
        """True if a row is at the place."""
        self.dirty = np.zeros(places, np.bool_)
        """True if the line differs from the one below."""
        self.recent = np.zeros(places, np.bool_)
        """True if the row was used since the hand of the clock last came."""
        self.loading = np.zeros(places, np.bool_)
        """True while the cache reads ahead into the place."""
        self.held = np.full(places, -1, np.int64)
        """Number of the last call that returned the place."""
        self.step = np.full(places, -1, np.int64)
        """Step in which the row was, or is to be, used for learning."""
        if has_numba():  # compile the loops here, so that the first step does not wait for it
            none = np.empty(0, np.int64)
            self.hold(none, -1)
            self.use(none, -1, changes=False, learns=False, is_new=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all marks."""
        return sum(each.nbytes for each in vars(self).values())

    def hold(self, places: Places, call: int) -> bool:
        """Hold places for a call, unless the cache reads ahead into one of them.

        Args:
            places: Places, -1 for rows that have none: [N].
            call: Number of the call.

        Returns:
            False if the cache reads ahead into one of the places; then nothing is held.
        """
        if has_numba():
            return bool(_hold(places, self.loading, self.held, call))
        at = places[places >= 0]
        if self.loading[at].any():
            return False
        self.held[at] = call
        return True

    def use(self, places: Places, step: int, *, changes: bool, learns: bool, is_new: bool) -> None:
        """Note that a pass uses the rows at places.

        Args:
            places: Places, possibly repeated: [N].
            step: The running step.
            changes: True if the pass changes the lines.
            learns: True if the running step will update the rows.
            is_new: True if the rows have come into memory for this pass. Another row is used again if it was there for
                another step.
        """
        if has_numba():
            _use(places, self.recent, self.dirty, self.step, step, changes, learns, is_new)
            return
        if not is_new:
            self.recent[places] |= self.step[places] != step
        if changes:
            self.dirty[places] = True
        if learns:
            self.step[places] = step


@loop
def _hold(places: np.ndarray, loading: np.ndarray, held: np.ndarray, call: int) -> bool:
    for i in range(places.size):
        if places[i] >= 0 and loading[places[i]]:
            return False
    for i in range(places.size):
        if places[i] >= 0:
            held[places[i]] = call
    return True


@loop
def _use(
    places: np.ndarray,
    recent: np.ndarray,
    dirty: np.ndarray,
    steps: np.ndarray,
    step: int,
    changes: bool,
    learns: bool,
    is_new: bool,
) -> None:
    for i in range(places.size):
        place = places[i]
        if not is_new and steps[place] != step:
            recent[place] = True
        if changes:
            dirty[place] = True
        if learns:
            steps[place] = step
