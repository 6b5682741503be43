"""Numbers in 16 and 8 bits, rounded up or down at random so that the mean is the number (optim/coded_moments.py).

    bf16             the 16 bits of fp32 that do not fit are added to 16 random ones: a carry rounds away from 0
    int8, signed     x = ±q² · 4^e           q = 0 .. 127
    int8, squares    x =  q⁴ · 16^e          q = 0 .. 255, not 0 unless x is 0

e is the smallest with which the largest of a block of 16 has a q; it takes 8 bits. All steps but one quotient are exact
in fp32, and roots are rounded correctly: every form on every device has the same bits.

Each has a plain form, in torch operations, which is the reference and runs everywhere, and one that numba compiles.

Cost:  nanoseconds an element on one core that others used too, random bits not counted: bf16 0.7 (plain 5), int8 2 to
       encode and 1 to decode (plain 12 and 2).
Shapes: N elements, B = ceil(N/16) blocks.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwise.kernels.tables.compiled import has_numba, loop
from shardwise.kernels.threads import in_threads
from shardwise.plan.state_form import BLOCK

_NAN_BLOCK = 127
"""Value of e of a block with an infinite or NaN element, which decodes to NaN."""
_SIGNED, _SQUARES = (2, 13, 127.0**2, -63), (4, 31, 255.0**4, -31)
"""(log2 of the base, floor of log2 of the largest power of q, that power, the lowest exponent)."""
_LEAST = 1 << 14
"""Number of elements that are worth a thread."""
_POWERS = np.ldexp(np.float32(1), np.arange(-126, 128)).astype(np.float32)
"""Powers of two from 2^-126 to 2^127."""


def to_bf16(x: Tensor, bits: Tensor | None) -> Tensor:
    """Round fp32 [N] by ``bits`` (int16 [N]), or to the nearest: bf16 [N]."""
    if bits is None:
        return x.to(torch.bfloat16)
    if not _compiled(x, bits):
        return plain_to_bf16(x, bits)
    out = torch.empty(x.shape, dtype=torch.int16)
    words, added, rounded = x.view(torch.int32).numpy(), bits.numpy(), out.numpy()
    in_threads(lambda a, b: _to_bf16(words[a:b], added[a:b], rounded[a:b]), out.numel(), _LEAST)
    return out.view(torch.bfloat16)


def plain_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """Return ``to_bf16`` in plain torch operations: the reference."""
    carried = (x.view(torch.int32) + bits).add_(1 << 15) >> 16
    return torch.where(x.isfinite(), carried.to(torch.int16).view(torch.bfloat16), x.to(torch.bfloat16))


def from_int8(q: Tensor, exponents: Tensor, squares: bool) -> Tensor:
    """Decode ``q`` (uint8 [N]; signed numbers as their bits) with the exponents of its blocks (int8 [B]): fp32 [N]."""
    if q.numel() % BLOCK or not _compiled(q, exponents):
        return plain_from_int8(q, exponents, squares)
    out = torch.empty(q.shape, dtype=torch.float32)
    form = _decode_squares if squares else _decode_signed
    codes, e, decoded = (
        q.view(torch.uint8 if squares else torch.int8).numpy(),
        exponents.numpy(),
        out.numpy(),
    )
    in_threads(
        lambda a, b: form(codes[a:b], e[a // BLOCK : b // BLOCK], _POWERS, decoded[a:b]),
        q.numel(),
        _LEAST,
        BLOCK,
    )
    return out


def plain_from_int8(q: Tensor, exponents: Tensor, squares: bool) -> Tensor:
    """Return ``from_int8`` in plain torch operations: the reference."""
    is_finite = exponents != _NAN_BLOCK
    scale = _power(torch.where(is_finite, exponents.int(), 0) * (4 if squares else 2))
    scale = torch.where(is_finite, scale, torch.nan)
    values = q.float() if squares else q.view(torch.int8).float()
    values = values.square_().square_() if squares else values.mul_(values.abs())
    return _in_blocks(values).mul_(scale[:, None]).view(-1)[: q.numel()]


def to_int8(x: Tensor, bits: Tensor | None, squares: bool) -> tuple[Tensor, Tensor]:
    """Encode fp32 ``x`` [N], rounded by ``bits`` (int16 [N]) or to the nearest: (uint8 [N], exponents int8 [B])."""
    if bits is None or x.numel() % BLOCK or not _compiled(x, bits):
        return plain_to_int8(x, bits, squares)
    q = torch.empty(x.shape, dtype=torch.uint8)
    exponents = torch.empty(x.numel() // BLOCK, dtype=torch.int8)
    form = _encode_squares if squares else _encode_signed
    codes = q.view(torch.uint8 if squares else torch.int8).numpy()
    numbers, words, added, e = x.numpy(), x.view(torch.int32).numpy(), bits.numpy(), exponents.numpy()

    def run(a: int, b: int) -> None:
        form(numbers[a:b], words[a:b], added[a:b], _POWERS, codes[a:b], e[a // BLOCK : b // BLOCK])

    in_threads(run, x.numel(), _LEAST, BLOCK)
    return q, exponents


def plain_to_int8(x: Tensor, bits: Tensor | None, squares: bool) -> tuple[Tensor, Tensor]:
    """Return ``to_int8`` in plain torch operations: the reference."""
    base, whole, most_of_q, lowest = _SQUARES if squares else _SIGNED
    # A sum of squares cannot be below 0, so a negative number counts as 0.
    size = _in_blocks(x.clamp(min=0) if squares else x.abs())
    most = size.amax(1)
    e = ((most.view(torch.int32) >> 23) - 127 - whole + base - 1) // base
    e = e.clamp_(min=lowest)
    e += most > most_of_q * _power(e * base)
    is_finite = most.isfinite()
    inverse = torch.where(is_finite, _power(torch.where(is_finite, -e * base, 0)), 0.0)
    y = (size * inverse[:, None]).view(-1)[: x.numel()]
    if squares:
        q = y.sqrt().sqrt_().floor_()
        low = q.square().square_()
        share = (y - low).div_((q + 1).square_().square_().sub_(low))
    else:
        q = y.sqrt().floor_()
        share = (y - q.square()).div_((2 * q).add_(1))
    q += share > (0.5 if bits is None else bits.float().add_(2.0**15 + 0.5).mul_(2.0**-16))
    q = torch.maximum(q, (y > 0).float()) if squares else q.copysign_(x)
    codes = q.nan_to_num_(0.0, 0.0, 0.0).to(torch.uint8 if squares else torch.int8).view(torch.uint8)
    return codes, torch.where(is_finite, e, _NAN_BLOCK).to(torch.int8)


def _power(exponent: Tensor) -> Tensor:
    """Return 2^exponent in fp32, exactly, for -126 to 127."""
    return ((exponent + 127) << 23).view(torch.float32)


def _in_blocks(x: Tensor) -> Tensor:
    """Return ``x`` as [B, 16], with zeros behind the end."""
    missing = -x.numel() % BLOCK
    return (pad(x, (0, missing)) if missing else x).view(-1, BLOCK)


# Compiled ----------------------------------------------------------------------------------------------------------

_HALF, _ONE, _TWO, _SCALE = np.float32(2**15 + 0.5), np.float32(1), np.float32(2), np.float32(2.0**-16)
_ZERO = np.float32(0)
_INFINITE = 0x7F800000
"""Bits of infinity in fp32, which are also the mask of the exponent."""
_TOP_SIGNED = int(np.float32(127.0**2).view(np.int32)) - (13 << 23)
_TOP_SQUARES = int(np.float32(255.0**4).view(np.int32)) - (31 << 23)
"""Bits of the largest power of q, scaled into [1, 2), as those of ``_TOP_SIGNED``."""


def _compiled(*tensors: Tensor) -> bool:
    return has_numba() and all(each.device.type == "cpu" and each.is_contiguous() for each in tensors)


@loop
def _to_bf16(x: np.ndarray, bits: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.size):
        carried = (x[i] + bits[i] + 32768) >> 16
        special = (x[i] >> 16) | (64 if x[i] & 0x7FFFFF else 0)
        out[i] = special if x[i] & _INFINITE == _INFINITE else carried


@loop
def _decode_signed(q: np.ndarray, exponents: np.ndarray, powers: np.ndarray, out: np.ndarray) -> None:
    for block in range(exponents.size):
        e = exponents[block]
        scale = np.float32(np.nan) if e == _NAN_BLOCK else powers[126 + 2 * e]
        for i in range(BLOCK * block, BLOCK * block + BLOCK):
            value = np.float32(q[i])
            out[i] = value * abs(value) * scale


@loop
def _decode_squares(q: np.ndarray, exponents: np.ndarray, powers: np.ndarray, out: np.ndarray) -> None:
    for block in range(exponents.size):
        e = exponents[block]
        scale = np.float32(np.nan) if e == _NAN_BLOCK else powers[126 + 4 * e]
        for i in range(BLOCK * block, BLOCK * block + BLOCK):
            value = np.float32(q[i])
            root = value * value
            out[i] = root * root * scale


@loop
def _exponent(most: int, base: int, whole: int, top: int, lowest: int) -> int:
    """Return e of a block whose largest number has the bits ``most``."""
    if most >= _INFINITE:
        return _NAN_BLOCK
    shift = 1 if base == 2 else 2
    e = max(((most >> 23) - 127 - whole + base - 1) >> shift, lowest)
    return e + (most > top + ((whole + base * e) << 23))


@loop
def _encode_signed(
    x: np.ndarray,
    words: np.ndarray,
    bits: np.ndarray,
    powers: np.ndarray,
    q: np.ndarray,
    exponents: np.ndarray,
) -> None:
    for block in range(exponents.size):
        first, most = BLOCK * block, 0
        for i in range(first, first + BLOCK):
            most = max(most, words[i] & 0x7FFFFFFF)
        e = _exponent(most, 2, 13, _TOP_SIGNED, -63)
        exponents[block] = e
        if e == _NAN_BLOCK:
            q[first : first + BLOCK] = 0
            continue
        inverse = powers[126 - 2 * e]
        for i in range(first, first + BLOCK):
            y = abs(x[i]) * inverse
            root = np.floor(np.sqrt(y))
            share = (y - root * root) / (_TWO * root + _ONE)
            up = _ONE if share > (np.float32(bits[i]) + _HALF) * _SCALE else _ZERO
            code = np.int32(root + up)
            q[i] = -code if words[i] < 0 else code


@loop
def _encode_squares(
    x: np.ndarray,
    words: np.ndarray,
    bits: np.ndarray,
    powers: np.ndarray,
    q: np.ndarray,
    exponents: np.ndarray,
) -> None:
    for block in range(exponents.size):
        first, most = BLOCK * block, 0
        for i in range(first, first + BLOCK):
            # A negative number has negative bits and never is the largest; a NaN counts whatever its sign.
            word = words[i] & 0x7FFFFFFF
            most = max(most, word if word > _INFINITE else words[i])
        e = _exponent(most, 4, 31, _TOP_SQUARES, -31)
        exponents[block] = e
        if e == _NAN_BLOCK:
            q[first : first + BLOCK] = 0
            continue
        inverse = powers[126 - 4 * e]
        for i in range(first, first + BLOCK):
            y = max(x[i], _ZERO) * inverse
            root = np.floor(np.sqrt(np.sqrt(y)))
            low, next_one = root * root, (root + _ONE) * (root + _ONE)
            low, high = low * low, next_one * next_one
            share = (y - low) / (high - low)
            up = _ONE if share > (np.float32(bits[i]) + _HALF) * _SCALE else _ZERO
            least = _ONE if y > _ZERO else _ZERO
            q[i] = np.int32(max(root + up, least))
