"""Dispatch and combine: rows to the ranks that hold their experts, and one weighted sum of each back.

    hidden -> messages  ==>  arrived -> rows sorted by expert -> results -> sums  ==>  returned -> out
    [N, D]     [S, D]        [R, D]           [P, D]              [P, D]   [R, D]       [S, D]    [N, D]

A message is a (token, rank) pair: a row goes once to each rank that holds any of its experts, with its weights, and the
rank sends back the sum of its experts' results, weighted. A pair is (arrived row, local expert). Both sums are gathers
by ``embedding_bag``, which writes nothing in between.

Which message holds what is a ``Routes``, found from ``index`` alone and before any row travels: how many rows go from
whom to whom (``comm.exchange.share``), then the numbers of their experts. A pass that runs again takes the Routes of
the first.

Where a rank would take more than ``rows`` pairs, all ranks cut what they send it into as many rounds as the fullest
needs. A round keeps nothing and runs again in backward, its messages too: routing that goes to few ranks costs time,
not memory.

Where an expert's features are cut over ``etp``, the rows that arrived at its ranks are gathered there, each works on
its features for all of them, and what comes out, addends now, is summed and scattered before it returns.

[Note: the same calls on every rank] A rank to which no row came makes the same calls, with 0 rows, and keeps as many
tensors as any other: torch's checkpoint ends a recomputation with the last tensor that was kept, and ranks that end it
at different places would wait for one another. ``_Combine`` keeps its tensors after its exchange, so that no
recomputation ends before.

Cost:   ``parallel.expert.cost``; half as much again in rounds. Kept for backward, but in rounds: results and weights
        of P pairs, besides what ``compute`` keeps.
Shapes: N tokens of this rank, k experts a token, D width, S messages that this rank sends, R rows that arrive (over
        ``etp`` too), P pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from shardwise.comm.collectives import Group
from shardwise.comm.duals import uncompiled
from shardwise.comm.exchange import Counts, back, gather, scatter, send, share
from shardwise.kernels.grouped import stretches
from shardwise.precision.operations import running_dtypes_again

Compute = Callable[[Tensor, list[int]], Tensor]
"""(rows sorted by local expert [P, D], how many rows each expert has) -> results [P, D]."""


@dataclass(frozen=True)
class RowSums:
    """Which rows are summed to one: ``rows[starts[b] : starts[b + 1]]`` make sum b."""

    rows: Tensor
    starts: Tensor

    def of(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """The sums of these rows of ``values`` [n, D], each times its weight where ``weights`` are given: [sums, D]."""
        number = self.starts.shape[0]
        if not number or not self.rows.shape[0]:
            return values.new_zeros(number, values.shape[1])
        return torch.embedding_bag(
            values.contiguous(), self.rows, self.starts, mode=0, per_sample_weights=weights
        )[0]


@dataclass(frozen=True)
class Round:
    """Where rows go that travel together."""

    ep: Group
    etp: Group
    name: str
    """The layer's in errors and traces."""
    tokens: Tensor
    """Of each message, its token: [S]."""
    messages: RowSums | None
    """Of each token, its messages; None where each has one, in order."""
    counts: Counts
    """Messages from rank to rank of ``ep``."""
    parts: list[int]
    """Rows that arrived at each rank of ``etp``."""
    rows: Tensor
    """Of each pair, its arrived row, in the order of the experts: [P]."""
    slots: Tensor
    """Of each pair, its place among the arrived weights [R, k] one after another: [P]."""
    pairs: RowSums
    """Of each arrived row, its pairs."""
    experts: list[int]
    """Pairs of each local expert."""

    def select(self, rows: Tensor) -> Tensor:
        """Of each message the row of its token: [N, ...] -> [S, ...]."""
        return rows if self.messages is None else rows.index_select(0, self.tokens)

    def join(self, returned: Tensor) -> Tensor:
        """Of each token the sum of its messages: [S, ...] -> [N, ...]. ``select`` backwards."""
        return returned if self.messages is None else self.messages.of(returned)

    def go(self, rows: Tensor, what: str) -> Tensor:
        """Messages to the ranks of their experts: [S, ...] -> [R, ...]."""
        what = f"{what} of {self.name}"
        return gather(send(rows, self.counts, self.ep, what), self.parts, self.etp, what)

    def back(self, rows: Tensor, what: str) -> Tensor:
        """What was made of the rows that arrived, to where these came from: [R, ...] -> [S, ...]. ``go`` backwards."""
        what = f"{what} of {self.name}"
        return back(scatter(rows, self.parts, self.etp, what), self.counts, self.ep, what)


@dataclass(frozen=True)
class Routes:
    """Where the rows of one pass go."""

    rounds: tuple[Round, ...]

    @property
    def rows_sent(self) -> int:
        """Rows that leave this rank: of each token one for every other rank among those of its experts."""
        return sum(
            count
            for each in self.rounds
            for rank, count in enumerate(each.counts[each.ep.index])
            if rank != each.ep.index
        )


class Dispatcher:
    """Carries rows to the experts of a layer: E/ep of them on each rank of ``ep``, in order, features cut over ``etp``.

    ``rows`` bounds the pairs that a rank takes at once; None: there is no bound. It should exceed k for each rank that
    sends, for a token's pairs stay together. ``name`` is the layer's in errors and traces.
    """

    def __init__(self, ep: Group, etp: Group, experts: int, rows: int | None = None, name: str = "experts"):
        assert experts % ep.size == 0, f"{experts} experts cannot be spread evenly over {ep.size} ranks"
        self.ep = ep
        self.etp = etp
        self.experts = experts
        self.rows = rows
        self.name = name

    @uncompiled
    def __call__(
        self, hidden: Tensor, index: Tensor, weights: Tensor, compute: Compute, routes: Routes | None = None
    ) -> Tensor:
        """Of each token the sum over j of ``weights[j]`` times expert ``index[j]`` of ``hidden``: [N, D].

        An ``index`` of -1 [N, k] counts nowhere. ``routes``: what ``self.routes(index)`` returned before.
        All ranks of ``ep`` and ``etp`` call this together, however many tokens they have. With ``etp``, what
        ``compute`` returns is this rank's addend. In rounds ``compute`` runs again in backward.
        """
        first, *rest = (routes or self.routes(index)).rounds
        if not rest:
            return _carried(hidden, weights, compute, first)
        again = partial(checkpoint, _carried, use_reentrant=False, context_fn=running_dtypes_again)
        out: Tensor = again(hidden, weights, compute, first)
        for each in rest:
            out = out + again(hidden, weights, compute, each)
        return out

    @torch.no_grad()
    def routes(self, index: Tensor) -> Routes:
        """Where rows with the experts ``index`` [N, k] go. All ranks of ``ep`` and ``etp`` call this together."""
        ep, local = self.ep, self.experts // self.ep.size
        owner = torch.where(index < 0, ep.size, index.div(local, rounding_mode="floor"))  # ep.size: nobody
        held = index.new_zeros(index.shape[0], ep.size + 1).scatter_add_(1, owner, torch.ones_like(owner))
        held = held[:, : ep.size]  # pairs of each (token, rank)
        goes = held > 0
        rounds = self._number_of_rounds(held, index.shape[1])
        if rounds == 1:
            return Routes(
                (self._round(index, owner, goes | (ep.size == 1)),)
            )  # on one rank rows stay as they lie
        before = held.cumsum(0) - held
        turn = before * rounds // held.sum(0).clamp_min(1)
        return Routes(tuple(self._round(index, owner, goes & (turn == each)) for each in range(rounds)))

    def _number_of_rounds(self, held: Tensor, top_k: int) -> int:
        """In how many the fullest rank takes no more than ``rows`` pairs; the same on all ranks."""
        if self.rows is None:
            return 1
        what = f"counts of {self.name}"
        all_pairs = share(share(held.sum(0)[:, None], self.ep, what), self.etp, what)  # [etp, from, to, 1]
        fullest = int(all_pairs.sum((0, 1)).max())
        if fullest <= self.rows:
            return 1
        # A rank cuts between tokens, so that its part of a round may have k pairs more than the mean.
        return -(-fullest // max(self.rows - self.ep.size * self.etp.size * top_k, 1))

    def _round(self, index: Tensor, owner: Tensor, goes: Tensor) -> Round:
        """Of the messages ``goes`` [N, ep], which (token, rank) pairs are marked."""
        ep, etp, name, local = self.ep, self.etp, self.name, self.experts // self.ep.size
        count, top_k = index.shape
        rank, tokens = goes.T.nonzero(as_tuple=True)
        counts = share(goes.sum(0)[:, None], ep, f"counts of {name}")[..., 0].tolist()
        here = torch.where(owner[tokens] == rank[:, None], index[tokens] - rank[:, None] * local, -1)
        arrived = send(here.to(torch.int32), counts, ep, f"numbers of {name}", "control")
        parts = share(index.new_tensor([arrived.shape[0]]), etp, f"counts of {name}").flatten().tolist()
        chosen = gather(arrived, parts, etp, f"numbers of {name}", "control").flatten().long()
        lives = chosen >= 0
        experts = torch.bincount(chosen[lives], minlength=local).tolist()
        assert len(experts) == local, f"{name}: a router chose an expert beyond the {self.experts} there are"
        slots = torch.where(lives, chosen, local).argsort(stable=True)[: sum(experts)]
        place = torch.empty_like(chosen)
        place[slots] = torch.arange(slots.shape[0], device=slots.device)
        message = goes.T.flatten().cumsum(0).view(ep.size, count).T - 1  # of each (token, rank): [N, ep]
        return Round(
            ep,
            etp,
            name,
            tokens=tokens,
            messages=None if goes.all() and ep.size == 1 else RowSums(message[goes], _starts(goes.sum(1))),
            counts=counts,
            parts=parts,
            rows=slots.div(top_k, rounding_mode="floor"),
            slots=slots,
            pairs=RowSums(place[lives], _starts(lives.view(-1, top_k).sum(1))),
            experts=experts,
        )


def _carried(hidden: Tensor, weights: Tensor, compute: Compute, round: Round) -> Tensor:
    """Of each token the weighted sum of the results of those experts that this round goes to: [N, D]."""
    rows, pair_weights = _Dispatch.apply(hidden, weights, round)
    results = compute(rows, round.experts)
    returned = _Combine.apply(results, pair_weights, hidden.dtype, round)
    out: Tensor = _SumMessages.apply(returned, round)
    return out


def _starts(sizes: Tensor) -> Tensor:
    """Where each of the parts begins that lie one after another."""
    return sizes.cumsum(0) - sizes


class _Dispatch(torch.autograd.Function):
    """Rows and weights of the pairs, sorted by expert; their gradients return and are summed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, round: Round) -> tuple[Tensor, Tensor]:
        ctx.round, ctx.top_k = round, weights.shape[1]
        arrived = round.go(round.select(hidden), "rows")
        arrived_weights = round.go(round.select(weights), "weights")
        return arrived.index_select(0, round.rows), arrived_weights.flatten().index_select(0, round.slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, d_pairs: Tensor) -> tuple[Any, ...]:
        round: Round = ctx.round
        d_arrived = round.pairs.of(d_rows)
        d_hidden = round.join(round.back(d_arrived, "gradients"))
        d_weights = d_pairs.new_zeros(d_arrived.shape[0], ctx.top_k)
        d_weights.view(-1).index_copy_(0, round.slots, d_pairs)
        return d_hidden, round.join(round.back(d_weights, "gradients of weights")), None


class _Combine(torch.autograd.Function):
    """Weighted sums of each arrived row's results, returned: [S, D]. [Note: the same calls on every rank]"""

    @staticmethod
    def forward(ctx: Any, results: Tensor, weights: Tensor, dtype: torch.dtype, round: Round) -> Tensor:
        ctx.round = round
        ctx.save_for_backward(results, weights)
        of_pairs = weights.index_select(0, round.pairs.rows).to(results.dtype)
        return round.back(round.pairs.of(results, of_pairs).to(dtype), "results")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        results, weights = ctx.saved_tensors
        round: Round = ctx.round
        arrived = round.go(grad, "gradients of results")
        arrived, own = arrived.to(results.dtype), weights.to(results.dtype)[:, None]
        d_results, d_weights = torch.empty_like(results), torch.empty_like(weights)
        for place in stretches(results):
            part = torch.index_select(arrived, 0, round.rows[place], out=d_results[place])
            # Gradients of a router are as precise as its weights, which may be wider than the rows.
            d_weights[place] = torch.linalg.vecdot(part.to(weights.dtype), results[place].to(weights.dtype))
            part.mul_(own[place])
        return d_results, d_weights, None, None


class _SumMessages(torch.autograd.Function):
    """Of each token the sum of what came back: [S, D] -> [N, D]."""

    @staticmethod
    def forward(ctx: Any, returned: Tensor, round: Round) -> Tensor:
        ctx.round = round
        return round.join(returned)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.round.select(grad), None
