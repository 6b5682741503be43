"""A small net with linear layers that compute in fp8, and the plain loop of torchao that engines are compared with."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tests.engine.nets import seeded
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

WIDTH, HIDDEN, TOKENS = 32, 64, 16
FP8 = {"linear": "fp8", "fp8_emulate": True}


class Block(nn.Module):
    """Two linear layers and a norm around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


class Net(nn.Module):
    """Blocks between two linear layers that stay as they are, because they lie in the root."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


LAYERS = tuple(f"blocks.{block}.{layer}" for block in range(3) for layer in ("up", "down"))


class Curve(NamedTuple):
    """Losses, and the weights behind the last step."""

    losses: list[float]
    weights: dict[str, Tensor]


def net(dtype: torch.dtype = torch.float32) -> Net:
    made: Net = seeded(Net, dtype=dtype)
    return made


def batch(step: int, part: int) -> Tensor:
    """The tokens of one microbatch; parts differ in size, so that their scales do too."""
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(TOKENS, WIDTH, generator=generator) * (1 + part)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def by_torchao(model: nn.Module, recipe: str = "tensorwise") -> nn.Module:
    """A copy of the model with the layers of the blocks converted by torchao."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    made = copy.deepcopy(model)
    return convert_to_float8_training(
        made, config=config, module_filter_fn=lambda module, name: name in LAYERS
    )


def plain(dtype: torch.dtype, recipe: str, steps: int, parts: int, writes: Sequence[int] = ()) -> Curve:
    """The plain loop: torchao's layers, one process, one backward pass for each microbatch.

    Before each step of ``writes`` a weight gets 4 times its size.
    """
    model = by_torchao(net(dtype), recipe)
    optimizer = optimizer_of(model.parameters())
    losses = []
    for step in range(steps):
        if step in writes:
            grow(model)
        total = 0.0
        for part in range(parts):
            loss = model(batch(step, part).to(dtype))
            (loss / parts).backward()
            total += float(loss.detach()) / parts
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return Curve(losses, {name: each.detach().clone() for name, each in model.named_parameters()})


@torch.no_grad()
def grow(model: nn.Module) -> None:
    """Make one weight larger, so that its scale changes."""
    dict(model.named_parameters())["blocks.1.up.weight"].mul_(4)
