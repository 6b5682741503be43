"""Surroundings: what a mixture of experts must know of the place it runs at. An engine fills them in, one per layer.

Without an engine the layer is alone: all tokens of a sequence are here, nothing scales its gradients, nothing runs
again. Among several ranks that share a sequence, each routes tokens of its own, so that none is computed twice:

    layout    x here              take: forward, backward            give: forward, backward
    cut       [B, T/N, D]         all rows here; the same            all rows here; the same
    alike     [B, T, D], alike    this rank's rows; joined           joined; this rank's rows
    addends   [B, T, D], alike    this rank's rows; others 0         joined; summed, this rank's rows

"alike" and "addends" differ in the gradients outside: alike on the ranks, or addends of the true one. Rank i of N takes
rows [i·n/N, (i+1)·n/N) of the n = B·T tokens: ragged, none where there are fewer tokens than ranks. What a token does
(noise, room with an expert, balance) follows from its place b·T + t in the microbatch, whoever has it.

Cost:   alike and addends: one gather of [B·T, D] each way, and for addends a sum of it backward.
Shapes: B sequences of a microbatch, T tokens of a whole sequence, D width, N ranks, n tokens here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.comm import exchange
from shardwise.comm.collectives import Group
from shardwise.comm.duals import uncompiled
from shardwise.memory.replay import Replay
from shardwise.plan.errors import UsageError

Layout = Literal["cut", "alike", "addends"]
"""How activations and their gradients lie on the ranks that share a sequence."""

Keep = Callable[[str, Callable[[], Any]], Any]
"""(name, make) -> what ``make`` returns, which a pass decides once; where a piece of it runs again, what it returned at
first. It has no gradients."""


def _cut() -> Layout:
    return "cut"


def make_anew(name: str, make: Callable[[], Any]) -> Any:
    """The ``Keep`` of a layer that is alone."""
    return make()


def _one() -> float:
    return 1.0


class LoadSink(Protocol):
    """Takes what went where in a forward pass of a layer."""

    def add(self, layer: str, routed: Tensor, kept: Tensor, tokens: Tensor, entropy: Tensor) -> None: ...

    def sent(self, layer: str, rows: int, crossed: int) -> None: ...


class Tokens(NamedTuple):
    """The tokens that this rank routes."""

    hidden: Tensor
    """[n, D]"""
    place: Tensor
    """b·T + t of each: int64 [n], rising."""
    sequences: int
    """B"""
    length: int
    """T, of whole sequences."""
    parts: tuple[int, ...]
    """Tokens of each rank that shares the sequences."""

    @property
    def sequence(self) -> Tensor:
        """b of each token: int64 [n]."""
        return self.place.div(max(self.length, 1), rounding_mode="floor")


@dataclass
class Surroundings:
    """Of one layer."""

    name: str = ""
    """Name of the layer in its model; empty where nobody said."""
    group: Group | None = None
    """The ranks that share the tokens of a sequence; None where all are here."""
    layout: Callable[[], Layout] = _cut
    """How the running pass lies on ``group``."""
    keep: Keep = make_anew
    """See ``Keep``."""
    scale: Callable[[], float | Tensor] = _one
    """Called in a backward pass: what the loss of its microbatch was multiplied by."""
    replay: Replay | None = None
    """Where the running microbatch stands, which noise is keyed by; None where torch's generator draws it."""
    seed: int = 0
    """The run's, for noise."""
    loads: LoadSink | None = None
    """Counts the pairs of this rank's tokens; None where ``routed`` does."""
    routed: Tensor | None = None
    """Pairs that chose each expert in training since the bias moved: int64 [E]."""
    room: int | None = None
    """Pairs that an expert may get of the tokens of the running pass; None: as many as come."""

    def __deepcopy__(self, memo: Any) -> "Surroundings":
        """Those of a copy of the layer, an average of weights say, which runs alone.

        Errors: UsageError where ranks share its sequences.
        """
        if self.group is not None and self.group.size > 1:
            raise UsageError(
                f"copy.deepcopy(model): the ranks along tp share the tokens of {self.name}, and a copy would see its "
                "own alone; take engine.state_dict(), or copy the model before initialize()"
            )
        return Surroundings(self.name)

    def take(self, x: Tensor) -> Tokens:
        """This rank's tokens of ``x`` [B, T or T/N, D]."""
        batch, here, width = x.shape
        rows = x.reshape(-1, width)
        if self.group is None or self.group.size == 1:
            place = torch.arange(batch * here, device=x.device)
            return Tokens(rows, place, batch, here, (batch * here,))
        ranks, index = self.group.size, self.group.index
        if self.layout() == "cut":
            at = torch.arange(here, device=x.device) + index * here
            place = (torch.arange(batch, device=x.device)[:, None] * (here * ranks) + at).view(-1)
            return Tokens(rows, place, batch, here * ranks, (batch * here,) * ranks)
        parts = _parts(batch * here, ranks)
        start = sum(parts[:index])
        place = torch.arange(start, start + parts[index], device=x.device)
        mine = _own_rows(rows, parts, self.group, self.layout() == "addends")
        return Tokens(mine, place, batch, here, parts)

    def give(self, rows: Tensor, x: Tensor) -> Tensor:
        """Results ``rows`` [n, D] in the layout of ``x``: [B, T or T/N, D]."""
        if self.group is None or self.group.size == 1 or self.layout() == "cut":
            return rows.view(x.shape)
        parts = _parts(x.shape[0] * x.shape[1], self.group.size)
        return _joined(rows, parts, self.group, self.layout() == "addends").view(x.shape)

    def here(self, mask: Tensor, tokens: Tokens) -> Tensor:
        """What a mask [B, T or T/N] says of the tokens here: [n]."""
        flat = mask.reshape(-1)
        return flat if flat.numel() == tokens.place.numel() else flat[tokens.place]


def _parts(rows: int, ranks: int) -> tuple[int, ...]:
    ends = [i * rows // ranks for i in range(ranks + 1)]
    return tuple(stop - start for start, stop in zip(ends, ends[1:], strict=False))


def _piece(rows: Tensor, parts: Sequence[int], group: Group) -> Tensor:
    return rows.narrow(0, sum(parts[: group.index]), parts[group.index])


@uncompiled
def _own_rows(rows: Tensor, parts: Sequence[int], group: Group, addends: bool) -> Tensor:
    return _OwnRows.apply(rows, parts, group, addends)


@uncompiled
def _joined(rows: Tensor, parts: Sequence[int], group: Group, addends: bool) -> Tensor:
    return _Joined.apply(rows, parts, group, addends)


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, parts: Sequence[int], group: Group, addends: bool) -> Tensor:
        ctx.place = parts, group, addends
        return _piece(rows, parts, group).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        parts, group, addends = ctx.place
        if not addends:
            return exchange.gather(grad, parts, group, "gradients of tokens to experts"), None, None, None
        full = grad.new_zeros(sum(parts), *grad.shape[1:])
        _piece(full, parts, group).copy_(grad)
        return full, None, None, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, parts: Sequence[int], group: Group, addends: bool) -> Tensor:
        ctx.place = parts, group, addends
        return exchange.gather(rows, parts, group, "results of experts")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        parts, group, addends = ctx.place
        if addends:
            grad = grad.clone(memory_format=torch.contiguous_format)
            group.all_reduce(grad.view(-1), "gradients of results of experts", "activations").wait()
        return _piece(grad, parts, group).clone(), None, None, None
