"""Row optimizers: the references' bits, torch.optim's values, formulas written out where torch has none."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardwise.kernels.tables.row_optimizers import plain_update, update
from shardwise.kernels.tables.row_replay import StepHistory, catch_up
from shardwise.kernels.tables.row_rules import (
    Adagrad,
    Adam,
    Momentum,
    RowOptimizer,
    Sgd,
)
from tests.kernels.tables.cases import ALL, ROWS, WIDTH, batch, slab_of

Build = Callable[[list[Tensor]], torch.optim.Optimizer]

SPARSE: list[tuple[RowOptimizer, Build]] = [
    (Sgd(), lambda p: torch.optim.SGD(p, 0.1)),
    (Adagrad(), lambda p: torch.optim.Adagrad(p, 0.1)),
    (
        Adagrad(eps=1e-6, initial=0.3),
        lambda p: torch.optim.Adagrad(p, 0.1, eps=1e-6, initial_accumulator_value=0.3),
    ),
    (Adam(), lambda p: torch.optim.SparseAdam(p, 0.1)),
    (Adam(0.7, 0.9, 1e-3), lambda p: torch.optim.SparseAdam(p, 0.1, (0.7, 0.9), 1e-3)),
]


@pytest.mark.parametrize(("optimizer", "build"), SPARSE, ids=lambda x: str(x) if isinstance(x, tuple) else "")
def test_torch_with_sparse_gradients(optimizer: RowOptimizer, build: Build) -> None:
    weights = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    slab = slab_of(optimizer, weights)
    parameter = weights.clone().requires_grad_()
    reference = build([parameter])
    with torch.sparse.check_sparse_tensor_invariants():
        for step in range(1, 31):
            rows, grads = batch(torch.float64)
            update(optimizer, slab, rows, grads, lr=0.1, step=step)
            parameter.grad = torch.sparse_coo_tensor(rows[None], grads, parameter.shape).coalesce()
            reference.step()
    torch.testing.assert_close(slab[:, :WIDTH], parameter.detach(), rtol=1e-12, atol=1e-12)


DENSE: list[tuple[RowOptimizer, Build]] = [
    (Sgd(weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1)),
    (Momentum(0.8), lambda p: torch.optim.SGD(p, 0.1, 0.8)),
    (
        Momentum(0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, weight_decay=0.1),
    ),
    (Adagrad(weight_decay=0.1), lambda p: torch.optim.Adagrad(p, 0.1, weight_decay=0.1)),
    (Adam(exact=True), lambda p: torch.optim.Adam(p, 0.1)),
    (Adam(weight_decay=0.1, exact=True), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1)),
]


@pytest.mark.parametrize(("optimizer", "build"), DENSE, ids=lambda x: str(x) if isinstance(x, tuple) else "")
def test_torch_where_every_step_touches_every_row(optimizer: RowOptimizer, build: Build) -> None:
    weights = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    slab = slab_of(optimizer, weights)
    parameter = weights.clone().requires_grad_()
    reference = build([parameter])
    for step in range(1, 31):
        grads = torch.randn(ROWS, WIDTH, dtype=torch.float64)
        update(optimizer, slab, torch.arange(ROWS), grads, lr=0.1, step=step)
        parameter.grad = grads
        reference.step()
    torch.testing.assert_close(slab[:, :WIDTH], parameter.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lr", [0.0, 1e-60])
@pytest.mark.parametrize("optimizer", ALL, ids=str)
def test_a_rate_of_zero_moves_no_weight_and_harms_no_later_step(optimizer: RowOptimizer, lr: float) -> None:
    """The first step of a warm-up and the last of a schedule; 1e-60 is 0 in fp32."""
    ours = slab_of(optimizer, torch.randn(ROWS, WIDTH))
    plain, before = ours.clone(), ours[:, :WIDTH].clone()
    rows, grads = batch(torch.float32)
    grads[0] = 0
    for form, slab in ((update, ours), (plain_update, plain)):
        form(optimizer, slab, rows, grads, lr=lr, step=1)
        assert torch.equal(slab[:, :WIDTH], before)
        assert bool(slab.isfinite().all())
        form(optimizer, slab, rows, grads, lr=0.05, step=2)
        assert bool(slab.isfinite().all())
    assert torch.equal(ours, plain)
    assert not torch.equal(ours[:, :WIDTH], before)


def test_what_does_not_fit_is_refused() -> None:
    slab, rows, grads = torch.zeros(5, 4), torch.tensor([0, 4]), torch.zeros(2, 4)
    with pytest.raises(ValueError, match="a slab of 4 columns for Momentum at width 4; expected 8"):
        update(Momentum(), slab, rows, grads, lr=0.1, step=1)
    with pytest.raises(ValueError, match="for 2 rows of a torch.float32 slab"):
        update(Sgd(), slab, rows, grads.double(), lr=0.1, step=1)
    with pytest.raises(ValueError, match="steps count from 1"):
        update(Sgd(), slab, rows, grads, lr=0.1, step=0)
    for bad in (-1, 5):
        with pytest.raises(IndexError, match="of a slab with 5"):
            update(Sgd(), slab, torch.tensor([0, bad]), grads, lr=0.1, step=1)
    with pytest.raises(ValueError, match="lazy Adam"):
        catch_up(StepHistory(Adam()), Adam(), slab, rows, 1)
    update(Sgd(), slab, rows[:0], grads[:0], lr=0.1, step=1)
