"""Small layers of the tests, and what they are compared by."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.parallel.expert.module import MixtureOfExperts
from shardwise.parallel.expert.policy import RouterPolicy

WIDTH, HIDDEN, EXPERTS = 5, 3, 4


def made(
    seed: int = 0, experts: int = EXPERTS, shared: int = 0, residual: bool = False, **router: Any
) -> MixtureOfExperts:
    torch.manual_seed(seed)
    policy = RouterPolicy(**router)
    layer = MixtureOfExperts(WIDTH, HIDDEN, experts, router=policy, shared=shared, residual=residual).double()
    # So that no two scores are near, nor all weights alike.
    nn.init.normal_(layer.router.weight)
    return layer


def batch(b: int = 2, t: int = 6, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(b, t, WIDTH, generator=generator, dtype=torch.float64)


def gradients(loss: Tensor, layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*layer.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, [x, *parameters])
    return dict(zip(("x", *names), found, strict=True))


def close(a: Tensor, b: Tensor) -> bool:
    a, b = a.detach(), b.detach()
    return bool((a - b).norm() <= 1e-12 * max(float(b.norm()), 1.0))
