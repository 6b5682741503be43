"""The rows of a dynamic table by key, with scores and the rows to evict.

    pairs     key -> row                            pair_map.py, which grows a few slots at a time
    columns   key, score and state of each row      addresses for ``limit`` rows are reserved, memory is taken by rows
    ahead     the rows with the lowest scores       rows_ahead.py, if ``look_ahead`` is called between the steps

Rows are handed out in the order in which keys first occur: rows that were freed, the last freed first, then rows never
used before. A row keeps its number until its key is removed. Any int64 is a key. An index that has reached its
``limit`` refuses the whole call and does not change.

Each row has a score, an int64 whose meaning the caller chooses (the step of the last use, a count, the step of
insertion), and may be pinned. ``lowest`` finds the rows to evict: by score, then by key, so the choice does not depend
on the row that a key got or on the time at which it came. A search reads all rows, unless enough of the lowest ones
were found ahead of it.

Without numba a dictionary replaces the pairs, every search reads all rows, and the rows are the same.

Cost:  pair_map.py; 17 bytes a row, 8 more for each that was freed, and rows_ahead.py if rows are searched ahead.
Shapes: N keys of one call, R rows.
"""

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shardwise.base.errors import TableFullError
from shardwise.kernels.tables import rows_ahead
from shardwise.kernels.tables.compiled import array, has_numba, is_installed, loop
from shardwise.kernels.tables.keys import count_buckets
from shardwise.kernels.tables.pair_map import PairMap
from shardwise.kernels.tables.rows_ahead import LIVE, RowColumns, RowsAhead
from shardwise.kernels.tables.slab import reserve
from shardwise.kernels.tables.unique import UniqueScratch, unique

_FEW = 16
"""Number of rows for each evicted one above which a heap of the lowest so far is faster than a partition."""

_PINNED = np.uint8(2)
"""Bit of the state of a pinned row, beside ``LIVE``; the state is 0 for a row without a key."""

_FEWEST_ROWS, _MOST_ROWS = 1 << 10, 1 << 31
"""Least and largest number of rows for which addresses are reserved at once."""


_WANTED_SHARE, _WANTED_TIMES = 16, 8
"""Rows to know ahead: one row in 16, and 8 times as many as were asked for at once."""

_PACE = 4
"""Passes over all rows in the time in which the rows that are known would leave."""

_MOST_HASTE = 16
"""Number of times that a pass may be faster than one for which all wanted rows are known."""


class HashIndex:
    """Rows of a table by key, on the CPU.

    Args:
        limit: largest number of rows; None is without limit.
        expected: number of rows that are expected soon.
        room: number of rows up to which growth copies nothing; None: ``limit``, and ``expected`` without one.
        buckets: number of logical buckets whose keys are counted; 0 counts none.

    Raises:
        ValueError: if ``limit`` is not positive.
    """

    def __init__(
        self, limit: int | None = None, expected: int = 0, room: int | None = None, buckets: int = 0
    ) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"a table of at most {limit} rows; expected a positive limit")
        self.limit = limit
        self.before_change: Callable[[np.ndarray], None] | None = None
        """Function that is called with rows whose key, score or state is about to change."""
        self.bucket_counts = torch.zeros(buckets, dtype=torch.int64)
        """Number of keys of each logical bucket."""
        wanted = expected if room is None and limit is None else (room or limit or 0)
        self._room = max(min(wanted, _MOST_ROWS), expected, _FEWEST_ROWS)
        self._places: _RowMap = PairMap(self._room, expected) if is_installed() else _DictionaryRowMap()
        self._columns = RowColumns(
            *(_reserved(self._room, dtype) for dtype in (torch.int64, torch.int64, torch.uint8))
        )
        self._freed = _reserved(self._room, torch.int64)
        self._freed_count = 0
        self._rows = 0
        self._scratch = UniqueScratch()
        self._ahead: RowsAhead | None = None
        self._asked = self._inserted = 0
        """Largest number of rows asked of ``lowest``, and rows inserted since the last call of ``look_ahead``."""
        self._pairs_lock = threading.Lock()

    @staticmethod
    def bytes_for(rows: int, freed: int = 0, grown: bool = False) -> int:
        """Return the bytes of an index, with numba.

        Args:
            rows: number of rows ever in use.
            freed: most rows that wait for another key at once.
            grown: True if the index has grown row by row; False if it was made for so many rows.
        """
        pairs = PairMap.grown_bytes_for(rows) if grown else PairMap.bytes_for(rows)
        return pairs + 17 * rows + 8 * freed

    def __len__(self) -> int:
        return self._rows - self._freed_count

    @property
    def rows(self) -> int:
        """Number of rows ever in use: the length that the table's slab must have."""
        return self._rows

    @property
    def columns(self) -> list[Tensor]:
        """Key, score and state of each row; the state is 0 for a row without a key."""
        columns = self._columns
        return [torch.from_numpy(each) for each in (columns.keys, columns.scores, columns.state)]

    @property
    def freed(self) -> int:
        """Number of rows that have lost their key and wait for another."""
        return self._freed_count

    def freed_since(self, count: int) -> Tensor:
        """Return the rows that have lost their key since ``freed`` was ``count``, if no key was inserted meanwhile."""
        return torch.from_numpy(self._freed[count : self._freed_count].copy())

    @property
    def nbytes(self) -> int:
        """Bytes of the index itself; without numba an estimate for the dictionary."""
        ahead = 0 if self._ahead is None else self._ahead.nbytes + 4 * self._rows
        return self._places.nbytes + 17 * self._rows + 8 * self._freed_count + ahead

    def find(self, keys: Tensor) -> Tensor:
        """Return the row of each key, -1 if there is none: int64 [N] -> [N].

        Another thread may find rows while one thread changes the index.
        """
        with self._pairs_lock:
            return torch.from_numpy(self._places.find(_as_keys(keys)))

    def find_or_insert(self, keys: Tensor, score: int = 0) -> tuple[Tensor, Tensor]:
        """Return the row of each key, and the rows that are new, in the order of their keys: int64 [N] -> [N], [new].

        New rows have ``score`` and are not pinned. The caller must overwrite the content of the table's new rows, which
        may be that of freed ones.

        Raises:
            TableFullError: if the limit leaves too few rows; nothing is inserted then.
        """
        wanted = _as_keys(keys)
        with self._pairs_lock:
            out = self._places.find(wanted)
        missing = np.flatnonzero(out < 0)
        if missing.size == 0:
            return torch.from_numpy(out), torch.empty(0, dtype=torch.int64)
        fresh, inverse = unique(torch.from_numpy(wanted[missing]), self._scratch)
        if self.limit is not None and len(self) + len(fresh) > self.limit:
            raise TableFullError(
                f"{len(fresh)} new keys for a table with {len(self)} of at most {self.limit} rows in use; raise its "
                f"limit, or evict {len(self) + len(fresh) - self.limit} rows first"
            )
        rows, columns = self._take(len(fresh)), self._columns
        self._announce(rows)
        columns.keys[rows], columns.scores[rows], columns.state[rows] = fresh.numpy(), score, LIVE
        with self._pairs_lock:
            self._places.insert(fresh.numpy(), rows)
        if self.bucket_counts.numel():
            count_buckets(fresh, self.bucket_counts, 1)
        if self._ahead is not None:
            self._ahead.note(rows)
        out[missing] = rows[inverse.numpy()]
        return torch.from_numpy(out), torch.from_numpy(rows)

    def remove(self, keys: Tensor) -> Tensor:
        """Remove keys and free their rows, pinned or not; absent keys are ignored: [N] -> [removed]."""
        with self._pairs_lock:
            rows = self._places.remove(_as_keys(keys))
        rows = rows[rows >= 0]
        self._announce(rows)
        self._columns.state[rows] = 0
        if self.bucket_counts.numel():
            count_buckets(torch.from_numpy(self._columns.keys[rows]), self.bucket_counts, -1)
        count = self._freed_count + rows.size
        self._freed[self._freed_count : count] = rows
        self._freed_count = count
        return torch.from_numpy(rows)

    def items(self) -> tuple[Tensor, Tensor]:
        """Return all keys and their rows, by row: int64 [len], [len]."""
        rows = np.flatnonzero(self._columns.state[: self._rows])
        return torch.from_numpy(self._columns.keys[rows]), torch.from_numpy(rows)

    def keys_of(self, rows: Tensor) -> Tensor:
        """Return the key of each row: [N] -> [N]."""
        return torch.from_numpy(self._columns.keys[self._checked(rows)])

    def scores_of(self, rows: Tensor) -> Tensor:
        """Return the score of each row: [N] -> [N]."""
        return torch.from_numpy(self._columns.scores[self._checked(rows)])

    def set_scores(self, rows: Tensor, scores: Tensor | int) -> None:
        """Overwrite the scores of rows, for example by the step of the last use."""
        places = self._checked(rows)
        self._announce(places)
        given = scores.numpy() if isinstance(scores, Tensor) else scores
        fallen = None if self._ahead is None else places[self._columns.scores[places] > given]
        self._columns.scores[places] = given
        if self._ahead is not None and fallen is not None:
            self._ahead.note(fallen)

    def add_scores(self, rows: Tensor, amounts: Tensor | int = 1) -> None:
        """Add to the scores of rows, each named once, for example the number of times that a batch has a key."""
        places = self._checked(rows)
        self._announce(places)
        given = amounts.numpy() if isinstance(amounts, Tensor) else amounts
        self._columns.scores[places] += given
        if self._ahead is not None:
            self._ahead.note(places[np.broadcast_to(given, places.shape) < 0])

    def pin(self, rows: Tensor, pinned: bool = True) -> None:
        """Exclude rows from ``lowest`` and ``below``, or include them again."""
        places = self._checked(rows)
        self._columns.state[places] = LIVE | _PINNED if pinned else LIVE
        if self._ahead is not None and not pinned:
            self._ahead.note(places)

    def pinned(self) -> Tensor:
        """Return the rows that are pinned: [n]."""
        return torch.from_numpy(np.flatnonzero(self._columns.state[: self._rows] & _PINNED))

    def lowest(self, count: int) -> Tensor:
        """Return the ``count`` rows to evict, lowest (score, key) first, or all that are not pinned: [n]."""
        columns, used = self._columns, self._rows
        self._asked = max(self._asked, count)
        rows = None if self._ahead is None else self._ahead.lowest(max(count, 0))
        if rows is not None:
            rows = _lowest_by_partition(rows, columns.scores, columns.keys, count)
        elif is_installed() and _FEW * count <= len(self):
            heap = np.empty(max(count, 0), np.int64)
            live = columns.state[:used], columns.scores[:used], columns.keys[:used]
            rows = heap[: _lowest(*live, heap)] if count > 0 else heap
        else:
            rows = np.flatnonzero(columns.state[:used] == LIVE)
            rows = _lowest_by_partition(rows, columns.scores, columns.keys, count)
        order = np.lexsort((columns.keys[rows], columns.scores[rows]))
        return torch.from_numpy(rows[order][: max(count, 0)])

    def below(self, score: int) -> Tensor:
        """Return the rows that are not pinned and have less than ``score``, by row: [n]."""
        columns, used = self._columns, self._rows
        rows = None if self._ahead is None else self._ahead.below(score)
        if rows is not None:
            return torch.from_numpy(np.sort(rows[columns.scores[rows] < score]))
        state, scores = columns.state[:used], columns.scores[:used]
        return torch.from_numpy(np.flatnonzero((state == LIVE) & (scores < score)))

    def look_ahead(self) -> None:
        """Continue the search for the rows with the lowest scores, so that ``lowest`` need not read all rows.

        Call this method once a step. How many rows it reads follows from the rows inserted since the last call and from
        the number that is still known: a pass ends before the known rows have left. How many it wants to know follows
        from the largest number that ``lowest`` was asked for.
        """
        inserted, self._inserted = self._inserted, 0
        ahead = self._looks_ahead()
        if ahead is None:
            return
        wanted = max(len(self) // _WANTED_SHARE, _WANTED_TIMES * self._asked, 1)
        if not ahead.is_passing and ahead.known < wanted:
            ahead.begin_lowest(self._rows, wanted)
        known = min(max(ahead.known, wanted // _MOST_HASTE, 1), wanted) if self._asked else wanted
        ahead.scan(max(_PACE * inserted * self._rows // known, _FEWEST_ROWS))

    def look_ahead_below(self, score: int, calls: int, unit: int = 1) -> None:
        """Continue the search for the rows below ``score``, which rises by 1 with each call.

        Args:
            score: what the next call of ``below`` will ask for, in ``unit``s.
            calls: number of calls after which a row that has just got its score may be below.
            unit: amount by which scores rise between two calls.
        """
        horizon = max(calls // 2, 1)
        ahead = self._looks_ahead()
        if ahead is None or score + horizon <= 0:
            return
        complete = ahead.complete_score
        first = score - 1 if complete is None else max((complete + 1) // unit, score - 1)
        if not ahead.is_passing and first < score + horizon // 2:
            ahead.begin_below(self._rows, first, score + horizon, unit)
        ahead.scan(max(-(-_PACE * self._rows // horizon), _FEWEST_ROWS))

    def _looks_ahead(self) -> RowsAhead | None:
        """Return the search ahead, begun at the first call; None without numba."""
        if self._ahead is None and is_installed():
            self._ahead = RowsAhead(self._columns, self._room)
        return self._ahead

    def _announce(self, rows: np.ndarray) -> None:
        if self.before_change is not None:
            self.before_change(rows)

    def _take(self, count: int) -> np.ndarray:
        """Return rows without a key, which then count as in use: [count]."""
        again = min(count, self._freed_count)
        fresh = count - again
        rows = np.empty(count, np.int64)
        rows[:again] = self._freed[self._freed_count - again : self._freed_count][::-1]
        rows[again:] = np.arange(self._rows, self._rows + fresh)
        self._freed_count -= again
        self._rows += fresh
        self._inserted += count
        if self._rows > self._room:
            self._lengthen(self._rows - fresh)
        return rows

    def _lengthen(self, used: int) -> None:
        """Copy the columns of ``used`` rows to memory with room for twice the rows."""
        self._room = max(2 * self._room, self._rows)
        columns = self._columns
        for name in ("scores", "keys", "state"):
            before = getattr(columns, name)
            longer = _reserved(self._room, torch.from_numpy(before[:0]).dtype)
            longer[:used] = before[:used]
            setattr(columns, name, longer)
        freed, self._freed = self._freed, _reserved(self._room, torch.int64)
        self._freed[: self._freed_count] = freed[: self._freed_count]
        if self._ahead is not None:
            self._ahead.lengthen(self._room)

    def _checked(self, rows: Tensor) -> np.ndarray:
        places: np.ndarray = rows.numpy()
        if places.size and (places.min() < 0 or places.max() >= self._rows):
            raise IndexError(f"rows {places.min()} to {places.max()} of an index with {self._rows} rows")
        lost = self._columns.state[places] == 0
        if lost.any():
            raise IndexError(
                f"row {places[lost][0]} has no key: it was never given one, or its key was removed"
            )
        return places


def compile_loops() -> None:
    """Compile the loops that only evictions run, so that the first eviction does not wait for it."""
    if has_numba():
        none = np.empty(0, np.int64)
        PairMap(0, 0).remove(none)
        _lowest(np.empty(0, np.uint8), none, none, none)
        rows_ahead.compile_loops()


class _RowMap(Protocol):
    """Interface of a map from keys to rows."""

    @property
    def nbytes(self) -> int: ...

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return rows, -1 for keys that are absent."""

    def insert(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Insert keys that are absent, each once."""

    def remove(self, keys: np.ndarray) -> np.ndarray:
        """Remove keys and return the rows that they had, -1 for keys that are absent."""


class _DictionaryRowMap:
    """Map from keys to rows as a dictionary, if numba is missing, and as the reference of the tests."""

    def __init__(self) -> None:
        self._row_of: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        return 100 * len(self._row_of)

    def find(self, keys: np.ndarray) -> np.ndarray:
        row_of = self._row_of.get
        return np.array([row_of(key, -1) for key in keys.tolist()], np.int64)

    def insert(self, keys: np.ndarray, rows: np.ndarray) -> None:
        self._row_of.update(zip(keys.tolist(), rows.tolist(), strict=True))

    def remove(self, keys: np.ndarray) -> np.ndarray:
        return np.array([self._row_of.pop(key, -1) for key in keys.tolist()], np.int64)


def _as_keys(keys: Tensor) -> np.ndarray:
    if keys.dtype != torch.int64 or keys.dim() != 1 or keys.device.type != "cpu":
        raise ValueError(
            f"keys are {keys.dtype} {list(keys.shape)} on {keys.device}; expected int64 [N] on the CPU"
        )
    return array(keys)


def _reserved(room: int, dtype: torch.dtype) -> np.ndarray:
    """Return zeros for ``room`` rows, which take memory as rows are written."""
    found: np.ndarray = reserve(room, 1, dtype, small_first=True).view(-1).numpy()
    return found


def _lowest_by_partition(rows: np.ndarray, scores: np.ndarray, keys: np.ndarray, count: int) -> np.ndarray:
    """Return the ``count`` lowest of the rows, or all; in any order."""
    if not 0 < count < rows.size:
        return rows
    held = scores[rows]
    bound = np.partition(held, count - 1)[count - 1]
    under, tied = rows[held < bound], rows[held == bound]
    left = count - under.size
    if left < tied.size:
        tied = tied[np.argpartition(keys[tied], left - 1)[:left]]
    return np.concatenate([under, tied])


@loop
def _lowest(state: np.ndarray, scores: np.ndarray, keys: np.ndarray, heap: np.ndarray) -> int:
    """Fill ``heap`` with the lowest rows, the highest of them at its root, and return their number."""
    count = 0
    for row in range(state.size):
        if state[row] != LIVE:
            continue
        if count < heap.size:
            place = count
            count += 1
            while place > 0 and _is_lower(scores, keys, heap[(place - 1) // 2], row):
                heap[place] = heap[(place - 1) // 2]
                place = (place - 1) // 2
            heap[place] = row
        elif _is_lower(scores, keys, row, heap[0]):
            place = 0
            while 2 * place + 1 < count:
                child = 2 * place + 1
                if child + 1 < count and _is_lower(scores, keys, heap[child], heap[child + 1]):
                    child += 1
                if not _is_lower(scores, keys, row, heap[child]):
                    break
                heap[place] = heap[child]
                place = child
            heap[place] = row
    return count


@loop
def _is_lower(scores: np.ndarray, keys: np.ndarray, one: int, other: int) -> bool:
    if scores[one] != scores[other]:
        return scores[one] < scores[other]
    return keys[one] < keys[other]
