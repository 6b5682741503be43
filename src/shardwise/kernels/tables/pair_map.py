"""A map from keys to rows that grows a few slots at a time: linear hashing with linear probing.

    h          mix(key ^ seed)
    home(h)    h mod S            if that slot is not below ``moved``: it still has the pairs of both halves
               h mod 2·S          otherwise
    | 0 ... moved | moved ... S | S ... S + moved | free ... |
    a round    ``moved`` goes from 0 to S while pairs with bit S of h move from slot s to slot s + S; then S doubles

The pair of a key lies in its home or in the slots after it, before the first free one. ``remove`` moves later pairs
back over the gap, so that there are no tombstones and no clean-up. A round begins when half of S is taken and ends when
five eighths are, so an inserted key moves the pairs of eight slots, and the work of a call follows from its own keys. A
map that is copied to twice its size stops for all its pairs: 8 M of them take 0.2 s.

The slots lie in one reserved range of addresses (slab.py), whose pages are taken when the round comes to them. Nothing
is copied as long as there are at most ``room`` keys; beyond, the pairs are copied to a range of twice the size.

Each map draws its own seed, so that no sender can choose keys that all fall into one slot, where time would grow with
their square. The seed only decides the slots of pairs: rows, and so all results, are the same with any seed.

Source: W. Litwin, "Linear hashing: a new tool for file and table addressing", VLDB 1980.
Cost:   16 bytes a slot, at most 5 slots in 8 and at least 5 in 16 taken once the map has grown.
Shapes: N keys of one call, P slots.
"""

import secrets

import numpy as np
import torch

from shardwise.kernels.tables.compiled import loop, prefetch
from shardwise.kernels.tables.keys import mixed
from shardwise.kernels.tables.slab import reserve

_ONE, _NONE = np.uint64(1), np.uint64(0)
_AHEAD = 16
"""Number of keys between the request for a slot's line and its use."""

_TAKEN, _OF = 5, 8
"""Share of the slots that may be taken, as numerator and denominator."""

_SLOT_BYTES = 16
_FEWEST_SLOTS = 64
_SPARE_SLOTS = 4096
"""Slots behind the last home. Pairs whose run of slots passes them go on at the first slot."""


class PairMap:
    """Map from keys to rows as (key, row + 1) pairs; 0 in place of a row marks a free slot.

    Args:
        room: number of keys for which addresses are reserved.
        expected: number of keys for which the first round is large enough.
    """

    def __init__(self, room: int, expected: int) -> None:
        self._most_slots = _slots_for(max(room, expected))
        self._pairs = _free_pairs(self._most_slots)
        self._slots = _slots_for(expected)
        """Slots of the round, S."""
        self._moved = 0
        self._seed = secrets.randbits(63)
        self._taken = 0

    @staticmethod
    def bytes_for(keys: int) -> int:
        """Return the bytes of the slots of a map that is made for this number of keys."""
        return _slots_for(keys) * _SLOT_BYTES

    @staticmethod
    def grown_bytes_for(keys: int) -> int:
        """Return the bytes of the slots of a map that has grown to this number of keys."""
        slots = _slots_for(keys)
        moved = max(_OF * keys - (_TAKEN - 1) * slots, 0)
        return (slots + min(moved, slots)) * _SLOT_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of the slots of the round."""
        return (self._slots + self._moved) * self._pairs.itemsize * 2

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return rows, -1 for keys that are absent."""
        out = np.empty(keys.size, np.int64)
        _find(self._pairs, self._seed, self._slots, self._moved, keys, out)
        return out

    def insert(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Insert keys that are absent, each once."""
        self._taken += keys.size
        if self._taken * _OF > self._most_slots * _TAKEN:
            self._copy()
        self._grow()
        _insert(self._pairs, self._seed, self._slots, self._moved, keys, rows)

    def remove(self, keys: np.ndarray) -> np.ndarray:
        """Remove keys and return the rows that they had, -1 for keys that are absent."""
        out = np.empty(keys.size, np.int64)
        _remove(self._pairs, self._seed, self._slots, self._moved, keys, out)
        self._taken -= int((out >= 0).sum())
        return out

    def _grow(self) -> None:
        """Move pairs until the slots of the round are enough for the keys that are taken."""
        while self._slots < self._most_slots:
            # From half of the slots to 5 in 8, eight slots a key.
            goal = min(_OF * self._taken - (_TAKEN - 1) * self._slots, self._slots)
            if goal <= self._moved:
                return
            self._moved = int(_split(self._pairs, self._seed, self._slots, self._moved, goal))
            if self._moved < self._slots:
                return
            self._slots, self._moved = 2 * self._slots, 0

    def _copy(self) -> None:
        """Copy the pairs to a reserved range that has room for the keys that are taken."""
        held = self._pairs[self._pairs[:, 1] > 0]
        self._most_slots = max(2 * self._most_slots, _slots_for(self._taken))
        self._pairs = _free_pairs(self._most_slots)
        self._slots, self._moved = _slots_for(self._taken), 0
        keys, rows = (np.ascontiguousarray(column) for column in held.T)
        _insert(self._pairs, self._seed, self._slots, 0, keys, rows - 1)


def _slots_for(keys: int) -> int:
    """Return a power of two of slots for this number of keys."""
    return max(_FEWEST_SLOTS, 1 << (-(-keys * _OF // _TAKEN) - 1).bit_length())


def _free_pairs(slots: int) -> np.ndarray:
    pairs: np.ndarray = reserve(slots + _SPARE_SLOTS, 2, torch.int64, small_first=True).numpy()
    return pairs


@loop
def _home(mix: np.uint64, low: np.uint64, moved: np.uint64) -> np.uint64:
    """Return the slot in which the probing for a key begins."""
    slot = mix & low
    if slot < moved:
        slot = mix & (low + low + _ONE)
    return slot


@loop
def _after(slot: np.uint64, end: np.uint64) -> np.uint64:
    slot += _ONE
    return _NONE if slot == end else slot


@loop
def _between(first: np.uint64, last: np.uint64, end: np.uint64) -> np.uint64:
    """Return the number of slots from ``first`` on to ``last``."""
    return last - first if last >= first else last + end - first


@loop
def _find(pairs: np.ndarray, seed: int, slots: int, moved: int, keys: np.ndarray, out: np.ndarray) -> None:
    low, edge, end = np.uint64(slots - 1), np.uint64(moved), np.uint64(pairs.shape[0])
    for i in range(keys.size):
        if i + _AHEAD < keys.size:
            prefetch(pairs, _home(mixed(keys[i + _AHEAD] ^ seed), low, edge), 2)
        slot = _home(mixed(keys[i] ^ seed), low, edge)
        while pairs[slot, 1] > 0 and pairs[slot, 0] != keys[i]:
            slot = _after(slot, end)
        out[i] = pairs[slot, 1] - 1


@loop
def _insert(pairs: np.ndarray, seed: int, slots: int, moved: int, keys: np.ndarray, rows: np.ndarray) -> None:
    low, edge, end = np.uint64(slots - 1), np.uint64(moved), np.uint64(pairs.shape[0])
    for i in range(keys.size):
        if i + _AHEAD < keys.size:
            prefetch(pairs, _home(mixed(keys[i + _AHEAD] ^ seed), low, edge), 2)
        slot = _home(mixed(keys[i] ^ seed), low, edge)
        while pairs[slot, 1] > 0:
            slot = _after(slot, end)
        pairs[slot, 0] = keys[i]
        pairs[slot, 1] = rows[i] + 1


@loop
def _split(pairs: np.ndarray, seed: int, slots: int, moved: int, goal: int) -> np.int64:
    """Move the pairs of slots from ``moved`` on into both halves, run by run, and return the slot that comes next.

    A run ends before a free slot, so it has all pairs whose home is in it. Its pairs are placed again in their order:
    each finds a free slot between its home and the slot that it had, or in the other half.
    """
    low, end = np.uint64(slots - 1), np.uint64(pairs.shape[0])
    slot = np.uint64(moved)
    while slot < np.uint64(goal):
        stop, edge = slot, np.uint64(slots)
        while pairs[stop, 1] > 0:
            stop = _after(stop, end)
        if slot <= stop < edge:
            edge = stop + _ONE
        place = slot
        while place != stop:
            key, row = pairs[place, 0], pairs[place, 1]
            pairs[place, 1] = 0
            free = _home(mixed(key ^ seed), low, edge)
            while pairs[free, 1] > 0:
                free = _after(free, end)
            pairs[free, 0] = key
            pairs[free, 1] = row
            place = _after(place, end)
        slot = edge
    return np.int64(slot)


@loop
def _remove(pairs: np.ndarray, seed: int, slots: int, moved: int, keys: np.ndarray, out: np.ndarray) -> None:
    low, edge, end = np.uint64(slots - 1), np.uint64(moved), np.uint64(pairs.shape[0])
    for i in range(keys.size):
        if i + _AHEAD < keys.size:
            prefetch(pairs, _home(mixed(keys[i + _AHEAD] ^ seed), low, edge), 2)
        slot = _home(mixed(keys[i] ^ seed), low, edge)
        while pairs[slot, 1] > 0 and pairs[slot, 0] != keys[i]:
            slot = _after(slot, end)
        out[i] = pairs[slot, 1] - 1
        if out[i] < 0:
            continue
        gap = slot
        while True:
            slot = _after(slot, end)
            if pairs[slot, 1] == 0:
                break
            home = _home(mixed(pairs[slot, 0] ^ seed), low, edge)
            if _between(home, slot, end) >= _between(gap, slot, end):
                pairs[gap, 0] = pairs[slot, 0]
                pairs[gap, 1] = pairs[slot, 1]
                gap = slot
        pairs[gap, 1] = 0
