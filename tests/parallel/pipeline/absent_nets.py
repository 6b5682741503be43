"""Nets that use what another stage holds."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 6


TOKENS = torch.randint(0, 11, (2, 4), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.aux: Any = 0.0
        self.kept: Any = None

    def forward(self, x: Tensor, sink: list[Tensor] | None = None) -> Tensor:
        y = torch.tanh(self.inner(x))
        self.aux = y.square().mean()
        if sink is not None:
            sink.append(y)
        return x + y


class Net(nn.Module):
    """``use`` is given the net, the embedding and the blocks' result, and says what becomes of the result."""

    def __init__(self, use: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("moving", torch.zeros(WIDTH))
        self.use = use

    def begin(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)

    def walk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def end(self, x: Tensor) -> Tensor:
        return self.norm(x).square().mean() + (self.norm(x)[..., 0] - x[..., 1]).abs().mean()

    def forward(self, tokens: Tensor) -> Any:
        first = self.begin(tokens)
        x = self.walk(first)
        if self.use is not None:
            x = self.use(self, first, x)
        return self.end(x)
