"""Compiled forms of the codes of moments have the bits of the plain ones."""

import pytest
import torch
from torch import Tensor

from shardwise.kernels import moment_codes
from shardwise.kernels.moment_codes import (
    from_int8,
    plain_from_int8,
    plain_to_bf16,
    plain_to_int8,
    to_bf16,
    to_int8,
)

pytest.importorskip("numba")


def numbers() -> tuple[Tensor, Tensor]:
    """Of all magnitudes, both signs, with zeros, the smallest and largest, infinite ones and NaN; and bits."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, generator=generator) * (6 * torch.randn(4096, generator=generator)).exp()
    x[::7] = 0
    x[500:600] *= 1e-38
    x[600:700] *= 1e30
    x[100], x[200], x[300], x[301] = torch.inf, -torch.inf, torch.nan, 3.4e38
    x[400:416] = -0.0
    return x, torch.randint(-(2**15), 2**15, (4096,), dtype=torch.int16, generator=generator)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moment_codes, "_LEAST", 100)
    torch.set_num_threads(request.param)


def test_bf16(threads: None) -> None:
    x, bits = numbers()
    mine, theirs = to_bf16(x, bits), plain_to_bf16(x, bits)
    assert torch.equal(mine.isnan(), theirs.isnan())
    assert torch.equal(mine.view(torch.int16)[~x.isnan()], theirs.view(torch.int16)[~x.isnan()])


@pytest.mark.parametrize("squares", [False, True])
def test_int8(squares: bool, threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, bits = numbers()
    for each in (x, -x):
        mine, theirs = to_int8(each, bits, squares), plain_to_int8(each, bits, squares)
        assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))
        for q, e in (mine, (torch.arange(256, dtype=torch.uint8), torch.arange(-8, 8, dtype=torch.int8))):
            decoded, plain = from_int8(q, e, squares), plain_from_int8(q, e, squares)
            assert torch.equal(decoded.isnan(), plain.isnan())
            assert torch.equal(decoded.nan_to_num(), plain.nan_to_num())
    monkeypatch.setattr(moment_codes, "has_numba", lambda: False)
    assert torch.equal(to_int8(x, bits, squares)[0], plain_to_int8(x, bits, squares)[0])
