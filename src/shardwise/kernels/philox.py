"""Random numbers that are a function of their place: element i of a stream can be drawn alone, by anyone.

A counter-based generator has no state to carry along: word i is a keyed bijection of the counter i.

    word(key, i)    = Philox4x64-10(key, counter = i // 4 + 1)[i % 4]            64 random bits
    uniform(key, i) = (word >> 12 + 1/2) / 2^52                                  in (0, 1), both ends left out
    normal(key, i)  = ndtri(uniform)                                             inverse of the normal's CDF, fp64

So every rank draws exactly the elements it keeps, and the same model starts on every mesh. A normal takes one word
(Box-Muller takes pairs, rejection takes an unknown number: with both, a cut in the wrong place changes the bits).

Always on the CPU: the bits must not depend on the device. The 64-bit variant, because numpy carries it in compiled
code under a promise of a stable stream. The uniform is bit-equal everywhere; the normal as far as the machine's
``log`` and fused multiply-add agree in the last bit of fp64, which rounding to fp32 hides but for one draw in 2^29.

Paper: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
Cost:  one chunk of memory beside the result; 75 million normals a second on one core (AMD Zen 5).
Shapes: everything is 1-D.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

_WORDS = 4
"""Words that one step of Philox's counter yields."""

_CHUNK_ELEMENTS = 1 << 16
"""Elements drawn at once: 512 KiB of fp64, which stays in a core's cache from the words to the result."""

_ONE = np.uint64(0x3FF0_0000_0000_0000)
"""Exponent bits of the doubles in [1, 2)."""


def key_of(seed: int, name: str) -> int:
    """The 64-bit key of one named stream. Distinct (seed, name) collide with probability 2^-64."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def words(key: int, start: int, stop: int) -> np.ndarray:
    """Words [start, stop) of the stream ``key``: uint64 [stop - start]."""
    generator = np.random.Philox(key=np.array([key, 0], np.uint64))
    generator.advance(start // _WORDS)
    skip = start % _WORDS
    return generator.random_raw(skip + stop - start)[skip:]


def uniform(key: int, start: int, stop: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Elements [start, stop) of the stream ``key``, uniform in (0, 1), drawn in fp64 and cast: [stop - start].

    The cast rounds, so in a narrower dtype the largest draws become 1.
    """
    return _fill(key, start, stop, dtype, inverse_cdf=False)


def normal(key: int, start: int, stop: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Elements [start, stop) of the stream ``key``, mean 0 and standard deviation 1, |x| < 8.3: [stop - start]."""
    return _fill(key, start, stop, dtype, inverse_cdf=True)


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
    """The odd multiples of 2^-53, each with equal probability. Overwrites ``raw``.

    52 bits under the exponent of 1 make 1 + k / 2^52; the subtraction of 1 - 2^-53 is exact, and neither 0 nor 1
    can come out, where the inverse CDF would be infinite.
    """
    raw >>= np.uint64(12)
    raw |= _ONE
    unit = raw.view(np.float64)
    unit -= 1.0 - 2.0**-53
    return unit
