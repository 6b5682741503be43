"""A model with a norm and a router of its own classes."""

import torch
from torch import Tensor, nn


class OwnNorm(nn.LayerNorm):
    """Derived from one of torch's."""


class Router(nn.Module):
    """Holds a buffer that 16 bits would spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("bias", torch.arange(4) / 100)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("other", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) * self.other.to(x.dtype)
        return result + self.bias.to(x.dtype)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), OwnNorm(4), Router(), nn.BatchNorm1d(4))
