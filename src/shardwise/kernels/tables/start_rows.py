"""The start weights of a row: a function of (seed, table, key), on any rank and at any time.

    word(key, j) = word j of Philox's substream (key, 0, 0) under the table's own key      shardwise.kernels.philox
    Uniform      low + (high - low) · u(word)
    Normal       mean + std · ndtri(u(word))                  drawn and computed in fp64, then cast

Element j does not depend on the width, so a rank that holds columns [a, b) of a table draws only those.

Cost:  of fp32 rows of width 16 on one Zen 4 core, see benchmarks/embedding; without numba 8 microseconds a row.
Shapes: N keys, D columns.
"""

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels import philox
from shardwise.kernels.initializers import Constant, Initializer, Normal
from shardwise.kernels.tables.compiled import array, loop, runs_compiled

_CHUNK_ELEMENTS = 1 << 16
_ROUNDS = 10
_WORDS = 4
_M0, _M1 = np.uint64(0xD2E7_470E_E14C_6C93), np.uint64(0xCA5A_8263_9512_1157)
_K0, _K1 = np.uint64(0x9E37_79B9_7F4A_7C15), np.uint64(0xBB67_AE85_84CA_A73B)
_LOW, _HALF, _ZERO = np.uint64(0xFFFF_FFFF), np.uint64(32), np.uint64(0)
_DROPPED = np.uint64(12)
_UNIT, _MIDDLE = 2.0**-52, 2.0**-53


def start_rows(
    table_key: int,
    keys: Tensor,
    width: int,
    initializer: Initializer,
    *,
    first: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return columns [first, first + width) of the rows of some keys: int64 [N] -> ``dtype`` [N, width] on the CPU.

    Args:
        table_key: ``philox.key_of(seed, name of the table)``.
        keys: keys of the rows.
        width: number of columns.
        initializer: distribution of the weights.
        first: first column.
        dtype: dtype of the result.
    """
    out = torch.empty(len(keys), width, dtype=dtype)
    if isinstance(initializer, Constant):
        return out.fill_(initializer.value)
    words = array(keys.cpu()).view(np.uint64)
    rows = max(1, _CHUNK_ELEMENTS // max(width, 1))
    for begin in range(0, len(words), rows):
        chunk = words[begin : begin + rows]
        drawn = np.empty((len(chunk), width))
        (_uniform if runs_compiled() else plain_uniform)(np.uint64(table_key), chunk, first, drawn)
        values = torch.from_numpy(drawn)
        if isinstance(initializer, Normal):
            torch.special.ndtri(values, out=values)
            values.mul_(initializer.std).add_(initializer.mean)
        else:
            values.mul_(initializer.high - initializer.low).add_(initializer.low)
        out[begin : begin + rows] = values
    return out


def plain_uniform(table_key: np.uint64, keys: np.ndarray, first: int, out: np.ndarray) -> None:
    """Write uniform draws in (0, 1) from numpy's generator: the reference."""
    substreams = [(int(key), 0, 0) for key in keys]
    words = philox.words_of(int(table_key), first, first + out.shape[1], substreams)
    out[:] = (words >> _DROPPED) * _UNIT + _MIDDLE


@loop
def _uniform(table_key: np.uint64, keys: np.ndarray, first: int, out: np.ndarray) -> None:
    width = out.shape[1]
    for i in range(keys.size):
        for block in range(first // _WORDS, (first + width + _WORDS - 1) // _WORDS):
            c0, c1, c2, c3 = np.uint64(block + 1), keys[i], _ZERO, _ZERO
            k0, k1 = table_key, _ZERO
            for _ in range(_ROUNDS):
                low0, high0 = c0 * _M0, _high(c0, _M0)
                low2, high2 = c2 * _M1, _high(c2, _M1)
                c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
                k0, k1 = k0 + _K0, k1 + _K1
            for lane, word in enumerate((c0, c1, c2, c3)):
                j = block * _WORDS + lane - first
                if 0 <= j < width:
                    out[i, j] = np.float64(word >> _DROPPED) * _UNIT + _MIDDLE


@loop
def _high(x: np.uint64, y: np.uint64) -> np.uint64:
    """Return the upper 64 bits of the product, from products of halves."""
    x0, x1, y0, y1 = x & _LOW, x >> _HALF, y & _LOW, y >> _HALF
    middle = x1 * y0 + (x0 * y0 >> _HALF)
    other = x0 * y1 + (middle & _LOW)
    return x1 * y1 + (middle >> _HALF) + (other >> _HALF)
