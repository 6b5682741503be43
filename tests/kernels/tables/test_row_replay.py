"""Steps of Adam that a row missed, replayed when it is touched again: those of the dense table."""

import math

import pytest
import torch
from torch import Tensor

from shardwise.kernels.tables import row_replay
from shardwise.kernels.tables.row_optimizers import plain_update, update
from shardwise.kernels.tables.row_replay import StepHistory, catch_up
from shardwise.kernels.tables.row_rules import (
    Adam,
)
from tests.kernels.tables.cases import ROWS, WIDTH, batch, slab_of


def plain_catch_up(
    history: StepHistory, optimizer: Adam, slab: Tensor, rows: Tensor, width: int, **options: bool
) -> None:
    """In torch operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_replay, "runs_compiled", lambda *tensors: False)
        catch_up(history, optimizer, slab, rows, width, **options)  # type: ignore[arg-type]


def told_catch_up(
    history: StepHistory, optimizer: Adam, slab: Tensor, rows: Tensor, width: int, **options: bool
) -> None:
    """As on a device: in torch operations, by what the host knows of where rows stand."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_replay, "runs_compiled", lambda *tensors: False)
        catch_up(history, optimizer, slab, rows, width, slab[rows, -1].int(), **options)


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
        form(history, optimizer, slab, rows, 5, for_update=True)
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


def moved_rows(optimizer: Adam, dtype: torch.dtype = torch.float32) -> tuple[Tensor, StepHistory]:
    """A slab after four steps in which some rows had gradients, and their history."""
    slab, history = slab_of(optimizer, torch.randn(ROWS, WIDTH, dtype=dtype)), StepHistory(optimizer)
    for step in range(1, 5):
        rows, grads = batch(dtype)
        catch_up(history, optimizer, slab, rows, WIDTH, for_update=True)
        update(optimizer, slab, rows, grads, lr=0.1, step=step)
        history.append(0.1)
    return slab, history


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_missed_step_is_a_step_with_a_gradient_of_zero(dtype: torch.dtype, weight_decay: float) -> None:
    optimizer, rows = Adam(weight_decay=weight_decay, exact=True), torch.arange(ROWS)
    ours, history = moved_rows(optimizer, dtype)
    catch_up(history, optimizer, ours, rows, WIDTH)
    dense = ours.clone()
    for step in range(5, 700):
        history.append(0.1 / step)
        plain_update(optimizer, dense, rows, torch.zeros(ROWS, WIDTH, dtype=dtype), lr=0.1 / step, step=step)
    plain = ours.clone()
    catch_up(history, optimizer, ours, rows, WIDTH)
    plain_catch_up(history, optimizer, plain, rows, WIDTH)
    assert torch.equal(ours, plain), "the loop and the operations have the same bits"
    assert torch.equal(ours[:, :WIDTH], dense[:, :WIDTH]), "to the bit"
    assert (ours[:, WIDTH : 2 * WIDTH] == 0).all(), "the first moments are over"
    if weight_decay:
        assert torch.equal(ours[:, 2 * WIDTH : 3 * WIDTH], dense[:, 2 * WIDTH : 3 * WIDTH])
        assert (ours[:, -1] == 699).all(), "no row rests"
    else:
        assert (ours[:, -1] < 5 + (optimizer.horizon or 0)).all(), "all rows rest within the horizon"


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("form", [catch_up, plain_catch_up, told_catch_up])
def test_bits_do_not_depend_on_when_rows_are_read(form, weight_decay: float) -> None:  # type: ignore[no-untyped-def]
    """Rows that are read in every step, in some steps, and only before they are updated."""
    optimizer, draws = Adam(weight_decay=weight_decay, exact=True), torch.Generator().manual_seed(3)
    seldom, history = moved_rows(optimizer)
    always, sometimes = seldom.clone(), seldom.clone()
    for step in range(5, 600):
        form(history, optimizer, always, torch.arange(ROWS), WIDTH)
        form(history, optimizer, sometimes, torch.randperm(ROWS, generator=draws)[:7], WIDTH)
        rows = torch.randperm(20, generator=draws)[: 3 * (step % 100 < 3)]  # the others never again
        rows = rows if step < 110 or step > 540 else rows[:0]  # longer than the horizon
        grads = torch.randn(len(rows), WIDTH, generator=draws)
        for slab in (seldom, always, sometimes):
            form(history, optimizer, slab, rows, WIDTH, for_update=True)
            update(optimizer, slab, rows, grads, lr=0.1 / step, step=step)
        history.append(0.1 / step)
    for slab in (seldom, always, sometimes):
        form(history, optimizer, slab, torch.arange(ROWS), WIDTH)
    assert torch.equal(always, seldom) and torch.equal(sometimes, seldom)


def test_steps_that_come_later_are_not_in_a_frozen_history() -> None:
    history = StepHistory(Adam(exact=True), [0.1] * 63)
    frozen = history.frozen()
    for _ in range(100):  # more than there was room for
        history.append(0.2)
    assert frozen.lrs == [0.1] * 63 and len(history) == 163
    assert len(frozen.sizes) == len(frozen.roots) == 64


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
