"""Keyed dropout in one launch: the kernel draws the bits where it uses them.

One step of Philox serves 16 consecutive elements, so a program takes steps of the counter and not elements; a row that
begins in the middle of a step leaves its first draws unused. ``kernels/dropout.py`` defines which element has which
bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_M0, _M1 = tl.constexpr(0xD2E7_470E_E14C_6C93), tl.constexpr(0xCA5A_8263_9512_1157)
_K0, _K1 = tl.constexpr(0x9E37_79B9_7F4A_7C15), tl.constexpr(0xBB67_AE85_84CA_A73B)

_ELEMENTS = 16
"""Number of elements that one step of the counter serves."""
_BLOCK = 128


class DrawnRows(NamedTuple):
    """Description of a tensor as rows of consecutive elements of substreams."""

    rows: int
    inside: int
    """Number of elements of a row."""
    before: int
    """Number of rows that share a substream."""
    whole: int
    """Distance in the substream from one row's first element to that of the next."""
    start: int
    """Position of the first row in its substream."""
    sample: int
    """Second word of the first row's substream, which counts up by one every ``before`` rows."""


def dropped(
    x: Tensor, rows: DrawnRows, key: int, call: int, step: int, threshold: int, scale: float
) -> Tensor:
    """Return ``x``, contiguous, times ``scale`` if an element's bits reach ``threshold``, else times 0."""
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    if rows.whole == rows.inside:  # nothing is cut, so the rows of a substream join to one
        count = rows.rows // rows.before
        rows = rows._replace(rows=count, inside=rows.inside * rows.before, before=1, whole=0)
    skipped = _ELEMENTS - 1 if rows.start % _ELEMENTS or rows.whole % _ELEMENTS else 0
    groups = triton.cdiv(rows.inside + skipped, _ELEMENTS)
    _dropped[(triton.cdiv(rows.rows * groups, _BLOCK),)](
        x,
        out,
        *rows,
        groups,
        key,
        call,
        step,
        threshold,
        scale,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _word(x):
    return x.to(tl.int64).to(tl.uint64, bitcast=True)


@triton.jit
def _philox(c0, c1, c2, c3, k0):
    """Return Philox4x64-10 of [N] counters under the key (k0, 0)."""
    m0, m1 = tl.full(c0.shape, _M0, tl.uint64), tl.full(c0.shape, _M1, tl.uint64)
    k1 = tl.full([], 0, tl.uint64)
    for _ in tl.static_range(10):
        high_0, low_0 = tl.umulhi(c0, m0), c0 * m0
        high_2, low_2 = tl.umulhi(c2, m1), c2 * m1
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
        k0, k1 = k0 + _K0, k1 + _K1
    return c0, c1, c2, c3


@triton.jit(do_not_specialize=["rows", "start", "sample", "key", "call", "step", "threshold"])
def _dropped(
    x,
    out,
    rows,
    inside,
    before,
    whole,
    start,
    sample,
    groups,
    key,
    call,
    step,
    threshold,
    scale,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = place // groups
    first = start.to(tl.int64) + (row % before) * whole
    counter = first // 16 + place % groups
    zero = tl.zeros([BLOCK], tl.uint64)
    sample_of = _word(sample.to(tl.int64) + row // before)
    w0, w1, w2, w3 = _philox(
        _word(counter + 1), zero + _word(call), sample_of, zero + _word(step), _word(key)
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK, 4)
    lanes = tl.join(tl.join(words, words >> 32), tl.join(words >> 16, words >> 48))
    bits = lanes.reshape(BLOCK, 16).to(tl.int16, bitcast=False).to(tl.int32)
    inner = (counter * 16 - first)[:, None] + tl.arange(0, 16)[None, :]
    here = (row < rows)[:, None] & (inner >= 0) & (inner < inside)
    at = (row * inside)[:, None] + inner
    held = tl.load(x + at, here, other=0.0).to(tl.float32)
    tl.store(out + at, (held * (bits >= threshold).to(tl.float32) * scale).to(out.dtype.element_ty), here)
