"""Wire forms of vectors and gradients of rows: 32 bits, 16 bits, or 8 bits with one fp32 scale a row.

    fp32    the numbers as they are computed
    bf16    2 D bytes a row
    fp16    2 D bytes a row; numbers beyond 65,504 are infinite
    int8    D + 4 bytes a row: q = round(x / s), s = max |x| / 127         a row with NaN or infinity is NaN

Vectors are rounded to the nearest. Gradients are rounded stochastically: r is uniform in [0, 1),

    q = floor(x / unit + r)        unit: of the last place of x in bf16 or fp16, or s        E[q · unit] = x

so that the sum of many is exact in the mean, also of fp16 numbers below 6e-8. r is a function of the word of the
message (seed, group of tables, step, pass, rank), the place of the row in the message, and the column.

Cost:   one pass over the numbers on each side.
Shapes: U rows of a message, D columns, E elements of a row of the message.
"""

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels.tables.compiled import loop, runs_compiled
from shardwise.kernels.tables.keys import mixed
from shardwise.kernels.tables.rounding import GOLDEN, draws, narrow

WireName = Literal["fp32", "bf16", "fp16", "int8"]
_SCALE_BYTES = 4
_MOST = 127
_STEP_OF_DRAWS = 2.0**-16
_NORMAL = 2.0**-14
"""Smallest number that fp16 holds with all its bits."""
_SMALLEST = 2.0**-24
"""Distance of neighbouring fp16 numbers below ``_NORMAL``."""
_ODD, _LOW, _SIXTEEN, _STEP = np.uint64(GOLDEN), np.uint64(0xFFFF), np.uint64(16), np.float32(_STEP_OF_DRAWS)
_DROPPED_BITS = 13
"""Bits of an fp32 number that fp16 does not have."""


class RowWire(NamedTuple):
    """Form in which rows of numbers travel."""

    name: WireName
    dtype: torch.dtype
    """Dtype in which the numbers are computed."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a message."""
        return {"fp32": self.dtype.itemsize, "bf16": 2, "fp16": 2, "int8": 1}[self.name]

    def elements(self, columns: float) -> float:
        """Return the elements of a message that a row of ``columns`` numbers takes, E."""
        return columns + _SCALE_BYTES if self.name == "int8" and columns else columns

    def row_bytes(self, columns: float) -> float:
        """Return the bytes that a row of ``columns`` numbers takes."""
        return self.elements(columns) * self.itemsize

    def width(self, columns: int) -> int:
        """Return ``elements`` of a whole number of columns."""
        return int(self.elements(columns))

    def packed(self, rows: Tensor, word: int | None = None) -> Tensor:
        """Return a message of rows: [U, D] -> [U, E].

        Args:
            rows: the rows.
            word: word of the message, to round stochastically; None rounds to the nearest.
        """
        if self.name == "fp32":
            return rows
        rows = rows.float().contiguous()
        if self.name == "int8":
            if rows.numel():
                return _to_int8(rows, word)
            return rows.new_empty(len(rows), self.width(rows.shape[1]), dtype=torch.uint8)
        if word is None:
            return rows.to(torch.bfloat16 if self.name == "bf16" else torch.float16)
        if self.name == "bf16":
            found = torch.empty(rows.shape, dtype=torch.bfloat16, device=rows.device)
            places = torch.arange(len(rows), device=rows.device)
            narrow(rows, 0, found, places, places, word, 0)
            return found
        return _rounded_to_fp16(rows, word).to(torch.float16)

    def unpacked(self, message: Tensor, columns: int) -> Tensor:
        """Return the rows of a message: [U · E] in any shape -> [U, D]."""
        if not columns:
            return message.new_empty(0, 0, dtype=self.dtype)
        message = message.view(-1, self.width(columns))
        if self.name == "int8":
            # A copy even of one row, because scales must begin at a multiple of four bytes.
            scales = torch.empty(len(message), _SCALE_BYTES, dtype=torch.uint8, device=message.device)
            scales = scales.copy_(message[:, columns:]).view(torch.float32)
            return (message[:, :columns].view(torch.int8) * scales).to(self.dtype)
        return message.to(self.dtype)


def _to_int8(rows: Tensor, word: int | None) -> Tensor:
    """Return rows of bytes: D numbers, then the scale."""
    scales = rows.abs().amax(1, keepdim=True) / _MOST
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    numbers = rows / torch.where(scales > 0, scales, 1)
    if word is None:
        numbers.round_()
    else:
        numbers.add_(_shares(rows, word)).floor_()
    numbers.clamp_(-_MOST, _MOST).nan_to_num_(1.0)
    return torch.cat([numbers.to(torch.int8).view(torch.uint8), scales.view(torch.uint8)], 1)


def _shares(rows: Tensor, word: int) -> Tensor:
    """Return a random number in [0, 1) for each element: fp32 [U, D]."""
    if not runs_compiled(rows):
        places = torch.arange(len(rows), device=rows.device)
        return draws(places, word, 0, rows.shape[1]) * _STEP_OF_DRAWS
    found = torch.empty(rows.shape)
    _draw_shares(np.uint64(word & ((1 << 64) - 1)), found.numpy())
    return found


def _rounded_to_fp16(rows: Tensor, word: int) -> Tensor:
    """Return rows rounded stochastically to numbers that fp16 has, in fp32."""
    units = 1 << _DROPPED_BITS
    shares = (_shares(rows, word) * units).floor_()  # of 13 bits: fp32 adds them to 10 bits without rounding
    cut = (rows.view(torch.int32) + shares.to(torch.int32) >> _DROPPED_BITS << _DROPPED_BITS).view(
        torch.float32
    )
    small = (rows / _SMALLEST + shares / units).floor_() * _SMALLEST
    found = torch.where(rows.abs() < _NORMAL, small, cut)
    return torch.where(rows.isfinite(), found, rows)


@loop
def _draw_shares(word: np.uint64, out: np.ndarray) -> None:
    draw = np.uint64(0)
    for i in range(out.shape[0]):
        base = np.uint64(i) ^ word
        for j in range(out.shape[1]):
            if j & 3 == 0:
                draw = mixed(base + np.uint64(j >> 2) * _ODD)
            out[i, j] = np.float32(draw & _LOW) * _STEP
            draw >>= _SIXTEEN
