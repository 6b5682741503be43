"""The windows of a stage's Units: what BRING, UNSHARD, RESHARD, RECALL and REDUCE do here.

[Note: deferred gathers]
An UNSHARD ahead of its use finds its memory taken where the order changed since memory was given out. It then waits for
the F or B of its Unit, or for the cursor to pass that: at a point of the list, again, and so on every rank alike.

[Note: second derivatives]
``autograd.grad(..., create_graph=True)`` before ``engine.backward`` (a gradient penalty, a force) is a foreign backward
whose own graph is walked again in the step's backward pass. That graph saved weights in the order of a backward pass,
and no output says when it will be needed. So after it all Units are gathered for the whole of the step's backward pass,
which needs memory of their own (zero.reuse_buffers: false).
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence

from shardwise.comm.collectives import Pending
from shardwise.parallel.zero.bucket import BucketState
from shardwise.parallel.zero.unit_state import UnitState, Window
from shardwise.plan.action import Action
from shardwise.plan.errors import UsageError
from shardwise.plan.walker import Walker


class UnitWindows:
    """See the module's docstring. ``first``: number of the first Unit in the rank's list; ``keeps``: whether the list
    gathers a Unit once for all passes of a step; ``reductions``: of how many Units the gradients may still travel while
    the backward pass goes on; ``overlaps``: whether gathers after an update run beside the next forward pass."""

    def __init__(
        self,
        states: Sequence[UnitState],
        walker: Walker,
        first: int,
        keeps: bool,
        reductions: int = 0,
        overlaps: bool = False,
    ):
        self.states = list(states)
        self.first = first
        self._walker = walker
        self._keeps = keeps
        self.adds_up = False
        """Whether earlier backward passes of the step wait for the one that runs."""
        self._is_last = True
        self.on_reduced: Callable[[BucketState, bool], None] = lambda bucket, last: None
        """Told of a gradient that may leave the device, and whether nothing more comes to it in this step."""
        self.on_recall: Callable[[str], None] = lambda name: None
        """Told of a Unit whose forward pass has saved elsewhere what its backward pass needs, ahead of that."""
        self._is_held = False
        """[Note: second derivatives]"""
        self._deferred: set[int] = set()
        self._reductions = reductions
        self._overlaps = overlaps
        self._travelling: deque[tuple[UnitState, bool]] = deque()
        """Units whose gradients have begun to travel, the first of them first, and whether for the last time."""
        self._updates: list[Pending] = []
        """Gathers of weights that are kept whole, under way since the step."""
        self._holders: dict[Hashable, UnitState] = {
            bucket.what: state for state in self.states for bucket in state.buckets
        }

    def of(self, action: Action) -> UnitState:
        """The Unit that an Action of the rank's list names."""
        return self.states[action.unit - self.first]

    # Actions ---------------------------------------------------------------------------------------------------

    def bring(self, action: Action) -> None:
        """BRING: begin to bring what the next gather sends, from the tier where it lies."""
        for bucket in self.of(action).buckets:
            bucket.weight.bring()

    def unshard(self, action: Action) -> None:
        """UNSHARD: begin to gather what is cut; in the end of the step what was updated in pieces."""
        state = self.of(action)
        if not state.has_windows:
            trained = [bucket for bucket in state.buckets if bucket.layout.key.trained]
            self._updates += [bucket.weight.gather_updated(self._overlaps) for bucket in trained]
            return
        if any(bucket.weight.in_the_way is not None for bucket in state.buckets):
            self._deferred.add(state.unit.index)  # [Note: deferred gathers]
            return
        state.is_kept = self._keeps and not self._walker.is_aside
        for bucket in state.buckets:
            bucket.weight.start_unshard()

    def finish_updates(self) -> None:
        """The gathers of a step's end are over."""
        for pending in self._updates:
            pending.wait()
        self._updates.clear()

    def reshard(self, action: Action) -> None:
        """RESHARD: give the memory back."""
        state = self.of(action)
        if state.is_kept and not self._walker.is_aside:
            state.is_kept = False
        self.close(state)

    def recall(self, action: Action) -> None:
        """RECALL: begin to bring back what its forward has saved."""
        self.on_recall(self.of(action).unit.name)

    def reduce(self, action: Action) -> None:
        """REDUCE: begin to sum the gradients over the ranks, to where the masters lie."""
        state = self.of(action)
        for bucket in state.buckets:
            if bucket.layout.key.trained:
                bucket.gradient.reduce()
        state.is_reduced = True
        self._travelling.append((state, self._is_last))
        while len(self._travelling) > self._reductions:
            first, is_last = self._travelling.popleft()
            for bucket in first.buckets:
                bucket.gradient.arrive()
                if bucket.gradient.leaves:
                    self.on_reduced(bucket, is_last)

    # UnitWindows ---------------------------------------------------------------------------------------------------

    def need(self, state: UnitState, recomputes: bool = False) -> None:
        """The Unit's weights are needed now. Who was gathered ahead into its memory makes way."""
        for bucket in state.buckets:
            holder_name = bucket.weight.in_the_way
            if holder_name is None:
                continue
            holder = self._holders[holder_name]
            if holder.window is Window.FORWARD or (holder.is_in_backward and not recomputes):
                break  # the slot itself will complain
            for other in holder.buckets:
                other.weight.reshard()
            if holder.is_in_backward:
                holder.enter(Window.DISPLACED)
            else:
                self._deferred.add(holder.unit.index)
        state.gather()
        self._deferred.discard(state.unit.index)

    def need_if_deferred(self, state: UnitState) -> None:
        """The cursor goes by the Unit's pass. [Note: deferred gathers]"""
        if state.unit.index in self._deferred:
            self.need(state)

    def recompute(self, state: UnitState) -> None:
        """Its forward runs inside the backward pass."""
        self.need(state, recomputes=True)
        state.enter(Window.BACKWARD if state.is_in_backward else Window.RECOMPUTING)

    def close(self, state: UnitState) -> None:
        """The Unit is not used any more: its memory goes back, but for what the step's list keeps."""
        if not self._is_held and not state.is_kept:
            for bucket in state.buckets:
                bucket.weight.reshard()
        state.enter(Window.CLOSED)
        state.calls = 0

    def close_all(self) -> None:
        """What passes have left open, by an exception or by a departure from the list."""
        for state in self.states:
            if state.has_windows:
                self.close(state)

    # Passes ----------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """A list begins."""
        self._deferred.clear()

    def begin_backward(self, last: bool, holds: bool) -> None:
        """``last``: the last one of the step. ``holds``: [Note: second derivatives]"""
        self._deferred.clear()
        self._is_last = last
        for state in self.states:
            state.missing = state.trained_parameters
            state.is_reduced = False
            if state.window is not Window.CLOSED:
                state.enter(Window.CLOSED)
            for bucket in state.buckets:
                bucket.gradient.reduces_alone = last and not self.adds_up
        if holds:
            self._hold_all()

    def _hold_all(self) -> None:
        """[Note: second derivatives] Where Units share memory nothing is held, and autograd's version check decides."""
        try:
            for state in self.states:
                state.gather()
        except UsageError:
            self.close_all()
        else:
            self._is_held = True

    def end_backward(self) -> None:
        """Of the step's own: what was held for it goes, and the next one adds to it."""
        self._is_held = False
        self.adds_up = True

    @property
    def not_reduced(self) -> set[int]:
        """Numbers in the rank's list of Units whose gradients stay whole and were not reduced, because the step's last
        backward pass was not known to be it. Cut ones were: a second time would count them twice."""
        if not self.adds_up or self._is_last:
            return set()
        return {self.first + state.unit.index for state in self.states if not state.strategy.reduces_each}

    def end_step(self) -> None:
        """The next backward pass is the first of a step."""
        self.adds_up = False
        self._travelling.clear()

    def drop(self) -> None:
        """Back to the state between two steps, after whatever happened."""
        self._deferred.clear()
        self._travelling.clear()
        self._is_held = self.adds_up = False
        self._updates.clear()
        for state in self.states:
            state.is_kept = False
        self.close_all()
        for state in self.states:
            for bucket in state.buckets:
                bucket.gradient.drop_gradients()
