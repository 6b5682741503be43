"""The gate of SwiGLU: the plain form by its formula, and the operations behind the fused form."""

import torch

from shardwise.kernels import gated as module
from shardwise.kernels.gated import gated, plain_gated


def test_it_is_the_formula() -> None:
    gate, up = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    y = gated(torch.cat([gate, up], -1))
    assert torch.allclose(y, gate * torch.sigmoid(gate) * up, atol=1e-14)
    assert torch.equal(y, plain_gated(torch.cat([gate, up], -1)))


def test_the_gradient_of_the_single_operation_is_that_of_the_formula() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    y = module._Gated.apply(x)
    pull = torch.randn_like(y)
    assert torch.equal(y, plain_gated(x))
    (found,), (expected,) = (torch.autograd.grad(each, x, pull) for each in (y, plain_gated(x)))
    assert torch.allclose(found, expected, rtol=1e-12)


def test_shapes_are_known_without_numbers() -> None:
    x = torch.empty(2, 6, device="meta")
    assert module.gate(x).shape == (2, 3) and module.gate_gradient(module.gate(x), x).shape == (2, 6)


def test_a_tensor_that_overrides_functions_sees_one_operation() -> None:
    seen: list[object] = []

    class Noted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(function)
            return "noted"

    assert gated(torch.zeros(4).as_subclass(Noted)) == "noted" and seen == [gated]
