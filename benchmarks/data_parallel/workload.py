"""The one training problem that every contender is given: the same GPT, start weights and tokens.

The model is Shardwise's own ``Gpt``, an ordinary ``nn.Module`` that the peers wrap as they would any other.
Its start weights are drawn from (seed, parameter name), so no contender has to send them and all begin at
the same bits. The tokens follow a noisy affine walk over the vocabulary,

    x[t + 1] = (a * x[t] + c) mod V   with probability 0.9,   uniform otherwise,

which a model can learn: a contender that trains wrongly shows in the final loss.

Shapes: B micro batch per rank, T context, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.models.gpt import Gpt, GptPolicy


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained. The defaults are the published benchmark; a test passes something tiny."""

    layers: int = 8
    width: int = 512
    heads: int = 8
    hidden: int = 1376
    vocabulary: int = 8192
    context: int = 256
    micro_batch: int = 4
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    seed: int = 0

    @classmethod
    def tiny(cls) -> Workload:
        """Small enough that start-up dominates: for checking that every contender runs."""
        return cls(layers=2, width=64, heads=2, hidden=160, vocabulary=256, context=32, micro_batch=2)

    @property
    def adamw(self) -> dict[str, Any]:
        """Arguments of AdamW, the same for all."""
        return {
            "lr": self.learning_rate,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "weight_decay": self.weight_decay,
        }


def policy(workload: Workload) -> GptPolicy:
    """The model's shape."""
    return GptPolicy(
        layers=workload.layers,
        width=workload.width,
        heads=workload.heads,
        hidden=workload.hidden,
        context=workload.context,
        vocab=workload.vocabulary,
        tied_head=False,
    )


def build_model(workload: Workload) -> nn.Module:
    """The model with its start weights in fp32."""
    return Gpt(policy(workload), seed=workload.seed)


def batch(workload: Workload, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, both [B, T], of one rank and step. They depend on nothing else."""
    shape = (workload.micro_batch, workload.context + 1)
    generator = torch.Generator().manual_seed(1_000_003 * (step + 1) + rank)
    noise = torch.randint(workload.vocabulary, shape, generator=generator)
    follow = torch.rand(shape, generator=generator) < 0.9
    walk = [noise[:, 0]]
    for t in range(1, shape[1]):
        walk.append(torch.where(follow[:, t], (5 * walk[-1] + 7) % workload.vocabulary, noise[:, t]))
    tokens = torch.stack(walk, dim=1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
