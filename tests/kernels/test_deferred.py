"""Products that wait have the bits of those that autograd computes at once, in every form of a layer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.kernels.deferred import (
    ProductQueue,
    deferral_of,
    deferred_linear,
    is_plain_linear,
    is_transposed,
)
from shardwise.kernels.grouped import gated_experts, grouped_product


@contextmanager
def waiting(queue: ProductQueue, microbatch: int = 0) -> Iterator[None]:
    queue.open(microbatch)
    try:
        yield
    finally:
        queue.close()


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape).to(dtype))


def queue_of(*parameters: nn.Parameter) -> ProductQueue:
    queue = ProductQueue()
    queue.own(dict.fromkeys(parameters, 0))
    return queue


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_that_waits_has_the_bits_of_autograd(
    shape: tuple[int, ...], dtype: torch.dtype, has_bias: bool
) -> None:
    torch.manual_seed(0)
    weight, bias = parameter(5, 6, dtype=dtype), parameter(5, dtype=dtype) if has_bias else None
    x = torch.randn(*shape).to(dtype).requires_grad_()
    F.linear(x, weight, bias).square().sum().backward()
    wanted = [each.grad for each in (x, weight, bias) if each is not None]
    for each in (x, weight, bias):
        if each is not None:
            each.grad = None
    queue = queue_of(weight)
    y = deferred_linear(x, weight, bias, queue)
    with waiting(queue):
        y.square().sum().backward()
    assert weight.grad is None and queue.nbytes >= x.nbytes
    ((owner, gradient),) = queue.take(0, 0)
    assert owner is weight and queue.nbytes == 0
    found = [each for each in (x.grad, gradient, None if bias is None else bias.grad) if each is not None]
    for got, expected in zip(found, wanted, strict=True):
        assert torch.equal(got, expected)


def test_the_weight_of_a_transposed_layer() -> None:
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D(5, 6)
    x = torch.randn(2, 3, 6)
    conv(x).square().sum().backward()
    wanted, conv.weight.grad = conv.weight.grad, None
    queue = queue_of(conv.weight)
    y = deferred_linear(x, conv.weight, conv.bias, queue, is_transposed(conv))
    with waiting(queue):
        y.square().sum().backward()
    ((_, gradient),) = queue.take(0, 0)
    assert is_plain_linear(conv) and torch.equal(gradient, wanted)


def test_microbatches_keep_apart_and_uses_of_one_weight_add_up_in_order() -> None:
    weight = parameter(4, 4)
    queue, xs = queue_of(weight), [torch.randn(3, 4) for _ in range(2)]
    for microbatch, x in enumerate(xs):
        y = deferred_linear(deferred_linear(x, weight, None, queue), weight, None, queue)
        with waiting(queue, microbatch):
            y.square().sum().backward()
    assert queue.left(0) == queue.left(1) == [0]
    for microbatch, x in enumerate(xs):
        ((_, gradient),) = queue.take(microbatch, 0)
        F.linear(F.linear(x, weight), weight).square().sum().backward()
        assert weight.grad is not None and torch.equal(gradient, weight.grad)
        weight.grad = None
    assert not queue.left(0) and not list(queue.take(0, 0))


def test_nothing_waits_outside_of_i_nor_for_weights_with_hooks() -> None:
    weight, x = parameter(4, 4), torch.randn(3, 4)
    queue = queue_of(weight)
    deferred_linear(x, weight, None, queue).sum().backward()
    assert weight.grad is not None, "no I runs"
    assert deferral_of(queue, weight, x) is not None
    assert deferral_of(queue, weight.detach(), x) is None, "a tile's own copy of the weight"
    assert deferral_of(queue, parameter(4, 4), x) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert deferral_of(queue, weight, x) is None
    seen: list[Tensor] = []
    handle = weight.register_hook(seen.append)
    with waiting(queue):
        deferred_linear(x, weight, None, queue).sum().backward()
    assert len(seen) == 1 and not queue.left(0), "a hook of the user's sees its gradient in I"
    handle.remove()
    assert deferral_of(queue, weight, x) is not None


def test_a_loss_on_gradients_is_differentiated_again() -> None:
    torch.manual_seed(0)
    weight, x = parameter(4, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64).requires_grad_()
    queue = queue_of(weight)

    def penalty(linear: Callable[[Tensor], Tensor]) -> Tensor:
        (grad,) = torch.autograd.grad(linear(x).square().sum(), x, create_graph=True)
        return grad.square().sum()

    (wanted,) = torch.autograd.grad(penalty(lambda x: F.linear(x, weight)), weight)
    loss = penalty(lambda x: deferred_linear(x, weight, None, queue))
    with waiting(queue):
        loss.backward()
    found = [gradient for _, gradient in queue.take(0, 0)]
    found += [] if weight.grad is None else [weight.grad]
    torch.testing.assert_close(sum(found[1:], found[0]), wanted)


@pytest.mark.parametrize("counts", [(3, 4), (0, 7), (2, 5)])
@pytest.mark.parametrize("width", [6, 1 << 15])
def test_products_of_experts_wait(counts: tuple[int, ...], width: int) -> None:
    torch.manual_seed(0)
    gate_up, down = parameter(2, width, 4), parameter(2, 4, width // 2)
    queue = queue_of(gate_up, down)
    rows = torch.randn(sum(counts), 4).requires_grad_()
    gated_experts(rows, gate_up, down, counts).square().sum().backward()
    wanted = [each.grad for each in (rows, gate_up, down)]
    rows.grad = gate_up.grad = down.grad = None
    y = gated_experts(rows, gate_up, down, counts, queue)
    with waiting(queue):
        y.square().sum().backward()
    assert gate_up.grad is None and down.grad is None
    gradients = {id(owner): gradient for owner, gradient in queue.take(0, 0)}
    for got, expected in zip((rows.grad, gradients[id(gate_up)], gradients[id(down)]), wanted, strict=True):
        assert got is not None and torch.equal(got, expected)


def test_a_grouped_product_waits() -> None:
    weights, rows = parameter(3, 5, 4), torch.randn(7, 4).requires_grad_()
    queue, counts = queue_of(weights), (3, 0, 4)
    grouped_product(rows, weights, counts).square().sum().backward()
    wanted, weights.grad = weights.grad, None
    y = grouped_product(rows, weights, counts, deferral_of(queue, weights, rows))
    with waiting(queue):
        y.square().sum().backward()
    ((_, gradient),) = queue.take(0, 0)
    assert torch.equal(gradient, wanted)
