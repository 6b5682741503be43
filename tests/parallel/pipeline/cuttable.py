"""Models that stages are cut out of."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.models.gpt import Gpt, GptPolicy

TOKENS = torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(0))


def gpt(**keys: Any) -> nn.Module:
    shape = {"layers": 4, "width": 8, "heads": 2, "context": 8, "vocab": 11, "hidden": 8}
    return Gpt(GptPolicy(**shape, **keys)).double()


def loss(model: nn.Module) -> Tensor:
    return model(TOKENS, TOKENS)


class Images(nn.Module):
    """Blocks are attributes of the root, with an activation that writes in place between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
        self.layer2 = nn.Conv2d(4, 6, 3, stride=2)
        self.layer3 = nn.Conv2d(6, 6, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(6, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stem(images)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.head(self.pool(x).flatten(1)).logsumexp(1).mean()


class Patches(nn.Module):
    """Parameters of the root itself, a convolution in front, and a buffer that every block is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1, 1, 6))
        self.places = nn.Parameter(torch.randn(1, 5, 6))
        self.embed = nn.Conv2d(3, 6, 2, 2)
        self.register_buffer("scale", torch.full((6,), 1.5))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return self.norm(x).square().mean()


def on_images(shape: tuple[int, ...]) -> Callable[[nn.Module], Tensor]:
    images = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return lambda model: model(images)
