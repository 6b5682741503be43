"""Rows of 16 bits: widened to fp32 where they are read, rounded stochastically where they are written.

    widened(b)   the fp32 number whose upper 16 bits are b                                   exact
    narrow(x)    the upper 16 bits of (bits of x) + r, r uniform in [0, 2^16)                E[narrow(x)] = x
    r(i, c)      16 bits, number c % 4 of mix((id of row i ^ word) + (c // 4) · GOLDEN)      word: of the step

An update below half a unit in the last place would be lost in each step if rows were rounded to the nearest. Rounded
stochastically, it is lost or becomes a whole unit, and the mean is exact. The id of a row is a function of its table
and its key, and c counts the columns of the whole table: so the result depends neither on the rank that holds the row,
nor on the row's place in memory, nor on the order of rows. Infinity and NaN stay what they are; a finite number within
one unit of the largest may become infinite, as it may if it is rounded to the nearest.

Papers: Gupta et al. 2015, arXiv:1502.02551; Zhang, Yang, Yuen 2018, "Training with low-precision embedding tables",
Systems for Machine Learning at NeurIPS.
Cost:   one mix of 64 bits for four columns, and one for a row.
Shapes: U rows, R lines of the memory, D columns.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels.tables.compiled import CompiledLoop, ahead, array, loop, prefetch, runs_compiled
from shardwise.kernels.tables.keys import FACTORS, SHIFT, mix, mixed, plain_mix

GOLDEN = 0x9E37_79B9_7F4A_7C15
"""Odd number near 2^64 divided by the golden ratio."""
_MASK = (1 << 64) - 1
_LANES = 4
"""Columns that one mix of 64 bits serves."""
_SIXTEEN, _THIRTY_TWO, _FORTY_EIGHT = np.uint64(16), np.uint64(32), np.uint64(48)
_LOW = np.uint64(0xFFFF)
_ODD = np.uint64(GOLDEN)
_EXPONENT, _MANTISSA, _QUIET = np.uint32(0x7F80_0000), np.uint32(0x7F_FFFF), 64
_MADE_QUIET, _NO_BITS, _HALF = np.uint32(_QUIET << 16), np.uint32(0), np.uint32(16)


class _Widened(CompiledLoop):
    """Loop that returns the fp32 number of which a uint16 is the upper half, and any other number as it is.

    It is an intrinsic, because numba has no bf16.
    """

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        from llvmlite import ir
        from numba.core import types
        from numba.extending import intrinsic

        def widened(typing_context: Any, number: Any) -> Any:
            def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                word = ir.IntType(32)
                bits = builder.shl(builder.zext(arguments[0], word), word(16))
                return builder.bitcast(bits, ir.FloatType())

            def keep(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                return arguments[0]

            return (types.float32(number), build) if number == types.uint16 else (number(number), keep)

        return intrinsic(widened)


def _widened_in_python(number: Any) -> Any:
    return (number.astype(np.uint32) << 16).view(np.float32) if number.dtype == np.uint16 else number


widened = _Widened(_widened_in_python)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which rows of ``dtype`` are computed with: fp32 for 16 bits, else the dtype itself."""
    return torch.promote_types(dtype, torch.float32)


def readable(rows: Tensor) -> Tensor:
    """Return rows that compiled loops can read: bf16 as uint16, whose elements ``widened`` converts."""
    rows = rows.detach()
    return rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows


def row_ids(table_key: int | Sequence[int], keys: Tensor, tables: Tensor | None = None) -> Tensor:
    """Return the id of each row for rounding: int64 [U] -> [U].

    Args:
        table_key: ``philox.key_of(seed, name of the table)``; of several tables, one each.
        keys: keys of the rows.
        tables: index of each row's table among several: int64 [U].
    """
    if isinstance(table_key, int):
        return mix(keys ^ _signed(table_key))
    assert tables is not None, "rows of several tables name them"
    return mix(keys ^ torch.tensor([_signed(key) for key in table_key])[tables])


def word_of(*numbers: int) -> int:
    """Return a 64-bit word that depends on each of some numbers and on their order, as a signed number."""
    word = 0
    for number in numbers:
        word = _mixed_number(word ^ number) + GOLDEN
    return _signed(_mixed_number(word))


def _mixed_number(word: int) -> int:
    """Return the mix of a number, as ``keys.mix`` computes it."""
    word &= _MASK
    for factor in FACTORS:
        word = (word ^ word >> SHIFT) * factor & _MASK
    return word ^ word >> SHIFT


def _signed(word: int) -> int:
    """Return the int64 with the lower 64 bits of a number."""
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


def widen(source: Tensor, places: Tensor, out: Tensor, first: int = 0) -> None:
    """Write lines of ``source`` into columns of ``out`` from ``first`` on: [R, D], int64 [U] -> [U, >= first + D].

    Args:
        source: memory of the rows.
        places: lines to read; they exist.
        out: memory for the result, in fp32 if ``source`` has 16 bits.
        first: column of ``out`` at which the lines begin.
    """
    if not runs_compiled(readable(source), places, out):
        out[:, first : first + source.shape[1]] = source.index_select(0, places)
        return
    _widen(readable(source).numpy(), array(places), out.numpy(), first)


def narrow(
    lines: Tensor, first: int, into: Tensor, places: Tensor, ids: Tensor, word: int, column: int
) -> None:
    """Write columns of fp32 lines into memory at places: [U, >= first + D] -> [R, D], rounded if it has 16 bits.

    Args:
        lines: the lines.
        first: column of ``lines`` at which the written columns begin.
        into: memory of the rows, bf16 or the dtype of ``lines``.
        places: lines of ``into`` to write: int64 [U], each named once.
        ids: id of each row: int64 [U].
        word: word of the step, as ``word_of`` returns it.
        column: number of the first written column in the whole table.
    """
    width = into.shape[1]
    if into.dtype != torch.bfloat16:
        into[places] = lines[:, first : first + width]
    elif runs_compiled(lines, readable(into), places, ids):
        _narrow(
            lines.numpy().view(np.uint32),
            first,
            array(ids).view(np.uint64),
            np.uint64(word & _MASK),
            column,
            array(places),
            readable(into).numpy(),
        )
    else:
        into[places] = plain_narrow(lines[:, first : first + width], ids, word, column)


def plain_narrow(x: Tensor, ids: Tensor, word: int, column: int) -> Tensor:
    """Round fp32 [U, D] to bf16 in torch operations, on any device, with the bits of the loop."""
    words = x.contiguous().view(torch.int32)
    carried = (words + draws(ids, word, column, x.shape[1]).to(torch.int32)) >> 16
    special = words >> 16 | x.isnan() * _QUIET
    return torch.where(x.isfinite(), carried, special).to(torch.int16).view(torch.bfloat16)


def draws(ids: Tensor, word: int, column: int, width: int) -> Tensor:
    """Return 16 random bits for each element of columns [column, column + width): int64 [U, width]."""
    columns = torch.arange(column, column + width, device=ids.device)
    words = plain_mix((ids ^ word)[:, None] + (columns // _LANES) * _signed(GOLDEN))
    return (words >> (columns % _LANES * 16)) & 0xFFFF


@loop
def _widen(source: np.ndarray, places: np.ndarray, out: np.ndarray, first: int) -> None:
    width = source.shape[1]
    far = ahead(width * source.itemsize)
    for i in range(places.size):
        if i + far < places.size:
            prefetch(source, places[i + far], width)
        place = places[i]
        for j in range(width):
            out[i, first + j] = widened(source[place, j])


@loop
def _narrow(
    words: np.ndarray,
    first: int,
    ids: np.ndarray,
    step_word: np.uint64,
    column: int,
    places: np.ndarray,
    into: np.ndarray,
) -> None:
    width, block = into.shape[1], column >> 2
    offset = column - 4 * block
    blocks = (offset + width + 3) >> 2
    drawn = np.empty(4 * blocks, np.uint32)
    for i in range(places.size):
        place = places[i]
        base = ids[i] ^ step_word
        for b in range(blocks):
            draw = mixed(base + np.uint64(block + b) * _ODD)
            drawn[4 * b] = draw & _LOW
            drawn[4 * b + 1] = (draw >> _SIXTEEN) & _LOW
            drawn[4 * b + 2] = (draw >> _THIRTY_TWO) & _LOW
            drawn[4 * b + 3] = draw >> _FORTY_EIGHT
        for j in range(width):
            bits = words[i, first + j]
            carried = np.uint32(bits + drawn[offset + j])
            kept = np.uint32(bits | (_MADE_QUIET if bits & _MANTISSA else _NO_BITS))
            into[place, j] = (kept if bits & _EXPONENT == _EXPONENT else carried) >> _HALF
