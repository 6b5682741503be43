"""A 64-bit mix of keys, and the logical bucket that a key belongs to for good.

    mix(key)              the finalizer of MurmurHash3: a bijection whose every output bit depends on every input bit
    bucket(key, buckets)  (mix(key) >> 33) · buckets >> 31

A table's buckets are dealt to ranks and to a checkpoint's files; a key's bucket depends on nothing else. Buckets read
the upper bits of the mix and a hash index the lower ones, so the keys of one rank spread over all slots of its index.

Cost:  2 multiplications and 3 shifts a key.
Shapes: N keys.
"""

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels.tables.compiled import array, loop, runs_compiled

_FACTORS = (0xFF51_AFD7_ED55_8CCD, 0xC4CE_B9FE_1A85_EC53)
_SHIFT = 33

_A, _B = np.uint64(_FACTORS[0]), np.uint64(_FACTORS[1])
_S = np.uint64(_SHIFT)

MOST_BUCKETS = 1 << 31


def mix(keys: Tensor) -> Tensor:
    """The mix of each key, as the int64 with its bits: [N] -> [N]."""
    if not runs_compiled(keys):
        return plain_mix(keys)
    out = torch.empty(keys.shape, dtype=torch.int64)
    _mix_all(array(keys), out.numpy())
    return out


def plain_mix(keys: Tensor) -> Tensor:
    """The same in torch operations, on any device; products wrap around."""
    for factor in _FACTORS:
        keys = (keys ^ _logical_shift(keys)) * (factor - (1 << 64))
    return keys ^ _logical_shift(keys)


def bucket(keys: Tensor, buckets: int) -> Tensor:
    """The logical bucket of each key, of ``buckets`` in all: [N] -> [N]."""
    if not 1 <= buckets <= MOST_BUCKETS:
        raise ValueError(f"{buckets} buckets for a table's keys; expected 1 to {MOST_BUCKETS}")
    return _logical_shift(mix(keys)) * buckets >> 31


def _logical_shift(x: Tensor) -> Tensor:
    return (x >> _SHIFT) & ((1 << 64 - _SHIFT) - 1)


@loop
def mixed(key: int) -> np.uint64:
    """The mix of one key as uint64."""
    x = np.uint64(key)
    x = (x ^ (x >> _S)) * _A
    x = (x ^ (x >> _S)) * _B
    return x ^ (x >> _S)


@loop
def _mix_all(keys: np.ndarray, out: np.ndarray) -> None:
    for i in range(keys.size):
        out[i] = np.int64(mixed(keys[i]))
