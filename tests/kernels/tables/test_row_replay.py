"""Steps of Adam that a row missed, replayed when it is touched again: those of the dense table."""

import math

import pytest
import torch
from torch import Tensor

from shardwise.kernels.tables import row_replay
from shardwise.kernels.tables.row_optimizers import update
from shardwise.kernels.tables.row_replay import StepHistory, catch_up, plain_catch_up
from shardwise.kernels.tables.row_rules import (
    Adam,
)
from tests.kernels.tables.cases import ROWS, WIDTH, batch, slab_of


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
