"""Philox: the published vectors, and the same bits however the stream is cut."""

import hashlib
import math

import numpy as np
import pytest
import torch

from shardwise.kernels import philox

MASK = (1 << 64) - 1


def reference(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x64-10 in Python integers, as the paper writes it."""
    c, k = list(counter), list(key)
    for _ in range(10):
        low, high = c[0] * 0xD2E7470EE14C6C93, c[2] * 0xCA5A826395121157
        c = [high >> 64 ^ c[1] ^ k[0], high & MASK, low >> 64 ^ c[3] ^ k[1], low & MASK]
        k = [k[0] + 0x9E3779B97F4A7C15 & MASK, k[1] + 0xBB67AE8584CAA73B & MASK]
    return c


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"),
        ([MASK] * 4, [MASK] * 2, "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0"),
        (
            [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89],
            [0x452821E638D01377, 0xBE5466CF34E90C6C],
            "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6",
        ),
    ],
)
def test_the_reference_gives_the_published_vectors(counter: list[int], key: list[int], expected: str) -> None:
    assert " ".join(f"{word:016x}" for word in reference(counter, key)) == expected


@pytest.mark.parametrize("start", [0, 1, 7, 4 * 10**12 + 3])
def test_words_are_the_reference(start: int) -> None:
    key = philox.key_of(3, "blocks.0.attention.qkv.weight")
    expected = [reference([i // 4 + 1, 0, 0, 0], [key, 0])[i % 4] for i in range(start, start + 9)]
    assert philox.words(key, start, start + 9).tolist() == expected


def test_uniform_and_normal_of_a_word() -> None:
    word = int(philox.words(5, 11, 12)[0])
    u = ((word >> 12) + 0.5) / 2**52
    assert philox.uniform(5, 11, 12).item() == u
    x = philox.normal(5, 11, 12).item()
    assert math.erfc(-x / math.sqrt(2)) / 2 == pytest.approx(u, rel=1e-14)


def test_the_ends_of_the_interval_are_left_out() -> None:
    extremes = philox._to_unit_interval(np.array([0, MASK], np.uint64))
    assert extremes.tolist() == [2.0**-53, 1 - 2.0**-53]
    assert torch.special.ndtri(torch.from_numpy(extremes)).isfinite().all()


@pytest.mark.parametrize("draw", [philox.uniform, philox.normal], ids=["uniform", "normal"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_any_cut_gives_the_same_bits(draw, dtype: torch.dtype) -> None:
    total = 3 * philox._CHUNK_ELEMENTS + 17
    whole = draw(9, 0, total, dtype)
    chunk = philox._CHUNK_ELEMENTS
    for cuts in ([0, 1, 2, 3, 5, 1000, total], [0, chunk - 1, chunk + 1, total], range(0, total + 1, 65_553)):
        cuts = [*cuts, total]
        pieces = [draw(9, start, stop, dtype) for start, stop in zip(cuts, cuts[1:], strict=False)]
        assert torch.equal(torch.cat(pieces), whole)


def test_threads_do_not_change_the_bits() -> None:
    alone = philox.normal(2, 0, 200_000)
    torch.set_num_threads(2)
    assert torch.equal(philox.normal(2, 0, 200_000), alone)


def test_the_moments_are_those_of_a_normal() -> None:
    x = philox.normal(1, 0, 1 << 20)
    expected = [0, 1, 0, 3, 0, 15]
    moments = [x.pow(n).mean().item() for n in range(1, 7)]
    # Six standard errors of each moment.
    errors = [6 * math.sqrt(v / len(x)) for v in (1, 2, 15, 96, 945, 10_170)]
    assert all(abs(m - e) < error for m, e, error in zip(moments, expected, errors, strict=True))


def test_neighbours_and_streams_are_uncorrelated() -> None:
    x, y = philox.normal(1, 0, 100_000), philox.normal(2, 0, 100_000)
    for other in (x.roll(1), x.roll(4), y):
        assert abs((x * other).mean().item()) < 6 / math.sqrt(len(x))


def test_keys_differ_by_seed_and_by_name() -> None:
    keys = {philox.key_of(seed, name) for seed in (0, 1, 11) for name in ("a", "1:a", ":a", "b")}
    assert len(keys) == 12
    assert philox.key_of(7, "x") == int.from_bytes(hashlib.sha256(b"7:x").digest()[:8], "little")


def test_an_empty_range_and_a_wrong_one() -> None:
    assert philox.normal(1, 5, 5).shape == (0,)
    with pytest.raises(ValueError, match=r"elements \[3, 2\)"):
        philox.uniform(1, 3, 2)
    with pytest.raises(ValueError, match="0 <= start"):
        philox.normal(1, -1, 2)


def test_compiled_words_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of long streams, by several threads."""
    pytest.importorskip("numba")
    key, substreams = philox.key_of(7, "long"), [(1, 2, 3), (2**63, 0, 2**64 - 1)]
    monkeypatch.setattr(philox, "_WORTH_COMPILING", 1 << 60)
    expected = philox.words_of(key, 5, 5003, substreams)
    monkeypatch.setattr(philox, "_WORTH_COMPILING", 300)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert np.array_equal(philox.words_of(key, 5, 5003, substreams), expected)
