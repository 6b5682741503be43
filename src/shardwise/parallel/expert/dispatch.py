"""Dispatch and combine: sends rows to the ranks that hold their experts, and one weighted sum of each back.

    hidden -> messages  ==>  arrived -> rows sorted by expert -> results -> sums  ==>  returned -> out
    [N, D]     [S, D]        [R, D]           [P, D]              [P, D]   [R, D]       [S, D]    [N, D]

A message is a (token, rank) pair: a row goes once to each rank that holds any of its experts, with its weights, and the
rank sends back the weighted sum of its experts' results. A pair is (arrived row, local expert). Both sums are gathers
by ``embedding_bag``, which writes no intermediate tensor.

If the ranks of ep are spread over hosts, with the same number on each, a row makes two hops. The first goes once to
each host that holds any of its experts, to the rank with the sender's index within its host; the second goes to the
ranks of that host that hold the experts. On the way back a host's results are summed before they leave the host.

``PassRoutes`` describe which rows a message holds. They are computed from ``index`` before any row travels: the numbers
of rows between ranks in each hop (``row_counts``, the one wait for a device), then, hop by hop, the numbers of their
experts. A recomputation reuses the PassRoutes of the first pass.

If a router has a capacity, messages may travel in padded blocks of fixed size (``row_counts.block_counts``): no host
waits. Sums have the same addends in the same order. The check that ranks are at one layer then runs on the device:
numbers of experts carry the layer's tag, and a tag of another layer makes the weights NaN.

If a rank would take more than ``rows`` pairs, all ranks cut what they send it into as many rounds as the fullest rank
needs. A round keeps nothing and runs again in backward, its messages too: routing that goes to few ranks costs time,
not memory.

If an expert's features are cut over ``etp``, the rows that arrived at its ranks are gathered, each rank works on its
features for all of them, and the results, which are addends, are summed and scattered before they return.

[Note: the same calls on every rank] A rank that received no row makes the same calls, with 0 rows, and keeps as many
tensors as any other: torch's checkpoint ends a recomputation with the last tensor that was kept, and ranks that end it
at different operations would wait for one another. ``_Combine`` keeps its tensors after its exchange, so that no
recomputation ends before the exchange.

Cost:   ``parallel.expert.cost``; half as much again in rounds. Kept for backward, except in rounds: results and weights
        of P pairs, besides what ``compute`` keeps.
Shapes: N tokens of this rank, k experts a token, D width, S messages that this rank sends in a hop, R rows that arrive
        (over ``etp`` too), P pairs.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from shardwise.base.errors import UsageError
from shardwise.comm.collectives import Group
from shardwise.comm.duals import uncompiled
from shardwise.comm.exchange import Counts, back, gather, scatter, send, share
from shardwise.kernels.grouped import stretches
from shardwise.parallel.expert.row_counts import (
    RowCounts,
    block_counts,
    even_counts,
    owner_of,
    reaches,
    row_counts,
)
from shardwise.precision.operations import running_dtypes_again

Compute = Callable[[Tensor, list[int]], Tensor]
"""Function from (rows sorted by local expert [P, D], number of rows of each expert) to results [P, D]."""


@dataclass(frozen=True)
class RowSums:
    """Sums of rows: sum b is over ``rows[starts[b] : starts[b + 1]]``."""

    rows: Tensor
    starts: Tensor
    has_rest: bool = False
    """True if the last sum collects rows that belong to none."""

    def of(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the sums of these rows of ``values`` [n, D], times ``weights`` if given: [sums, D]."""
        number = self.starts.shape[0] - self.has_rest
        if not number or not self.rows.shape[0]:
            return values.new_zeros(number, values.shape[1])
        return torch.embedding_bag(
            values.contiguous(), self.rows, self.starts, mode=0, per_sample_weights=weights
        )[0][:number]


@dataclass(frozen=True)
class RowRoutes:
    """Routes of rows in one exchange."""

    group: Group
    tokens: Tensor
    """Row of each message: [S]."""
    messages: RowSums | None
    """Messages of each row; None if each row has one, in order."""
    counts: Counts
    """Number of messages from rank to rank of ``group``."""

    def go(self, rows: Tensor, what: str) -> Tensor:
        """Send rows as messages to the ranks: [N, ...] -> [R, ...]."""
        leaving = rows
        if self.messages is not None:
            filled = rows if rows.shape[0] else rows.new_zeros(1, *rows.shape[1:])
            leaving = filled.index_select(0, self.tokens)
        return send(leaving, self.counts, self.group, what)

    def back(self, rows: Tensor, what: str) -> Tensor:
        """Return messages and sum them by row: [R, ...] -> [N, ...]. The reverse of ``go``."""
        returned = back(rows, self.counts, self.group, what)
        return returned if self.messages is None else self.messages.of(returned)

    def leaving(self, places: Sequence[int]) -> int:
        """Return the number of messages to ranks in other places.

        ``places`` has one entry for each rank of the group.
        """
        here = self.group.index
        return sum(self.counts[here][rank] for rank, place in enumerate(places) if place != places[here])


@dataclass(frozen=True)
class RoundRoutes:
    """Routes of the rows that travel together."""

    hops: tuple[RowRoutes, ...]
    etp: Group
    name: str
    """Name of the layer in errors and traces."""
    parts: list[int]
    """Number of rows that arrived at each rank of ``etp``."""
    rows: Tensor
    """Arrived row of each pair, in the order of the experts: [P]."""
    slots: Tensor
    """Index of each pair in the flattened arrived weights [R, k]; R·k for a pair of padding: [P]."""
    pairs: RowSums
    """Pairs of each arrived row."""
    experts: list[int]
    """Number of pairs of each local expert."""
    alike: Tensor | None = None
    """For padded blocks: 0, or NaN if some messages came from another layer. Otherwise None."""

    def go(self, rows: Tensor, what: str) -> Tensor:
        """Send rows of tokens to the ranks of their experts: [N, ...] -> [R, ...]."""
        what = f"{what} of {self.name}"
        for hop in self.hops:
            rows = hop.go(rows, what)
        return gather(rows, self.parts, self.etp, what)

    def back(self, rows: Tensor, what: str) -> Tensor:
        """Return rows and sum them by token: [R, ...] -> [N, ...]. The reverse of ``go``."""
        what = f"{what} of {self.name}"
        rows = scatter(rows, self.parts, self.etp, what)
        for hop in reversed(self.hops):
            rows = hop.back(rows, what)
        return rows


@dataclass(frozen=True)
class PassRoutes:
    """Routes of the rows of one pass."""

    rounds: tuple[RoundRoutes, ...]

    @property
    def rows_sent(self) -> int:
        """Number of rows that leave this rank.

        A token counts once for every other rank that holds any of its experts. With two hops, a token counts once for
        every other host, and a row that this rank passes on counts once for every other rank of its host.
        """
        return sum(hop.leaving(range(hop.group.size)) for each in self.rounds for hop in each.hops)

    @property
    def rows_crossed(self) -> int:
        """Number of those rows that leave this host."""
        return sum(hop.leaving(hop.group.hosts) for each in self.rounds for hop in each.hops)


class Dispatcher:
    """Dispatcher of the rows of a layer, whose E experts are spread evenly over ``ep``, in order, and cut over ``etp``.

    Args:
        ep: ranks over which experts are spread.
        etp: ranks over which the features of an expert are cut.
        experts: number of experts, E.
        rows: largest number of pairs that a rank takes at once; None is without limit. It should exceed k for each rank
            that sends, because a token's pairs stay together.
        name: name of the layer in errors and traces.
        levels: the groups of each hop, as ``World.levels`` returns them for ``ep``; empty means one hop.
        counts_rows: False if tensors have no numbers, so that rows are assumed to be spread evenly.
    """

    def __init__(
        self,
        ep: Group,
        etp: Group,
        experts: int,
        rows: int | None = None,
        name: str = "experts",
        levels: Sequence[Group] = (),
        counts_rows: bool = True,
    ):
        assert experts % ep.size == 0, f"{experts} experts cannot be spread evenly over {ep.size} ranks"
        self.ep = ep
        self.etp = etp
        self.levels = tuple(levels) or (ep,)
        self.experts = experts
        self.rows = rows
        self.name = name
        self._counts_rows = counts_rows
        self._largest: tuple[int, int] | None = None
        """Largest number of tokens of a rank, and largest room of an expert for them, for which blocks are made."""

    @uncompiled
    def __call__(
        self,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
        compute: Compute,
        routes: PassRoutes | None = None,
    ) -> Tensor:
        """Return, for each token, the sum over j of ``weights[j]`` times expert ``index[j]`` of ``hidden``: [N, D].

        All ranks of ``ep`` and ``etp`` call this together, whatever their numbers of tokens. In rounds ``compute`` runs
        again in backward.

        Args:
            hidden: tokens, [N, D].
            index: experts of each token, [N, k]; -1 adds nothing.
            weights: weights of these experts, [N, k].
            compute: computes rows that are sorted by expert; with ``etp`` its result is this rank's addend.
            routes: result of an earlier ``self.routes(index)``; None computes the routes.
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
    def routes(self, index: Tensor, room: int | None = None) -> PassRoutes:
        """Return the routes of rows with the experts ``index`` [N, k].

        All ranks of ``ep`` and ``etp`` call this together.

        Args:
            index: experts of each token, [N, k].
            room: largest number of pairs that an expert gets of these rows, for padded blocks; None counts rows.

        Raises:
            UsageError: if there are more rows than the blocks were made for.
        """
        if room is not None:
            return PassRoutes((self._round(index, self._blocks(index, room)),))
        [counts] = self._counts([index])
        rounds = self._number_of_rounds(counts.fullest, index.shape[1])
        if rounds == 1:
            return PassRoutes((self._round(index, counts),))
        ep = self.ep
        owner = owner_of(index, self.experts // ep.size, ep.size)
        held = index.new_zeros(index.shape[0], ep.size + 1).scatter_add_(1, owner, torch.ones_like(owner))
        held[:, ep.size] = 0  # pairs of each (token, rank)
        before = held.cumsum(0) - held
        turn = (before * rounds // held.sum(0).clamp_min(1)).gather(1, owner)
        parts = [torch.where(turn == each, index, -1) for each in range(rounds)]
        return PassRoutes(tuple(map(self._round, parts, self._counts(parts))))

    def _counts(self, choices: Sequence[Tensor]) -> list[RowCounts]:
        if not self._counts_rows:
            rows, top_k = choices[0].shape
            even = even_counts(rows, len(choices), top_k, self.experts, self.levels, self.ep, self.etp)
            return [even] * len(choices)
        return row_counts(choices, self.experts, self.levels, self.ep, self.etp, self.name)

    def _blocks(self, index: Tensor, room: int) -> RowCounts:
        """Return the sizes of blocks for the largest rank of the first pass."""
        tokens = index.shape[0]
        if self.ep.size == self.etp.size == 1:
            return block_counts(tokens, room, self.experts, self.levels, self.etp)
        if self._largest is None and not self._counts_rows:
            self._largest = tokens, room
        if self._largest is None:
            what = f"sizes of {self.name}"
            sizes = share(share(index.new_tensor([tokens, room]), self.ep, what), self.etp, what)
            largest, roomiest = sizes.view(-1, 2).amax(0).tolist()
            self._largest = largest, roomiest
        largest, roomiest = self._largest
        if tokens > largest or room > roomiest:
            raise UsageError(
                f"{self.name}: a microbatch of {tokens} tokens here, of which an expert may get {room}; the blocks of "
                f"experts.exchange: blocks were made for {largest} and {roomiest}, the most of any rank in the first "
                "pass. Give all microbatches one shape, or set experts.exchange: counted"
            )
        return block_counts(largest, roomiest, self.experts, self.levels, self.etp)

    def _number_of_rounds(self, fullest: int, top_k: int) -> int:
        """Return the number of rounds in which the fullest rank takes no more than ``rows`` pairs."""
        if self.rows is None or fullest <= self.rows:
            return 1
        # A rank cuts between tokens, so that its part of a round may have k pairs more than the mean.
        return -(-fullest // max(self.rows - self.ep.size * self.etp.size * top_k, 1))

    def _round(self, index: Tensor, counts: RowCounts) -> RoundRoutes:
        """Return the round of the pairs in ``index`` [N, k]."""
        etp, name, local, top_k = self.etp, self.name, self.experts, index.shape[1]
        hops, alike = [], None
        fills = counts.is_bound and self.ep.size * etp.size > 1
        if fills:
            alike = torch.zeros((), device=index.device)
        for group, between in zip(self.levels, counts.hops, strict=True):
            hop, index = self._hop(index, group, local, between, fills)
            if alike is not None:
                index, layers = _told(index)
                alike = alike.masked_fill((layers != self._tag).any(), torch.nan)
            hops.append(hop)
            local //= group.size
        chosen = gather(index.to(torch.int32), counts.parts, etp, f"numbers of {name}", "control")
        chosen = chosen.flatten().long()
        lives = chosen >= 0
        number = sum(counts.experts)
        slots = torch.where(lives, chosen, local).argsort(stable=True)
        place = torch.empty_like(chosen)
        if counts.is_bound:
            each, expert = counts.experts[0], torch.where(lives, chosen, local)[slots]  # rising
            behind = torch.arange(len(slots), device=slots.device) - torch.searchsorted(expert, expert)
            place[slots] = torch.where(expert < local, expert * each + behind, number)
            slots = _holders(place, number, nobody=len(chosen))
            place.clamp_(max=max(number - 1, 0))
        else:
            slots = slots[:number]
            place[slots] = torch.arange(number, device=slots.device)
        return RoundRoutes(
            tuple(hops),
            etp,
            name,
            parts=counts.parts,
            rows=slots.div(top_k, rounding_mode="floor").clamp_(max=max(len(chosen) // top_k - 1, 0)),
            slots=slots,
            pairs=_sums(place, lives.view(-1, top_k), min(number, len(chosen)), counts.is_bound),
            experts=counts.experts,
            alike=alike,
        )

    @property
    def _tag(self) -> int:
        """Number that distinguishes this layer from others."""
        return zlib.crc32(self.name.encode()) & _MOST_TAGS

    def _hop(
        self, index: Tensor, group: Group, experts: int, counts: Counts, fills: bool
    ) -> tuple[RowRoutes, Tensor]:
        """Return the hop of rows with the experts ``index`` [N, k], of ``experts`` that lie on ``group``.

        The second result has the experts of the arrived rows, counted from the first of this rank: [R, k], -1 for
        experts of other ranks. In padded blocks it includes the layer's tag.
        """
        size, local, count = group.size, experts // group.size, index.shape[0]
        owner = owner_of(index, local, size)
        goes = reaches(owner, size)
        if size == self.etp.size == 1:  # no exchange: rows keep their order, those without experts too
            goes, counts = torch.ones_like(goes), [[count]]
        messages, most = (sum(counts[group.index]),) * 2
        if fills:
            block, ranks = counts[0][0], torch.arange(size, device=index.device)
            message = torch.where(goes.T, ranks[:, None] * block + goes.T.cumsum(1) - 1, messages)
            rows = torch.arange(count, device=index.device).repeat(size)
            tokens = _holders(message.flatten(), messages, nobody=count, values=rows)
            rank = ranks.repeat_interleave(block, output_size=messages)
            index, owner = (
                torch.cat([each, each.new_full((1, each.shape[1]), nobody)])
                for each, nobody in ((index, -1), (owner, size))
            )
            message, most = message.T.clamp(max=max(messages - 1, 0)), min(messages, goes.numel())
        else:
            rank, tokens = goes.T.nonzero_static(size=messages).unbind(1)
            message = goes.T.flatten().cumsum(0).view(size, count).T - 1  # of each (row, rank): [N, size]
        here = torch.where(owner[tokens] == rank[:, None], index[tokens] - rank[:, None] * local, -1)
        if fills:
            here, tokens = here + 1 + (self._tag << _TAG_FROM), tokens.clamp(max=max(count - 1, 0))
        arrived = send(here.to(torch.int32), counts, group, f"numbers of {self.name}", "control")
        sums = None
        if size > 1 or messages < count or fills:
            sums = _sums(message.flatten(), goes, most, fills)
        return RowRoutes(group, tokens, sums, counts), arrived.long()


_TAG_FROM = 15
"""Lowest bit of the layer's tag in an expert's number; both fit in 31 bits."""
_MOST_TAGS = (1 << 16) - 1


def _told(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts, -1 for none, and the tags of their layers."""
    return (numbers & ((1 << _TAG_FROM) - 1)) - 1, numbers >> _TAG_FROM


def _holders(place: Tensor, places: int, nobody: int, values: Tensor | None = None) -> Tensor:
    """Return the index (or the ``values``) of the element of ``place`` that has each of ``places``: [n] -> [places].

    An element without a place has the number ``places``; a place without an element gets ``nobody``.
    """
    found = place.new_full((places + 1,), nobody)
    found[place] = torch.arange(len(place), device=place.device) if values is None else values
    return found[:places]


def _sums(place: Tensor, marks: Tensor, most: int, has_rest: bool) -> RowSums:
    """Return the sums whose row r adds the elements of ``place`` [n·m] where ``marks`` [n, m] is true in row r.

    There are ``most`` such elements, or at most so many if ``has_rest``: the host need not ask the device.
    """
    marked = marks.flatten().nonzero_static(size=most, fill_value=0)[:, 0]
    sizes = marks.sum(1)
    ends = sizes.cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends]) if has_rest else ends - sizes
    return RowSums(place[marked], starts, has_rest)


def _carried(hidden: Tensor, weights: Tensor, compute: Compute, round: RoundRoutes) -> Tensor:
    """Return, for each token, the weighted sum of the results of the experts in this round: [N, D]."""
    rows, pair_weights = _Dispatch.apply(hidden, weights, round)
    out: Tensor = _Combine.apply(compute(rows, round.experts), pair_weights, hidden.dtype, round)
    return out


class _Dispatch(torch.autograd.Function):
    """Autograd function that sends rows and weights to the experts; backward returns and sums their gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, round: RoundRoutes) -> tuple[Tensor, Tensor]:
        ctx.round, ctx.top_k = round, weights.shape[1]
        arrived, arrived_weights = round.go(hidden, "rows"), round.go(weights, "weights")
        slots = arrived_weights.flatten()
        if round.pairs.has_rest:
            slots = torch.cat([slots, slots.new_zeros(1)])  # the weight of padding
        if round.alike is not None:
            slots = slots + round.alike.to(slots.dtype)
        return arrived.index_select(0, round.rows), slots.index_select(0, round.slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, d_pairs: Tensor) -> tuple[Any, ...]:
        round: RoundRoutes = ctx.round
        d_arrived = round.pairs.of(d_rows)
        d_hidden = round.back(d_arrived, "gradients")
        slots = d_arrived.shape[0] * ctx.top_k
        d_weights = d_pairs.new_zeros(slots + round.pairs.has_rest).index_copy_(0, round.slots, d_pairs)
        d_weights = d_weights[:slots].view(-1, ctx.top_k)
        return d_hidden, round.back(d_weights, "gradients of weights"), None


class _Combine(torch.autograd.Function):
    """Autograd function that returns the weighted sums of each token's results: [N, D].

    [Note: the same calls on every rank] in the module's docstring explains why tensors are kept after the exchange.
    """

    @staticmethod
    def forward(ctx: Any, results: Tensor, weights: Tensor, dtype: torch.dtype, round: RoundRoutes) -> Tensor:
        ctx.round = round
        ctx.save_for_backward(results, weights)
        of_pairs = weights.index_select(0, round.pairs.rows).to(results.dtype)
        return round.back(round.pairs.of(results, of_pairs).to(dtype), "results")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        results, weights = ctx.saved_tensors
        round: RoundRoutes = ctx.round
        arrived = round.go(grad, "gradients of results")
        arrived, own = arrived.to(results.dtype), weights.to(results.dtype)[:, None]
        d_results, d_weights = torch.empty_like(results), torch.empty_like(weights)
        for place in stretches(results):
            part = torch.index_select(arrived, 0, round.rows[place], out=d_results[place])
            # Gradients of a router are as precise as its weights, which may be wider than the rows.
            d_weights[place] = torch.linalg.vecdot(part.to(weights.dtype), results[place].to(weights.dtype))
            part.mul_(own[place])
        return d_results, d_weights, None, None
