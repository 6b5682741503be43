"""A decoder-only language model, in the family of LLaMA or of GPT-2.

    family   norm        positions           feed-forward         biases   head
    llama    RMSNorm     rotary              SwiGLU, F = 8/3·D    no       its own (``tied_head: false``)
    gpt2     LayerNorm   learned, added      GELU,   F = 4·D      yes      the embedding's weights

With ``experts`` the feed-forward part of some blocks is a mixture of experts (parallel/expert/module.py).

The model contains no code for ranks: the engine cuts it by its Units, and the attention function is an argument. The
model can be built on the meta device, where it has neither weights nor buffers: rotary angles are a function of the
position, and initial weights follow from (seed, name) by ``initial_rules``.

Papers: Touvron et al. 2023, arXiv:2302.13971; Radford et al. 2019 (GPT-2).
Cost:   ``flops_per_token``.
Shapes: B batch, T sequence, D width, H heads, N key and value heads, K head size, F hidden, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from shardwise.base.errors import ConfigError, PlanError, UsageError
from shardwise.base.policy import Policy
from shardwise.kernels.attention import causal_attention
from shardwise.kernels.attention_view import packed_documents
from shardwise.kernels.cross_entropy import IGNORE
from shardwise.kernels.initializers import Constant, Initializer, Normal
from shardwise.kernels.rotary import FrequencyScaling, RotaryAngles, angles_at
from shardwise.models.cache import KeyValueCache
from shardwise.models.initial import draw_all
from shardwise.models.layers import (
    Attention,
    AttentionFunction,
    ExpertMlp,
    GeluMlp,
    Head,
    RmsNorm,
    SwiGlu,
    TransformerBlock,
)
from shardwise.observe.flops import needed_per_token
from shardwise.parallel.expert.policy import RouterPolicy

_STD = 0.02
"""The standard deviation of GPT-2's initial weights."""

_HIDDEN_MULTIPLE = 64
"""The number to whose multiple the default SwiGLU hidden width is rounded up, because matrix units prefer multiples."""


Size = Annotated[int, Field(ge=1, le=2**31)]
"""A number of features, heads or tokens; a larger number is a typing error or from an untrusted file."""


class RopeScaling(Policy):
    """LLaMA 3.1's slower rotary angles, for a context longer than that of the first training."""

    factor: Annotated[float, Field(ge=1)]
    """The factor by which the slowest angles are slowed down."""
    low_freq_factor: float = 1.0
    """The number of turns over ``original_context`` below which angles are slowed down by ``factor``."""
    high_freq_factor: float = 4.0
    """The number of turns over ``original_context`` above which angles stay as they are."""
    original_context: PositiveInt = 8192
    """Tokens of context in the first training."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError("low_freq_factor must be below high_freq_factor")
        return self


class GptExperts(Policy):
    """Keys under ``model.experts``: the experts, and the blocks that have experts as their feed-forward part."""

    count: Size
    """Experts of a block."""
    hidden: Size | None = None
    """Features inside one expert; left out: as many as the feed-forward part of a dense block."""
    shared: Annotated[int, Field(ge=0, le=64)] = 0
    """Experts in addition to ``count`` that every token passes through."""
    first: Annotated[int, Field(ge=0)] = 0
    """The first block with experts, counted from 0; the blocks before it are dense."""
    every: PositiveInt = 1
    """The distance between blocks with experts, from ``first`` on: every block (1), every second block (2) ..."""
    router: RouterPolicy = RouterPolicy()
    """The router, which chooses the experts of each token."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if said := self.router.check_experts(self.count):
            raise ValueError(said)
        return self

    def in_block(self, index: int) -> bool:
        """Return whether the block at ``index`` has experts."""
        return index >= self.first and (index - self.first) % self.every == 0


class GptPolicy(Policy):
    """The shape of a :class:`Gpt`; ``resolved`` fills keys that are left out."""

    name: Literal["gpt"] = "gpt"
    """The name of the built-in model."""
    family: Literal["llama", "gpt2"] = "llama"
    """``llama``: RMSNorm, rotary angles, SwiGLU; ``gpt2``: LayerNorm, learned positions, GELU."""
    layers: Annotated[int, Field(ge=1, le=10_000)] = 6
    """Transformer blocks."""
    width: Size = 384
    """Features of a token between the blocks."""
    heads: Size = 6
    """Attention heads (queries)."""
    kv_heads: Size | None = None
    """Heads of keys and values, each shared by an equal group of query heads; left out: as many as ``heads``."""
    head_size: Size | None = None
    """Features of a head; left out: width / heads."""
    context: Size = 256
    """Tokens in the longest sequence."""
    vocab: Size | None = None
    """Tokens in the vocabulary; left out: the tokenizer's."""
    hidden: Size | None = None
    """Features inside the feed-forward part; left out: 8/3 of the width (llama, rounded up to 64) or 4 times the
    width."""
    tied_head: bool | None = None
    """True if the head uses the embedding's weights; left out: true only for the family gpt2."""
    sliding_window: Size | None = None
    """Tokens that a token sees at most, itself included, in blocks with a window; left out: all earlier ones."""
    sliding_window_pattern: Annotated[int, Field(ge=2, le=10_000)] | None = None
    """Every block of this number, counted from 1, sees all earlier tokens, and the others have the window (as in
    Gemma 3: 6, gpt-oss: 2); left out: all blocks have it."""
    sinks: bool = False
    """True for a trained number for each head that takes part in the softmax of attention and has no value."""
    rope_theta: Annotated[float, Field(gt=1)] = 10_000.0
    """The base of the rotary angles (llama)."""
    rope_scaling: RopeScaling | None = None
    """LLaMA 3.1's change of the rotary angles (llama)."""
    norm_eps: Annotated[float, Field(ge=0)] = 1e-5
    """The number that is added to the variance inside the norms."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of features zeroed in training after the embedding and after each half of a block. Attention weights
    have no dropout."""
    experts: GptExperts | None = None
    """Mixtures of experts in place of feed-forward parts; left out: none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_size is None and self.width % self.heads:
            raise ValueError(f"width {self.width} does not divide by heads {self.heads}; or set head_size")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} does not divide by kv_heads {self.kv_heads}")
        size = self.head_size or self.width // self.heads
        if self.family == "llama" and size % 2:
            raise ValueError(f"rotary positions turn pairs of features, but a head has {size}; make it even")
        if self.family == "gpt2":
            self._check_gpt2(size)
        if self.sliding_window_pattern is not None and self.sliding_window is None:
            raise ValueError(
                f"sliding_window_pattern {self.sliding_window_pattern} names the blocks without a window, and there "
                "is no sliding_window; set sliding_window, or leave the pattern out"
            )
        if self.experts is not None and self.experts.first >= self.layers:
            raise ValueError(
                f"experts.first is {self.experts.first}, but the blocks are 0 to {self.layers - 1}: none would have any"
            )
        return self

    def _check_gpt2(self, size: int) -> None:
        if self.experts is not None:
            raise ValueError("experts are for family: llama, whose feed-forward part they repeat")
        if self.kv_heads not in (None, self.heads):
            raise ValueError(
                f"kv_heads {self.kv_heads} is for family: llama; gpt2 has as many as heads ({self.heads})"
            )
        if size * self.heads != self.width:
            raise ValueError(f"head_size {size} is for family: llama; gpt2 has width / heads")
        if self.rope_scaling is not None or self.rope_theta != GptPolicy.model_fields["rope_theta"].default:
            raise ValueError("rope_theta and rope_scaling are for family: llama; gpt2 learns its positions")

    def has_experts(self, block: int) -> bool:
        """Return whether the block at index ``block`` has a mixture of experts."""
        return self.experts is not None and self.experts.in_block(block)

    def window_of(self, block: int) -> int | None:
        """Return the tokens that a token sees at most in the block at index ``block``; None for all earlier ones."""
        pattern = self.sliding_window_pattern
        return None if pattern is not None and (block + 1) % pattern == 0 else self.sliding_window

    def resolved(self, vocab: int | None = None) -> Self:
        """Return the same policy with every key filled.

        Args:
            vocab: The size of the tokenizer's vocabulary; None: there is no tokenizer.

        Raises:
            ConfigError: if there is no size of the vocabulary, or the policy's is smaller than the tokenizer's.
        """
        if vocab is None and self.vocab is None:
            raise ConfigError(
                "model.vocab is not set and there is no tokenizer to take it from; set model.vocab"
            )
        if vocab is not None and self.vocab is not None and self.vocab < vocab:
            raise ConfigError(
                f"model.vocab is {self.vocab} but the tokenizer makes {vocab} different tokens; "
                f"leave model.vocab out or set at least {vocab}"
            )
        llama = self.family == "llama"
        multiple = _HIDDEN_MULTIPLE
        hidden = math.ceil(self.width * 8 / 3 / multiple) * multiple if llama else 4 * self.width
        filled: dict[str, Any] = {
            "vocab": self.vocab or vocab,
            "kv_heads": self.kv_heads or self.heads,
            "head_size": self.head_size or self.width // self.heads,
            "hidden": self.hidden or hidden,
            "tied_head": not llama if self.tied_head is None else self.tied_head,
        }
        if self.experts is not None:
            own = self.experts.hidden or filled["hidden"]
            filled["experts"] = self.experts.model_copy(update={"hidden": own}).model_dump()
        return type(self).model_validate(self.model_dump() | filled)


class Gpt(nn.Module):
    """A decoder-only language model; the initial weights follow from ``seed``, except on the meta device."""

    def __init__(
        self, policy: GptPolicy, attention: AttentionFunction = causal_attention, seed: int = 0
    ) -> None:
        super().__init__()
        p = self.policy = policy.resolved()
        llama = p.family == "llama"
        self.embed = nn.Embedding(_set(p.vocab), p.width)
        self.positions = None if llama else nn.Embedding(p.context, p.width)
        self.dropout = nn.Dropout(p.dropout)
        self.blocks = nn.ModuleList(_block(p, attention, index) for index in range(p.layers))
        self.norm = _norm(p)
        self.head = Head(p.width, _set(p.vocab), bias=False)
        if p.tied_head:
            self.head.weight = self.embed.weight
        if not self.embed.weight.is_meta:
            draw_all(self, self.initial_rules(), seed)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache: KeyValueCache | None = None,
        positions: Tensor | None = None,
        *,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of ``tokens``, or the mean loss if ``targets`` are given.

        Args:
            tokens: [B, T].
            targets: [B, T]; labels of -100 do not count.
            cache: Keys and values of earlier tokens, which ``tokens`` continue. Only the logits of the last position
                are computed then: [B, 1, V].
            positions: Position of each token in its sequence, [T] or [B, T]; None: they follow one another, and those
                of the cache.
            documents: Number of each token's document, [B, T], which never falls along T. A token sees its own document
                alone, and positions begin anew in each; None: every sequence is one document.

        Returns:
            Logits [B, T, V], or the loss [] in fp32.

        Raises:
            UsageError: if there are more tokens than the context has, if the numbers of documents fall or are not one
                for each token, or if there are documents beside a cache.
        """
        packed = None
        if documents is not None:
            if cache is not None:
                raise UsageError(
                    "documents: a cache holds the tokens of one document for each sequence; generate without documents"
                )
            packed = packed_documents(documents, tokens.shape)
            positions = packed.positions() if positions is None else positions
        start = 0 if cache is None else cache.length
        stop = start + tokens.shape[1]
        self.check_tokens(stop)
        x, at = self.embed(tokens), None  # [B, T, D]
        places = torch.arange(start, stop, device=x.device) if positions is None else positions.to(x.device)
        if self.positions is None:
            at = self._angles(places)
        else:
            x = x + self.positions(places)
        x = self.dropout(x)
        labels = None if targets is None else (targets != IGNORE).sum(1)  # [B]
        for i, block in enumerate(self.blocks):
            x = block(x, at, None if cache is None else cache.layer(i), labels, packed)
        if cache is not None:
            cache.length = stop
            x = x[:, -1:]
        return self.head(self.norm(x), targets)

    def initial_rules(self) -> dict[str, Initializer]:
        """Return GPT-2's initial rules.

        Matrices are normal with standard deviation 0.02, scaled by 1/√(2L) if they add to the residual; norms are 1
        and biases 0.
        """
        residual = Normal(_STD / math.sqrt(2 * self.policy.layers))
        rules: dict[str, Initializer] = {}
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                rules[name] = Constant(1.0 if name.endswith("norm.weight") else 0.0)
            else:
                rules[name] = (
                    residual if name.endswith(("out.weight", "down.weight", "experts.down")) else Normal(_STD)
                )
        return rules

    def unit_patterns(self) -> list[str]:
        """Return patterns of the modules whose parameters move together; all other parameters belong to the root.

        A tied embedding is read first and last: as a Unit of its own it would be gathered twice.
        """
        return ["blocks.*"] if self.policy.tied_head else ["embed", "blocks.*", "head"]

    def tensor_table(self) -> dict[str, str]:
        """Return the style of each module's cut along "tp"; ``parallel/tensor/layout.py`` defines the styles."""
        p = self.policy
        table = {
            "embed": "vocabulary",
            "dropout": "sequence",
            "blocks.*.attention_norm": "sequence",
            "blocks.*.attention": "channels head_counts" if p.sinks else "head_counts",
            "blocks.*.attention.qkv": f"column {p.heads}+{p.kv_heads}+{p.kv_heads}",
            "blocks.*.attention.out": f"row {p.heads}",
            "blocks.*.attention.dropout": "sequence",
            "blocks.*.mlp_norm": "sequence",
            "blocks.*.mlp.dropout": "sequence",
            "norm": "sequence",
            "head": "head",
        }
        if any(not p.has_experts(block) for block in range(p.layers)):
            table["blocks.*.mlp.down"] = "row"
            if p.family == "llama":
                table["blocks.*.mlp.gate_up"] = f"column {p.hidden}+{p.hidden}"
        if p.family == "gpt2":
            table |= {"blocks.*.mlp.up": "column", "positions": "sequence"}
        return table

    def _angles(self, positions: Tensor) -> RotaryAngles:
        p = self.policy
        scaling = None
        if p.rope_scaling is not None:
            s = p.rope_scaling
            scaling = FrequencyScaling(s.factor, s.low_freq_factor, s.high_freq_factor, s.original_context)
        return angles_at(positions, _set(p.head_size), p.rope_theta, scaling)

    def check_tokens(self, stop: int) -> None:
        """Check that the model takes sequences of ``stop`` tokens.

        Raises:
            UsageError: if its context is shorter.
        """
        if stop > self.policy.context:
            raise UsageError(
                f"the model was given {stop} tokens but its context is {self.policy.context}; "
                "give shorter sequences or set model.context"
            )
        if self.policy.tied_head and self.head.weight is not self.embed.weight:
            raise PlanError(
                "head.weight and embed.weight are tied but became two tensors; whatever replaces a parameter must "
                "replace it under both names"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Moving a module off the meta device makes new parameters one module at a time, which unties them.
        super()._apply(fn, recurse)
        if self.policy.tied_head:
            self.head.weight = self.embed.weight
        return self


def parameter_count(policy: GptPolicy) -> int:
    """Return the number of parameters of the whole model, with tied ones counted once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Gpt(policy).parameters())


def flops_per_token(policy: GptPolicy, causal: bool = True) -> int:
    """Return the floating-point operations per token, forward and backward: 6·P + 12·L·H·K·C, the second term halved.

    P counts the matrices with which a token is multiplied: not the embedding, in which it is only looked up, but a
    head tied to the embedding; of E experts the k that the token passes through. A causal query reads half of the
    context on average.

    Args:
        policy: The shape of the model.
        causal: False for the figure of papers that count the whole square of the context.
    """
    p = policy.resolved()
    with torch.device("meta"):
        model = Gpt(p)
    looked_up = {"positions.weight"} if p.tied_head else {"embed.weight", "positions.weight"}
    multiplied = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and name not in looked_up:
            multiplied += parameter.numel()
        elif parameter.dim() == 3:  # a stack of experts
            assert p.experts is not None, "only experts are stacked"
            multiplied += parameter.numel() * p.experts.router.top_k // p.experts.count
    seen = sum(_seen_tokens(p.context, p.window_of(block), causal) for block in range(p.layers))
    return needed_per_token(multiplied, 1, seen, p.heads * _set(p.head_size))


def _seen_tokens(context: int, window: int | None, causal: bool) -> int:
    """Return the tokens that a token sees on average; without ``causal`` also those that come later."""
    if window is None or window >= context:
        return context // 2 if causal else context
    return window - window * (window - 1) // (2 * context) if causal else window


def _block(p: GptPolicy, attention: AttentionFunction, index: int) -> TransformerBlock:
    llama = p.family == "llama"
    mix = Attention(
        p.width,
        p.heads,
        _set(p.kv_heads),
        _set(p.head_size),
        not llama,
        p.dropout,
        attention,
        p.window_of(index),
        p.sinks,
    )
    mlp: nn.Module
    if p.experts is not None and p.has_experts(index):
        own = p.experts
        mlp = ExpertMlp(p.width, _set(own.hidden), own.count, own.router, own.shared, p.dropout)
    else:
        mlp = (SwiGlu if llama else GeluMlp)(p.width, _set(p.hidden), p.dropout)
    return TransformerBlock(_norm(p), mix, _norm(p), mlp)


def _norm(p: GptPolicy) -> nn.Module:
    return (RmsNorm if p.family == "llama" else nn.LayerNorm)(p.width, eps=p.norm_eps)


def _set(value: int | None) -> int:
    """Return a key that ``resolved`` has filled."""
    assert value is not None, "a key of the policy is read before it is resolved"
    return value
