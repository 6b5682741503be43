"""Places of rows and sums over them in one launch: the plain forms' integers, and their sums."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwise.kernels import expert_rows
from shardwise.kernels.expert_rows import (
    RowPlaces,
    message_places,
    pair_gradients,
    pairs_by_expert,
    plain_message_places,
    plain_pair_gradients,
    plain_pairs_by_expert,
    plain_sum_rows,
)

from .cases import BOUNDS, DEVICE, DRAWN, DTYPES, away, plain


def drawn(rows: int, top_k: int, experts: int, seed: int = 0) -> Tensor:
    """Experts of rows, some of which have fewer than ``top_k``, or none."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.rand(rows, experts, generator=generator).argsort(1)[:, :top_k]
    index[torch.rand(index.shape, generator=generator) < 0.3] = -1
    return index.to(DEVICE)


@DRAWN
@given(st.integers(0, 40), st.integers(1, 3), st.sampled_from([1, 2, 3]), st.booleans(), st.booleans())
def test_message_places(rows: int, top_k: int, ranks: int, is_padded: bool, is_second: bool) -> None:
    """In the second hop the experts of other hosts count as none."""
    index, first, experts = drawn(rows, top_k, 12), *((6, 6) if is_second else (0, 12))
    with plain():
        goes = plain_message_places(index, first, experts, ranks, ranks * rows, True)[1] >= 0
    messages = ranks * max(int(goes.sum(0).max()) if rows else 0, 1) + ranks if is_padded else int(goes.sum())
    found = message_places(index, first, experts, ranks, messages, is_padded)
    expected = plain_message_places(index, first, experts, ranks, messages, is_padded)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@DRAWN
@given(st.integers(0, 40), st.integers(1, 3), st.booleans(), st.integers(0, 3), st.booleans())
def test_pairs_by_expert(rows: int, top_k: int, in_blocks: bool, more: int, is_short: bool) -> None:
    chosen = drawn(rows, top_k, 8)
    chosen = chosen.int() if is_short else chosen
    own = chosen - 2
    number = int(((own >= 0) & (own < 5)).sum())
    most = int(torch.bincount(own[(own >= 0) & (own < 5)].flatten().cpu(), minlength=5).max())
    each = most + more if in_blocks else 0
    pairs = 5 * each if in_blocks else number + more
    if in_blocks and not each:
        return
    found = pairs_by_expert(chosen, 2, 5, pairs, each)
    expected = plain_pairs_by_expert(chosen, 2, 5, pairs, each)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))


def test_places_over_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.kernels.fused import expert_rows as kernels

    monkeypatch.setattr(kernels, "_TILE", 16)
    index = drawn(70, 2, 8)
    total = int((plain_message_places(index, 0, 8, 2, 140, True)[1] >= 0).sum())
    for found, expected in (
        (message_places(index, 0, 8, 2, total, False), plain_message_places(index, 0, 8, 2, total, False)),
        (message_places(index, 0, 8, 2, 150, True), plain_message_places(index, 0, 8, 2, 150, True)),
        (pairs_by_expert(index, 0, 8, 140, 0), plain_pairs_by_expert(index, 0, 8, 140, 0)),
        (pairs_by_expert(index, 0, 8, 400, 50), plain_pairs_by_expert(index, 0, 8, 400, 50)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def sums(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Values, weights of slots, and experts of rows."""
    generator = torch.Generator().manual_seed(rows)
    index = drawn(rows, 2, 4, rows)
    values = torch.randn(int((index >= 0).sum()), width, generator=generator).to(DEVICE, dtype)
    return values, torch.rand(rows, 2, generator=generator).to(DEVICE), index


@DRAWN
@given(st.integers(1, 20), st.integers(1, 70), st.sampled_from(DTYPES), st.booleans())
def test_sums(rows: int, width: int, dtype: torch.dtype, has_weights: bool) -> None:
    values, weights, index = sums(rows, width, dtype)
    places = pairs_by_expert(index, 0, 4, len(values), 0)[2]
    held = weights if has_weights else None
    found = RowPlaces(places, len(values)).sum(values, held)
    assert found.dtype == dtype
    assert away(found, plain_sum_rows(values.double(), places, held), least=1) < BOUNDS[dtype]


@DRAWN
@given(st.integers(1, 20), st.integers(1, 70), st.sampled_from(DTYPES), st.booleans())
def test_gradients_of_pairs(rows: int, width: int, dtype: torch.dtype, in_blocks: bool) -> None:
    """Pairs of no row have a gradient of 0."""
    values, weights, index = sums(rows, width, dtype)
    each = rows if in_blocks else 0
    pairs = 4 * each or len(values)
    slots, of_rows, places, _ = pairs_by_expert(index, 0, 4, pairs, each)
    held = torch.randn(pairs, width, device=DEVICE).to(dtype)
    grad = torch.randn(rows, width, device=DEVICE).to(dtype)
    found = pair_gradients(grad, held, weights, slots, of_rows)
    expected = plain_pair_gradients(grad.double(), held.double(), weights.double(), slots, of_rows)
    for a, b, like in zip(found, expected, (dtype, torch.float32), strict=True):
        assert a.dtype == like and away(a, b, least=1) < BOUNDS[like] * 2
    assert not found[0][slots == index.numel()].any() and not found[1][places < 0].any()


def test_sums_of_a_field_of_messages() -> None:
    """Fields lie in rows of bytes, not one row behind the other."""
    values, weights, index = sums(9, 24, torch.float32)
    places = pairs_by_expert(index, 0, 4, len(values), 0)[2]
    columns = [(24, torch.float32), (2, torch.float64)]
    packed = expert_rows.pack([values, torch.ones(len(values), 2, device=DEVICE)], columns)
    field = expert_rows.unpack(packed, columns)[0]
    assert torch.equal(RowPlaces(places, len(values)).sum(field), RowPlaces(places, len(values)).sum(values))
