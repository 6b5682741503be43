"""Conjugate pairs: the collective on activations in the forward pass, and its gradient in the backward pass.

    name      forward             backward            used where
    copy      identity            all-reduce          a whole activation enters cut layers
    reduce    all-reduce          identity            their addends become whole
    gather    all-gather          reduce-scatter      a cut sequence enters cut layers
    scatter   reduce-scatter      all-gather          their addends become a cut sequence
    cut       slice               all-gather          a whole activation, alike on all ranks, is cut
    join      all-gather          slice               pieces become whole for a computation alike on all ranks
    scale     identity            times a number      gradients that are alike become addends, and back

Each takes an ``ExchangeSite``, which has the ranks and the name. The compiler traces into the functions here and keeps
each collective as one operator (``comm/operators.py``).

Read backwards, each row is its own transpose: copy and reduce, gather and scatter, cut and join. The all-reduce of the
first pair is the gather and the scatter of the second: cutting the sequence sends the same bytes.

Papers: Shoeybi et al. 2019, arXiv:1909.08053 (f and g); Korthikanti et al. 2022, arXiv:2205.05198 (g and its bar).
Cost:   an all-reduce sends 2·(N-1)/N of the activation per rank, each of the others (N-1)/N.
Shapes: activations [B, T, D], cut along ``dim`` (the sequence, 1, unless said otherwise) into N equal pieces.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from shardwise.comm.collectives import Group
from shardwise.comm.operators import ExchangeSite, exchange_operator
from shardwise.comm.transports import Move, NoTransport

_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")

uncompiled = _disable_dynamo
"""Decorator of functions that run collectives: torch.compile does not trace them.

The first call imports the compiler. ``torch.compiler.disable`` is the same, but imports it with the module.
"""


def apart(function: Callable[_Given, _Found]) -> Callable[_Given, _Found]:
    """Return ``function`` so that torch.compile does not trace it if the user compiles its module; loads no compiler.

    A call of an ``uncompiled`` function loads the compiler, which takes seconds.
    """

    @uncompiled
    def outside(*args: _Given.args, **kwargs: _Given.kwargs) -> _Found:
        return function(*args, **kwargs)

    @wraps(function)
    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Found:
        is_loaded = "torch._dynamo" in sys.modules
        return outside(*args, **kwargs) if is_loaded else function(*args, **kwargs)

    return call


SEQUENCE = 1
"""Dim of an activation that is the sequence."""


# Without gradients -------------------------------------------------------------------------------------------------


def note_move(where: Group | ExchangeSite, move: Move, before: Tensor, after: Tensor, dim: int) -> None:
    """Report a move of an activation to the transport of a pass on shapes; between real ranks do nothing.

    Args:
        where: The ranks, or their site.
        move: The kind of the move.
        before: The tensor before it.
        after: The tensor after it.
        dim: The dim that is cut or joined.
    """
    if torch.compiler.is_compiling():
        return  # a compiler can read no Group
    group = where if isinstance(where, Group) else where.group
    if isinstance(group.transport, NoTransport):
        group.transport.moved(move, before, after, dim % after.dim())


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
        whole = joined(parts, dim)
        note_move(group, "gather", x, whole, dim)
        return whole

    return finish


def joined(parts: Tensor, dim: int) -> Tensor:
    """Return the ranks' pieces [N, ...] as one tensor: a view if everything before ``dim`` is 1, else a copy."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def start_scatter(
    x: Tensor,
    group: Group,
    what: str,
    dim: int = SEQUENCE,
    keeps: bool = False,
    into: Tensor | None = None,
) -> Callable[[], Tensor]:
    """Start to sum ``x`` over the ranks and keep this rank's piece, and return a function that waits for it.

    Args:
        x: This rank's addend; undefined afterwards, unless ``keeps``.
        group: The ranks.
        what: Name of the tensor in errors.
        dim: Dim that is cut.
        keeps: True if ``x`` stays as it is.
        into: Where the piece is to lie; None for new memory.
    """
    pieces = x.unflatten(dim, (group.size, -1)).movedim(dim, 0)
    parts = pieces.clone(memory_format=torch.contiguous_format) if keeps else pieces.contiguous()
    piece = into if into is not None and into.is_contiguous() else torch.empty_like(parts[0])
    pending = group.reduce_scatter(piece.view(-1), parts.view(-1), what, "activations")

    def finish() -> Tensor:
        pending.wait()
        note_move(group, "scatter", x, piece, dim)
        return piece if into is None or piece is into else into.copy_(piece)

    return finish


def piece_of(x: Tensor, group: Group | ExchangeSite, dim: int = SEQUENCE) -> Tensor:
    """Return this rank's piece of ``x`` along ``dim``, a view."""
    size = x.shape[dim] // group.size
    piece = x.narrow(dim, group.index * size, size)
    note_move(group, "piece", x, piece, dim)
    return piece


@exchange_operator("summed(Tensor x) -> Tensor", lambda size, x: _empty(x))
def summed(site: ExchangeSite, x: Tensor) -> Tensor:
    """Return the sum over the ranks."""
    return start_sum(x.clone(memory_format=torch.contiguous_format), site.group, site.what)()


@exchange_operator("scattered(Tensor x, int dim) -> Tensor", lambda size, x, dim: _empty(x, dim, size))
def scattered(site: ExchangeSite, x: Tensor, dim: int) -> Tensor:
    """Return this rank's piece along ``dim`` of the sum over the ranks."""
    return start_scatter(x, site.group, site.what, dim, keeps=True)()


@exchange_operator("gathered(Tensor x, int dim) -> Tensor", lambda size, x, dim: joined(_every(x, size), dim))
def gathered(site: ExchangeSite, x: Tensor, dim: int) -> Tensor:
    """Return the ranks' pieces joined along ``dim``."""
    return start_gather(x, site.group, site.what, dim)()


def _every(x: Tensor, size: int) -> Tensor:
    return x.new_empty(size, *x.shape)


def _empty(x: Tensor, dim: int = 0, size: int = 1) -> Tensor:
    shape = list(x.shape)
    if size > 1:
        shape[dim] //= size
    return x.new_empty(shape)


# With gradients ----------------------------------------------------------------------------------------------------


def copy(x: Tensor, site: ExchangeSite) -> Tensor:
    """Return ``x``; in the backward pass, sum the gradients of the ranks."""
    return x if site.size == 1 else _Copy.apply(x, site)


def reduce(x: Tensor, site: ExchangeSite) -> Tensor:
    """Return the sum over the ranks; in the backward pass, pass the gradient, which is whole on every rank."""
    return x if site.size == 1 else _Reduce.apply(x, site)


def gather(x: Tensor, site: ExchangeSite, dim: int = SEQUENCE) -> Tensor:
    """Return the ranks' pieces joined; in the backward pass, sum the gradients of the ranks and cut the sum."""
    return x if site.size == 1 else _Gather.apply(x, site, dim)


def scatter(x: Tensor, site: ExchangeSite, dim: int = SEQUENCE) -> Tensor:
    """Return this rank's piece of the sum over the ranks; in the backward pass, join the gradients."""
    return x if site.size == 1 else _Scatter.apply(x, site, dim)


def cut(x: Tensor, site: ExchangeSite, dim: int = SEQUENCE) -> Tensor:
    """Return this rank's piece; in the backward pass, join the gradients."""
    return x if site.size == 1 else _PieceOf.apply(x, site, dim)


def join(x: Tensor, site: ExchangeSite, dim: int = SEQUENCE) -> Tensor:
    """Return the ranks' pieces joined; in the backward pass, cut the gradient, which is alike on every rank."""
    return x if site.size == 1 else _Join.apply(x, site, dim)


def scale(x: Tensor, factor: float, group: Group) -> Tensor:
    """Return ``x``; in the backward pass, multiply the gradient by ``factor``, 1/N or N for the N ranks."""
    return _Scale.apply(x, factor, group)


class _Dual(torch.autograd.Function):
    """A Function that keeps the site and the dim; nothing of the activation is saved."""

    gives = ""
    """Form of the result on a rank, for a walk over the graph (parallel/tensor/outputs.py)."""


class _Copy(_Dual):
    gives = "HEADS"

    @staticmethod
    def forward(ctx: Any, x: Tensor, site: ExchangeSite) -> Tensor:
        ctx.site = site
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return summed(ctx.site, grad), None


class _Reduce(_Dual):
    gives = "WHOLE"

    @staticmethod
    def forward(ctx: Any, x: Tensor, site: ExchangeSite) -> Tensor:
        return summed(site, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


class _Gather(_Dual):
    gives = "HEADS"

    @staticmethod
    def forward(ctx: Any, x: Tensor, site: ExchangeSite, dim: int) -> Tensor:
        ctx.site, ctx.dim = site, dim
        return gathered(site, x, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return scattered(ctx.site, grad, ctx.dim), None, None


class _Scatter(_Dual):
    gives = "TOKENS"

    @staticmethod
    def forward(ctx: Any, x: Tensor, site: ExchangeSite, dim: int) -> Tensor:
        ctx.site, ctx.dim = site, dim
        return scattered(site, x, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return gathered(ctx.site, grad, ctx.dim), None, None


class _PieceOf(_Dual):
    gives = "TOKENS"

    @staticmethod
    def forward(ctx: Any, x: Tensor, site: ExchangeSite, dim: int) -> Tensor:
        ctx.site, ctx.dim = site, dim
        return piece_of(x, site, dim).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return gathered(ctx.site, grad, ctx.dim), None, None


class _Join(_Dual):
    gives = "WHOLE"

    @staticmethod
    def forward(ctx: Any, x: Tensor, site: ExchangeSite, dim: int) -> Tensor:
        ctx.site, ctx.dim = site, dim
        return gathered(site, x, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return piece_of(grad, ctx.site, ctx.dim), None, None


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, group: Group) -> Tensor:
        ctx.factor, ctx.group, ctx.gives = factor, group, "ADDENDS" if factor > 1 else "WHOLE"
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        scaled = grad * ctx.factor
        note_move(ctx.group, "scale", grad, scaled, 0)
        return scaled, None, None
