"""Head and loss a tile of tokens at a time against the two one after the other."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.base.errors import UsageError
from shardwise.kernels import head_loss as module
from shardwise.kernels.cross_entropy import plain_cross_entropy
from shardwise.kernels.head_loss import LossTile, head_loss
from tests.parallel.tensor.test_loss import LargestTensor

ROWS, WIDTH, VOCABULARY = 23, 5, 11


def given(dtype: torch.dtype = torch.float64, bias: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)][: 2 + bias]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def targets() -> Tensor:
    found = torch.arange(ROWS) % VOCABULARY
    found[4:9] = -100
    return found


def gradients(
    at_once: bool | None, inputs: list[Tensor], scale: float = 3.0, tokens: int = 4
) -> list[Tensor]:
    """The loss, and its gradients; ``at_once`` None: untiled, in fp64."""
    if at_once is None:
        inputs = [each.double() for each in inputs]
    x, *head = leaves = [each.clone().requires_grad_() for each in inputs]
    weight, bias = (*head, None)[:2]
    if at_once is None:
        loss = plain_cross_entropy(F.linear(x, weight, bias), targets())  # type: ignore[arg-type]
    else:
        loss = head_loss(x, weight, bias, targets(), tokens, at_once)  # type: ignore[arg-type]
    return [loss.detach(), *torch.autograd.grad(loss * scale, leaves)]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("at_once", [True, False], ids=["at_once", "in_backward"])
def test_equals_the_two(at_once: bool, bias: bool) -> None:
    expected = gradients(None, given(bias=bias))
    for tokens in (1, 4, 23, 100):
        for one, other in zip(gradients(at_once, given(bias=bias), tokens=tokens), expected, strict=True):
            assert (one - other).norm() <= 1e-13 * other.norm()


@pytest.mark.parametrize("at_once", [True, False], ids=["at_once", "in_backward"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_of_16_bits_are_kept_in_fp32(dtype: torch.dtype, at_once: bool) -> None:
    """A sum over 23 tiles that was rounded to 16 bits each time would be off by more than one rounding."""
    inputs = given(dtype)
    loss, d_x, d_weight, d_bias = gradients(at_once, inputs, tokens=1)
    expected = gradients(None, inputs)
    assert loss.dtype == torch.float32
    assert (d_x.dtype, d_weight.dtype, d_bias.dtype) == (dtype,) * 3
    for one, other in zip((d_x, d_weight, d_bias), expected[1:], strict=True):
        assert (one - other).norm() <= 1.5 * torch.finfo(dtype).eps * other.norm()


def test_fp16_waits_for_the_scale_of_the_loss() -> None:
    """Of so small a share of the mean nothing is left in fp16 unless the loss is scaled before it is rounded."""
    inputs = given(torch.float16)
    inputs[1] *= 0.01
    inputs[0] *= 1e-4
    expected = gradients(None, inputs, 2.0**12)
    _, _, d_weight, _ = gradients(True, inputs, 2.0**12)
    assert (d_weight - expected[2]).norm() <= 2e-3 * expected[2].norm()


def test_a_hook_sees_one_gradient_and_a_frozen_head_costs_none() -> None:
    x, weight, bias = (each.requires_grad_() for each in given())
    seen: list[int] = []
    held = nn.Parameter(weight.detach())
    held.register_post_accumulate_grad_hook(lambda p: seen.append(p.numel()))
    bias.requires_grad_(False)
    head_loss(x, held, bias, targets(), 4).backward()
    assert seen == [held.numel()] and bias.grad is None and x.grad is not None
    with LargestTensor() as largest:
        head_loss(x, weight.detach(), bias, targets(), 2).backward()
    assert largest.elements == ROWS * WIDTH, "nothing of the size of the weight was made"


def test_no_whole_logits_and_no_gradient_work_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = (each.requires_grad_() for each in given())
    with LargestTensor() as largest:
        head_loss(x, weight, None, targets(), 6).backward()
    assert largest.elements < ROWS * VOCABULARY
    monkeypatch.setattr(module, "row_gradient", None)
    with torch.no_grad():
        loss = head_loss(x, weight, None, targets(), 6)
    assert not loss.requires_grad


def test_a_second_backward_pass_needs_the_graph() -> None:
    x, weight, _ = (each.requires_grad_() for each in given())
    loss = head_loss(x, weight, None, targets(), 6)
    first = torch.autograd.grad(loss, [x, weight], retain_graph=True)
    second = torch.autograd.grad(2 * loss, [x, weight])
    assert all(torch.equal(2 * one, other) for one, other in zip(first, second, strict=True))
    with pytest.raises(UsageError, match="retain_graph"):
        loss.backward()


def test_no_target_at_all_is_a_loss_of_nothing() -> None:
    x, weight, _ = (each.requires_grad_() for each in given())
    loss = head_loss(x, weight, None, torch.full((ROWS,), -100), 6)
    loss.backward()
    assert loss.item() == 0 and not x.grad.any() and not weight.grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("target", [VOCABULARY, -1])
def test_a_target_outside_the_vocabulary_is_an_error(target: int) -> None:
    x, weight, _ = given()
    with pytest.raises((RuntimeError, IndexError), match="index"):
        head_loss(x, weight, None, torch.full((ROWS,), target), 6)


def test_what_fits_into_one_tile_has_none() -> None:
    def over(tokens: Any, rows: int, columns: int, dtype: torch.dtype = torch.float32, width: int = 2) -> int:
        return LossTile(tokens).of(rows, columns, torch.empty(0, width, dtype=dtype))

    assert over(8, 8, 100) == over(None, 2048, 8192) == 0
    assert over(8, 9, 100) == 8
    assert over(None, 2049, 8192) == 2048
    assert over(None, 8192, 8192, torch.bfloat16) == 4096
    assert [over(None, 4096, 1 << 16, width=width) for width in (8191, 8192)] == [256, 0]
    assert over(None, 8192, 1 << 20) == 128, "a product of few tokens reads the weight for nothing"


def test_a_tile_s_numbers_travel_while_the_next_one_is_made() -> None:
    """Begun for the next tile before they are waited for, and for no more than that one."""
    inputs, events = given(), list[str]()

    def combine(numbers: Tensor) -> Any:
        number = sum(each.startswith("begin") for each in events)
        events.append(f"begin {number}")

        def totals() -> Any:
            events.append(f"end {number}")
            return module._alone(numbers)()

        return totals

    x, weight, bias = [each.clone().requires_grad_() for each in inputs]
    counts = targets() != -100
    rows = module.TargetRows(targets().masked_fill(~counts, 0), counts, counts, counts.sum(), counts.sum())
    loss = module.summed_loss(x, weight, bias, rows, 8, True, combine)
    (3 * loss).backward()
    assert events == ["begin 0", "begin 1", "end 0", "begin 2", "end 1", "end 2"]
    for found, wanted in zip([x, weight, bias], gradients(None, inputs)[1:], strict=True):
        assert found.grad is not None and (found.grad - wanted).norm() <= 1e-13 * wanted.norm()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_change_of_logits_before_the_loss(at_once: bool) -> None:
    """A factor and a cap; their gradient is taken tile by tile."""

    def change(z: Tensor) -> Tensor:
        return torch.tanh(z * 0.7 / 2.0) * 2.0

    x, weight, bias = leaves = [each.clone().requires_grad_() for each in given()]
    expected = plain_cross_entropy(change(F.linear(x, weight, bias)), targets())
    (3 * expected).backward()
    wanted = [each.grad for each in leaves]
    x, weight, bias = leaves = [each.clone().requires_grad_() for each in given()]
    counts = targets() != -100
    rows = module.TargetRows(targets().masked_fill(~counts, 0), counts, counts, counts.sum(), counts.sum())
    loss = module.summed_loss(x, weight, bias, rows, 4, at_once, None, change)
    (3 * loss).backward()
    assert float((loss - expected).detach().abs()) <= 1e-14
    for leaf, grad in zip(leaves, wanted, strict=True):
        assert leaf.grad is not None and grad is not None and (leaf.grad - grad).norm() <= 1e-14 * grad.norm()
