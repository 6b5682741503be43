"""What one_script.py trains, and its configuration: a small transformer on sequences of tokens. Plain torch."""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Sentences(Dataset):
    """Token sequences with structure: each token follows from the two before, but for noise."""

    def __init__(self, count: int, length: int, words: int):
        draws = torch.Generator().manual_seed(7)
        tokens = torch.randint(words, (count, length + 1), generator=draws)
        noise = torch.rand(count, length + 1, generator=draws)
        for place in range(2, length + 1):
            follows = (3 * tokens[:, place - 1] + tokens[:, place - 2]) % words
            tokens[:, place] = torch.where(noise[:, place] < 0.9, follows, tokens[:, place])
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> tuple[int, Tensor, Tensor]:
        return place, self.tokens[place, :-1], self.tokens[place, 1:]


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            each.view(batch, length, self.heads, -1).transpose(1, 2)
            for each in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class Net(nn.Module):
    """A small language model."""

    def __init__(self, words: int, length: int, width: int, layers: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // 32) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def configuration(args: argparse.Namespace) -> dict:
    """As a ds_config.json."""
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "steps_per_print": 1000,
        "zero_optimization": {"stage": args.stage},
        "bf16": {"enabled": args.bf16},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 1e-3,
                "betas": [0.9, 0.95],
                "eps": 1e-8,
                "weight_decay": 0.01,
                "torch_adam": True,
            },
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 10, "total_num_steps": 100},
        },
    }
