"""Random numbers that are a function of their position: any rank can draw element i of a stream by itself.

A counter-based generator has no state to carry along: word i is a keyed bijection of the counter i.

    word(key, i)    = Philox4x64-10(key, counter = i // 4 + 1)[i % 4]            64 random bits
    word(key, s, i) = Philox4x64-10(key, counter = (i // 4 + 1, s0, s1, s2))[i % 4]       ... of substream s
    uniform(key, i) = (word >> 12 + 1/2) / 2^52                                  in (0, 1), without both ends
    normal(key, i)  = ndtri(uniform)                                             inverse of the normal's CDF, fp64

So every rank draws exactly the elements it keeps, and the same model starts on every mesh. A normal takes one word
(Box-Muller takes pairs, rejection takes an unknown number: with both, a cut in the wrong place changes the bits).

Floating-point draws are always on the CPU: the bits must not depend on the device. The 64-bit variant is used because
numpy has it in compiled code with a guarantee of a stable stream. The uniform is bit-equal everywhere; the normal as
far as the machine's ``log`` and fused multiply-add agree in the last bit of fp64, which rounding to fp32 hides in all
but one draw in 2^29.

Paper: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
Cost:  one chunk of memory beside the result; 75 million normals a second on one core (AMD Zen 5).
Shapes: everything is 1-D.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels.tables.compiled import CompiledLoop, has_numba, loop
from shardwise.kernels.threads import in_threads

Substream = tuple[int, int, int]
"""Three words that name one of 2^192 streams under the same key."""

_WORDS = 4
"""Number of words that one step of Philox's counter yields."""

_CHUNK_ELEMENTS = 1 << 16
"""Number of elements drawn at once: 512 KiB of fp64, which stays in a core's cache from the words to the result."""

_SEED = np.random.SeedSequence(0)
"""Seed of the generator, given because entropy from the system takes longer to get than the state that replaces it."""

_NOTHING = np.zeros(_WORDS, np.uint64)

_ROUNDS = 10
_MULTIPLIERS = (0xD2E7_470E_E14C_6C93, 0xCA5A_8263_9512_1157)
_KEY_STEPS = (0x9E37_79B9_7F4A_7C15, 0xBB67_AE85_84CA_A73B)
_MASK = (1 << 64) - 1
"""Mask of 64 bits; the names above are the constants of Philox4x64."""

_FACTOR_0, _FACTOR_2 = (np.uint64(word) for word in _MULTIPLIERS)
_STEP_0, _STEP_1 = (np.uint64(word) for word in _KEY_STEPS)
_WORTH_COMPILING = 1 << 13
"""Number of words above which a compiled loop draws them, without the interpreter's lock and in half the time."""

_ONE = np.uint64(0x3FF0_0000_0000_0000)
"""Exponent bits of the doubles in [1, 2)."""


def key_of(seed: int, name: str) -> int:
    """Return the 64-bit key of a named stream. Distinct (seed, name) collide with probability 2^-64."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def words(key: int, start: int, stop: int) -> np.ndarray:
    """Return words [start, stop) of the stream ``key``: uint64 [stop - start]."""
    return words_of(key, start, stop, [(0, 0, 0)])[0]


def words_of(key: int, start: int, stop: int, substreams: Sequence[Substream]) -> np.ndarray:
    """Return words [start, stop) of each of some substreams of the stream: uint64 [substreams, stop - start]."""
    skip = start % _WORDS
    if stop - start >= _WORTH_COMPILING and has_numba():
        return _compiled_words(key, start // _WORDS, -(-stop // _WORDS), substreams)[
            :, skip : skip + stop - start
        ]
    generator = np.random.Philox(_SEED)
    out = np.empty((len(substreams), stop - start), np.uint64)
    for row, substream in zip(out, substreams, strict=True):
        generator.state = {
            "bit_generator": "Philox",
            "state": {
                "counter": np.array([start // _WORDS, *substream], np.uint64),
                "key": np.array([key, 0], np.uint64),
            },
            "buffer": _NOTHING,
            "buffer_pos": _WORDS,
            "has_uint32": 0,
            "uinteger": 0,
        }
        row[:] = generator.random_raw(skip + stop - start)[skip:]
    return out


def _compiled_words(key: int, first: int, last: int, substreams: Sequence[Substream]) -> np.ndarray:
    """Return the words of whole steps of the counter: uint64 [substreams, 4 (last - first)]."""
    out = np.empty((len(substreams), last - first, _WORDS), np.uint64)
    for row, substream in zip(out, substreams, strict=True):
        named = [np.uint64(word) for word in (key, *substream)]

        def fill(start: int, stop: int, row: np.ndarray = row, named: Sequence[np.uint64] = named) -> None:
            _fill_words(*named, np.uint64(first + start + 1), row[start:stop])

        in_threads(fill, last - first, _WORTH_COMPILING)
    return out.reshape(len(substreams), -1)


class _HighProduct(CompiledLoop):
    """Loop that returns the upper 64 bits of the product of two words."""

    @functools.cached_property
    def compiled(self) -> Any:
        from llvmlite import ir
        from numba.core import types
        from numba.extending import intrinsic

        def high(typing_context: Any, x: Any, factor: Any) -> Any:
            def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                wide = ir.IntType(128)
                product = builder.mul(*(builder.zext(each, wide) for each in arguments))
                return builder.trunc(builder.lshr(product, wide(64)), ir.IntType(64))

            return types.uint64(types.uint64, types.uint64), build

        return intrinsic(high)


_high = _HighProduct(lambda x, factor: int(x) * int(factor) >> 64)


@loop
def _fill_words(
    key: np.uint64, one: np.uint64, two: np.uint64, three: np.uint64, first: np.uint64, out: np.ndarray
) -> None:
    for i in range(out.shape[0]):
        c0, c1, c2, c3 = first + np.uint64(i), one, two, three
        k0, k1 = key, np.uint64(0)
        for _ in range(_ROUNDS):
            high_0, low_0 = _high(c0, _FACTOR_0), c0 * _FACTOR_0
            high_2, low_2 = _high(c2, _FACTOR_2), c2 * _FACTOR_2
            c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
            k0 += _STEP_0
            k1 += _STEP_1
        out[i, 0], out[i, 1], out[i, 2], out[i, 3] = c0, c1, c2, c3


def words_on(
    device: torch.device, key: int, start: int, stop: int, substream: Substream = (0, 0, 0), count: int = 1
) -> Tensor:
    """Return the words of ``words_of`` as int64 [count, stop - start], computed on ``device``.

    Integers are exact on every device. The computation takes about 410 elementwise operations, whatever the number of
    words, each on a quarter of the words. On accelerators these cost less than a copy from the host.

    Args:
        device: device of the words.
        key: key of the stream.
        start: first word.
        stop: end of the words.
        substream: first substream.
        count: number of substreams, whose second words count up from that of ``substream``.
    """
    first, last = start // _WORDS, -(-stop // _WORDS)
    found = words_at(torch.arange(first, last, device=device), key, substream, count)
    return found.view(count, -1)[:, start - first * _WORDS : stop - first * _WORDS]


def words_at(
    blocks: Tensor,
    key: int | Tensor,
    substream: Substream = (0, 0, 0),
    count: int = 1,
    names: Tensor | None = None,
) -> Tensor:
    """Return words 4 b to 4 b + 3 of the stream for each b of ``blocks``, on their device: int64 [count, blocks, 4].

    Args:
        blocks: steps of the counter, int64 [blocks].
        key: key of the stream, or a key for each block as signed numbers, int64 [blocks].
        substream: first substream.
        count: number of substreams, whose second words count up from that of ``substream``.
        names: second word of the substream of each block instead, int64 [blocks]; ``count`` is then 1.
    """
    one, two, three = (signed(word) for word in substream)
    if names is None:
        names = torch.arange(two, two + count, device=blocks.device)[:, None]
    c: list[Any] = [blocks[None] + 1, one, names, three]
    k: list[Any] = [signed(key) if isinstance(key, int) else key, 0]
    for _ in range(_ROUNDS):
        low_0, high_0 = c[0] * signed(_MULTIPLIERS[0]), _high_product(c[0], _MULTIPLIERS[0])
        low_2, high_2 = c[2] * signed(_MULTIPLIERS[1]), _high_product(c[2], _MULTIPLIERS[1])
        c = [high_2 ^ c[1] ^ k[0], low_2, high_0 ^ c[3] ^ k[1], low_0]
        # Sums of tensors wrap around by themselves; sums of Python's numbers must be cut to 64 bits.
        sums = [word + signed(step) for word, step in zip(k, _KEY_STEPS, strict=True)]
        k = [signed(word & _MASK) if isinstance(word, int) else word for word in sums]
    return torch.stack(c, -1)


def uniform(key: int, start: int, stop: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return elements [start, stop) of the stream ``key``, uniform in (0, 1), drawn in fp64 and cast: [stop - start].

    The cast rounds, so in a narrower dtype the largest draws become 1.
    """
    return _fill(key, start, stop, dtype, inverse_cdf=False)


def uniform_of(key: int, start: int, stop: int, substreams: Sequence[Substream]) -> Tensor:
    """Return elements of ``uniform`` for each of some substreams, in fp64: [substreams, stop - start]."""
    return torch.from_numpy(_to_unit_interval(words_of(key, start, stop, substreams)))


def normal(key: int, start: int, stop: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return elements [start, stop) of the stream ``key``, mean 0 and standard deviation 1: [stop - start].

    |x| < 8.3.
    """
    return _fill(key, start, stop, dtype, inverse_cdf=True)


def signed(word: int) -> int:
    """Return the int64 with the bits of a uint64."""
    return word - (1 << 64) if word >> 63 else word


def _high_product(x: Tensor, factor: int) -> Tensor:
    """Return the upper 64 bits of the unsigned product of 64-bit words, from products of their halves."""
    half = 0xFFFF_FFFF
    x_low, x_high = x & half, (x >> 32) & half
    f_low, f_high = factor & half, factor >> 32
    middle = x_high * f_low + ((x_low * f_low >> 32) & half)  # no carry is lost: at most (2^32 - 1)·2^32
    other = x_low * f_high + (middle & half)
    return x_high * f_high + ((middle >> 32) & half) + ((other >> 32) & half)


def _fill(key: int, start: int, stop: int, dtype: torch.dtype, inverse_cdf: bool) -> Tensor:
    if not 0 <= start <= stop:
        raise ValueError(f"elements [{start}, {stop}) of a random stream; expected 0 <= start <= stop")
    out = torch.empty(stop - start, dtype=dtype, device="cpu")
    for begin in range(start, stop, _CHUNK_ELEMENTS):
        end = min(begin + _CHUNK_ELEMENTS, stop)
        chunk = torch.from_numpy(_to_unit_interval(words(key, begin, end)))
        if inverse_cdf:
            torch.special.ndtri(chunk, out=chunk)
        out[begin - start : end - start] = chunk
    return out


def _to_unit_interval(raw: np.ndarray) -> np.ndarray:
    """Return odd multiples of 2^-53, each with equal probability. Overwrites ``raw``.

    52 bits under the exponent of 1 make 1 + k / 2^52; the subtraction of 1 - 2^-53 is exact, and the result is neither
    0 nor 1, where the inverse CDF would be infinite.
    """
    raw >>= np.uint64(12)
    raw |= _ONE
    unit = raw.view(np.float64)
    unit -= 1.0 - 2.0**-53
    return unit
