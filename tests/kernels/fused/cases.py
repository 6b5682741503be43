"""What the tests of Triton's forms share."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.kernels import choice

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=3)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXAMPLES = int(os.environ.get("EXAMPLES", 5 if INTERPRETED else 40))
"""Of a property. The interpreter takes a thousand times what a device takes; it runs 40 in the soak."""
DRAWN = settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Relative errors of a whole tensor: fp32 throughout, and one rounding at the end."""


def given_and_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The result, then the gradients of the inputs, pulled by the same numbers in every dtype."""
    held = [x.detach().requires_grad_() for x in inputs]
    out = function(*held)
    pull = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).view(out.shape)
    pull = pull.bfloat16()  # which every dtype holds
    return [out.detach(), *torch.autograd.grad(out, held, pull.to(out.dtype))]


def away(found: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    """Relative distance, in the norm; where addends cancel, in terms of ``least``."""
    difference, size = (found.double() - expected.double()).norm(), expected.double().norm()
    return float(difference / size.clamp(min=least))


@contextmanager
def plain() -> Iterator[None]:
    """The plain forms inside."""
    served, choice.DEVICES = choice.DEVICES, frozenset()
    try:
        yield
    finally:
        choice.DEVICES = served


def compare(
    fused: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    bound: float,
    least: float = 1,
) -> None:
    """Values and gradients, against the reference in fp64 on the same rounded inputs; ``least``: of terms that may
    cancel each other."""
    found = given_and_gradients(fused, inputs)
    expected = given_and_gradients(reference, [x.detach().double() for x in inputs])
    for a, b, x in zip(found, expected, [inputs[0], *inputs], strict=True):
        assert a.dtype == x.dtype
        assert away(a, b, least=least) < bound
