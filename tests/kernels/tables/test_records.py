"""Records of rows: sums of compiled loops are those of zlib, and no changed byte is taken for right."""

import numpy as np
import pytest

from shardwise.kernels.tables import records


def test_compiled_sums_are_those_of_zlib() -> None:
    for width in (1, 2, 4, 7, 80, 272, 1040):
        size, n = records.record_bytes(width), 5
        found, plain = np.ones((n, size), np.uint8), np.zeros((n, size), np.uint8)
        rows = np.array([0, 1, 2**40, 2**62, 7])
        lines = np.random.default_rng(width).integers(0, 256, (n, width), np.uint8)
        records.pack(found, rows, lines, 2**33 + 5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(records, "has_numba", lambda: False)
            records.pack(plain, rows, lines, 2**33 + 5)
            assert records.intact(found, 2**33 + 5).all()
        assert np.array_equal(found, plain)
        assert records.intact(found, 2**33 + 5).all()
        assert not records.intact(found, 2**33 + 6).any(), "a record in another place is not right"


@pytest.mark.parametrize("is_compiled", [True, False])
def test_every_flipped_bit_is_seen(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_compiled:
        monkeypatch.setattr(records, "has_numba", lambda: False)
    width, n = 6, 3
    size = records.record_bytes(width)
    held, rows = np.zeros((n, size), np.uint8), np.array([7, 8, 2**33])
    lines = np.random.default_rng(0).integers(0, 256, (n, width), np.uint8)
    records.pack(held, rows, lines, 5)
    flat, starts, orders = held.reshape(-1), np.arange(n) * size, 5 + np.arange(n)
    out, places = np.zeros((5, width), np.uint8), np.array([4, 0, 2])
    assert records.collect(flat, starts, orders, rows, out, places) == -1
    assert np.array_equal(out[places], lines)
    for bit in range(8 * size):
        held[1, bit // 8] ^= 1 << bit % 8
        assert records.collect(flat, starts, orders, rows, out, places) == 1
        assert records.intact(held, 5).tolist() == [True, False, True]
        held[1, bit // 8] ^= 1 << bit % 8
    assert records.collect(flat, starts, orders, np.array([7, 9, 2**33]), out, places) == 1, "of another row"
    assert records.collect(flat, starts, orders + [0, 0, 1], rows, out, places) == 2, "of another place"
