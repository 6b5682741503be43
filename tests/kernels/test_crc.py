"""CRC-32 of bytes, and of a whole from those of its parts."""

import random
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernels import crc
from shardwise.kernels.crc import crc32, crc32_combine


@pytest.mark.parametrize("folds", [True, False])
def test_folded_as_zlib_sums(monkeypatch: pytest.MonkeyPatch, folds: bool) -> None:
    """Of any length, from any address."""
    if not folds:
        monkeypatch.setattr(crc, "_folds", lambda: False)
    draws = random.Random(0)
    data = np.frombuffer(bytearray(draws.randbytes(70_000)), np.uint8)
    lengths = [0, 1, 63, 64, 4095, *range(4096, 4096 + 130), *(draws.randrange(65_000) for _ in range(50))]
    for length in lengths:
        part = data[(first := draws.randrange(5_000)) : first + length]
        before = part.tobytes()
        assert crc32(part) == zlib.crc32(before), (first, length)
        assert part.tobytes() == before


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
    total = 0
    for _ in range(40):
        total = zlib.crc32(zeros, total)
    assert crc32_combine(zlib.crc32(b"head"), total, 40 * 2**20) == _continued(zlib.crc32(b"head"), zeros, 40)


def _continued(crc: int, data: bytes, times: int) -> int:
    for _ in range(times):
        crc = zlib.crc32(data, crc)
    return crc


def test_numba_is_asked_where_that_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(0).randbytes(10_000)
    monkeypatch.setattr(
        crc, "_folded", crc.loop(lambda *_: None)
    )  # as in a process that has compiled nothing
    assert crc.sum_for(1 << 30) is zlib.crc32
    assert crc.sum_for(1 << 33) is not zlib.crc32 or not crc._folds()
    monkeypatch.undo()
    crc32(np.frombuffer(data, np.uint8))
    assert crc.sum_for(0)(data) == crc.sum_for(0)(memoryview(data)) == zlib.crc32(data)
