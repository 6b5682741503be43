"""Dispatch and combine: rows to the ranks that hold their experts, and one weighted sum of each back.

    hidden -> messages  ==>  arrived -> rows sorted by expert -> results -> sums  ==>  returned -> out
    [N, D]     [S, D]        [R, D]           [P, D]              [P, D]   [R, D]       [S, D]    [N, D]

A message is a (token, rank) pair: a row goes once to each rank that holds any of its experts, with its weights, and the
rank sends back the sum of its experts' results, weighted. A pair is (arrived row, local expert). Both sums are gathers
by ``embedding_bag``, which writes nothing in between.

Which message holds what is a ``Routes``, found from ``index`` alone and before any row travels: how many rows go from
whom to whom (``comm.exchange.share``), then the numbers of their experts. A pass that runs again takes the Routes of
the first.

Where an expert's features are cut over ``etp``, the rows that arrived at its ranks are gathered there, each works on
its features for all of them, and what comes out, addends now, is summed and scattered before it returns.

[Note: the same calls on every rank] A rank to which no row came makes the same calls, with 0 rows, and keeps as many
tensors as any other: torch's checkpoint ends a recomputation with the last tensor that was kept, and ranks that end it
at different places would wait for one another. ``_Combine`` keeps its tensors after its exchange, so that no
recomputation ends before.

Cost:   ``parallel.expert.cost``. Kept for backward: results and weights of P pairs, besides what ``compute`` keeps.
Shapes: N tokens of this rank, k experts a token, D width, S messages that this rank sends, R rows that arrive (over
        ``etp`` too), P pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.comm.collectives import Group
from shardwise.comm.duals import uncompiled
from shardwise.comm.exchange import Counts, back, gather, scatter, send, share

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
class Routes:
    """Where the rows of one pass go, found from ``index`` alone."""

    ep: Group
    etp: Group
    name: str
    """The layer's in errors and traces."""
    tokens: Tensor
    """Of each message, its token: [S]."""
    messages: RowSums
    """Of each token, its messages."""
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

    @property
    def rows_sent(self) -> int:
        """Rows that leave this rank: of each token one for every other rank among those of its experts."""
        counts = self.counts[self.ep.index]
        return sum(counts) - counts[self.ep.index]

    def select(self, rows: Tensor) -> Tensor:
        """Of each message the row of its token: [N, ...] -> [S, ...]."""
        return rows if self.ep.size == 1 else rows.index_select(0, self.tokens)

    def join(self, returned: Tensor) -> Tensor:
        """Of each token the sum of its messages: [S, ...] -> [N, ...]. ``select`` backwards."""
        return returned if self.ep.size == 1 else self.messages.of(returned)

    def go(self, rows: Tensor, what: str) -> Tensor:
        """Messages to the ranks of their experts: [S, ...] -> [R, ...]."""
        what = f"{what} of {self.name}"
        return gather(send(rows, self.counts, self.ep, what), self.parts, self.etp, what)

    def back(self, rows: Tensor, what: str) -> Tensor:
        """What was made of the rows that arrived, to where these came from: [R, ...] -> [S, ...]. ``go`` backwards."""
        what = f"{what} of {self.name}"
        return back(scatter(rows, self.parts, self.etp, what), self.counts, self.ep, what)


class Dispatcher:
    """Carries rows to the experts of a layer: E/ep of them on each rank of ``ep``, in order, features cut over ``etp``.

    ``name`` is the layer's in errors and traces.
    """

    def __init__(self, ep: Group, etp: Group, experts: int, name: str = "experts"):
        assert experts % ep.size == 0, f"{experts} experts cannot be spread evenly over {ep.size} ranks"
        self.ep = ep
        self.etp = etp
        self.experts = experts
        self.name = name

    @uncompiled
    def __call__(
        self, hidden: Tensor, index: Tensor, weights: Tensor, compute: Compute, routes: Routes | None = None
    ) -> Tensor:
        """Of each token the sum over j of ``weights[j]`` times expert ``index[j]`` of ``hidden``: [N, D].

        An ``index`` of -1 [N, k] counts nowhere. ``routes``: what ``self.routes(index)`` returned before.
        All ranks of ``ep`` and ``etp`` call this together, however many tokens they have. With ``etp``, what
        ``compute`` returns is this rank's addend.
        """
        if routes is None:
            routes = self.routes(index)
        rows, pair_weights = _Dispatch.apply(hidden, weights, routes)
        results = compute(rows, routes.experts)
        returned = _Combine.apply(results, pair_weights, hidden.dtype, routes)
        out: Tensor = _SumMessages.apply(returned, routes)
        return out

    @torch.no_grad()
    def routes(self, index: Tensor) -> Routes:
        """Where rows with the experts ``index`` [N, k] go. All ranks of ``ep`` and ``etp`` call this together."""
        ep, etp, name, local = self.ep, self.etp, self.name, self.experts // self.ep.size
        count, top_k = index.shape
        owner = torch.where(index < 0, ep.size, index.div(local, rounding_mode="floor"))
        goes = torch.zeros(count, ep.size + 1, dtype=torch.bool, device=index.device)
        goes = goes.scatter_(1, owner, True)[:, : ep.size]
        if ep.size == 1:
            goes.fill_(True)  # the rows stay as they lie
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
        return Routes(
            ep,
            etp,
            name,
            tokens=tokens,
            messages=RowSums(message[goes], _starts(goes.sum(1))),
            counts=counts,
            parts=parts,
            rows=slots.div(top_k, rounding_mode="floor"),
            slots=slots,
            pairs=RowSums(place[lives], _starts(lives.view(-1, top_k).sum(1))),
            experts=experts,
        )


def _starts(sizes: Tensor) -> Tensor:
    """Where each of the parts begins that lie one after another."""
    return sizes.cumsum(0) - sizes


class _Dispatch(torch.autograd.Function):
    """Rows and weights of the pairs, sorted by expert; their gradients return and are summed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, routes: Routes) -> tuple[Tensor, Tensor]:
        ctx.routes, ctx.top_k = routes, weights.shape[1]
        arrived = routes.go(routes.select(hidden), "rows")
        arrived_weights = routes.go(routes.select(weights), "weights")
        return arrived.index_select(0, routes.rows), arrived_weights.flatten().index_select(0, routes.slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, d_pairs: Tensor) -> tuple[Any, ...]:
        routes: Routes = ctx.routes
        d_arrived = routes.pairs.of(d_rows)
        d_hidden = routes.join(routes.back(d_arrived, "gradients"))
        d_weights = d_pairs.new_zeros(d_arrived.shape[0], ctx.top_k)
        d_weights.view(-1).index_copy_(0, routes.slots, d_pairs)
        return d_hidden, routes.join(routes.back(d_weights, "gradients of weights")), None


class _Combine(torch.autograd.Function):
    """Weighted sums of each arrived row's results, returned: [S, D]. [Note: the same calls on every rank]"""

    @staticmethod
    def forward(ctx: Any, results: Tensor, weights: Tensor, dtype: torch.dtype, routes: Routes) -> Tensor:
        ctx.routes = routes
        ctx.save_for_backward(results, weights)
        of_pairs = weights.index_select(0, routes.pairs.rows).to(results.dtype)
        return routes.back(routes.pairs.of(results, of_pairs).to(dtype), "results")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        results, weights = ctx.saved_tensors
        routes: Routes = ctx.routes
        arrived = routes.go(grad, "gradients of results")
        d_results = arrived.to(results.dtype).index_select(0, routes.rows)
        d_weights = torch.linalg.vecdot(d_results, results).to(weights.dtype)
        return d_results.mul_(weights[:, None]), d_weights, None, None


class _SumMessages(torch.autograd.Function):
    """Of each token the sum of what came back: [S, D] -> [N, D]."""

    @staticmethod
    def forward(ctx: Any, returned: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return routes.join(returned)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.routes.select(grad), None
