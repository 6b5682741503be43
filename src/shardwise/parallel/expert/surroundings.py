"""Surroundings: the ranks, microbatch and sinks of a mixture of experts. An engine fills them in, one for each layer.

Without an engine the layer runs alone: this rank has all tokens of a sequence, nothing scales its gradients, nothing is
recomputed. If several ranks share a sequence, each routes different tokens, so that no token is computed twice:

    layout    x on this rank      take: forward, backward            give: forward, backward
    cut       [B, T/N, D]         all rows; the same                 all rows; the same
    alike     [B, T, D], alike    this rank's rows; joined           joined; this rank's rows
    addends   [B, T, D], alike    this rank's rows; others 0         joined; summed, this rank's rows

"alike" and "addends" differ in the gradients outside: alike on the ranks, or addends of the true gradient. Rank i of N
takes rows [i·n/N, (i+1)·n/N) of the n = B·T tokens; the numbers may differ, and some ranks have none if there are fewer
tokens than ranks. Everything about a token (noise, room with an expert, balance) follows from its position b·T + t in
the microbatch, whichever rank has it.

Under context parallelism the ranks along "cp" have different tokens of each sequence (``SequencePart``), padding among
them, which goes to no expert. The layouts above are then those of a rank's part over the ranks along "tp". What
concerns whole sequences (pairs by expert, choices for a capacity, labels, the factor of the loss) is summed or joined
over both.

Cost:   alike and addends: one gather of [B·T, D] each way, and for addends a sum of it backward.
Shapes: B sequences of a microbatch, T tokens of a whole sequence, D width, N ranks, n tokens of this rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.base.errors import UsageError
from shardwise.comm import exchange
from shardwise.comm.collectives import Group
from shardwise.comm.duals import note_move, uncompiled
from shardwise.passes.replay import DrawReplay

Layout = Literal["cut", "alike", "addends"]
"""Distribution of activations and their gradients over the ranks that share a sequence."""

Keep = Callable[[str, Callable[[], Any]], Any]
"""Function from (name, make) to the result of ``make``, which a pass computes once; a recomputation gets the first
result. The result has no gradients.
"""


def _cut() -> Layout:
    return "cut"


def _whole() -> None:
    return None


def make_anew(name: str, make: Callable[[], Any]) -> Any:
    """Return ``make()``: the ``Keep`` of a layer without an engine."""
    return make()


def _one() -> float:
    return 1.0


BESIDE_PAIRS = 4
"""Numbers of a layer's loads behind the pairs: tokens, rows sent, rows that left a host, entropy."""


class LoadSink(Protocol):
    """Interface of the sink for the loads of a layer's forward pass."""

    def add(self, layer: str, loads: Tensor) -> None:
        """Add the loads of a forward pass (``kernels.expert_choice.load_counts``): fp64 [2·E + 4]."""
        ...

    def sent(self, layer: str, rows: int, crossed: int) -> None:
        """Add the rows that left this rank in a forward pass, and those of them that left its host."""
        ...


class SequencePart(NamedTuple):
    """The tokens that this rank's input has of sequences that are cut over "cp"."""

    group: Group
    """Ranks along "cp"."""
    ranges: tuple[tuple[int, int], ...]
    """Ranges of tokens, ascending."""
    length: int
    """Number of tokens of a sequence."""
    padded: int
    """Number of tokens of a sequence with padding behind its end."""


class RoutedTokens(NamedTuple):
    """Tokens that this rank routes."""

    hidden: Tensor
    """Activations of the tokens: [n, D]."""
    place: Tensor
    """Position b·T + t of each token: int64 [n], rising."""
    sequences: int
    """Number of sequences, B."""
    length: int
    """Number of tokens of a whole sequence, T, with padding that context parallelism adds."""
    parts: tuple[int, ...]
    """Number of tokens of each rank of "tp" that shares the sequences."""
    first: int = 0
    """First of these tokens among those of the layer's input, if the input has more."""
    part: SequencePart | None = None
    """Part of the sequences that the input has; None if it has whole sequences."""

    @property
    def counted(self) -> Tensor | None:
        """Tokens that are no padding of context parallelism: bool [n]; None if all are none."""
        if self.part is None or self.part.padded == self.part.length:
            return None
        return self.place % self.length < self.part.length

    @property
    def sequence(self) -> Tensor:
        """Index b of the sequence of each token: int64 [n]."""
        return self.place.div(max(self.length, 1), rounding_mode="floor")


@dataclass
class ExpertContext:
    """Ranks, microbatch and sinks of one layer."""

    name: str = ""
    """Name of the layer in its model; empty without an engine."""
    group: Group | None = None
    """Ranks that share the tokens of a sequence; None if this rank has all tokens."""
    layout: Callable[[], Layout] = _cut
    """Function that returns how activations of the running pass lie on ``group``."""
    keep: Keep = make_anew
    """Store of the results that recomputations reuse; see ``Keep``."""
    scale: Callable[[], float | Tensor] = _one
    """Function that a backward pass calls for the factor of its microbatch's loss."""
    replay: DrawReplay | None = None
    """Position of the running microbatch, which keys the noise; None draws noise from torch's generator."""
    seed: int = 0
    """Seed of the run, for noise."""
    loads: LoadSink | None = None
    """Sink of the loads of this rank's tokens; None counts them in ``routed``."""
    routed: Tensor | None = None
    """Pairs that chose each expert in training since the last step of the bias: int64 [E]."""
    room: int | None = None
    """Largest number of pairs that an expert gets of the running pass's tokens; None is without limit."""
    part: Callable[[], SequencePart | None] = _whole
    """Function that returns the part of the sequences that the running pass's input has; None for whole ones."""

    def __deepcopy__(self, memo: Any) -> "ExpertContext":
        """Return the surroundings of a copy of the layer, such as an average of weights, which runs alone.

        Raises:
            UsageError: if ranks share its sequences.
        """
        if self.group is not None and self.group.size > 1:
            raise UsageError(
                f"copy.deepcopy(model): the ranks along tp share the tokens of {self.name}, and a copy would see its "
                "own alone; take engine.state_dict(), or copy the model before initialize()"
            )
        return ExpertContext(self.name)

    def take(self, x: Tensor) -> RoutedTokens:
        """Return the tokens of ``x`` [B, T or T/N, D] that this rank routes."""
        batch, here, width = x.shape
        rows, part = x.reshape(-1, width), self.part()
        if self.group is None or self.group.size == 1:
            place, length = _places(batch, here, part, x.device)
            return RoutedTokens(rows, place, batch, length, (batch * here,), 0, part)
        ranks, index = self.group.size, self.group.index
        if self.layout() == "cut":
            place, length = _places(batch, here, part, x.device, ranks, index)
            note_move(self.group, "own places", place, place, 0)
            return RoutedTokens(rows, place, batch, length, (batch * here,) * ranks, 0, part)
        parts = _parts(batch * here, ranks)
        start = sum(parts[:index])
        every, length = _places(batch, here, part, x.device)
        place = every[start : start + parts[index]]
        note_move(self.group, "own places", place, place, 0)
        mine = _own_rows(rows, parts, self.group, self.layout() == "addends")
        return RoutedTokens(mine, place, batch, length, parts, start, part)

    def give(self, rows: Tensor, x: Tensor) -> Tensor:
        """Return results ``rows`` [n, D] in the layout of ``x``: [B, T or T/N, D]."""
        if self.group is None or self.group.size == 1:
            return rows.view(x.shape)
        if self.layout() == "cut":
            y = rows.view(x.shape)
            note_move(self.group, "same rows", x, y, 0)
            return y
        parts = _parts(x.shape[0] * x.shape[1], self.group.size)
        return _joined(rows, parts, self.group, self.layout() == "addends").view(x.shape)

    def here(self, mask: Tensor, tokens: RoutedTokens) -> Tensor:
        """Return the entries of a mask [B, T or T/N] for this rank's tokens: [n]."""
        flat = mask.reshape(-1)
        return flat.narrow(0, tokens.first, tokens.place.numel())

    def summed(self, counts: Tensor, tokens: RoutedTokens) -> Tensor:
        """Return whole numbers, contiguous, summed in place over all ranks that share the sequences of ``tokens``."""
        if self.group is not None:
            self.group.all_reduce(counts.view(-1), f"loads of {self.name}", "control").wait()
        if tokens.part is not None:
            tokens.part.group.all_reduce(counts.view(-1), f"loads of {self.name}", "control").wait()
        return counts

    def labels_of(self, labels: Tensor | None, tokens: RoutedTokens) -> Tensor | None:
        """Return the numbers of labels [B] of whole sequences, from those of this rank's part of the sequences."""
        if labels is None or tokens.part is None:
            return labels
        whole = labels.clone(memory_format=torch.contiguous_format)
        tokens.part.group.all_reduce(whole, f"labels of {self.name}", "control").wait()
        return whole

    def scale_of(self, tokens: RoutedTokens) -> Callable[[], float | Tensor]:
        """Return the function that gives the factor of the loss of the whole sequences of ``tokens``.

        Each rank along "cp" has the loss of its own labels; the factor of the whole loss is the sum of theirs.
        """
        if tokens.part is None:
            return self.scale
        group, device, own = tokens.part.group, tokens.hidden.device, self.scale
        what = f"factors of {self.name}"

        def whole() -> Tensor:
            factor = torch.as_tensor(own(), dtype=torch.float64, device=device).reshape(1).clone()
            group.all_reduce(factor, what, "control").wait()
            return factor[0]

        return whole

    def joined(self, rows: Tensor, tokens: RoutedTokens, what: str) -> Tensor:
        """Return rows [n, ...] of the tokens of all ranks that share the sequences: [N, ...], rank by rank."""
        what = f"{what} of {self.name or 'MixtureOfExperts'}"
        if self.group is not None:
            rows = exchange.gather(rows, tokens.parts, self.group, what, "control")
        if tokens.part is not None:
            group = tokens.part.group
            rows = exchange.gather(rows, (len(rows),) * group.size, group, what, "control")
        return rows


def _places(
    batch: int,
    here: int,
    part: SequencePart | None,
    device: torch.device,
    ranks: int = 1,
    index: int = 0,
) -> tuple[Tensor, int]:
    """Return the positions of an input of ``here`` tokens of each sequence, and the tokens of a whole sequence.

    Args:
        batch: Number of sequences.
        here: Number of tokens of each.
        part: Part of the sequences that the ranks along "tp" have together; None if they have whole ones.
        device: Device of the positions.
        ranks: Number of equal pieces into which the part is cut.
        index: Index of this rank's piece.
    """
    if part is None and ranks == 1:
        return torch.arange(batch * here, device=device), here
    if part is None:
        length, at = here * ranks, torch.arange(here, device=device) + index * here
    else:
        length = part.padded
        at = torch.cat([torch.arange(start, stop) for start, stop in part.ranges])
        at = at.narrow(0, index * here, here).to(device)
    return (torch.arange(batch, device=device)[:, None] * length + at).view(-1), length


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
    return _JoinRows.apply(rows, parts, group, addends)


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, parts: Sequence[int], group: Group, addends: bool) -> Tensor:
        ctx.place = parts, group, addends
        piece = _piece(rows, parts, group).clone()
        note_move(group, "piece", rows, piece, 0)
        return piece

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        parts, group, addends = ctx.place
        if not addends:
            whole = exchange.gather(grad, parts, group, "gradients of tokens to experts")
            note_move(group, "gather", grad, whole, 0)
            return whole, None, None, None
        full = grad.new_zeros(sum(parts), *grad.shape[1:])
        _piece(full, parts, group).copy_(grad)
        note_move(group, "own rows", grad, full, 0)
        return full, None, None, None


class _JoinRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, parts: Sequence[int], group: Group, addends: bool) -> Tensor:
        ctx.place = parts, group, addends
        whole = exchange.gather(rows, parts, group, "results of experts")
        note_move(group, "gather", rows, whole, 0)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        parts, group, addends = ctx.place
        if addends:
            grad = grad.clone(memory_format=torch.contiguous_format)
            group.all_reduce(grad.view(-1), "gradients of results of experts", "activations").wait()
        piece = _piece(grad, parts, group).clone()
        note_move(group, "piece", grad, piece, 0)
        return piece, None, None, None
