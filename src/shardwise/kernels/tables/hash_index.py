"""The rows of a dynamic table by key: open addressing over (key, row) pairs, with scores and the rows to evict.

    slot of a key = lower bits of mix(key ^ seed); the pair lies there or in the slots after it, before the first free
    remove        moves later pairs back over the gap, so that there are no tombstones and no clean-up

Rows are handed out in the order in which keys first occur: rows that were freed, the last freed first, then rows never
used before. A row keeps its number until its key is removed; growth only rebuilds the pairs. Any int64 is a key. An
index that has reached its ``limit`` refuses the whole call and does not change.

Each row has a score, an int64 whose meaning the caller chooses (the step of the last use, a count, the step of
insertion), and may be pinned. ``lowest`` finds the rows to evict: by score, then by key, so the choice does not depend
on the row that a key got or on the time at which it came.

Each index draws its own seed, so that no sender can choose keys that all fall into one slot, where time would grow with
their square. The seed only decides the slots of pairs: rows, and so all results, are the same with any seed.

Without numba a dictionary replaces the pairs, with the same rows and several times slower.

Cost:  16 bytes a slot, at most 5 slots in 8 taken; 17 bytes a row.
Shapes: N keys of one call, R rows.
"""

import secrets
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shardwise.base.errors import TableFullError
from shardwise.kernels.tables.compiled import array, is_installed, loop, prefetch
from shardwise.kernels.tables.keys import mixed
from shardwise.kernels.tables.unique import UniqueScratch, unique

_ONE = np.uint64(1)
_AHEAD = 16
"""Number of keys between the request for a slot's line and its use."""

_TAKEN, _OF = 5, 8
"""Share of the slots that may be taken, as numerator and denominator."""

_FEWEST_SLOTS = 64

_FEW = 16
"""Number of rows for each evicted one above which a heap of the lowest so far is faster than a partition."""

_LIVE, _PINNED = np.uint8(1), np.uint8(2)
"""Bits of a row's state, which is 0 for a row without a key."""


class HashIndex:
    """Rows of a table by key, on the CPU.

    Args:
        limit: largest number of rows; None is without limit.
        expected: number of rows for which memory is allocated.

    Raises:
        ValueError: if ``limit`` is not positive.
    """

    def __init__(self, limit: int | None = None, expected: int = 0) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"a table of at most {limit} rows; expected a positive limit")
        self.limit = limit
        self._places: _RowMap = _PairRowMap(expected) if is_installed() else _DictionaryRowMap()
        self._keys = np.empty(expected, np.int64)
        self._scores = np.empty(expected, np.int64)
        self._state = np.zeros(expected, np.uint8)
        self._freed = np.empty(0, np.int64)
        self._freed_count = 0
        self._rows = 0
        self._scratch = UniqueScratch()

    def __len__(self) -> int:
        return self._rows - self._freed_count

    @property
    def rows(self) -> int:
        """Number of rows ever in use: the length that the table's slab must have."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of the index itself; without numba an estimate for the dictionary."""
        arrays = (self._keys, self._scores, self._state, self._freed)
        return self._places.nbytes + sum(array.nbytes for array in arrays)

    def find(self, keys: Tensor) -> Tensor:
        """Return the row of each key, -1 if there is none: int64 [N] -> [N]."""
        return torch.from_numpy(self._places.find(_as_keys(keys)))

    def find_or_insert(self, keys: Tensor, score: int = 0) -> tuple[Tensor, Tensor]:
        """Return the row of each key, and the rows that are new, in the order of their keys: int64 [N] -> [N], [new].

        New rows have ``score`` and are not pinned. The caller must overwrite the content of the table's new rows, which
        may be that of freed ones.

        Raises:
            TableFullError: if the limit leaves too few rows; nothing is inserted then.
        """
        wanted = _as_keys(keys)
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
        rows = self._take(len(fresh))
        self._keys[rows], self._scores[rows], self._state[rows] = fresh.numpy(), score, _LIVE
        self._places.insert(fresh.numpy(), rows)
        out[missing] = rows[inverse.numpy()]
        return torch.from_numpy(out), torch.from_numpy(rows)

    def remove(self, keys: Tensor) -> Tensor:
        """Remove keys and free their rows, pinned or not; absent keys are ignored: [N] -> [removed]."""
        rows = self._places.remove(_as_keys(keys))
        rows = rows[rows >= 0]
        self._state[rows] = 0
        count = self._freed_count + rows.size
        self._freed = _longer(self._freed, count)
        self._freed[self._freed_count : count] = rows
        self._freed_count = count
        return torch.from_numpy(rows)

    def items(self) -> tuple[Tensor, Tensor]:
        """Return all keys and their rows, by row: int64 [len], [len]."""
        rows = np.flatnonzero(self._state[: self._rows])
        return torch.from_numpy(self._keys[rows]), torch.from_numpy(rows)

    def keys_of(self, rows: Tensor) -> Tensor:
        """Return the key of each row: [N] -> [N]."""
        return torch.from_numpy(self._keys[self._checked(rows)])

    def scores_of(self, rows: Tensor) -> Tensor:
        """Return the score of each row: [N] -> [N]."""
        return torch.from_numpy(self._scores[self._checked(rows)])

    def set_scores(self, rows: Tensor, scores: Tensor | int) -> None:
        """Overwrite the scores of rows, for example by the step of the last use."""
        self._scores[self._checked(rows)] = scores.numpy() if isinstance(scores, Tensor) else scores

    def add_scores(self, rows: Tensor, amounts: Tensor | int = 1) -> None:
        """Add to the scores of rows, each named once, for example the number of times that a batch has a key."""
        self._scores[self._checked(rows)] += amounts.numpy() if isinstance(amounts, Tensor) else amounts

    def pin(self, rows: Tensor, pinned: bool = True) -> None:
        """Exclude rows from ``lowest`` and ``below``, or include them again."""
        self._state[self._checked(rows)] = _LIVE | _PINNED if pinned else _LIVE

    def pinned(self) -> Tensor:
        """Return the rows that are pinned: [n]."""
        return torch.from_numpy(np.flatnonzero(self._state[: self._rows] & _PINNED))

    def lowest(self, count: int) -> Tensor:
        """Return the ``count`` rows to evict, lowest (score, key) first, or all that are not pinned: [n]."""
        state, keys, scores = (array[: self._rows] for array in (self._state, self._keys, self._scores))
        if is_installed() and _FEW * count <= len(self):
            heap = np.empty(max(count, 0), np.int64)
            rows = heap[: _lowest(state, scores, keys, heap)] if count > 0 else heap
        else:
            rows = _lowest_by_partition(state, scores, keys, count)
        return torch.from_numpy(rows[np.lexsort((keys[rows], scores[rows]))][: max(count, 0)])

    def below(self, score: int) -> Tensor:
        """Return the rows that are not pinned and have less than ``score``, by row: [n]."""
        state, scores = self._state[: self._rows], self._scores[: self._rows]
        return torch.from_numpy(np.flatnonzero((state == _LIVE) & (scores < score)))

    def _take(self, count: int) -> np.ndarray:
        """Return rows without a key, which then count as in use: [count]."""
        again = min(count, self._freed_count)
        fresh = count - again
        rows = np.empty(count, np.int64)
        rows[:again] = self._freed[self._freed_count - again : self._freed_count][::-1]
        rows[again:] = np.arange(self._rows, self._rows + fresh)
        self._freed_count -= again
        self._rows += fresh
        self._keys = _longer(self._keys, self._rows)
        self._scores, self._state = _longer(self._scores, self._rows), _longer(self._state, self._rows)
        return rows

    def _checked(self, rows: Tensor) -> np.ndarray:
        places: np.ndarray = rows.numpy()
        if places.size and (places.min() < 0 or places.max() >= self._rows):
            raise IndexError(f"rows {places.min()} to {places.max()} of an index with {self._rows} rows")
        lost = self._state[places] == 0
        if lost.any():
            raise IndexError(
                f"row {places[lost][0]} has no key: it was never given one, or its key was removed"
            )
        return places


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


class _PairRowMap:
    """Map from keys to rows as (key, row) pairs by open addressing; a row of -1 marks a free slot."""

    def __init__(self, expected: int) -> None:
        self._pairs = _free_pairs(expected)
        self._seed = secrets.randbits(63)
        self._taken = 0

    @property
    def nbytes(self) -> int:
        return self._pairs.nbytes

    def find(self, keys: np.ndarray) -> np.ndarray:
        out = np.empty(keys.size, np.int64)
        _find(self._pairs, self._seed, keys, out)
        return out

    def insert(self, keys: np.ndarray, rows: np.ndarray) -> None:
        self._taken += keys.size
        if self._taken * _OF > len(self._pairs) * _TAKEN:
            before, self._pairs = self._pairs, _free_pairs(self._taken)
            _refill(self._pairs, self._seed, before)
        _insert(self._pairs, self._seed, keys, rows)

    def remove(self, keys: np.ndarray) -> np.ndarray:
        out = np.empty(keys.size, np.int64)
        _remove(self._pairs, self._seed, keys, out)
        self._taken -= int((out >= 0).sum())
        return out


def _as_keys(keys: Tensor) -> np.ndarray:
    if keys.dtype != torch.int64 or keys.dim() != 1 or keys.device.type != "cpu":
        raise ValueError(
            f"keys are {keys.dtype} {list(keys.shape)} on {keys.device}; expected int64 [N] on the CPU"
        )
    return array(keys)


def _free_pairs(keys: int) -> np.ndarray:
    """Return free slots for this number of keys."""
    slots = max(_FEWEST_SLOTS, 1 << (-(-keys * _OF // _TAKEN) - 1).bit_length())
    return np.full((slots, 2), -1, np.int64)


def _longer(array: np.ndarray, size: int) -> np.ndarray:
    """Return the array, or a copy longer by half at least, followed by zeros."""
    if size <= array.size:
        return array
    out = np.zeros(max(size, array.size * 3 // 2), array.dtype)
    out[: array.size] = array
    return out


def _lowest_by_partition(state: np.ndarray, scores: np.ndarray, keys: np.ndarray, count: int) -> np.ndarray:
    """Return the ``count`` lowest rows, or all; in any order."""
    rows = np.flatnonzero(state == _LIVE)
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
def _find(pairs: np.ndarray, seed: int, keys: np.ndarray, out: np.ndarray) -> None:
    mask = np.uint64(pairs.shape[0] - 1)
    for i in range(keys.size):
        if i + _AHEAD < keys.size:
            prefetch(pairs, mixed(keys[i + _AHEAD] ^ seed) & mask, 2)
        slot = mixed(keys[i] ^ seed) & mask
        while pairs[slot, 1] >= 0 and pairs[slot, 0] != keys[i]:
            slot = (slot + _ONE) & mask
        out[i] = pairs[slot, 1]


@loop
def _insert(pairs: np.ndarray, seed: int, keys: np.ndarray, rows: np.ndarray) -> None:
    mask = np.uint64(pairs.shape[0] - 1)
    for i in range(keys.size):
        if i + _AHEAD < keys.size:
            prefetch(pairs, mixed(keys[i + _AHEAD] ^ seed) & mask, 2)
        slot = mixed(keys[i] ^ seed) & mask
        while pairs[slot, 1] >= 0:
            slot = (slot + _ONE) & mask
        pairs[slot, 0] = keys[i]
        pairs[slot, 1] = rows[i]


@loop
def _refill(pairs: np.ndarray, seed: int, before: np.ndarray) -> None:
    mask = np.uint64(pairs.shape[0] - 1)
    for i in range(before.shape[0]):
        if i + _AHEAD < before.shape[0]:
            prefetch(pairs, mixed(before[i + _AHEAD, 0] ^ seed) & mask, 2)
        if before[i, 1] >= 0:
            slot = mixed(before[i, 0] ^ seed) & mask
            while pairs[slot, 1] >= 0:
                slot = (slot + _ONE) & mask
            pairs[slot, 0] = before[i, 0]
            pairs[slot, 1] = before[i, 1]


@loop
def _remove(pairs: np.ndarray, seed: int, keys: np.ndarray, out: np.ndarray) -> None:
    mask = np.uint64(pairs.shape[0] - 1)
    for i in range(keys.size):
        if i + _AHEAD < keys.size:
            prefetch(pairs, mixed(keys[i + _AHEAD] ^ seed) & mask, 2)
        slot = mixed(keys[i] ^ seed) & mask
        while pairs[slot, 1] >= 0 and pairs[slot, 0] != keys[i]:
            slot = (slot + _ONE) & mask
        out[i] = pairs[slot, 1]
        if out[i] < 0:
            continue
        gap = slot
        while True:
            slot = (slot + _ONE) & mask
            if pairs[slot, 1] < 0:
                break
            home = mixed(pairs[slot, 0] ^ seed) & mask
            if ((slot - home) & mask) >= ((slot - gap) & mask):
                pairs[gap, 0] = pairs[slot, 0]
                pairs[gap, 1] = pairs[slot, 1]
                gap = slot
        pairs[gap, 1] = -1


@loop
def _lowest(state: np.ndarray, scores: np.ndarray, keys: np.ndarray, heap: np.ndarray) -> int:
    """Fill ``heap`` with the lowest rows, the highest of them at its root, and return their number."""
    count = 0
    for row in range(state.size):
        if state[row] != _LIVE:
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
