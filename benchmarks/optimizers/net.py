"""The model of the measurement, in plain torch, and its batches."""

import torch
from torch import Tensor, nn

WORDS, WIDTH, LAYERS = 512, 256, 8
ROWS, LENGTH = 2, 32


class Block(nn.Module):
    """A norm, two matrices, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Predicts the next token of every place by itself; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def made() -> Net:
    """The same on every rank."""
    torch.manual_seed(0)
    return Net()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets."""
    draws = torch.Generator().manual_seed(2 * step + rank)
    tokens = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=draws)
    return tokens[:, :-1], tokens[:, 1:]
