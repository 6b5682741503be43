"""CRC-32 of a whole from those of its parts."""

import random
import zlib

from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.crc import crc32_combine


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_two_parts(first: bytes, second: bytes) -> None:
    assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_many_parts_of_many_lengths() -> None:
    draws = random.Random(0)
    parts = [draws.randbytes(draws.choice([0, 1, 7, 4096, 70_001])) for _ in range(60)]
    total = 0
    for part in parts:
        total = crc32_combine(total, zlib.crc32(part), len(part))
    assert total == zlib.crc32(b"".join(parts))


def test_long_second_part() -> None:
    zeros = bytes(2**20)
    crc = 0
    for _ in range(40):
        crc = zlib.crc32(zeros, crc)
    assert crc32_combine(zlib.crc32(b"head"), crc, 40 * 2**20) == _continued(zlib.crc32(b"head"), zeros, 40)


def _continued(crc: int, data: bytes, times: int) -> int:
    for _ in range(times):
        crc = zlib.crc32(data, crc)
    return crc
