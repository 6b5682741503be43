"""Tokens and targets outside a vocabulary on a device: NaN, not an assertion inside a kernel; on a CPU an error."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.kernels.cross_entropy import IGNORE, cross_entropy, log_probs, row_gradient, row_numbers
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


def log_probs_and_gradient(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of targets, and the gradient of the logits."""
    logits = torch.zeros(len(targets), VOCABULARY, device=targets.device).requires_grad_()
    found = log_probs(logits, targets)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    return found.detach(), logits.grad


def log_probs_on_the_device(_: Any) -> list[list[Any]]:
    device = register()
    with Bench():
        targets = torch.tensor([1, VOCABULARY, IGNORE, -1], device=device)
        return [on_host(each).tolist() for each in log_probs_and_gradient(targets)]


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


def test_log_probabilities_on_a_device_are_nan(device_process: RankPool) -> None:
    [(found, gradient)] = device_process.run(log_probs_on_the_device)
    expected, of_logits = log_probs_and_gradient(torch.tensor([1, IGNORE, IGNORE, IGNORE]))
    assert torch.tensor(found).isnan().tolist() == [False, True, False, True]
    assert torch.tensor(gradient).isnan().all(1).tolist() == [False, True, False, True]
    assert found[0] == expected[0] and found[2] == 0, "a target that does not count is 0, as on a CPU"
    assert torch.equal(torch.tensor(gradient)[[0, 2]], of_logits[[0, 2]])


@pytest.mark.parametrize("token", [VOCABULARY, -1])
def test_a_cpu_raises(token: int) -> None:
    tokens = torch.tensor([1, token])
    with pytest.raises(IndexError):
        looked_up(tokens, slice(0, 3))
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        losses(tokens)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        log_probs_and_gradient(tokens)
