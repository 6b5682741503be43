"""CRC-32 of a whole from the CRC-32s of its parts, without the bytes.

A CRC is the remainder of the message, read as a polynomial over GF(2), modulo P. Appending n bytes multiplies the
message by x^(8n), which is a linear map on the 32 bits of the remainder:

    crc(A + B) = crc(A) * x^(8 len(B)) mod P  xor  crc(B)

The map is kept as one polynomial instead of a 32 x 32 bit matrix and applied by multiplication modulo P; it depends
on the length alone and is cached, since a checkpoint has few distinct lengths.

Why: each rank sums only the ranges that it wrote, and still the manifest holds one CRC per block and per tensor.
Cost: 32 shifts per part once the length is known. Detects every single flipped bit and every burst up to 32 bits.
"""

from functools import lru_cache
from zlib import crc32

__all__ = ["crc32", "crc32_combine"]

_POLYNOMIAL = 0xEDB88320  # P without x^32, bit 31 = x^0: the order of bits that zlib uses
_ONE = 1 << 31
_X_TO_8 = _ONE >> 8


def _multiply(a: int, b: int) -> int:
    """a * b mod P."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=4096)
def _shift(length_bytes: int) -> int:
    """x^(8 length) mod P by repeated squaring."""
    result, power = _ONE, _X_TO_8
    while length_bytes:
        if length_bytes & 1:
            result = _multiply(result, power)
        power = _multiply(power, power)
        length_bytes >>= 1
    return result


def crc32_combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of A + B from those of A and of B, and B's length."""
    return _multiply(first, _shift(second_bytes)) ^ second
