"""Uniform random numbers of many rows in one launch. ``kernels/uniform.py`` defines which row has which numbers.

One step of Philox serves four consecutive numbers, so a program takes steps of the counter and not numbers; a row that
begins in the middle of a step leaves its first words unused.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.fused.dropout import _philox, _word

_BLOCK = 128
_ONE = tl.constexpr(0x3FF0_0000_0000_0000)
"""Exponent bits of the doubles in [1, 2)."""
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-53)


def uniform_rows(starts: Tensor, names: Tensor, width: int, key: int, call: int, step: int) -> Tensor:
    """Return ``width`` numbers in (0, 1) for each row: fp64 [n, width]. ``key`` is a signed number."""
    out = torch.empty(len(starts), width, dtype=torch.float64, device=starts.device)
    if out.numel() == 0:
        return out
    groups = triton.cdiv(width + 3, 4)
    _uniform_rows[(triton.cdiv(len(starts) * groups, _BLOCK),)](
        starts, names, out, len(starts), width, groups, key, call, step, BLOCK=_BLOCK
    )
    return out


@triton.jit(do_not_specialize=["rows", "key", "call", "step"])
def _uniform_rows(starts, names, out, rows, width, groups, key, call, step, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = place // groups
    is_row = row < rows
    start = tl.load(starts + row, is_row, other=0)
    name = tl.load(names + row, is_row, other=0)
    counter = start // 4 + place % groups
    zero = tl.zeros([BLOCK], tl.uint64)
    w0, w1, w2, w3 = _philox(
        _word(counter + 1), zero + _word(call), _word(name), zero + _word(step), _word(key)
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK, 4)
    unit = ((words >> 12) | _ONE).to(tl.float64, bitcast=True) - _BELOW_ONE
    inner = (counter * 4 - start)[:, None] + tl.arange(0, 4)[None, :]
    here = is_row[:, None] & (inner >= 0) & (inner < width)
    tl.store(out + (row * width)[:, None] + inner, unit, here)
