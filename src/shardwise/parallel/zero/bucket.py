"""One bucket of a Unit on this rank: its weight (weight.py) and its gradient (gradient.py), with a common layout."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor, nn

from shardwise.memory.pinned import pinned_empty
from shardwise.memory.slots import SlotPool
from shardwise.parallel.zero.context import BucketContext
from shardwise.parallel.zero.gradient import Gradient
from shardwise.parallel.zero.views import ParameterViews
from shardwise.parallel.zero.weight import Weight
from shardwise.plan.unit import Bucket, ParameterSlot
from shardwise.precision.policy import BucketDtypes
from shardwise.tiers.tier import NextWeight, TierState, TierTensor

Fill = Callable[[ParameterSlot, int, int, torch.dtype], Tensor]
"""Function (slot, first element, end, dtype) that returns these elements of the parameter as a flat tensor."""
NUMBERS = ("weight", "master")
"""Kinds of state that are the model's own numbers."""
_FILL_ELEMENTS = 1 << 22
"""Number of elements that are drawn or read at a time, whatever the size of the parameter."""


class BucketState:
    """One bucket on this rank: its weight, its gradient and its state on other tiers.

    Args:
        layout: The bucket.
        dtypes: The dtypes of the bucket.
        parameters: The user's parameters, in the order of the bucket's slots.
        what: Name of the bucket in errors and of its slots.
        around: The groups, slots and tiers of the bucket's Unit.
        moments: The optimizer's moments that lie on another tier, by name.
    """

    def __init__(
        self,
        layout: Bucket,
        dtypes: BucketDtypes,
        parameters: list[nn.Parameter],
        what: str,
        around: BucketContext,
        moments: Mapping[str, TierTensor] = MappingProxyType({}),
    ):
        self.layout = layout
        self.dtypes = dtypes
        self.parameters = parameters
        self.what = what
        self._strategy = around.strategy
        self._slots = (around.weights, around.shards, around.gradients)
        views = ParameterViews(layout, parameters, what, dtypes.compute, around.device)
        self.views = views
        self.owned_range = around.owned_range
        """Index and count: this rank's master is range ``index`` of ``count`` equal ranges."""
        self.state: TierState | None = None
        """State on another tier than the device (master, ``moments``, perhaps the weight), or None."""
        kinds = self._kinds_on_tier(moments)
        if kinds:
            tier, tiers, pins = around.strategy.tier, around.tiers, around.device.type != "cpu"
            assert tiers is not None and tier != "device", "a tier off the device has files or host memory"
            self.state = TierState(what, tier, kinds, tiers, pins)
            around.ledger.take(tier, what, self.state.nbytes)
            if around.strategy.is_delayed and layout.key.trained:
                following = pinned_empty(self.owned_elements, dtypes.compute, pins)
                self.state.next = NextWeight(following)
                around.ledger.take("host", what, following.nbytes)
        self.weight = Weight(layout, dtypes, views, what, around, self.state)
        self.gradient = Gradient(layout, dtypes, views, what, around, self.state)
        self.copy = (around.dp.index // self.owned_range[1], around.dp.size // self.owned_range[1])
        """(index, count): this rank is number ``index`` of ``count`` ranks that store the same range of the
        reduced gradient."""
        own = around.own_range(layout)
        self.written_range = (own.start, own.stop) if around.replicate.index == 0 else (0, 0)
        """Elements [start, stop) of the bucket that this rank writes into a checkpoint. Of a range that several
        ranks store, the first rank writes."""

    def _kinds_on_tier(self, moments: Mapping[str, TierTensor]) -> dict[str, TierTensor]:
        strategy, layout, dtypes = self._strategy, self.layout, self.dtypes
        weight, state = strategy.weight_tier != "device", layout.key.trained and strategy.tier != "device"
        kinds = {}
        if weight:
            elements = layout.shard_elements if strategy.cuts_weight else layout.elements
            kinds["weight"] = TierTensor(elements, dtypes.compute)
        if state and not (weight and dtypes.master == dtypes.compute):
            kinds["master"] = TierTensor(self.owned_elements, dtypes.master)
        if state:
            kinds |= moments
        if state and strategy.grad_tier != "device":
            kinds["grad"] = TierTensor(self.owned_elements, dtypes.grad)
        return kinds

    @property
    def owned_elements(self) -> int:
        """Number of elements that this rank updates, padding included."""
        return self.layout.elements // self.owned_range[1]

    def holds(self, kind: str) -> bool:
        """Return True if state of that kind lies on another tier than the device."""
        return self.state is not None and kind in self.state.kinds

    def on_device(self) -> dict[str, Tensor]:
        """Return the parts of weight and master that lie on the device, flat, by kind.

        A master that shares the weight's memory is left out.
        """
        weight = self.weight
        found = {} if self.holds("weight") else {"weight": weight.shard}
        if weight.master is not None and not weight.shares_master and not self.holds("master"):
            found["master"] = weight.master
        return found

    @property
    def state_is_here(self) -> bool:
        """True if master and moments lie on the device."""
        return self._strategy.tier == "device"

    @property
    def slots(self) -> tuple[SlotPool, ...]:
        """The pools of slots for the full weight, the shard that it is gathered from and the gradients."""
        return self._slots

    @contextmanager
    def opened(self, changes: bool = False, kinds: Collection[str] | None = None) -> Iterator[None]:
        """Keep weight, master and moments in memory inside the context, after the last update has ended.

        Args:
            changes: True to write changes back to the tier.
            kinds: Kinds of state to open; None for all.
        """
        self.weight.finish_update()
        if self.state is None:
            yield
            return
        self.state.finish_update()
        with self.state.opened(changes, kinds):
            yield

    def take_up_edits(self, places: Collection[int]) -> None:
        """Copy parameters that were edited in place since the last update into their masters, this rank's part.

        Args:
            places: Indices of the parameters that may have been edited.
        """
        with self.opened(kinds=NUMBERS):
            differs = self.weight.differs_from_master(places)
        if differs:
            with self.opened(changes=True, kinds=NUMBERS), torch.no_grad():
                self.weight.take_up_edits(places)
        else:
            self.weight.renew()

    def fill(self, fill: Fill, wanted: Callable[[ParameterSlot], bool] = lambda slot: True) -> None:
        """Set weights from outside; each rank requests only the elements that it owns. Collective.

        Args:
            fill: Function that returns elements of a parameter.
            wanted: Function that returns True for the slots to set.
        """
        with self.opened(changes=True, kinds=NUMBERS):
            self._write(fill, wanted)
            self.settle()

    def write(self, fill: Fill, wanted: Callable[[ParameterSlot], bool] = lambda slot: True) -> None:
        """Set what this rank updates: the first half of ``fill``.

        Args:
            fill: Function that returns elements of a parameter.
            wanted: Function that returns True for the slots to set.
        """
        with self.opened(changes=True, kinds=NUMBERS):
            self._write(fill, wanted)

    def _write(self, fill: Fill, wanted: Callable[[ParameterSlot], bool]) -> None:
        weight = self.weight
        target, (index, count) = weight.master, self.owned_range
        if target is None:  # frozen
            target = weight.shard
            index, count = (index, count) if target.numel() < self.layout.elements else (0, 1)
        for slot, start, stop, local in self.layout.overlaps(index, count):
            if not wanted(slot):
                continue
            for first in range(start, stop, _FILL_ELEMENTS):
                last, place = min(first + _FILL_ELEMENTS, stop), local + first - start
                target[place : place + last - first].copy_(fill(slot, first, last, target.dtype))

    def settle(self) -> None:
        """Round the masters into the weights and gather the weights: the second half of ``fill``. Collective."""
        weight = self.weight
        if weight.master is None:
            weight.renew()
            return
        with self.opened(changes=self.holds("weight"), kinds=() if weight.shares_master else NUMBERS):
            weight.copy_from_master()
        weight.gather_updated().wait()
