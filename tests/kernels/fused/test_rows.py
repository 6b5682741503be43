"""Rows of tables, pooled, merged and stepped in one launch: the bits of the plain form on the CPU."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwise.kernels.tables.pooling import Pooling, merge, plain_merge, plain_pool, pool
from shardwise.kernels.tables.row_optimizers import plain_update, update
from shardwise.kernels.tables.row_rules import (
    Adagrad,
    Adam,
    Ftrl,
    Momentum,
    RowOptimizer,
    RowwiseAdagrad,
    Sgd,
)

from .cases import DEVICE, DRAWN, INTERPRETED

KINDS: list[tuple[Pooling, bool]] = [("sum", False), ("mean", False), ("max", False), ("sum", True)]
OPTIMIZERS: list[RowOptimizer] = [
    Sgd(weight_decay=0.1),
    Momentum(0.8),
    Momentum(0.9, nesterov=True, weight_decay=0.01),
    Adagrad(weight_decay=0.01),
    RowwiseAdagrad(initial=0.1),
    Adam(0.8, 0.99, weight_decay=0.1),
    Adam(exact=True),
    Ftrl(l1=0.3, l2=0.1, beta=0.5, initial=0.2),
]


def on_host(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if each is None else each.cpu() for each in tensors]


@DRAWN
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.integers(1, 20),
    st.sampled_from(KINDS),
    st.booleans(),
)
def test_pool_and_merge(lengths: list[int], width: int, kind: tuple[Pooling, bool], has_state: bool) -> None:
    pooling, weighted = kind
    places, rows = sum(lengths), 7
    source = torch.randn(rows, width + 2 * has_state, device=DEVICE)
    index = torch.randint(0, rows, (places,), device=DEVICE)
    offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    weights = torch.randn(places, device=DEVICE) if weighted else None
    found = pool(source, index, offsets, pooling, weights, width)
    expected = plain_pool(*on_host(source, index, offsets), pooling, *on_host(weights), width)
    assert torch.equal(found.values.cpu(), expected.values)
    if pooling == "max":
        assert torch.equal(found.places.cpu(), expected.places)
    grad = torch.randn(len(lengths), width, device=DEVICE)
    out = torch.full((rows, width), float("nan"), device=DEVICE)
    merged = merge(grad, index, offsets, rows, pooling, weights, found.places, out)
    g, i, o, w, p = on_host(grad, index, offsets, weights, found.places)
    assert torch.equal(merged.cpu(), plain_merge(g, i, o, rows, pooling, w, p))


def indexes_with_long_rows(lengths: list[int]) -> Tensor:
    """Places of rows, mixed: row r has ``lengths[r]`` places."""
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return index[torch.randperm(len(index))]


@pytest.mark.parametrize(
    "lengths",
    [
        [3, 20, 0, 9, 8],
        [0, 0, 41],
        *(
            pytest.param(lengths, marks=pytest.mark.soak)
            for lengths in ([30, 1, 2], [8, 8, 9, 7], [17], [1] * 20, [9, 9, 9, 9], [5, 27, 5, 0])
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_long_rows_are_merged_in_pieces(
    lengths: list[int], kind: tuple[Pooling, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers are exact in every order, so each place must be added once; then the rounding of floats."""
    from shardwise.kernels.fused import rows as kernels

    monkeypatch.setattr(kernels, "_SHORTEST_PIECE", 8)
    pooling, weighted = kind
    index = indexes_with_long_rows(lengths).to(DEVICE)
    rows, places, width = len(lengths), len(index), 5
    ends = torch.arange(0, places + 1, 1 if places % 2 else 2, device=DEVICE)  # bags of one place, or of two
    pool_kind = "sum" if pooling == "mean" else pooling
    found = pool(torch.randn(rows, width, device=DEVICE), index, ends, pool_kind)
    for grad, weights, is_exact in (
        (torch.randint(-9, 9, (len(ends) - 1, width)) * 2.0, torch.randint(-3, 3, (places,)) * 1.0, True),
        (torch.randn(len(ends) - 1, width), torch.randn(places), False),
    ):
        given = (grad.to(DEVICE), index, ends)
        weight = weights.to(DEVICE) if weighted else None
        merged = merge(*given, rows, pooling, weight, found.places)
        g, i, o, w, p = on_host(*given, weight, found.places)
        expected = plain_merge(g, i, o, rows, pooling, w, p)
        assert torch.allclose(merged.cpu(), expected, rtol=0, atol=0 if is_exact else 1e-5)
        assert torch.equal(merged, merge(*given, rows, pooling, weight, found.places)), (
            "other bits in another run"
        )
        short = torch.tensor(lengths) <= 8
        assert torch.equal(merged.cpu()[short], expected[short]), "rows that are not cut have the CPU's bits"


def test_pieces_beside_indexes_outside_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.kernels.fused import rows as kernels

    monkeypatch.setattr(kernels, "_SHORTEST_PIECE", 4)
    index = torch.tensor([-1] * 9 + [0] * 3 + [1] * 10 + [2] * 11, device=DEVICE)
    merged = merge(torch.ones(33, 2, device=DEVICE), index, None, 2)
    assert merged.tolist() == [[3, 3], [10, 10]]


def test_no_program_issues_a_long_chain_of_loads() -> None:
    from shardwise.kernels.fused import rows as kernels

    assert kernels.longest_chain(65_536) <= 1024, "65,536 samples on 3 rows, or on one"
    assert kernels.longest_chain(1 << 20) <= 3 * 1024, "it grows with the root of the number of places"
    for places in (1, 2, 3, 255, 256, 257, 3 * 256**2 - 1, 3 * 512**2, 1 << 24):
        length = kernels.piece_length(places)
        assert length >= 256 and length & (length - 1) == 0
        assert (
            length == 256
            or length**2 * kernels._LOADS_A_PLACE <= places < 4 * length**2 * kernels._LOADS_A_PLACE
        )


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter counts the loads of a program")
def test_counted_loads_stay_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load of a program counts, also those that no other load waits for, in a batch on 3 rows."""
    from triton.runtime import interpreter

    from shardwise.kernels.fused import rows as kernels

    loads: Counter[tuple[int, ...]] = Counter()
    launches: list[int] = []
    builder = interpreter.interpreter_builder
    load, set_program = builder.create_masked_load, builder.set_grid_idx

    def count(*args: object) -> object:
        loads[len(launches), *builder.grid_idx] += 1
        return load(*args)

    def program(*index: int) -> None:
        if not any(index):
            launches.append(1)
        set_program(*index)

    monkeypatch.setattr(builder, "create_masked_load", count)
    monkeypatch.setattr(builder, "set_grid_idx", program)
    monkeypatch.setattr(kernels, "_SHORTEST_PIECE", 16)
    monkeypatch.setattr(kernels, "_MOST_ROWS", 1)
    ends = torch.arange(0, 601, 2)
    index = torch.arange(600) % 3
    merged = merge(torch.ones(300, 4), index, ends, 3)
    assert merged.tolist() == [[200.0] * 4] * 3
    assert len(launches) == 2
    assert 16 * 3 <= max(loads.values()) <= kernels.longest_chain(600) + 2, loads.most_common(3)
    assert kernels.longest_chain(600) < 200, "one program for a row of 200 places would issue 600 loads"


def test_one_place_a_bag_and_blocks_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.kernels.fused import rows as kernels

    monkeypatch.setattr(kernels, "_WIDEST_BLOCK", 8)
    source, index = torch.randn(9, 21, device=DEVICE), torch.randint(0, 9, (30,), device=DEVICE)
    grad = torch.randn(30, 21, device=DEVICE)
    ends = torch.arange(31, device=DEVICE)
    for kind in ("sum", "max"):
        found = pool(source, index, ends, kind)
        assert torch.equal(found.values, source[index])
        merged = merge(grad, index, None, 9, kind, None, found.places)
        assert torch.equal(merged.cpu(), plain_merge(*on_host(grad, index, None), 9))


def test_some_of_the_places_and_16_bits() -> None:
    source, index = torch.randn(9, 5, device=DEVICE).bfloat16(), torch.randint(0, 9, (12,), device=DEVICE)
    offsets = torch.tensor([2, 6, 6, 10], device=DEVICE)
    found = pool(source, index, offsets).values
    expected = plain_pool(*on_host(source.float(), index, offsets)).values
    assert torch.equal(found.cpu(), expected), "widened to fp32 and summed there"
    grad = torch.randn(3, 5, device=DEVICE)
    merged = merge(grad, index, offsets, 9)
    assert torch.equal(merged.cpu(), plain_merge(*on_host(grad, index, offsets), 9))


def test_indexes_outside_touch_no_memory() -> None:
    source, index = torch.randn(4, 3, device=DEVICE), torch.tensor([1, 4, -1, 2], device=DEVICE)
    pooled = pool(source, index, torch.tensor([0, 1, 2, 3, 4], device=DEVICE)).values
    assert pooled[:, 0].isnan().tolist() == [False, True, True, False]
    merged = merge(torch.ones(4, 3, device=DEVICE), index, None, 4)
    assert merged[:, 0].tolist() == [0, 1, 1, 0]
    slab = source.clone()
    update(Sgd(), slab, index, torch.ones(4, 3, device=DEVICE), lr=1.0, step=1)
    assert torch.equal(slab, source - torch.tensor([0.0, 1, 1, 0], device=DEVICE)[:, None])


@pytest.mark.parametrize("width", [1, 19])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_update(optimizer: RowOptimizer, width: int) -> None:
    state = torch.tensor([optimizer.start(width)]).expand(9, -1)
    expected = torch.cat([torch.randn(9, width), state], 1).contiguous()
    found = expected.to(DEVICE, copy=True)
    for step in (1, 2, 3):
        rows, grads = torch.randperm(9)[:5], torch.randn(5, width)
        numbers = {"lr": 0.05 / step, "step": step, "scale": 0.7}
        update(optimizer, found, rows.to(DEVICE), grads.to(DEVICE), **numbers)
        plain_update(optimizer, expected, rows, grads, **numbers)
    if isinstance(optimizer, RowwiseAdagrad):
        assert torch.allclose(found.cpu(), expected, rtol=1e-6)
    else:
        assert torch.equal(found.cpu(), expected)


def test_means_that_come_from_other_ranks() -> None:
    optimizer, given = RowwiseAdagrad(), torch.rand(3)
    expected = torch.cat([torch.randn(4, 5), torch.zeros(4, 1)], 1)
    found, rows, grads = expected.to(DEVICE, copy=True), torch.tensor([3, 0, 2]), torch.randn(3, 5)
    means = given.to(DEVICE)
    update(optimizer, found, rows.to(DEVICE), grads.to(DEVICE), lr=0.1, step=1, mean_squares=means)
    plain_update(optimizer, expected, rows, grads, lr=0.1, step=1, mean_squares=given)
    assert torch.equal(found.cpu(), expected)
