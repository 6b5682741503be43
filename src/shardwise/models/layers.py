"""The layers of a transformer block, for the LLaMA and the GPT-2 family.

Projections that read the same input are one matrix: queries, keys and values (``qkv``, rows in that order), gate and
up projection (``gate_up``). One large product is faster than three small ones, and a layout that cuts the matrix
names its blocks.

Papers: Shazeer 2020, arXiv:2002.05202 (SwiGLU); Ainslie et al. 2023, arXiv:2305.13245 (grouped-query attention);
        Radford et al. 2019 (GPT-2).
Shapes: B batch, T sequence, D width, H heads, N key and value heads, K head size, F hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.base.errors import PlanError, UsageError
from shardwise.base.user_hooks import has_hooks
from shardwise.kernels.attention_view import AttentionView, PackedDocuments, takes_view
from shardwise.kernels.cross_entropy import cross_entropy
from shardwise.kernels.deferred import DefersProducts, deferred_linear
from shardwise.kernels.gated import gated
from shardwise.kernels.head_loss import LossTile, head_loss
from shardwise.kernels.rms_norm import joins_sum, rms_norm, rms_norm_of_sum
from shardwise.kernels.rotary import RotaryAngles, split_heads
from shardwise.models.cache import LayerCache
from shardwise.parallel.expert.module import MixtureOfExperts
from shardwise.parallel.expert.policy import RouterPolicy

AttentionFunction = Callable[..., Tensor]
"""(q [B, H, T, K], k [B, N, S, K], v [B, N, S, K]) -> [B, H, T, K], causal, with an ``AttentionView`` as the
argument ``view`` if the layer has a window or a sink, or the batch documents; ``kernels.attention`` defines the
function."""


class Head(nn.Linear, DefersProducts):
    """The output matrix, which returns logits, or the mean loss if ``targets`` are given.

    Both are computed in one module, so that a head that is cut along the vocabulary, or computes tile by tile, never
    makes whole logits for a loss.
    """

    tile: LossTile | None = None
    """The tile of tokens by which the loss is computed, set from outside; None: no tiles."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits [B, T, V] of ``x`` [B, T, D], or the mean loss [] over ``targets`` [B, T]."""
        if self.tile is not None and targets is not None:
            tokens = self.tile.of(targets.numel(), self.out_features, x)
            if tokens:
                return head_loss(x, self.weight, self.bias, targets, tokens, self.tile.at_once)
        logits = deferred_linear(x, self.weight, self.bias, self.products)  # [B, T, V]
        return logits if targets is None else cross_entropy(logits, targets)


class RmsNorm(nn.RMSNorm):
    """RMSNorm with the package's kernel, which is also fast on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` [..., D] divided by its root mean square and multiplied by the weight."""
        return rms_norm(x, self.weight, self.eps or 0.0)

    def joins_sum(self, *addends: Tensor) -> bool:
        """Return whether ``of_sum`` takes fewer launches for these tensors, and nothing must see the norm called."""
        is_plain = type(self) is RmsNorm and "forward" not in vars(self) and not has_hooks(self)
        return is_plain and joins_sum(self.weight, *addends)

    def of_sum(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``x`` + ``added`` and its norm, twice [..., D]; without ``added``, ``x`` and its norm."""
        return rms_norm_of_sum(x, added, self.weight, self.eps or 0.0)


class Attention(nn.Module):
    """Causal self-attention; positions are rotations if the block gets angles.

    Args:
        width: Features of a token.
        heads: Heads of queries.
        kv_heads: Heads of keys and values.
        head_size: Features of a head.
        bias: True for projections with a bias.
        dropout: Share of the output that is zeroed in training.
        attention: Attention function.
        window: Tokens that a token sees at most, itself included; None: all earlier ones.
        sinks: True for a trained number for each head, which takes part in the softmax and has no value.

    Raises:
        PlanError: if there is a window or a sink, and ``attention`` does not take a view.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        bias: bool,
        dropout: float,
        attention: AttentionFunction,
        window: int | None = None,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        self.head_counts = (heads, kv_heads, kv_heads)
        self.head_size = head_size
        self.qkv = nn.Linear(width, sum(self.head_counts) * head_size, bias=bias)
        self.out = nn.Linear(heads * head_size, width, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.attention = attention
        self.window = window
        self.sinks = nn.Parameter(torch.zeros(heads)) if sinks else None
        self._takes_view = takes_view(attention)
        if (sinks or window is not None) and not self._takes_view:
            given = "sinks" if sinks else f"sliding_window: {window}"
            raise PlanError(
                f"model: {given} is for an attention function that {_TAKES_VIEW.format(_name(attention))}"
            )

    def forward(
        self,
        x: Tensor,
        at: RotaryAngles | None = None,
        cache: LayerCache | None = None,
        documents: PackedDocuments | None = None,
    ) -> Tensor:
        """Return the attention output for ``x`` [B, T, D].

        Args:
            x: [B, T, D].
            at: Rotary angles of the positions; None: no rotation.
            cache: Keys and values of earlier tokens, to which those of ``x`` are appended.
            documents: Documents of the sequences; None: every sequence is one document.

        Raises:
            UsageError: if there are documents, and the attention function does not take a view.
        """
        q, k, v = split_heads(self.qkv(x), self.head_counts, self.head_size, at)
        if cache is not None:
            k, v = cache.extend(k, v)
        if documents is None and self.window is None and self.sinks is None:
            mixed = self.attention(q, k, v)  # [B, H, T, K]
        elif self._takes_view:
            mixed = self.attention(q, k, v, view=AttentionView(self.window, self.sinks, documents))
        else:
            raise UsageError(
                f"documents are for an attention function that {_TAKES_VIEW.format(_name(self.attention))}"
            )
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))


_TAKES_VIEW = (
    "takes an argument 'view' (kernels.attention_view.AttentionView), which {} does not; give it one, or give the "
    "model kernels.attention.causal_attention"
)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


class SwiGlu(nn.Module):
    """A gated feed-forward part: down(silu(gate) · up)."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for ``x`` [..., D], of the same shape."""
        y: Tensor = self.dropout(self.down(gated(self.gate_up(x))))
        return y


class GeluMlp(nn.Module):
    """A feed-forward part: down(gelu(up)), with GPT-2's tanh approximation of the GELU."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for ``x`` [..., D], of the same shape."""
        y: Tensor = self.dropout(self.down(F.gelu(self.up(x), approximate="tanh")))
        return y


class ExpertMlp(MixtureOfExperts):
    """A mixture of SwiGLU experts, followed by dropout."""

    def __init__(
        self, width: int, hidden: int, experts: int, router: RouterPolicy, shared: int, dropout: float
    ) -> None:
        super().__init__(width, hidden, experts, router=router, shared=shared)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Return the output for ``x`` [B, T, D]; the base class documents ``mask`` and ``labels``."""
        y: Tensor = self.dropout(super().forward(x, mask, labels))
        return y


class TransformerBlock(nn.Module):
    """A block with pre-norms: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, attention_norm: nn.Module, attention: Attention, mlp_norm: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        at: RotaryAngles | None = None,
        cache: LayerCache | None = None,
        labels: Tensor | None = None,
        documents: PackedDocuments | None = None,
    ) -> Tensor:
        """Return the block's output for ``x`` [B, T, D].

        Args:
            x: [B, T, D].
            at: Rotary angles of the positions; None: no rotation.
            cache: Keys and values of earlier tokens.
            labels: [B], the number of labels of each sequence, by which experts are balanced.
            documents: Documents of the sequences; None: every sequence is one document.
        """
        x, y = _sum_and_norm(self.attention_norm, x)
        x, y = _sum_and_norm(self.mlp_norm, x, self.attention(y, at, cache, documents))
        return x + (self.mlp(y, labels=labels) if isinstance(self.mlp, MixtureOfExperts) else self.mlp(y))


def _sum_and_norm(norm: nn.Module, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return ``x`` + ``added`` and its norm, in one launch where a kernel serves the device."""
    addends = (x,) if added is None else (x, added)
    if isinstance(norm, RmsNorm) and norm.joins_sum(*addends):
        return norm.of_sum(x, added)
    total = x if added is None else x + added
    return total, norm(total)
