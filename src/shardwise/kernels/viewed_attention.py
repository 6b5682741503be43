"""Attention to keys that come a part at a time, as one function of autograd.

A ``KeySource`` says which keys come, with what the queries see of them. On one rank all keys are one part
(``OwnKeys``), and nothing is merged; under context parallelism they come from other ranks, and their gradients go home
(parallel/context/attention.py). ``attention_parts.py`` has the formulas.

Cost:   kept for the backward pass: queries, keys, values, outputs and B·H·T numbers.
Shapes: B batch, H heads, N key and value heads, T queries, S keys, K head size.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.kernels.attention_parts import (
    RowGroup,
    attend,
    attend_backward,
    row_products,
    sink_gradient,
    with_sink,
)


class GradientsOf(Protocol):
    """Function from keys, values and what the queries see of them to the gradients of both."""

    def __call__(
        self,
        keys: Tensor,
        values: Tensor,
        groups: Sequence[RowGroup],
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of keys and values; those of ``into`` are added to."""


class KeySource(Protocol):
    """Interface of the object that brings the keys of other tokens, and takes their gradients back."""

    def parts(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Sequence[RowGroup]]]:
        """Yield keys and values with what the queries see of them.

        Args:
            k: Keys of this rank's tokens, [B, N, t, K].
            v: Their values, [B, N, t, K].
        """

    def gradients(self, k: Tensor, v: Tensor, gradients_of: GradientsOf) -> tuple[Tensor, Tensor]:
        """Return the gradients of ``k`` and ``v``, summed over all queries that see them.

        Args:
            k: Keys of this rank's tokens, [B, N, t, K].
            v: Their values, [B, N, t, K].
            gradients_of: Function that computes the gradients of one part for this rank's queries.
        """


class OwnKeys(NamedTuple):
    """The source whose only part is the keys that are given."""

    groups: Sequence[RowGroup]
    """What the queries of each row see."""

    def parts(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Sequence[RowGroup]]]:
        """Yield all keys and values."""
        yield k, v, self.groups

    def gradients(self, k: Tensor, v: Tensor, gradients_of: GradientsOf) -> tuple[Tensor, Tensor]:
        """Return the gradients of all keys and values."""
        return gradients_of(k, v, self.groups)


def attend_to_seen(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, source: KeySource) -> Tensor:
    """Return the attention of queries to the keys that they see.

    Args:
        q: Queries, [B, H, T, K].
        k: Keys, [B, N, S, K].
        v: Values, [B, N, S, K].
        sink: One number for each head, [H], or None.
        source: Source of the keys that the queries see.

    Returns:
        [B, H, T, K].
    """
    found: Tensor = _AttentionToSeen.apply(q, k, v, sink, source)
    return found


class _AttentionToSeen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, source: KeySource) -> Tensor:
        q, k, v = _alone(q), _alone(k), _alone(v)
        sums: tuple[Tensor, Tensor] | None = None
        for keys, values, groups in source.parts(k, v):
            sums = attend(q, keys, values, groups, sums)
        assert sums is not None, "a rank has keys of its own"
        out, lse = sums
        if sink is not None:
            lse = with_sink(out, lse, sink)
        result = out.to(q.dtype)
        ctx.source = source
        ctx.save_for_backward(q, k, v, result, lse, *(() if sink is None else (sink,)))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, *sinks = ctx.saved_tensors
        # A query that sees nothing has no weights: exp(-inf - 0) is 0, and exp(-inf + inf) would not be a number.
        lse = lse.masked_fill(lse == float("-inf"), 0)
        d_q = torch.zeros_like(q, dtype=lse.dtype)

        def gradients_of(
            keys: Tensor,
            values: Tensor,
            groups: Sequence[RowGroup],
            into: tuple[Tensor, Tensor] | None = None,
        ) -> tuple[Tensor, Tensor]:
            return attend_backward(q, keys, values, groups, grad, lse, out, d_q, into)

        d_k, d_v = ctx.source.gradients(k, v, gradients_of)
        d_sink = None
        if sinks:
            d_sink = sink_gradient(sinks[0], lse, row_products(out, grad)).to(sinks[0].dtype)
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_sink, None


def _alone(x: Tensor) -> Tensor:
    """Return ``x``, or a copy if its memory holds other tensors, which would be kept until the backward pass."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.contiguous()
