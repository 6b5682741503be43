"""The rows with the lowest scores, found ahead of need by a scan of all rows that is spread over many calls.

    bounds     b_1 < b_2 < ... < b_n      pairs of (score, key)
    bucket i   the rows with b_(i-1) < (score, key) <= b_i
    pass       begins with new bounds above b_n and reads all rows, some at a call; when it ends, the new buckets hold
               every row that is not above the last bound

Scores rise between two passes: a row whose score has risen stays in its bucket until the bucket is read; then it moves.
``note`` takes the rows that may have become lower: new ones, and those whose score or pin was changed downwards. A row
without a key stays in its bucket, too, until the bucket is read, or until ``note`` takes it with its next key. So
buckets of finished passes always hold all the rows that belong to them, and the lowest rows of a table are those of its
first buckets, the same that a scan of all rows would find. If too few are known, the caller scans.

The bounds of a pass are quantiles of a sample of the rows, or given scores. A bucket is a list of rows; a row's entry
counts only if ``_bucket_of`` of the row names the bucket.

Cost:  4 bytes a row, 8 to 16 bytes a row in buckets; a pass reads 8 bytes of each row once, and 8 more of rows in the
       range. A call does not take longer with the number of calls before it.
Shapes: R rows, n rows of one call.
"""

import numpy as np
import torch

from shardwise.kernels.tables.compiled import has_numba, loop
from shardwise.kernels.tables.slab import reserve

LIVE = np.uint8(1)
"""State of a row that has a key and is not pinned."""

_LARGEST = np.iinfo(np.int64).max
_NONE = np.empty(0, np.int64)
_SAMPLES = 4096
_BUCKETS = 64
"""Number of buckets of a pass."""


class RowColumns:
    """Score, key and state of each row, as arrays that the owner may replace by longer ones."""

    def __init__(self, scores: np.ndarray, keys: np.ndarray, state: np.ndarray) -> None:
        self.scores, self.keys, self.state = scores, keys, state


class _Bucket:
    """Rows of one bucket, in an array that doubles if it is full."""

    def __init__(self, rows: np.ndarray) -> None:
        self._held, self.size = rows, rows.size

    @property
    def rows(self) -> np.ndarray:
        """The rows, in the order in which they were added."""
        return self._held[: self.size]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self._held.nbytes

    def add(self, rows: np.ndarray) -> None:
        """Add rows behind the others."""
        size = self.size + rows.size
        if size > self._held.size:
            longer = np.empty(max(2 * self._held.size, size), np.int64)
            longer[: self.size] = self.rows
            self._held = longer
        self._held[self.size : size] = rows
        self.size = size


class RowsAhead:
    """Buckets of the rows with the lowest scores.

    Args:
        columns: score, key and state of each row.
        room: number of rows for which addresses are reserved.
    """

    def __init__(self, columns: RowColumns, room: int) -> None:
        self._columns = columns
        self._bucket_of = _reserved(room)
        """Number of the bucket that has a row; 0 for none."""
        self._first = 1
        """Number of the first bucket."""
        self._scores = np.empty(0, np.int64)
        self._keys = np.empty(0, np.int64)
        self._buckets: list[_Bucket] = []
        self._finished = 0
        """Number of buckets, from the first one on, whose rows are complete."""
        self._next: int | None = None
        """Row that the running pass reads next; None between passes."""
        self._stop = 0
        self._read = (0, 0)
        """Bound of the bucket that was read last."""

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in buckets."""
        return sum(bucket.nbytes for bucket in self._buckets)

    @property
    def known(self) -> int:
        """Number of rows in finished buckets; some of them may have left for a higher score."""
        return sum(bucket.size for bucket in self._buckets[: self._finished])

    @property
    def complete_score(self) -> int | None:
        """Largest score up to which every row is in a finished bucket; None if no bucket is finished."""
        if self._finished == 0:
            return None
        last = self._finished - 1
        return int(self._scores[last]) - int(self._keys[last] != _LARGEST)

    @property
    def is_passing(self) -> bool:
        """True while a pass runs."""
        return self._next is not None

    def lengthen(self, room: int) -> None:
        """Reserve addresses for more rows."""
        longer = _reserved(room)
        longer[: self._bucket_of.size] = self._bucket_of
        self._bucket_of = longer

    # Passes ------------------------------------------------------------------------------------------------------

    def begin_lowest(self, rows: int, wanted: int) -> None:
        """Begin a pass for about ``wanted`` of the ``rows`` first rows beyond those in buckets."""
        columns = self._columns
        places = np.linspace(0, rows - 1, min(rows, _SAMPLES)).astype(np.int64)
        places = places[(columns.state[places] == LIVE) & (self._bucket_of[places] == 0)]
        order = np.lexsort((columns.keys[places], columns.scores[places]))
        share = min(wanted * min(rows, _SAMPLES) // max(rows, 1) + 1, len(order))
        picks = np.unique(np.linspace(0, share, _BUCKETS + 1).astype(np.int64)[1:] - 1)
        picked = places[order[picks[picks >= 0]]]
        self._begin(columns.scores[picked], columns.keys[picked], rows)

    def begin_below(self, rows: int, first: int, stop: int, unit: int = 1) -> None:
        """Begin a pass for the scores from ``first`` to ``stop`` - 1, in ``unit``s, of the ``rows`` first rows."""
        units = np.unique(np.linspace(first, stop - 1, min(stop - first, 2 * _BUCKETS)).astype(np.int64))
        scores = (units + 1) * unit - 1
        self._begin(scores, np.full(scores.size, _LARGEST), rows)

    def _begin(self, scores: np.ndarray, keys: np.ndarray, rows: int) -> None:
        if self._scores.size:
            last = (self._scores[-1], self._keys[-1])
            above = (scores > last[0]) | ((scores == last[0]) & (keys > last[1]))
            scores, keys = scores[above], keys[above]
        if scores.size:
            self._scores = np.concatenate([self._scores, scores])
            self._keys = np.concatenate([self._keys, keys])
            self._buckets += [_Bucket(_NONE) for _ in range(scores.size)]
            self._next, self._stop = 0, rows

    def scan(self, count: int) -> None:
        """Read up to ``count`` more rows for the running pass."""
        if self._next is None:
            return
        stop = min(self._next + count, self._stop)
        self._file(np.arange(self._next, stop), True)
        self._next = stop
        if stop == self._stop:
            self._next, self._finished = None, len(self._buckets)

    # Rows that change --------------------------------------------------------------------------------------------

    def note(self, rows: np.ndarray) -> None:
        """Put rows into their buckets that are new, or whose score has fallen, or that are no longer pinned."""
        if self._buckets and rows.size:
            self._file(rows, False)

    def _file(self, rows: np.ndarray, only_new: bool) -> None:
        columns = self._columns
        found, places = np.empty(rows.size, np.int64), np.empty(rows.size, np.int16)
        count = _place(
            rows,
            only_new,
            columns.scores,
            columns.keys,
            columns.state,
            self._bucket_of,
            self._first,
            self._scores,
            self._keys,
            found,
            places,
        )
        places = places[:count]
        order = places.argsort(kind="stable")
        ends = np.bincount(places, minlength=len(self._buckets)).cumsum()
        found = found[order]
        start = 0
        for place in np.unique(places).tolist():
            self._buckets[place].add(found[start : ends[place]])
            start = ends[place]

    # Reading -----------------------------------------------------------------------------------------------------

    def lowest(self, count: int) -> np.ndarray | None:
        """Return at least the ``count`` lowest rows, in any order; None if too few are known."""
        held: list[np.ndarray] = []
        found = 0
        while found < count and self._finished:
            held.append(self._first_bucket())
            found += held[-1].size
        return self._put_back(held, found >= count)

    def below(self, score: int) -> np.ndarray | None:
        """Return at least the rows with less than ``score``, in any order; None if they are not known."""
        wanted, complete = (score - 1, _LARGEST), self.complete_score
        if complete is None or complete < score - 1:
            return None
        held = [self._first_bucket()]
        while self._read < wanted:
            held.append(self._first_bucket())
        return self._put_back(held, True)

    def _first_bucket(self) -> np.ndarray:
        """Remove the first bucket and return its rows; rows whose score has risen move to later buckets."""
        rows = self._buckets[0].rows
        columns = self._columns
        own, risen = np.empty(rows.size, np.int64), np.empty(rows.size, np.int64)
        self._read = (int(self._scores[0]), int(self._keys[0]))
        few, many = _read(
            rows,
            self._first,
            columns.scores,
            columns.keys,
            columns.state,
            self._bucket_of,
            *self._read,
            own,
            risen,
        )
        self._first += 1
        self._finished -= 1
        self._buckets.pop(0)
        self._scores, self._keys = self._scores[1:], self._keys[1:]
        if self._buckets and many:
            self._file(risen[:many], False)
        return own[:few]

    def _put_back(self, held: list[np.ndarray], is_enough: bool) -> np.ndarray | None:
        """Return the rows that were read, and keep them as the first bucket."""
        if not held:
            return np.empty(0, np.int64) if is_enough else None
        rows = np.concatenate(held)
        score, key = self._read
        self._first -= 1
        self._scores, self._keys = np.append(score, self._scores), np.append(key, self._keys)
        self._buckets.insert(0, _Bucket(rows))
        self._finished += 1
        self._bucket_of[rows] = self._first
        return rows if is_enough else None


def compile_loops() -> None:
    """Compile the loops of this module, so that no later step waits for them."""
    if has_numba():
        none, few, one = np.empty(0, np.int64), np.empty(0, np.uint8), np.zeros(1, np.int64)
        of = np.empty(0, np.int32)
        _place(none, True, none, none, few, of, 1, one, one, none, np.empty(0, np.int16))
        _read(none, 1, none, none, few, of, 0, 0, none, none)


def _reserved(room: int) -> np.ndarray:
    found: np.ndarray = reserve(room, 1, torch.int32, small_first=True).view(-1).numpy()
    return found


@loop
def _place(
    rows: np.ndarray,
    only_new: bool,
    scores: np.ndarray,
    keys: np.ndarray,
    state: np.ndarray,
    bucket_of: np.ndarray,
    first: int,
    bound_scores: np.ndarray,
    bound_keys: np.ndarray,
    found: np.ndarray,
    places: np.ndarray,
) -> int:
    """Write the rows that are not above the last bound, and their buckets, and return their number."""
    count, last = 0, bound_scores.size - 1
    for i in range(rows.size):
        row = rows[i]
        if state[row] != LIVE or (only_new and bucket_of[row] != 0):
            continue
        score = scores[row]
        if score > bound_scores[last] or (score == bound_scores[last] and keys[row] > bound_keys[last]):
            bucket_of[row] = 0
            continue
        key = keys[row]
        low, high = 0, last
        while low < high:
            middle = (low + high) // 2
            if bound_scores[middle] < score or (bound_scores[middle] == score and bound_keys[middle] < key):
                low = middle + 1
            else:
                high = middle
        bucket_of[row] = first + low
        found[count], places[count] = row, low
        count += 1
    return count


@loop
def _read(
    rows: np.ndarray,
    number: int,
    scores: np.ndarray,
    keys: np.ndarray,
    state: np.ndarray,
    bucket_of: np.ndarray,
    bound_score: int,
    bound_key: int,
    own: np.ndarray,
    risen: np.ndarray,
) -> tuple[int, int]:
    """Sort the rows of a bucket into those that still belong to it and those that have risen; return both numbers."""
    few, many = 0, 0
    for i in range(rows.size):
        row = rows[i]
        if bucket_of[row] != number:
            continue
        bucket_of[row] = 0
        if state[row] != LIVE:
            continue
        score = scores[row]
        if score < bound_score or (score == bound_score and keys[row] <= bound_key):
            own[few] = row
            few += 1
        else:
            risen[many] = row
            many += 1
    return few, many
