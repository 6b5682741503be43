"""Small models of both manners, for all tests of this folder."""

import torch
from torch import Tensor

from shardwise.models.gpt import Gpt, GptPolicy

LLAMA = GptPolicy(layers=2, width=24, heads=4, kv_heads=2, head_size=8, context=16, vocab=50, hidden=40)
GPT2 = GptPolicy(family="gpt2", layers=2, width=24, heads=3, context=16, vocab=50)
BOTH = [LLAMA, GPT2]
NAMES = ["llama", "gpt2"]


def tokens(batch: int = 2, length: int = 12, vocab: int = 50) -> Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(0))


def restless(policy: GptPolicy, dtype: torch.dtype = torch.float32) -> Gpt:
    """A model whose norms and biases are not at 1 and 0, where a wrong mapping would not show."""
    model = Gpt(policy)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype)
