"""Tokens and targets outside a vocabulary on a device: NaN, not an assertion inside a kernel; on a CPU an error."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.kernels.cross_entropy import cross_entropy, row_gradient, row_numbers
from shardwise.parallel.tensor.layers import own_rows
from tests.accelerator.pretend import Bench, on_host, register
from tests.ranks import RankPool

VOCABULARY, WIDTH = 6, 3


def looked_up(tokens: Tensor, rows: slice) -> Tensor:
    return own_rows(
        tokens, torch.ones(rows.stop - rows.start, WIDTH, device=tokens.device), rows, VOCABULARY, None
    )


def losses(targets: Tensor) -> tuple[Tensor, ...]:
    """The loss and the gradient of whole logits, and the numbers and the gradient of their rows."""
    logits = torch.zeros(len(targets), VOCABULARY, device=targets.device).requires_grad_()
    loss = cross_entropy(logits, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    ones = torch.ones(len(targets), 1, device=targets.device)
    whole, columns = logits.detach(), targets[:, None]
    assert logits.grad is not None
    return (
        loss.detach(),
        logits.grad,
        row_numbers(whole, columns),
        row_gradient(whole, columns, ones[:, 0], ones, ones),
    )


def on_the_device(_: Any) -> list[list[Any]]:
    device = register()
    with Bench():
        tokens = torch.tensor([1, VOCABULARY, 4, -1], device=device)
        vectors = [looked_up(tokens, rows) for rows in (slice(0, 3), slice(3, 6))]
        return [on_host(each).tolist() for each in (*vectors, *losses(tokens))]


def is_nan(numbers: list[Any]) -> list[bool]:
    return torch.tensor(numbers).isnan().flatten(1).all(1).tolist()


def test_a_device_gives_nan(device_process: RankPool) -> None:
    [(first, second, loss, gradient, numbers, of_rows)] = device_process.run(on_the_device)
    outside = [False, True, False, True]
    assert is_nan(first) == is_nan(second) == outside, "on every rank"
    assert torch.tensor(loss).isnan()
    for rows in (gradient, of_rows):
        assert torch.tensor(rows).isnan().any(1).tolist() == outside
    assert torch.tensor(numbers)[2].isnan().tolist() == outside


@pytest.mark.parametrize("token", [VOCABULARY, -1])
def test_a_cpu_raises(token: int) -> None:
    tokens = torch.tensor([1, token])
    with pytest.raises(IndexError):
        looked_up(tokens, slice(0, 3))
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        losses(tokens)
