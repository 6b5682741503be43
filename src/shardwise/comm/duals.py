"""Conjugate pairs: the collective on activations in the forward pass, and its gradient in the backward pass.

    name      forward             backward            used where
    copy      identity            all-reduce          a whole activation enters cut layers
    reduce    all-reduce          identity            their addends become whole
    gather    all-gather          reduce-scatter      a cut sequence enters cut layers
    scatter   reduce-scatter      all-gather          their addends become a cut sequence
    cut       slice               all-gather          a whole activation, alike on all ranks, is cut
    join      all-gather          slice               pieces become whole for a computation alike on all ranks
    scale     identity            times a number      gradients that are alike become addends, and back

Read backwards, each row is its own transpose: copy and reduce, gather and scatter, cut and join. The all-reduce of the
first pair is the gather and the scatter of the second: cutting the sequence sends the same bytes.

Papers: Shoeybi et al. 2019, arXiv:1909.08053 (f and g); Korthikanti et al. 2022, arXiv:2205.05198 (g and its bar).
Cost:   an all-reduce sends 2·(N-1)/N of the activation per rank, each of the others (N-1)/N.
Shapes: activations [B, T, D], cut along ``dim`` (the sequence, 1, unless said otherwise) into N equal pieces.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from shardwise.comm.collectives import Group

uncompiled = _disable_dynamo
"""Decorator of functions that run collectives: torch.compile does not trace them.

``torch.compiler.disable`` is the same, but imports the compiler even if nothing is compiled.
"""


def apart(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``hook`` so that torch.compile does not trace it if the user compiles its module; loads no compiler."""

    @uncompiled
    def outside(*args: Any) -> Any:
        return hook(*args)

    @wraps(hook)
    def call(*args: Any) -> Any:
        return outside(*args) if "torch._dynamo" in sys.modules else hook(*args)

    return call


SEQUENCE = 1
"""Dim of an activation that is the sequence."""


# Without gradients -------------------------------------------------------------------------------------------------


def start_sum(x: Tensor, group: Group, what: str) -> Callable[[], Tensor]:
    """Start to sum the contiguous ``x`` over the ranks, in place, and return a function that waits for the result."""
    pending = group.all_reduce(x.view(-1), what, "activations")

    def finish() -> Tensor:
        pending.wait()
        return x

    return finish


def start_gather(x: Tensor, group: Group, what: str, dim: int = SEQUENCE) -> Callable[[], Tensor]:
    """Start to join the ranks' pieces along ``dim``, and return a function that waits for the result."""
    shard = x.contiguous()
    parts = shard.new_empty(group.size, *shard.shape)
    pending = group.all_gather(parts.view(-1), shard.view(-1), what, "activations")

    def finish() -> Tensor:
        pending.wait()
        # Rank-major pieces become one tensor: a view if everything before ``dim`` is 1, else a copy.
        return parts.movedim(0, dim).flatten(dim, dim + 1)

    return finish


def start_scatter(x: Tensor, group: Group, what: str, dim: int = SEQUENCE) -> Callable[[], Tensor]:
    """Start to sum ``x`` over the ranks and keep this rank's piece, and return a function that waits for it.

    Args:
        x: This rank's addend; undefined afterwards.
        group: The ranks.
        what: Name of the tensor in errors.
        dim: Dim that is cut.
    """
    parts = x.unflatten(dim, (group.size, -1)).movedim(dim, 0).contiguous()
    piece = torch.empty_like(parts[0])
    pending = group.reduce_scatter(piece.view(-1), parts.view(-1), what, "activations")

    def finish() -> Tensor:
        pending.wait()
        return piece

    return finish


def piece_of(x: Tensor, group: Group, dim: int = SEQUENCE) -> Tensor:
    """Return this rank's piece of ``x`` along ``dim``, a view."""
    size = x.shape[dim] // group.size
    return x.narrow(dim, group.index * size, size)


def _summed(x: Tensor, group: Group, what: str) -> Tensor:
    return start_sum(x.clone(memory_format=torch.contiguous_format), group, what)()


def _scattered(x: Tensor, group: Group, what: str, dim: int) -> Tensor:
    return start_scatter(x.clone(memory_format=torch.contiguous_format), group, what, dim)()


def _gathered(x: Tensor, group: Group, what: str, dim: int) -> Tensor:
    return start_gather(x, group, what, dim)()


# With gradients ----------------------------------------------------------------------------------------------------


@uncompiled
def copy(x: Tensor, group: Group, what: str) -> Tensor:
    """Return ``x``; in the backward pass, sum the gradients of the ranks."""
    return x if group.size == 1 else _Copy.apply(x, group, what)


@uncompiled
def reduce(x: Tensor, group: Group, what: str) -> Tensor:
    """Return the sum over the ranks; in the backward pass, pass the gradient, which is whole on every rank."""
    return x if group.size == 1 else _Reduce.apply(x, group, what)


@uncompiled
def gather(x: Tensor, group: Group, what: str, dim: int = SEQUENCE) -> Tensor:
    """Return the ranks' pieces joined; in the backward pass, sum the gradients of the ranks and cut the sum."""
    return x if group.size == 1 else _Gather.apply(x, group, what, dim)


@uncompiled
def scatter(x: Tensor, group: Group, what: str, dim: int = SEQUENCE) -> Tensor:
    """Return this rank's piece of the sum over the ranks; in the backward pass, join the gradients."""
    return x if group.size == 1 else _Scatter.apply(x, group, what, dim)


@uncompiled
def cut(x: Tensor, group: Group, what: str, dim: int = SEQUENCE) -> Tensor:
    """Return this rank's piece; in the backward pass, join the gradients."""
    return x if group.size == 1 else _PieceOf.apply(x, group, what, dim)


@uncompiled
def join(x: Tensor, group: Group, what: str, dim: int = SEQUENCE) -> Tensor:
    """Return the ranks' pieces joined; in the backward pass, cut the gradient, which is alike on every rank."""
    return x if group.size == 1 else _Join.apply(x, group, what, dim)


@uncompiled
def scale(x: Tensor, factor: float) -> Tensor:
    """Return ``x``; in the backward pass, multiply the gradient by ``factor``."""
    return _Scale.apply(x, factor)


class _Dual(torch.autograd.Function):
    """A Function that keeps the group, the name and the dim; nothing of the activation is saved."""

    gives = ""
    """Form of the result on a rank, for a walk over the graph (parallel/tensor/outputs.py)."""

    @staticmethod
    def keep(ctx: Any, *place: Any) -> None:
        ctx.place = place


class _Copy(_Dual):
    gives = "HEADS"

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, what: str) -> Tensor:
        _Dual.keep(ctx, group, what)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _summed(grad, *ctx.place), None, None


class _Reduce(_Dual):
    gives = "WHOLE"

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, what: str) -> Tensor:
        return _summed(x, group, what)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None, None


class _Gather(_Dual):
    gives = "HEADS"

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, what: str, dim: int) -> Tensor:
        _Dual.keep(ctx, group, what, dim)
        return _gathered(x, group, what, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _scattered(grad, *ctx.place), None, None, None


class _Scatter(_Dual):
    gives = "TOKENS"

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, what: str, dim: int) -> Tensor:
        _Dual.keep(ctx, group, what, dim)
        return _scattered(x, group, what, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _gathered(grad, *ctx.place), None, None, None


class _PieceOf(_Dual):
    gives = "TOKENS"

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, what: str, dim: int) -> Tensor:
        _Dual.keep(ctx, group, what, dim)
        return piece_of(x, group, dim).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _gathered(grad, *ctx.place), None, None, None


class _Join(_Dual):
    gives = "WHOLE"

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, what: str, dim: int) -> Tensor:
        _Dual.keep(ctx, group, dim)
        return _gathered(x, group, what, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return piece_of(grad, *ctx.place), None, None, None


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor, ctx.gives = factor, "ADDENDS" if factor > 1 else "WHOLE"
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad * ctx.factor, None
