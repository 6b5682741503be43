"""Updates of rows by their formulas, and the compiled form against the plain one."""

import math

import pytest
import torch

from shardwise.kernels.tables.row_optimizers import plain_update, row_mean_squares, update
from shardwise.kernels.tables.row_rules import (
    Ftrl,
    RowOptimizer,
    RowwiseAdagrad,
)
from tests.kernels.tables.cases import ALL, ROWS, WIDTH, batch, slab_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("optimizer", ALL, ids=str)
def test_the_references_bits(optimizer: RowOptimizer, dtype: torch.dtype) -> None:
    ours = slab_of(optimizer, torch.randn(ROWS, WIDTH, dtype=dtype))
    plain = ours.clone()
    for step in range(1, 7):
        rows, grads = batch(dtype)
        for form, slab in ((update, ours), (plain_update, plain)):
            form(optimizer, slab, rows, grads, lr=0.05 / step, step=step, scale=0.7)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("optimizer", ALL, ids=str)
@pytest.mark.parametrize("width", [1, 3, 4, 8])
def test_every_width(optimizer: RowOptimizer, width: int) -> None:
    ours = slab_of(optimizer, torch.randn(9, width))
    plain, before = ours.clone(), ours.clone()
    rows, grads = torch.tensor([8, 2, 0]), torch.randn(3, width)
    update(optimizer, ours, rows, grads, lr=0.1, step=3)
    plain_update(optimizer, plain, rows, grads, lr=0.1, step=3)
    assert torch.equal(ours, plain)
    untouched = torch.tensor([1, 3, 4, 5, 6, 7])
    assert torch.equal(ours[untouched], before[untouched])
    assert not torch.equal(ours[rows, :width], before[rows, :width])


def test_rowwise_adagrad_by_formula() -> None:
    optimizer = RowwiseAdagrad(eps=1e-3, initial=0.1)
    slab = slab_of(optimizer, torch.randn(6, 7, dtype=torch.float64))
    weights, sums = slab[:, :7].clone(), [0.1] * 6
    for step in range(1, 11):
        rows, grads = batch(torch.float64, 6, 7)
        update(optimizer, slab, rows, grads, lr=0.2, step=step, scale=0.5)
        for row, grad in zip(rows.tolist(), (0.5 * grads).tolist(), strict=True):
            sums[row] += sum(g * g for g in grad) / 7
            for j, g in enumerate(grad):
                weights[row, j] -= 0.2 * g / (math.sqrt(sums[row]) + 1e-3)
    torch.testing.assert_close(slab[:, :7], weights, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slab[:, 7], torch.tensor(sums, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("form", [update, plain_update])
def test_rowwise_adagrad_of_a_table_cut_by_columns(form) -> None:  # type: ignore[no-untyped-def]
    optimizer = RowwiseAdagrad()
    weights = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    whole = slab_of(optimizer, weights)
    rows, grads = batch(torch.float64)
    form(optimizer, whole, rows, grads, lr=0.1, step=1, scale=0.3)
    squares = row_mean_squares(grads * 0.3)
    for columns in (slice(0, 8), slice(8, WIDTH)):
        part = slab_of(optimizer, weights[:, columns])
        form(optimizer, part, rows, grads[:, columns], lr=0.1, step=1, scale=0.3, mean_squares=squares)
        torch.testing.assert_close(part[:, :-1], whole[:, columns], rtol=1e-14, atol=0)
        torch.testing.assert_close(part[:, -1], whole[:, -1], rtol=1e-14, atol=0)


def test_ftrl_by_formula() -> None:
    l1, l2, beta, lr = 0.3, 0.1, 0.5, 0.2
    optimizer = Ftrl(l1, l2, beta, initial=0.2)
    slab = slab_of(optimizer, torch.randn(4, 3, dtype=torch.float64))
    w = slab[:, :3].tolist()
    z, n = [[0.0] * 3 for _ in range(4)], [[0.2] * 3 for _ in range(4)]
    zeros = 0
    for step in range(1, 31):
        rows, grads = batch(torch.float64, 4, 3)
        update(optimizer, slab, rows, grads, lr=lr, step=step)
        for row, grad in zip(rows.tolist(), grads.tolist(), strict=True):
            for j, g in enumerate(grad):
                sigma = (math.sqrt(n[row][j] + g * g) - math.sqrt(n[row][j])) / lr
                z[row][j] += g - sigma * w[row][j]
                n[row][j] += g * g
                sign = math.copysign(1, z[row][j])
                shrunk = -(z[row][j] - sign * l1) / ((beta + math.sqrt(n[row][j])) / lr + l2)
                w[row][j] = 0.0 if abs(z[row][j]) <= l1 else shrunk
                zeros += w[row][j] == 0
    assert zeros, "l1 makes zeros"
    expected = torch.cat([torch.tensor(x, dtype=torch.float64) for x in (w, z, n)], 1)
    torch.testing.assert_close(slab, expected, rtol=1e-12, atol=1e-13)


def test_ftrl_after_a_rate_of_zero_goes_on_as_without_it() -> None:
    slab = slab_of(Ftrl(l1=0.1), torch.randn(ROWS, WIDTH))
    without = slab.clone()
    rows, grads = batch(torch.float32)
    update(Ftrl(l1=0.1), slab, rows, torch.randn_like(grads), lr=0.0, step=1)
    for each in (slab, without):
        update(Ftrl(l1=0.1), each, rows, grads, lr=0.1, step=2)
    assert torch.equal(slab, without)
