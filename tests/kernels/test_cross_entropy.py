"""Cross entropy a few rows at a time against the formula, in values and in gradients."""

import pytest
import torch
from torch import Tensor

from shardwise.kernels import cross_entropy as module
from shardwise.kernels.cross_entropy import cross_entropy, plain_cross_entropy


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(0, 11, (3, 7))
    targets[0, 2:5] = -100
    return (4 * torch.randn(3, 7, 11)).to(dtype).requires_grad_(), targets


def gradient(function, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    loss = function(logits, targets)
    return loss.detach(), torch.autograd.grad(3 * loss, logits)[0]


@pytest.mark.parametrize("rows", [1, 4, 1000])
def test_equals_the_formula(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setitem(module._CHUNK_ELEMENTS, "cpu", rows * 11)
    logits, targets = batch()
    (loss, grad), (expected, expected_grad) = (
        gradient(f, logits, targets) for f in (cross_entropy, plain_cross_entropy)
    )
    assert torch.allclose(loss, expected, rtol=1e-14)
    assert torch.allclose(grad, expected_grad, rtol=1e-13, atol=1e-16)
    assert not grad[0, 2:5].any()


def test_is_torch_s_mean() -> None:
    logits, targets = batch(torch.float32)
    expected = torch.nn.functional.cross_entropy(logits.view(-1, 11), targets.view(-1))
    assert torch.allclose(cross_entropy(logits, targets), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_logits_lose_nothing_but_their_own_rounding(dtype: torch.dtype) -> None:
    logits, targets = batch(dtype)
    loss, grad = gradient(cross_entropy, logits, targets)
    expected, expected_grad = gradient(
        plain_cross_entropy, logits.detach().double().requires_grad_(), targets
    )
    assert loss.dtype == torch.float32
    assert grad.dtype == dtype
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (grad - expected_grad).norm() / expected_grad.norm() < torch.finfo(dtype).eps / 2


def test_nothing_is_saved_but_the_logits() -> None:
    logits, targets = batch()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        cross_entropy(logits, targets)
    assert max(x.numel() for x in saved) == logits.numel()
    assert sum(x.numel() == logits.numel() for x in saved) == 1


def test_no_target_at_all_is_a_loss_of_nothing() -> None:
    """A mean over no target would be 0/0, and one rank's NaN would spread to all."""
    logits, targets = batch()
    loss, grad = gradient(cross_entropy, logits, torch.full_like(targets, -100))
    assert loss.item() == 0
    assert not grad.any()


def test_a_logit_of_minus_infinity_where_there_is_no_target() -> None:
    logits, targets = batch()
    logits = logits.detach()
    logits[..., 0] = float("-inf")
    targets[targets == 0] = 1
    assert torch.allclose(cross_entropy(logits, targets), plain_cross_entropy(logits, targets))


@pytest.mark.parametrize("target", [11, -1])
def test_a_target_outside_the_vocabulary_is_an_error(target: int) -> None:
    logits, targets = batch()
    with pytest.raises((RuntimeError, IndexError), match="index"):
        cross_entropy(logits, torch.full_like(targets, target))
