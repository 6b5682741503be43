"""BERT: an encoder that reads a text in both directions and learns to restore tokens that were masked.

    x = norm(embed(token) + position)
    x = norm(x + attention(x)),  x = norm(x + mlp(x))         in each block
    logits = embedᵀ · norm(gelu(W x)) + bias                  loss over the masked tokens (data/masked.py)

There is one segment and no prediction of the next sentence, which RoBERTa left out without loss (arXiv:1907.11692).
As in the GPT of this package, the model contains no code for ranks, and initial weights follow from (seed, name).

Paper:  Devlin et al. 2018, arXiv:1810.04805.
Shapes: B batch, T sequence, D width, V vocabulary with the token that masks.
"""

from collections.abc import Callable
from typing import Annotated, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from shardwise.base.errors import ConfigError, UsageError
from shardwise.base.policy import Policy
from shardwise.kernels.initializers import Constant, Initializer, Normal
from shardwise.models.gpt import Size
from shardwise.models.initial import draw_all
from shardwise.models.layers import Attention, GeluMlp, Head

_STD = 0.02
_EPS = 1e-12


class BertPolicy(Policy):
    """The shape of a :class:`Bert`; the defaults are the paper's base model."""

    name: Literal["bert"] = "bert"
    """The name of the built-in model."""
    layers: Annotated[int, Field(ge=1, le=10_000)] = 12
    """Transformer blocks."""
    width: Size = 768
    """Features of a token between the blocks; four times as many inside the feed-forward part."""
    heads: Size = 12
    """Attention heads."""
    context: Size = 512
    """Tokens in the longest sequence."""
    vocab: Size | None = None
    """Tokens in the vocabulary, with the mask token; left out: the tokenizer's tokens and the mask token."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """The share of features zeroed in training after the embedding and after each half of a block."""
    masked: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """The share of tokens to be restored: 80 % of them are masked, 10 % replaced by a random token, and 10 %
    unchanged."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not divide by heads {self.heads}")
        return self

    def resolved(self, vocab: int) -> Self:
        """Return the policy with the vocabulary of a tokenizer of ``vocab`` tokens, and the mask token.

        Raises:
            ConfigError: if the policy's own vocabulary is too small.
        """
        if self.vocab is not None and self.vocab <= vocab:
            raise ConfigError(
                f"model.vocab is {self.vocab} but the tokenizer makes {vocab} different tokens, and one more masks; "
                f"leave model.vocab out or set at least {vocab + 1}"
            )
        return self.model_copy(update={"vocab": self.vocab or vocab + 1})


class BertBlock(nn.Module):
    """A block of the encoder: norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, p: BertPolicy) -> None:
        super().__init__()
        size = p.width // p.heads
        self.attention = Attention(
            p.width, p.heads, p.heads, size, True, p.dropout, F.scaled_dot_product_attention
        )
        self.attention_norm = nn.LayerNorm(p.width, _EPS)
        self.mlp = GeluMlp(p.width, 4 * p.width, p.dropout)
        self.mlp_norm = nn.LayerNorm(p.width, _EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for ``x`` [B, T, D], of the same shape."""
        x = self.attention_norm(x + self.attention(x))
        out: Tensor = self.mlp_norm(x + self.mlp(x))
        return out


class Bert(nn.Module):
    """A BERT encoder with its output layer; the initial weights follow from ``seed``, except on the meta device."""

    def __init__(self, policy: BertPolicy, seed: int = 0) -> None:
        super().__init__()
        p = self.policy = policy
        if p.vocab is None:
            raise ConfigError(
                "model.vocab is not set and there is no tokenizer to take it from; set model.vocab"
            )
        self.embed = nn.Embedding(p.vocab, p.width)
        self.positions = nn.Embedding(p.context, p.width)
        self.embed_norm = nn.LayerNorm(p.width, _EPS)
        self.dropout = nn.Dropout(p.dropout)
        self.blocks = nn.ModuleList(BertBlock(p) for _ in range(p.layers))
        self.transform = nn.Linear(p.width, p.width)
        self.norm = nn.LayerNorm(p.width, _EPS)
        self.head = Head(p.width, p.vocab)
        self.head.weight = self.embed.weight
        if not self.embed.weight.is_meta:
            draw_all(self, self.initial_rules(), seed)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits of ``tokens``, or the mean loss if ``targets`` are given.

        Args:
            tokens: [B, T].
            targets: [B, T]; labels of -100 do not count.

        Returns:
            Logits [B, T, V], or the loss [] in fp32.

        Raises:
            UsageError: if there are more tokens than the context has.
        """
        if tokens.shape[1] > self.policy.context:
            raise UsageError(
                f"the model was given {tokens.shape[1]} tokens but its context is {self.policy.context}; give shorter "
                "sequences or set model.context"
            )
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embed_norm(self.embed(tokens) + self.positions(places)))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(F.gelu(self.transform(x))), targets)
        return out

    def initial_rules(self) -> dict[str, Initializer]:
        """Return the paper's initial rules: matrices normal with standard deviation 0.02, norms 1, biases 0."""
        return {
            name: Normal(_STD)
            if parameter.dim() > 1
            else Constant(1.0 if name.endswith("norm.weight") else 0.0)
            for name, parameter in self.named_parameters()
        }

    def unit_patterns(self) -> list[str]:
        """Return patterns of the modules whose parameters move together: the blocks.

        The embedding is read first and last, so it stays with the root.
        """
        return ["blocks.*"]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Moving a module off the meta device makes new parameters one module at a time, which unties them.
        super()._apply(fn, recurse)
        self.head.weight = self.embed.weight
        return self
