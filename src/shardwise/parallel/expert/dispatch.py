"""Dispatch and combine: sends rows to the ranks that hold their experts, and one weighted sum of each back.

    hidden -> messages  ==>  arrived -> rows sorted by expert -> results -> sums  ==>  returned -> out
    [N, D]     [S, B]        [R, B]           [P, D]              [P, D]   [R, D]       [S, D]    [N, D]

A message is a (token, rank) pair: a row goes once to each rank that holds any of its experts, and the rank sends back
the weighted sum of its experts' results. The bytes of a message are those of the row, of its k weights and of the
numbers of its k experts, so that a hop is one all-to-all; gradients of a row and of its weights return in one too. A
pair is (arrived row, local expert). Sums are gathers over places (``kernels.expert_rows``), which write no intermediate
tensor.

If the ranks of ep are spread over hosts, with the same number on each, a row makes two hops. The first goes once to
each host that holds any of its experts, to the rank with the sender's index within its host; the second goes to the
ranks of that host that hold the experts. On the way back a host's results are summed before they leave the host.

``PassRoutes`` describe which rows a message holds. The numbers of rows between ranks in each hop come before any row
travels (``row_counts``, the one wait for a device); the places of rows follow from the numbers of their experts, which
arrive with the rows. A recomputation reuses the PassRoutes of the first pass, and sends no numbers of experts.

[Note: beside the exchange] The first hop of the forward pass, and the last one of the backward pass, are started by
``_Depart`` and ``_Arrive``, and waited for by the other one. What is computed between them, such as shared experts,
runs beside the exchange: forward because it is called there, backward because autograd runs what came later first.

If a router has a capacity, messages may travel in padded blocks of fixed size (``row_counts.block_counts``): no host
waits. Sums have the same addends in the same order. The check that ranks are at one layer then runs on the device:
numbers of experts carry the layer's tag, and a tag of another layer makes the weights NaN.

On a device that multiplies groups whose sizes it has itself (``kernels.grouped``), a single rank reads no counts at
all, and a block's padding is not computed.

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
Shapes: N tokens of this rank, k experts a token, D width, S messages that this rank sends in a hop, B bytes of a
        message, R rows that arrive (over ``etp`` too), P pairs.
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
from shardwise.comm.exchange import Counts, back, gather, scatter, send, share, start_send, transposed
from shardwise.comm.flights import PendingCollective
from shardwise.kernels import choice
from shardwise.kernels.expert_rows import (
    RowPlaces,
    message_places,
    owner_of,
    pack,
    pair_gradients,
    pairs_by_expert,
    unpack,
)
from shardwise.kernels.grouped import GroupSizes
from shardwise.parallel.expert.row_counts import (
    RowCounts,
    block_counts,
    even_counts,
    gathered_lines,
    places_of,
    row_counts,
)
from shardwise.precision.operations import running_dtypes_again

Compute = Callable[[Tensor, GroupSizes], Tensor]
"""Function from (rows sorted by local expert [P, D], number of rows of each expert) to results [P, D]. There may be
more rows than the numbers' sum; results of these are not read."""


Beside = Callable[[], None]
"""Computation that does not need the experts, and runs while rows travel."""


@dataclass
class RowRoutes:
    """Routes of rows in one hop. ``find`` completes them in the first pass."""

    group: Group
    first: int
    """First expert that lies on ``group``."""
    experts: int
    """Number of experts that lie on ``group``."""
    counts: Counts
    """Number of messages from rank to rank of ``group``."""
    is_padded: bool
    """True if every rank gets a block of one size, in which some messages are of no row."""
    tokens: Tensor | None = None
    """Row of each message, N for none: [S]."""
    messages: RowPlaces | None = None
    """Messages of each row."""

    def find(self, numbers: Tensor) -> None:
        """Find the routes of rows with the experts ``numbers`` [N, k]."""
        number, ranks = sum(self.counts[self.group.index]), self.group.size
        self.tokens, places = message_places(numbers, self.first, self.experts, ranks, number, self.is_padded)
        self.messages = RowPlaces(places, min(number, places.numel()), self.is_padded)

    def leaving(self, rows: Tensor) -> Tensor:
        """Return the rows that the messages hold: [N, ...] -> [S, ...].

        Messages of no row hold row N, or the last row.
        """
        assert self.tokens is not None, "routes are found before rows travel"
        filled = rows if rows.shape[0] else rows.new_zeros(1, *rows.shape[1:])
        tokens = self.tokens.clamp(max=len(filled) - 1) if self.is_padded else self.tokens
        return filled.index_select(0, tokens)

    def returned(self, rows: Tensor, what: str) -> Tensor:
        """Return results of messages to their senders and sum them by row: [R, D] -> [N, D]."""
        return self.sum(back(rows, self.counts, self.group, what))

    def sum(self, returned: Tensor) -> Tensor:
        """Return the sums of messages that came back, by row: [S, D] -> [N, D]."""
        assert self.messages is not None, "routes are found before rows travel"
        return self.messages.sum(returned)

    def crossing(self, places: Sequence[int]) -> int:
        """Return the number of messages to ranks in other places.

        ``places`` has one entry for each rank of the group.
        """
        here = self.group.index
        return sum(self.counts[here][rank] for rank, place in enumerate(places) if place != places[here])


@dataclass
class RoundRoutes:
    """Routes of the rows that travel together. ``find`` completes them in the first pass."""

    hops: tuple[RowRoutes, ...]
    """Routes of each hop; none if this rank is alone."""
    etp: Group
    name: str
    """Name of the layer in errors and traces."""
    index: Tensor | None
    """Experts of this rank's rows, [N, k], until the routes are found."""
    parts: list[int]
    """Number of rows that arrived at each rank of ``etp``."""
    own: range
    """Experts of this rank."""
    number: int
    """Number of pairs, P."""
    counts: list[int] | None
    """Number of pairs of each expert; None if only the device has them."""
    tag: int | None = None
    """For padded blocks: number that distinguishes this layer from others."""
    has_blocks: bool = False
    """True if each expert gets a block of pairs of one size, in which some are of no row."""
    rows: Tensor | None = None
    """Arrived row of each pair, in the order of the experts: [P]."""
    slots: Tensor | None = None
    """Index of each pair in the flattened arrived weights [R, k]; R·k for a pair of no row: [P]."""
    pairs: RowPlaces | None = None
    """Pairs of each arrived row."""
    sizes: GroupSizes | None = None
    """Number of pairs of each expert."""
    alike: Tensor | None = None
    """For padded blocks: 0, or NaN if some messages came from another layer. Otherwise None."""

    @property
    def is_found(self) -> bool:
        """True if the places of the rows are known."""
        return self.pairs is not None

    def numbers(self) -> Tensor:
        """Return the numbers that travel with this rank's rows: [N, k], in 31 bits."""
        assert self.index is not None, "numbers travel in the first pass"
        return self.index if self.tag is None else self.index + 1 + (self.tag << _TAG_FROM)

    def find(self, numbers: Tensor) -> None:
        """Find the pairs of the arrived rows with the experts ``numbers`` [R, k]."""
        each = self.counts[0] if self.has_blocks and self.counts else 0
        self.slots, self.rows, places, ends = pairs_by_expert(
            numbers, self.own.start, len(self.own), self.number, each
        )
        is_bound = self.has_blocks or self.counts is None
        self.pairs = RowPlaces(places, min(self.number, places.numel()), is_bound)
        self.sizes = GroupSizes(self.counts, None if self.has_blocks else ends)
        self.index = None

    def go(self, rows: Tensor, what: str) -> Tensor:
        """Send rows of tokens to the ranks of their experts: [N, D] -> [R, D]."""
        what = f"{what} of {self.name}"
        for hop in self.hops:
            rows = send(hop.leaving(rows), hop.counts, hop.group, what)
        return gather(rows, self.parts, self.etp, what)

    def back(self, rows: Tensor, what: str) -> Tensor:
        """Return rows and sum them by token: [R, D] -> [N, D]. The reverse of ``go``."""
        what = f"{what} of {self.name}"
        rows = scatter(rows, self.parts, self.etp, what)
        for hop in reversed(self.hops):
            rows = hop.returned(rows, what)
        return rows


class _Trip:
    """One pass of a round's rows: what is in flight between ``_Depart`` and ``_Arrive``, forward and backward.

    [Note: beside the exchange] in the module's docstring explains the two halves.
    """

    def __init__(self, round: RoundRoutes, columns: Sequence[tuple[int, torch.dtype]]) -> None:
        self.round = round
        self.columns = list(columns)
        """Columns and dtypes of rows and weights."""
        self._fields: list[Tensor] = []
        self._arriving: tuple[Tensor, PendingCollective] | None = None
        self._spare: Tensor | None = None
        """A message of no row."""
        self._is_first = not round.is_found

    def depart(self, hidden: Tensor, weights: Tensor) -> None:
        """Start the first hop of rows and weights to their experts."""
        round = self.round
        self._is_first = not round.is_found
        if not round.hops:
            self._fields = [hidden, weights]
            return
        hop, fields = round.hops[0], [hidden, weights]
        if self._is_first:
            assert round.index is not None, "experts are known until the routes are found"
            fields.append(round.numbers())
            hop.find(round.index)
        packed = pack(fields, self._columns_now, has_spare=round.tag is not None)
        if round.tag is not None:
            self._spare = packed[-1:]
            if self._is_first:
                self._unpacked(self._spare)[-1].fill_(round.tag << _TAG_FROM)
        self._start(hop.leaving(packed), hop, "rows")

    def arrive(self) -> tuple[Tensor, Tensor]:
        """Return the rows and weights that arrived, [R, D] and [R, k], and find their pairs in the first pass."""
        round, numbers = self.round, self.round.index
        if round.hops:
            packed = self._wait()
            for hop in round.hops[1:]:
                if self._is_first:
                    hop.find(self._told(self._unpacked(packed)[-1]))
                packed = packed if self._spare is None else torch.cat([packed, self._spare])
                self._start(hop.leaving(packed), hop, "rows")
                packed = self._wait()
            packed = gather(packed, round.parts, round.etp, f"rows of {round.name}")
            self._fields = self._unpacked(packed)
            if self._is_first:
                numbers = self._told(self._fields[-1])
                if round.tag is not None:
                    others = (self._fields[-1] >> _TAG_FROM != round.tag).any()
                    round.alike = torch.zeros((), device=packed.device).masked_fill_(others, torch.nan)
        if self._is_first:
            assert numbers is not None, "experts are known until the routes are found"
            round.find(numbers)
        (rows, weights, *_), self._fields, self._spare = self._fields, [], None
        return rows, weights

    def start_back(self, d_rows: Tensor, d_weights: Tensor) -> None:
        """Return the gradients of rows and weights, but for the last hop, which is started."""
        round, fields = self.round, [d_rows, d_weights]
        if not round.hops:
            self._fields = fields
            return
        self._is_first = False
        if round.etp.size > 1:
            ranks, what = round.etp.size, f"gradients of {round.name}"
            addends = send(pack(fields, self.columns), [round.parts] * ranks, round.etp, what)
            fields = [
                field.reshape(ranks, -1, field.shape[1])
                .sum(0, dtype=torch.promote_types(field.dtype, torch.float32))
                .to(field.dtype)
                for field in self._unpacked(addends)
            ]
        for hop in round.hops[:0:-1]:
            self._start(pack(fields, self.columns), hop, "gradients", to_senders=True)
            fields = self._summed(hop)
        self._start(pack(fields, self.columns), round.hops[0], "gradients", to_senders=True)

    def finish_back(self) -> tuple[Tensor, Tensor]:
        """Return the sums of the gradients by token: [N, D], [N, k]."""
        fields = self._summed(self.round.hops[0]) if self.round.hops else self._fields
        self._fields = []
        d_hidden, d_weights = fields
        return d_hidden, d_weights

    def _summed(self, hop: RowRoutes) -> list[Tensor]:
        return [hop.sum(field) for field in self._unpacked(self._wait())]

    def _start(self, rows: Tensor, hop: RowRoutes, what: str, to_senders: bool = False) -> None:
        what = f"{what} of {self.round.name}"
        counts = transposed(hop.counts) if to_senders else hop.counts
        self._arriving = start_send(rows, counts, hop.group, what)

    def _wait(self) -> Tensor:
        assert self._arriving is not None, "an exchange is started before its end"
        (arrived, pending), self._arriving = self._arriving, None
        pending.wait()
        return arrived

    @property
    def _columns_now(self) -> list[tuple[int, torch.dtype]]:
        """Columns and dtypes of the fields of a message; experts' numbers travel in the first pass alone."""
        numbers = [(self.columns[1][0], torch.int32)] if self._is_first else []
        return self.columns + numbers

    def _unpacked(self, packed: Tensor) -> list[Tensor]:
        return unpack(packed, self._columns_now)

    def _told(self, numbers: Tensor) -> Tensor:
        """Return the experts of arrived rows, -1 for none."""
        return numbers if self.round.tag is None else (numbers & ((1 << _TAG_FROM) - 1)) - 1


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
        return sum(hop.crossing(range(hop.group.size)) for each in self.rounds for hop in each.hops)

    @property
    def rows_crossed(self) -> int:
        """Number of those rows that leave this host."""
        return sum(hop.crossing(hop.group.hosts) for each in self.rounds for hop in each.hops)


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
        beside: Beside | None = None,
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
            beside: computation that does not need the experts; it is called once, while rows travel if there is a
                single round.
        """
        first, *rest = (routes or self.routes(index)).rounds
        if not rest:
            return _carried(hidden, weights, compute, first, beside)
        if beside is not None:
            beside()
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
        if self._is_alone and self.rows is None and self._counts_rows and self._counts_on_device(index):
            return PassRoutes((self._round(index, None),))
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
            length = 1 + self.experts + sum(places_of(self.levels))
            gathered_lines(choices[0].new_empty(len(choices), length), self.ep, self.etp, self.name)
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

    @property
    def _is_alone(self) -> bool:
        return self.ep.size == self.etp.size == 1

    @staticmethod
    def _counts_on_device(index: Tensor) -> bool:
        """Return whether products of groups may do without numbers of rows on the host."""
        return index.device.type != "cpu" and choice.has_grouped_mm(index.device)

    def _round(self, index: Tensor, counts: RowCounts | None) -> RoundRoutes:
        """Return the round of the pairs in ``index`` [N, k]; without counts on one rank, which has all experts."""
        ep, local = self.ep, self.experts // self.ep.size
        if counts is None:
            return RoundRoutes(
                (), self.etp, self.name, index, [len(index)], range(local), index.numel(), counts=None
            )
        hops, first, experts = [], 0, self.experts
        is_padded = counts.is_bound and not self._is_alone
        for group, between in zip(self.levels, counts.hops, strict=True):
            if not self._is_alone:
                hops.append(RowRoutes(group, first, experts, between, is_padded))
            experts //= group.size
            first += group.index * experts
        number, sizes = sum(counts.experts), counts.experts
        has_blocks = counts.is_bound and not self._counts_on_device(index)
        if counts.is_bound and not has_blocks:
            number = min(number, sum(counts.parts) * index.shape[1])
        return RoundRoutes(
            tuple(hops),
            self.etp,
            self.name,
            index,
            counts.parts,
            own=range(ep.index * local, (ep.index + 1) * local),
            number=number,
            counts=None if counts.is_bound and not has_blocks else sizes,
            tag=self._tag if is_padded else None,
            has_blocks=has_blocks,
        )

    @property
    def _tag(self) -> int:
        """Number that distinguishes this layer from others."""
        return zlib.crc32(self.name.encode()) & _MOST_TAGS


_TAG_FROM = 15
"""Lowest bit of the layer's tag in an expert's number; both fit in 31 bits."""
_MOST_TAGS = (1 << 16) - 1


def _carried(
    hidden: Tensor,
    weights: Tensor,
    compute: Compute,
    round: RoundRoutes,
    beside: Beside | None = None,
) -> Tensor:
    """Return, for each token, the weighted sum of the results of the experts in this round: [N, D]."""
    trip = _Trip(round, [(each.shape[1], each.dtype) for each in (hidden, weights)])
    edge = _Depart.apply(hidden, weights, trip)
    if beside is not None:
        beside()
    rows, arrived_weights = _Arrive.apply(edge, trip)
    assert round.sizes is not None, "routes are found when rows arrive"
    out: Tensor = _Combine.apply(compute(rows, round.sizes), arrived_weights, hidden.dtype, round)
    return out


class _Depart(torch.autograd.Function):
    """Autograd function that starts to send rows and weights to the experts; backward gets their gradients.

    Its result is empty: it makes autograd run ``_Arrive`` before.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        trip.depart(hidden, weights)
        return hidden.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, edge: Tensor) -> tuple[Any, ...]:
        return *ctx.trip.finish_back(), None


class _Arrive(torch.autograd.Function):
    """Autograd function that returns the rows of all pairs and the weights that arrived; backward sends gradients."""

    @staticmethod
    def forward(ctx: Any, edge: Tensor, trip: _Trip) -> tuple[Tensor, Tensor]:
        ctx.trip, round = trip, trip.round
        arrived, weights = trip.arrive()
        assert round.rows is not None, "routes are found when rows arrive"
        weights = weights.contiguous() if round.alike is None else weights + round.alike.to(weights.dtype)
        rows = arrived if arrived.shape[0] else arrived.new_zeros(1, arrived.shape[1])
        return rows.index_select(0, round.rows), weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, d_weights: Tensor) -> tuple[Any, ...]:
        ctx.trip.start_back(ctx.trip.round.pairs.sum(d_rows), d_weights)
        return d_rows.new_empty(0), None


class _Combine(torch.autograd.Function):
    """Autograd function that returns the weighted sums of each token's results: [N, D].

    [Note: the same calls on every rank] in the module's docstring explains why tensors are kept after the exchange.
    """

    @staticmethod
    def forward(ctx: Any, results: Tensor, weights: Tensor, dtype: torch.dtype, round: RoundRoutes) -> Tensor:
        assert round.pairs is not None, "routes are found when rows arrive"
        ctx.round = round
        ctx.save_for_backward(results, weights)
        return round.back(round.pairs.sum(results, weights).to(dtype), "results")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        results, weights = ctx.saved_tensors
        round: RoundRoutes = ctx.round
        assert round.slots is not None and round.rows is not None, "routes are found when rows arrive"
        arrived, number = round.go(grad, "gradients of results"), len(results)
        return (
            *pair_gradients(arrived, results, weights, round.slots[:number], round.rows[:number]),
            None,
            None,
        )
