"""The weight of one bucket on this rank: what is kept, when it is whole, and the master that it is rounded from.

    stage           0        1             2              3
    shard           [P]      [P]           [P]            [P/N] + a slot [P] while unsharded
    master          [P]      [P/N]         [P/N]          [P/N]

A master of the compute dtype is the kept weight itself or this rank's range of it.

    SUMMONED   the parameters show memory outside: the user's before ``attach`` and after ``give_back``, a whole copy
               between ``summon`` and ``restore``
    SHARDED    they show nothing; the shard alone is here                      views.py, [Note: stale memory]
    GATHERING  the slot is taken and the all-gather is under way; they still show nothing
    UNSHARDED  they show the whole weight; for ever where the weight has no window

                 attach, restore              start_unshard              finish_unshard
    SUMMONED <------------------> SHARDED ------------------> GATHERING ---------------> UNSHARDED
        ^            summon          ^------- reshard ------------+                        |   ^
        |                            +------------------------- reshard -------------------+   |
        +------------------------------- without a window: attach, restore, summon ------------+

Shapes: P elements of the bucket with padding, N shard ranks.
"""

from collections.abc import Hashable, Sequence
from enum import Enum

import torch
from torch import Tensor

from shardwise.comm.collectives import DONE, Pending
from shardwise.parallel.zero.context import BucketContext
from shardwise.parallel.zero.views import ParameterViews
from shardwise.plan.unit import Bucket
from shardwise.precision.policy import Dtypes


class WeightState(Enum):
    """Where a weight is in its life: see the module's docstring."""

    SUMMONED = "summoned"
    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"

    __hash__ = object.__hash__  # Enum's own runs in Python, and every window of a Unit asks four times


_SUMMONED, _SHARDED, _GATHERING, _UNSHARDED = WeightState

_NEXT: dict[WeightState, tuple[WeightState, ...]] = {
    _SUMMONED: (_SHARDED, _UNSHARDED),
    _SHARDED: (_SUMMONED, _GATHERING),
    _GATHERING: (_SHARDED, _UNSHARDED),
    _UNSHARDED: (_SUMMONED, _SHARDED),
}


class Weight:
    """See the module's docstring. ``what`` names the bucket in errors."""

    def __init__(
        self, layout: Bucket, dtypes: Dtypes, views: ParameterViews, what: str, around: BucketContext
    ):
        self.layout = layout
        self.dtypes = dtypes
        self.views = views
        self.what = what
        self.state = _SUMMONED
        self.has_window = around.strategy.has_windows
        """Whether the parameters show the weight inside its Unit's windows alone."""
        self._around = around
        strategy = around.strategy
        self._updates_range = strategy.cuts_master and not strategy.cuts_weight
        """Whether the whole weight is kept and this rank updates its range of it alone."""
        self._own = around.own_range(layout)
        piece = layout.shard_elements
        self.shard = torch.zeros(
            piece if strategy.cuts_weight else layout.elements, dtype=dtypes.compute, device=around.device
        )
        """What this rank keeps between windows."""
        self.master: Tensor | None = None
        """What the optimizer updates; None where the bucket is frozen."""
        if layout.key.trained:
            if dtypes.master == dtypes.compute:
                self.master = self.shard[self._own] if self._updates_range else self.shard
            else:
                elements = piece if strategy.cuts_master else layout.elements
                self.master = torch.zeros(elements, dtype=dtypes.master, device=around.device)
        around.ledger.take("weights", what, self.shard.nbytes)
        if self.master is not None and not self.shares_master:
            around.ledger.take("master", what, self.master.nbytes)
        self._full: Tensor | None = None if self.has_window else self.shard
        self._gathering: Pending = DONE
        self._summoned_versions: list[int] = []

    @property
    def first(self) -> int:
        """Element of the bucket with which the shard begins."""
        return self._own.start if self._around.strategy.cuts_weight else 0

    def _enter(self, state: WeightState) -> None:
        assert state in _NEXT[self.state], f"{self.what}: {self.state.value} does not become {state.value}"
        self.state = state

    # UnitWindows ---------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """The parameters show the engine's memory from now on; a weight with a window starts sharded."""
        if self._full is None:
            self._enter(_SHARDED)
            self.views.withhold()
        else:
            self._enter(_UNSHARDED)
            self.views.point_into(self._full)

    @property
    def in_the_way(self) -> Hashable | None:
        """Name of the bucket that stands in this one's slot."""
        return self._around.weights.holder_in_the_way(self.what) if self._full is None else None

    def start_unshard(self) -> None:
        """Begin to gather the weight into its slot, where it is sharded."""
        if self.state is not _SHARDED:
            return
        self._full = self._around.weights.acquire(self.what, self.layout.elements, self.dtypes.compute)
        # Before the collective, which may fail: ``reshard`` then finds a slot to give back.
        self._enter(_GATHERING)
        self._gathering = self._around.shard.all_gather(self._full, self.shard, self.what)

    def finish_unshard(self) -> None:
        """Wait for the weight, where it is under way, and let the parameters show it."""
        if self.state is not _GATHERING:
            return
        assert self._full is not None, "a weight that is gathered has a slot"
        self._gathering.wait()
        self._enter(_UNSHARDED)
        self.views.point_into(self._full)
        self.views.restore_versions()

    def reshard(self) -> None:
        """Give the slot back, where the weight has one. [Note: stale memory]"""
        if not self.has_window or self._full is None:
            return
        self._gathering.wait()
        self._enter(_SHARDED)
        self.views.withhold()
        self._full = None
        self._around.weights.release(self.what)

    # Outside memory --------------------------------------------------------------------------------------------

    @property
    def is_summoned(self) -> bool:
        """True while the parameters show memory outside, whole."""
        return self.state is _SUMMONED

    def gathered_copy(self, source: Tensor | None = None) -> Tensor:
        """The whole weight (or another tensor that is cut like the master) in new memory; collective."""
        source = self.shard if source is None else source
        if source.numel() == self.layout.elements:
            return source
        full = torch.empty(self.layout.elements, dtype=source.dtype, device=source.device)
        self._around.shard.all_gather(full, source, self.what, purpose="control").wait()
        return full

    def summon(self, full: Tensor) -> None:
        """Let the parameters show ``full`` until ``restore``; nothing is unsharded or resharded meanwhile."""
        self.reshard()
        self._enter(_SUMMONED)
        for parameter, view in zip(self.views.parameters, self.views.fresh(full), strict=True):
            parameter.data = view
        self._summoned_versions = [parameter._version for parameter in self.views.parameters]

    def restore(self, full: Tensor, keep: bool) -> list[str]:
        """End ``summon``; with ``keep`` this rank's range of the edited values becomes shard and master.

        Returns the names of the parameters that were edited.
        """
        assert self.is_summoned, (
            f"{self.what}: {self.state.value} does not become what it was before a summon"
        )
        edited = [
            slot.name
            for slot, parameter, version in zip(
                self.layout.slots, self.views.parameters, self._summoned_versions, strict=True
            )
            if parameter._version != version
        ]
        if keep:
            if full is not self.shard:
                self.shard.copy_(full[self._own] if self._around.strategy.cuts_weight else full)
            if self.master is not None and not self.shares_master:
                self.master.copy_(full[self._own] if self._around.strategy.cuts_master else full)
        self.attach()
        if keep:
            self.renew()
        return edited

    def give_back(self, dtypes: Sequence[torch.dtype]) -> None:
        """The engine ends: the parameters hold their values, whole, in these dtypes, from the master where it is more
        precise than the weight. Collective where what they are made of is cut."""
        if self.is_summoned:
            return
        same = all(dtype == self.dtypes.compute for dtype in dtypes)
        source = self.shard if same or self.master is None else self.master
        if source is not self._full:
            self.summon(self.gathered_copy(source))
        for parameter, dtype in zip(self.views.parameters, dtypes, strict=True):
            parameter.data = parameter.data.to(dtype)

    # Updates ---------------------------------------------------------------------------------------------------

    @property
    def shares_master(self) -> bool:
        """True where the weight is its own master: what is written into it stays."""
        return self.master is None or self.dtypes.master == self.dtypes.compute

    def copy_from_master(self) -> None:
        """After an update of the master: round it into the weight."""
        if self.master is None:
            return
        if self.state is _UNSHARDED and self._full is not None:
            self.views.check(self._full, None if self.shares_master else self.dtypes.master)
        if not self.shares_master:
            (self.shard[self._own] if self._updates_range else self.shard).copy_(self.master)
        self.renew()

    def gather_updated(self) -> Pending:
        """After ``copy_from_master``: gather the other ranks' ranges where the weight is kept whole and the master is
        not."""
        if not self._updates_range:
            return DONE
        return self._around.shard.all_gather(self.shard, self.shard[self._own], self.what)

    def renew(self) -> None:
        """The values changed: what autograd saved before may not be used any more."""
        self.views.renew(is_shown=self._full is not None)
