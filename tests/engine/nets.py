"""Tiny models of the engine's tests."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 11
WIDTH = 6
PREFETCH_BYTES = (0, 1, 5000)
"""For gathers ahead of their use: none, one Unit at a time, several at once."""
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": None,
}
"""Arguments of a small LlamaConfig and its like in transformers; the vocabulary is each test's own."""


class Block(nn.Module):
    """Two linears and a norm around a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width + 1)
        self.down = nn.Linear(width + 1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


class Language(nn.Module):
    """An embedding tied to the head, blocks, and a mean loss over targets that are not -100."""

    def __init__(self, blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def cache_name(model: nn.Module) -> str:
    """Return the name under which a model of transformers takes and returns its cache, which 5.24 has changed."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def seeded(make: Any, *args: Any, seed: int = 0, dtype: torch.dtype = torch.float64, **kwargs: Any) -> Any:
    """The same model on every rank and in the plain loop."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make(*args, **kwargs).to(dtype)
