"""A 64-bit mix of keys, and the logical bucket of a key, which never changes.

    mix(key)              the finalizer of MurmurHash3: a bijection whose every output bit depends on every input bit
    bucket(key, buckets)  (mix(key) >> 33) · buckets >> 31
    in_turn               for a static table: the key q·buckets + b lies on rank b mod N, in row q·n + b div N,
                          n: buckets of that rank

A table's buckets are dealt to ranks and to a checkpoint's files; a key's bucket depends on nothing else. Buckets read
the upper bits of the mix and a hash index the lower ones, so the keys of one rank spread over all slots of its index.

Cost:  2 multiplications and 3 shifts a key.
Shapes: N keys.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels.tables.compiled import array, loop, runs_compiled

FACTORS = (0xFF51_AFD7_ED55_8CCD, 0xC4CE_B9FE_1A85_EC53)
SHIFT = 33

_A, _B = np.uint64(FACTORS[0]), np.uint64(FACTORS[1])
_S = np.uint64(SHIFT)
_LEFT = np.uint64(64 - SHIFT)

MOST_BUCKETS = 1 << 31


def mix(keys: Tensor) -> Tensor:
    """Return the mix of each key, as the int64 with its bits: [N] -> [N]."""
    if not runs_compiled(keys):
        return plain_mix(keys)
    out = torch.empty(keys.shape, dtype=torch.int64)
    _mix_all(array(keys), out.numpy())
    return out


def plain_mix(keys: Tensor) -> Tensor:
    """Run ``mix`` in torch operations, on any device; products wrap around."""
    for factor in FACTORS:
        keys = (keys ^ _logical_shift(keys)) * (factor - (1 << 64))
    return keys ^ _logical_shift(keys)


def bucket(keys: Tensor, buckets: int) -> Tensor:
    """Return the logical bucket of each key, of ``buckets`` in all: [N] -> [N].

    Raises:
        ValueError: if ``buckets`` is out of range.
    """
    if not 1 <= buckets <= MOST_BUCKETS:
        raise ValueError(f"{buckets} buckets for a table's keys; expected 1 to {MOST_BUCKETS}")
    return _logical_shift(mix(keys)) * buckets >> 31


def count_buckets(keys: Tensor, counts: Tensor, amount: int) -> None:
    """Add ``amount`` to the count of each key's bucket: [N] into int64 [buckets]."""
    if runs_compiled(keys):
        _count_buckets(array(keys), counts.numpy(), amount)
    else:
        buckets = counts.numel()
        counts += amount * torch.bincount(bucket(keys, buckets), minlength=buckets)


class RoundRobinKeys(NamedTuple):
    """Owners and rows of keys of a static table whose buckets are dealt out in turn."""

    owners: Tensor
    """Rank that owns each key: int64 [N]."""
    rows: Tensor
    """Row of each key on its owner: int64 [N]."""


def in_turn(keys: Tensor, buckets: int, ranks: int) -> RoundRobinKeys:
    """Return owner and row of keys from 0 on: int64 [N]."""
    if not runs_compiled(keys):
        return plain_in_turn(keys, buckets, ranks)
    found = RoundRobinKeys(
        torch.empty(keys.shape, dtype=torch.int64), torch.empty(keys.shape, dtype=torch.int64)
    )
    _in_turn(array(keys), buckets, ranks, found.owners.numpy(), found.rows.numpy())
    return found


def plain_in_turn(keys: Tensor, buckets: int, ranks: int) -> RoundRobinKeys:
    """Run ``in_turn`` in torch operations, on any device."""
    place = keys % buckets
    owners = place % ranks
    return RoundRobinKeys(owners, keys // buckets * ((buckets - 1 - owners) // ranks + 1) + place // ranks)


def _logical_shift(x: Tensor) -> Tensor:
    return (x >> SHIFT) & ((1 << 64 - SHIFT) - 1)


@loop
def mixed(key: int) -> np.uint64:
    """Return the mix of one key as uint64."""
    x = np.uint64(key)
    x = (x ^ (x >> _S)) * _A
    x = (x ^ (x >> _S)) * _B
    return x ^ (x >> _S)


@loop
def _mix_all(keys: np.ndarray, out: np.ndarray) -> None:
    for i in range(keys.size):
        out[i] = np.int64(mixed(keys[i]))


@loop
def _count_buckets(keys: np.ndarray, counts: np.ndarray, amount: int) -> None:
    buckets = np.uint64(counts.size)
    for i in range(keys.size):
        counts[((mixed(keys[i]) >> _S) * buckets) >> _LEFT] += amount


@loop
def _in_turn(keys: np.ndarray, buckets: int, ranks: int, owners: np.ndarray, rows: np.ndarray) -> None:
    # Divisions by variables cost more than all else, so there is one for each bucket instead of each key.
    owner_of, row_of, held = (
        np.empty(buckets, np.int64),
        np.empty(buckets, np.int64),
        np.empty(buckets, np.int64),
    )
    for place in range(buckets):
        owner_of[place], row_of[place] = place % ranks, place // ranks
        held[place] = (buckets - 1 - place % ranks) // ranks + 1
    is_power = buckets & (buckets - 1) == 0
    shift = 0
    while (1 << shift) < buckets:
        shift += 1
    for i in range(keys.size):
        if is_power:
            turn, place = keys[i] >> shift, keys[i] & (buckets - 1)
        else:
            turn, place = keys[i] // buckets, keys[i] % buckets
        owners[i] = owner_of[place]
        rows[i] = turn * held[place] + row_of[place]
