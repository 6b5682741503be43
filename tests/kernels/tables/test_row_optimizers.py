"""Row optimizers: the references' bits, torch.optim's values, formulas written out where torch has none."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardwise.kernels.tables import row_replay
from shardwise.kernels.tables.row_optimizers import plain_update, row_mean_squares, update
from shardwise.kernels.tables.row_replay import StepHistory, catch_up, plain_catch_up
from shardwise.kernels.tables.row_rules import (
    Adagrad,
    Adam,
    Ftrl,
    Momentum,
    RowOptimizer,
    RowwiseAdagrad,
    Sgd,
)

ROWS, WIDTH = 50, 19
ALL: list[RowOptimizer] = [
    Sgd(),
    Sgd(weight_decay=0.1),
    Momentum(0.8),
    Momentum(0.9, nesterov=True, weight_decay=0.01),
    Adagrad(initial=0.1),
    Adagrad(weight_decay=0.01),
    RowwiseAdagrad(initial=0.1),
    RowwiseAdagrad(weight_decay=0.01),
    Adam(),
    Adam(0.8, 0.99, weight_decay=0.1),
    Adam(exact=True),
    Ftrl(),
    Ftrl(l1=0.3, l2=0.1, beta=0.5, initial=0.2),
]


def slab_of(optimizer: RowOptimizer, weights: Tensor) -> Tensor:
    rows, width = weights.shape
    state = torch.tensor([optimizer.start(width)], dtype=weights.dtype).expand(rows, -1)
    assert state.shape[1] == optimizer.columns(width)
    return torch.cat([weights, state], 1).contiguous()


def batch(dtype: torch.dtype, rows: int = ROWS, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    touched = torch.randperm(rows)[: 3 * rows // 5]
    return touched, torch.randn(len(touched), width, dtype=dtype)


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


def told_catch_up(history: StepHistory, optimizer: Adam, slab: Tensor, rows: Tensor, width: int) -> None:
    """As on a device: in torch operations, by what the host knows of where rows stand."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_replay, "runs_compiled", lambda *tensors: False)
        catch_up(history, optimizer, slab, rows, width, slab[rows, -1].int())


@pytest.mark.parametrize("weight_decay", [0.0, 0.02])
@pytest.mark.parametrize("form", [catch_up, plain_catch_up, told_catch_up])
def test_exact_adam_is_adam_on_the_dense_table(form, weight_decay: float) -> None:  # type: ignore[no-untyped-def]
    optimizer = Adam(0.8, 0.99, weight_decay=weight_decay, exact=True)
    assert optimizer.horizon is not None and optimizer.horizon < 250
    weights = torch.randn(8, 5, dtype=torch.float64)
    slab = slab_of(optimizer, weights)
    parameter = weights.clone().requires_grad_()
    reference = torch.optim.AdamW([parameter], betas=(0.8, 0.99), weight_decay=weight_decay)
    history = StepHistory(optimizer)
    for step in range(1, 401):
        lr = 0.05 * (1 + math.cos(step / 50))
        rows = torch.tensor([0] if 10 < step < 390 else [0, 1 + step % 6])  # row 7 is never touched
        form(history, optimizer, slab, rows, 5)
        torch.testing.assert_close(slab[rows, :5], parameter.detach()[rows], rtol=1e-11, atol=1e-11)
        grads = torch.randn(len(rows), 5, dtype=torch.float64)
        update(optimizer, slab, rows, grads, lr=lr, step=step)
        history.append(lr)
        parameter.grad = torch.zeros_like(parameter).index_put((rows,), grads)
        reference.param_groups[0]["lr"] = lr
        reference.step()
    form(history, optimizer, slab, torch.arange(8), 5)
    torch.testing.assert_close(slab[:, :5], parameter.detach(), rtol=1e-11, atol=1e-11)
    state = reference.state[parameter]
    torch.testing.assert_close(slab[:, 5:10], state["exp_avg"], rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(slab[:, 10:15], state["exp_avg_sq"], rtol=1e-11, atol=1e-14)


def test_replay_in_fp32_and_its_reference() -> None:
    optimizer = Adam(weight_decay=0.01, exact=True)
    ours = slab_of(optimizer, torch.randn(ROWS, WIDTH))
    history = StepHistory(optimizer)
    for step in range(1, 5):
        update(optimizer, ours, *batch(torch.float32), lr=0.1, step=step)
        history.append(0.1)
    for step in range(5, 700):
        history.append(0.1 / step)
    plain = ours.clone()
    catch_up(history, optimizer, ours, torch.arange(ROWS), WIDTH)
    plain_catch_up(history, optimizer, plain, torch.arange(ROWS), WIDTH)
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)
    again = ours.clone()
    catch_up(history, optimizer, again, torch.arange(ROWS), WIDTH)
    assert torch.equal(again, ours), "a row that stands at the last step stays"


def test_a_history_is_made_again_from_its_rates() -> None:
    optimizer = Adam(weight_decay=0.01, exact=True)
    history = StepHistory(optimizer)
    for step in range(200):
        history.append(1.0 / (1 + step))
    again = StepHistory(optimizer, history.lrs)
    assert len(again) == 200
    for ours, theirs in zip(
        (again.sizes, again.roots, again.keeps, again.kept),
        (history.sizes, history.roots, history.keeps, history.kept),
        strict=True,
    ):
        assert ours.tolist() == theirs.tolist()


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


def test_ftrl_after_a_rate_of_zero_goes_on_as_without_it() -> None:
    slab = slab_of(Ftrl(l1=0.1), torch.randn(ROWS, WIDTH))
    without = slab.clone()
    rows, grads = batch(torch.float32)
    update(Ftrl(l1=0.1), slab, rows, torch.randn_like(grads), lr=0.0, step=1)
    for each in (slab, without):
        update(Ftrl(l1=0.1), each, rows, grads, lr=0.1, step=2)
    assert torch.equal(slab, without)


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
