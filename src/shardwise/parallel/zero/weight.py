"""The weight of one bucket on this rank: the stored shard, the gathered weight and the master that updates it.

    stage           0        1             2              3
    shard           [P]      [P]           [P]            [P/N] + a slot [P] while unsharded
    master          [P]      [P/N]         [P/N]          [P/N]

A weight whose key has a ``gather_dtype`` of fp8 lies in its slot in fp8, with scales that the ranks agree on
(scales.py). Its parameters show nothing then: the products of their layers read the slot (``numbers_of``).

A master of the compute dtype on the same tier is the stored weight itself or this rank's range of it. A master on a
disk is an empty tensor between updates (tiers/tier.py).

    SUMMONED   the parameters show memory outside: the user's before ``attach`` and after ``give_back``, a full copy
               between ``summon`` and ``restore``
    SHARDED    the parameters show nothing; only the shard is in memory        views.py, [Note: stale memory]
    GATHERING  the slot is taken and the all-gather is in flight; the parameters still show nothing. Without a window:
               the other ranks' ranges are in flight after an update; every use of the parameters waits first
    UNSHARDED  the parameters show the full weight; without a window this state lasts

                 attach, restore              start_unshard              finish_unshard
    SUMMONED <------------------> SHARDED ------------------> GATHERING ---------------> UNSHARDED
        ^            summon          ^------- reshard ------------+                        |   ^
        |                            +------------------------- reshard -------------------+   |
        +------------------------------- without a window: attach, restore, summon ------------+
          without a window too: UNSHARDED -- gather_updated(beside) --> GATHERING -- finish_unshard --> UNSHARDED

Shapes: P elements of the bucket with padding, N shard ranks.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.base.errors import UsageError
from shardwise.comm.flights import DONE, PendingCollective
from shardwise.memory.streams import to_computation
from shardwise.parallel.zero.context import BucketContext
from shardwise.parallel.zero.views import ParameterViews
from shardwise.passes.absent import give
from shardwise.plan.unit import Bucket, ParameterSlot
from shardwise.precision.policy import BucketDtypes
from shardwise.tiers.tier import NextWeight, TierState


class WeightState(Enum):
    """State of a bucket's weight; the module's docstring draws the transitions."""

    SUMMONED = "summoned"
    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"

    __hash__ = object.__hash__  # Enum's own runs in Python, four times in every window of a Unit


_SUMMONED, _SHARDED, _GATHERING, _UNSHARDED = WeightState

_NEXT: dict[WeightState, tuple[WeightState, ...]] = {
    _SUMMONED: (_SHARDED, _UNSHARDED),
    _SHARDED: (_SUMMONED, _GATHERING),
    _GATHERING: (_SHARDED, _UNSHARDED),
    _UNSHARDED: (_SUMMONED, _SHARDED, _GATHERING),
}


class LoadedShard(NamedTuple):
    """A shard in a slot of the device, and the call that waits for its arrival from another tier."""

    shard: Tensor
    arrive: Callable[[], object]


class SummonedView(NamedTuple):
    """The full weight that a summoned parameter shows."""

    whole: Tensor
    version: int
    """Version counter of the parameter before any edit."""


class Weight:
    """The weight of one bucket on this rank: its shard, its gathered form and its master.

    Args:
        layout: The bucket.
        dtypes: The dtypes of the bucket.
        views: The user's parameters of the bucket.
        what: Name of the bucket in errors and of its slots.
        around: The groups, slots and ledger of the bucket's Unit.
        state: The state that lies on another tier than the device, or None.
    """

    def __init__(
        self,
        layout: Bucket,
        dtypes: BucketDtypes,
        views: ParameterViews,
        what: str,
        around: BucketContext,
        state: TierState | None,
    ):
        self.layout = layout
        self.dtypes = dtypes
        self.views = views
        self.what = what
        self.state = _SUMMONED
        self._around = around
        strategy = around.strategy
        piece = layout.shard_elements
        self._elsewhere = state
        """State that lies on another tier than the device, or None."""
        if self._held is not None:
            self._shard = self._held.tensors["weight"]
        else:
            elements = piece if strategy.cuts_weight else layout.elements
            self._shard = torch.zeros(elements, dtype=dtypes.compute, device=around.device)
        self.master: Tensor | None = None
        """The tensor that the optimizer updates, or None if the bucket is frozen."""
        if state is not None:
            self._follow(state.tensors)
            state.followers.append(self._follow)
        elif layout.key.trained:
            if dtypes.master == dtypes.compute:
                self.master = self._shard[self._own] if self._updates_range else self._shard
            else:
                elements = piece if strategy.cuts_master else layout.elements
                self.master = torch.zeros(elements, dtype=dtypes.master, device=around.device)
        if self._held is None:
            around.ledger.take("weights", what, lambda: self._shard.nbytes)
        if self.master is not None and state is None and not self.shares_master:
            around.ledger.take("master", what, lambda: 0 if self.master is None else self.master.nbytes)
        self._full: Tensor | None = None if self.has_window else self._shard
        self._gathering: PendingCollective = DONE
        self._brought: LoadedShard | None = None
        """The shard that was brought from its tier and that the next gather sends."""
        self._updating: Future[None] | None = None
        """An update on another tier that has run since the step."""
        self._shown: dict[int, SummonedView] = {}
        """Parameters that show memory outside the engine, by index in the bucket."""
        of_rank = around.scales if layout.key.gather_dtype is not None else None
        self._scales = None if of_rank is None else of_rank.add(self, len(layout.slots))
        """The scales of a weight that is gathered in fp8; None for any other."""

    @cached_property
    def has_window(self) -> bool:
        """True if the parameters show the weight only inside its Unit's windows."""
        return self._around.strategy.has_windows

    @property
    def changes(self) -> int:
        """Number of changes so far of the values of a weight that is gathered in fp8."""
        return 0 if self._scales is None else self._scales.changes

    @property
    def shares_master(self) -> bool:
        """True if the weight is its own master, so that edits of the weight persist."""
        strategy = self._around.strategy
        together = strategy.tier == strategy.weight_tier
        return not self.layout.key.trained or (together and self.dtypes.master == self.dtypes.compute)

    @property
    def _held(self) -> TierState | None:
        """The tier state in which the weight lies between windows, or None if the weight lies on the device."""
        there = self._elsewhere
        return there if there is not None and "weight" in there.kinds else None

    @property
    def _next(self) -> NextWeight | None:
        """The updated weight that is adopted later if updates count one step late, else None."""
        return None if self._elsewhere is None else self._elsewhere.next

    @property
    def _own(self) -> slice:
        """The range of a cut buffer that belongs to this rank."""
        return self._around.own_range(self.layout)

    @property
    def _updates_range(self) -> bool:
        """True if this rank stores the full weight but updates only its own range."""
        return self._around.strategy.cuts_master and not self._around.strategy.cuts_weight

    def _follow(self, tensors: Mapping[str, Tensor]) -> None:
        if self._held is not None:
            self._shard = tensors["weight"]
        if self.layout.key.trained:
            self.master = tensors["weight" if self.shares_master else "master"]

    @property
    def shard(self) -> Tensor:
        """The part of the weight that this rank stores between windows."""
        self.finish_update()
        return self._shard

    @property
    def first(self) -> int:
        """Index in the bucket of the shard's first element."""
        return self._own.start if self._around.strategy.cuts_weight else 0

    def _enter(self, state: WeightState) -> None:
        assert state in _NEXT[self.state], f"{self.what}: {self.state.value} does not become {state.value}"
        self.state = state

    # Windows ---------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Let the parameters show the engine's memory from now on; a weight with a window starts sharded."""
        if self._full is None:
            self._enter(_SHARDED)
            self.views.withhold()
        else:
            self._enter(_UNSHARDED)
            self.views.point_into(self._full)
            self.watch()

    def watch(self) -> None:
        """Begin to detect reads of ``p.data`` if a master would overwrite edits of the parameters."""
        if self.state is _UNSHARDED and not self.shares_master and not self.has_window:
            self.views.watch(keeps_copies=self._next is not None)

    @property
    def in_the_way(self) -> Hashable | None:
        """Name of the bucket that occupies this weight's slot, or None."""
        return self._around.weights.holder_in_the_way(self.what) if self._full is None else None

    @property
    def is_sharded(self) -> bool:
        """True if the parameters show nothing, and no gather is under way."""
        return self.state is _SHARDED

    @property
    def is_whole_here(self) -> bool:
        """True if the full weight is in a window's slot, or on its way there."""
        return self.has_window and (self.state is _GATHERING or self.state is _UNSHARDED)

    @property
    def is_updating(self) -> bool:
        """True if an update on another tier has not been waited for."""
        return self._updating is not None

    @property
    def is_brought(self) -> bool:
        """True if the shard has been brought from its tier, or is on its way."""
        return self._brought is not None

    def load(self) -> None:
        """Begin to bring the shard that ``start_unshard`` sends, after any update that runs on its tier."""
        if self._held is not None and self._brought is None and self.state is _SHARDED:
            self._brought = self._begin_bring(self._held)

    def _begin_bring(self, held: TierState) -> LoadedShard:
        elements, dtype = self.layout.shard_elements, self.dtypes.compute
        into = self._around.shards.acquire(self.what, elements, dtype, movable=True)
        return LoadedShard(into, held.bring("weight", into, self._updating))

    def _let_go(self) -> None:
        """Release the slot of a brought shard, after its last use or if nothing will use the shard."""
        if self._brought is not None:
            self._brought.arrive()
            self._brought = None
            self._around.shards.release(self.what)

    def start_unshard(self) -> None:
        """Begin to gather a sharded weight into its slot; do nothing in any other state."""
        if self.state is not _SHARDED:
            return
        held, around = self._held, self._around
        if held is None:
            self.finish_update()
        scales = None if self._scales is None else self._scales.agree()
        self._full = around.weights.acquire(self.what, self.layout.elements, self.layout.gathered_dtype)
        # Enter the state before the collective, which may fail: else ``reshard`` would not release the slot.
        self._enter(_GATHERING)
        if scales is not None:
            self._gathering = self._gather_in_fp8(self._full, scales)
        elif held is None:
            self._gathering = around.shard.all_gather(self._full, self._shard, self.what)
        else:
            self._gathering = self._come_from(held, self._full)

    def _gather_in_fp8(self, full: Tensor, scales: Tensor) -> PendingCollective:
        """Begin to gather the weight in fp8: cast this rank's shard into its range of ``full``, and send the range."""
        assert self._scales is not None, "a weight that is gathered in fp8 has scales"
        own, first = full[self._own], self._own.start
        with torch.no_grad():
            for place, (slot, piece) in enumerate(zip(self.layout.slots, self.shard_pieces(), strict=True)):
                if piece is not None:
                    _, _, local = _overlap(slot, first, first + own.numel())
                    own[local : local + piece.numel()].copy_(self._scales.numbers(piece, scales[place]))
        # Transports move bytes: not every backend has a dtype of 8 bits.
        sent, gathered = own.view(torch.uint8), full.view(torch.uint8)
        return self._around.shard.all_gather(gathered, sent, self.what)

    def shard_pieces(self) -> list[Tensor | None]:
        """Return this rank's part of each parameter of a cut weight; None for a parameter without a part here."""
        first, shard, found = self._own.start, self.shard, []
        for slot in self.layout.slots:
            start, stop, local = _overlap(slot, first, first + shard.numel())
            found.append(shard[local : local + stop - start] if start < stop else None)
        return found

    def numbers_of(self, place: int) -> tuple[Tensor, Tensor]:
        """Return the numbers of a parameter in fp8, in its shape, and their scale, while the weight is gathered.

        Args:
            place: Index of the parameter in the bucket.

        Raises:
            UsageError: If the weight is not in memory.
        """
        slot = self.layout.slots[place]
        if self._scales is None or self._full is None or self.state is not _UNSHARDED:
            raise UsageError(
                f"{self.what}: the weight {slot.name} is multiplied while it is released; call the module's forward, "
                "which gathers it, or name one Unit around what belongs together (zero.units)"
            )
        numbers = self._full[slot.offset : slot.offset + slot.elements].view(slot.shape)
        return numbers, self._scales.agree()[place]

    def _come_from(self, held: TierState, full: Tensor) -> PendingCollective:
        """Begin to fill ``full`` from the tier that holds the weight.

        Ranks that hold pieces bring each its own piece and all-gather the pieces.
        """
        if not self._around.strategy.cuts_weight:
            arrive = held.bring("weight", full, self._updating)

            def finish() -> None:
                arrive()

            return PendingCollective(finish)
        self._brought = self._brought or self._begin_bring(held)
        shard, arrive = self._brought
        arrive()
        return self._around.shard.all_gather(full, shard, self.what)

    def finish_unshard(self) -> None:
        """Wait for a gather in flight, and let the parameters show the full weight."""
        if self.state is not _GATHERING:
            return
        assert self._full is not None, "a weight that is gathered has a slot"
        self._gathering.wait()
        self._let_go()
        if self.has_window:
            self.finish_update()
        self._enter(_UNSHARDED)
        if not self.has_window:
            self.views.show()
            return
        if (
            self._scales is not None
        ):  # the parameters show nothing, because their dtype is not that of the numbers
            return
        self.views.point_into(self._full)
        self.views.restore_versions()

    def finish_update(self) -> None:
        """Wait for the last update, on another tier or between ranks.

        The wait must precede every read of the full weight and every write into the range that this rank sends.

        Raises:
            TierError: If the tier failed.
            DamagedError: If bytes read from a disk are not the bytes that were written.
        """
        if self._updating is not None:
            self._updating.result()
            self._updating = None
        if not self.has_window:
            self.finish_unshard()

    def reshard(self) -> None:
        """Release the slot of a weight that has a window. See [Note: stale memory]."""
        if not self.has_window:
            return
        if self._full is None:
            self._let_go()
            return
        self._gathering.wait()
        self._let_go()
        self._enter(_SHARDED)
        self.views.withhold()
        self._full = None
        self._around.weights.release(self.what)

    # Between steps ---------------------------------------------------------------------------------------------

    def leave(self, kinds: Collection[str]) -> None:
        """Release the device memory of ``kinds`` until ``come``; without the weight the parameters show nothing.

        Args:
            kinds: Kinds of state to release: "weight", "master".
        """
        self.finish_update()
        self.reshard()
        self.views.forget()
        if "master" in kinds and self.master is not None:
            self.master = self.master.new_empty(0)
        if "weight" in kinds:
            self._enter(_SUMMONED)
            self.views.is_away = True
            self.views.withhold()
            self._shard, self._full = self._shard.new_empty(0), None
            if self.layout.key.trained and self.shares_master:
                self.master = self._shard

    def come(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that ``leave`` released.

        Args:
            tensors: The released state by kind; the weight keeps these tensors as its memory.
        """
        if "master" in tensors:
            self.master = tensors["master"]
        if "weight" not in tensors:
            return
        self._shard = tensors["weight"]
        self._full = None if self.has_window else self._shard
        if self.layout.key.trained and self.shares_master:
            self.master = self._shard[self._own] if self._updates_range else self._shard
        self.views.is_away = False
        self.attach()
        self.renew()

    # Outside memory --------------------------------------------------------------------------------------------

    @property
    def is_summoned(self) -> bool:
        """True while some or all parameters show memory outside the engine."""
        return self.state is _SUMMONED

    @property
    def is_whole(self) -> bool:
        """True while all parameters show memory outside the engine."""
        return self.is_summoned and len(self._shown) == len(self.layout.slots)

    def gathered_copy(self, source: Tensor | None = None) -> Tensor:
        """Gather the full weight, or another tensor that is cut like the master, into new memory. Collective.

        Args:
            source: The tensor to gather, or None for the weight.

        Returns:
            The flat full tensor, or ``source`` itself if it is not cut.
        """
        source = self._near(source)
        if source.numel() == self.layout.elements:
            return source
        full = torch.empty(self.layout.elements, dtype=source.dtype, device=source.device)
        self._around.shard.all_gather(full, source, self.what, purpose="control").wait()
        return full

    def _near(self, source: Tensor | None) -> Tensor:
        """Return ``source``, or the stored weight on the device; a weight on another tier is copied."""
        if source is not None:
            return source
        return self.shard if self._held is None else self.shard.to(self._around.device, copy=True)

    def gathered_slot(self, place: int, source: Tensor | None = None) -> Tensor:
        """Gather one parameter in its full shape: each rank sends the range that it stores. Collective.

        Args:
            place: Index of the parameter in the bucket.
            source: The flat tensor that holds this rank's range, or None for the weight.

        Returns:
            The full parameter.
        """
        source, slot = self._near(source), self.layout.slots[place]
        if source.numel() == self.layout.elements:
            return source[slot.offset : slot.offset + slot.elements].view(slot.shape)
        group, piece = self._around.shard, self.layout.shard_elements
        full = torch.empty(slot.elements, dtype=source.dtype, device=source.device)
        for rank in range(group.size):
            start, stop, local = _overlap(slot, rank * piece, (rank + 1) * piece)
            if start < stop:
                part = full[start:stop]
                if rank == group.index:
                    part.copy_(source[local : local + stop - start])
                group.broadcast(part, rank, slot.name).wait()
        return full.view(slot.shape)

    def summon(self, places: Collection[int]) -> list[int]:
        """Let parameters show their full weights until ``restore``. Collective.

        The bucket is not unsharded or resharded meanwhile.

        Args:
            places: Indices of the parameters in the bucket.

        Returns:
            Indices of the parameters that did not show their full weights before.
        """
        new = [place for place in places if place not in self._shown]
        if len(new) == len(self.layout.slots):
            whole = self.views.fresh(self.gathered_copy())
            self._show(dict(zip(new, whole, strict=True)))
        else:
            self._show({place: self.gathered_slot(place) for place in new})
        return new

    def _show(self, whole: Mapping[int, Tensor]) -> None:
        if not self.is_summoned:
            self.reshard()
            self._enter(_SUMMONED)
        for place, view in whole.items():
            parameter = self.views.parameters[place]
            give([parameter])
            parameter.data = view
            self._shown[place] = SummonedView(view, parameter._version)

    def restore(self, places: Collection[int], keep: bool) -> list[str]:
        """End ``summon`` for some parameters.

        With ``keep`` this rank's range of the edited values becomes shard and master. An element whose rounded
        master equals the new value keeps its master, which is more precise.

        Args:
            places: Indices of the parameters in the bucket.
            keep: True to take over the edited values, False to drop them.

        Returns:
            The names of the parameters that were edited.

        Raises:
            UsageError: If a parameter was given another shape.
        """
        assert self.is_summoned, (
            f"{self.what}: {self.state.value} does not become what it was before a summon"
        )
        edited = []
        for place in places:
            view, version = self._shown.pop(place)
            slot, parameter = self.layout.slots[place], self.views.parameters[place]
            is_replaced = parameter.data_ptr() != view.data_ptr()
            if parameter._version != version or is_replaced:
                edited.append(slot.name)
            if keep and tuple(parameter.shape) != slot.shape:
                raise UsageError(
                    f"full_parameters: {slot.name} was given the shape {tuple(parameter.shape)}; expected {slot.shape}"
                )
            if keep:
                self._take_over(slot, parameter.detach().reshape(-1))
        left = {
            place: self.views.parameters[place]._version - shown.version
            for place, shown in self._shown.items()
        }
        if not left:
            self.attach()
        elif self.has_window:
            self.views.withhold(places)
        if keep:
            self.renew()
        for place, edits in left.items():
            version = self.views.parameters[place]._version - edits
            self._shown[place] = self._shown[place]._replace(version=version)
        return edited

    def _take_over(self, slot: ParameterSlot, whole: Tensor) -> None:
        """Copy this rank's part of a parameter's new values into shard and master."""
        kept_apart = [] if self.master is None or self.shares_master else [self.master]
        for held in (self.shard, *kept_apart):
            first = 0 if held.numel() == self.layout.elements else self._own.start
            start, stop, local = _overlap(slot, first, first + held.numel())
            mine, new = held[local : local + stop - start], whole[start:stop].to(held.device)
            if start < stop and mine.data_ptr() != new.data_ptr():
                kept = mine.to(new.dtype) == new
                mine.copy_(torch.where(kept, mine, new.to(mine.dtype)))

    def give_back(self, dtypes: Sequence[torch.dtype]) -> None:
        """Leave the parameters with their full values in the given dtypes, because the engine ends.

        The values come from the master if the master is more precise than the weight. Collective if the source
        is cut.

        Args:
            dtypes: The dtype that each parameter gets.
        """
        self.views.unwatch()
        if self.is_summoned:
            return
        self.finish_update()
        same = all(dtype == self.dtypes.compute for dtype in dtypes)
        source = self.shard if same or self.master is None else self.master.to(self._around.device)
        if source is not self._full:
            if source is self._shard or self.shares_master:
                source = self._near(None)
            self._show(dict(enumerate(self.views.fresh(self.gathered_copy(source)))))
        for parameter, dtype in zip(self.views.parameters, dtypes, strict=True):
            parameter.data = parameter.data.to(dtype)

    # Updates ---------------------------------------------------------------------------------------------------

    @property
    def rounded(self) -> Tensor | None:
        """The part of the stored weight that is rounded from the master, or None if the weight is its own master."""
        if self.shares_master:
            return None
        return self.shard[self._own] if self._updates_range else self.shard

    def edited_places(self) -> list[int]:
        """Return the indices of the parameters that may have been edited since the last update.

        Only edits that the next update would overwrite count: the parameters show the stored weight beside a
        separate master.
        """
        return self.views.perhaps_edited() if self.master_overwrites and self.state is _UNSHARDED else []

    @property
    def master_overwrites(self) -> bool:
        """True if the parameters show the stored weight beside a master that overwrites it at each update."""
        return not (self.shares_master or self.has_window or self._next is not None)

    def evenly_spaced(self, count: int) -> Tensor:
        """Return indices into the part of the weight that this rank updates: a row of ``count`` for each parameter.

        A parameter that has no element on this rank repeats one of another.
        """
        cuts = self._around.strategy.cuts_master
        first, elements = (self._own.start, self.layout.shard_elements) if cuts else (0, self.layout.elements)
        parts = [_overlap(slot, first, first + elements) for slot in self.layout.slots]
        rows = [
            torch.linspace(local, local + max(stop - start, 1) - 1, count, dtype=torch.float64)
            for start, stop, local in parts
        ]
        return torch.stack(rows).round().long().clamp_(0, elements - 1).to(self._shard.device)

    def differs_at(self, places: Tensor) -> Tensor | None:
        """Return whether the weight differs from the rounded master at any of ``places``, as a tensor on the device.

        Returns:
            None if the parameters show nothing now, or if the master is not in the memory of the device.
        """
        master, rounded = self.master, self.rounded if self.state is _UNSHARDED else None
        if master is None or rounded is None or master.numel() == 0 or master.device != rounded.device:
            return None
        return (master[places].to(rounded.dtype) != rounded[places]).any()

    def differs_from_master(self, places: Collection[int]) -> bool:
        """Return True if this rank's part of these parameters is not what its master rounds to."""
        return any(not bool(kept.all()) for kept, _, _ in self._beside_master(places))

    def take_up_edits(self, places: Collection[int]) -> None:
        """Copy this rank's part of edited parameters into their masters.

        An element that did not change keeps its master, which is more precise.
        """
        for kept, master, shown in self._beside_master(places):
            master.copy_(torch.where(kept, master, shown.to(master.dtype)))
        self.renew()

    def _beside_master(self, places: Collection[int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (which elements equal the rounded master, the master, the weight beside it) by parameter."""
        master, rounded = self.master, self.rounded
        assert master is not None and rounded is not None, "the weight is its own master"
        first = 0 if master.numel() == self.layout.elements else self._own.start
        for place in places:
            slot = self.layout.slots[place]
            start, stop, local = _overlap(slot, first, first + master.numel())
            if start < stop:
                mine = master[local : local + stop - start]
                shown = rounded[local : local + stop - start].to(mine.device)
                yield mine.to(shown.dtype) == shown, mine, shown

    def copy_from_master(self, is_rounded: bool = False) -> None:
        """Round an updated master into the weight.

        Args:
            is_rounded: True if the update has written the rounded values already.
        """
        if self.master is None:
            return
        self.finish_update()
        self._check()
        rounded = self.rounded
        if rounded is not None and not is_rounded:
            rounded.copy_(self.master)
        self.renew()

    def _check(self) -> None:
        if self.state is _UNSHARDED and self._full is not None and self._scales is None:
            self.views.check(self._full, None if self.shares_master else self.dtypes.master)

    @property
    def is_late(self) -> bool:
        """True if an update runs or has ended that the weight has not adopted."""
        return self._next is not None and self._next.update is not None

    def swap(self) -> None:
        """Run SWAP_WEIGHT: take over the result of the last update, if updates count one step late."""
        if self._next is None or self._next.update is None:
            return
        self._next.update.result()
        self._next.update = None
        self._check()
        rounded = self.rounded
        assert rounded is not None, "a master on another tier is no weight"
        to_computation(self._next.numbers, rounded)()
        self.renew()

    def begin_update(self, begin: Callable[[Tensor | None], "Future[None]"]) -> None:
        """Begin an update of the master in another thread, which rounds the master into the weight.

        ``finish_update``, or any use of the parameters, waits for the update. If updates count one step late,
        the weight stays as it is until ``adopt``.

        Args:
            begin: Function that starts the update. Its argument is the tensor to round the master into, or None
                for the weight on its tier.
        """
        if self._next is not None:
            assert self._next.update is None, f"{self.what}: the update before was not adopted"
            self._next.update = begin(self._next.numbers)
            return
        self.finish_update()
        self._check()
        rounded = None if self._held is not None else self.rounded
        self.renew()
        self._updating = begin(rounded)
        if self.state is _UNSHARDED and not self.has_window:
            self._enter(_GATHERING)
            self.views.expect(self.finish_update)

    def gather_updated(self, beside: bool = False) -> PendingCollective:
        """Gather the other ranks' ranges after ``copy_from_master``, if the stored weight is full and the master cut.

        Args:
            beside: True to return before the gather ends. ``finish_unshard``, or any use of the parameters,
                then waits.

        Returns:
            The gather to wait for, already done if ``beside`` is true.
        """
        if not self._updates_range:
            return DONE
        self.finish_update()
        gathering = self._around.shard.all_gather(self._shard, self._shard[self._own], self.what)
        if not beside or self.state is not _UNSHARDED:
            return gathering
        self._gathering = gathering
        self._enter(_GATHERING)
        self.views.expect(self.finish_update)
        return DONE

    def renew(self) -> None:
        """Invalidate what autograd saved of the parameters, because their values have changed."""
        if self._scales is not None:
            self._scales.forget()
        self.views.renew(is_shown=self._full is not None and self._scales is None)


def _overlap(slot: ParameterSlot, first: int, last: int) -> tuple[int, int, int]:
    """Return (start, stop, local): the elements of a parameter in the range [first, last) of its bucket.

    ``start`` and ``stop`` count within the parameter, ``local`` within the range. There are no elements if stop
    <= start.
    """
    start, stop = max(first, slot.offset), min(last, slot.offset + slot.elements)
    return start - slot.offset, stop - slot.offset, start - first
