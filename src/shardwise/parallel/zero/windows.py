"""The windows of a stage's Units: the effects of LOAD_WEIGHT, UNSHARD, RESHARD, OFFLOAD, RELOAD, REDUCE, ARRIVE.

    CLOSED -> FORWARD -> CLOSED -> BACKWARD -> CLOSED     a Unit in a step
    CLOSED -> RECOMPUTING -> CLOSED                      its forward inside the backward pass
    BACKWARD -> DISPLACED -> BACKWARD                    its memory is used by another Unit for a while
    FORWARD -> BACKWARD -> FORWARD                       autograd.grad inside a forward pass

A window states what the Unit is used for. Whether the weights are in memory is the state of each bucket: weights that
were gathered ahead are in memory before the window opens, and a step that gathers once keeps them after it closes.

[Note: deferred gathers]
An UNSHARD ahead of its use finds its slot taken if the order has changed since the slots were assigned. The gather then
waits for the F or B of its Unit, or for the cursor to pass that Action. Both are points of the list, so every rank
defers the gather alike.

[Note: second derivatives]
``autograd.grad(..., create_graph=True)`` before ``engine.backward`` (a gradient penalty, a force) is a foreign backward
whose own graph is walked again in the step's backward pass. That graph saved weights in the order of a backward pass,
and no hook on an output announces when the weights are needed. So all Units are gathered for the whole of the step's
backward pass, which needs separate memory for each Unit (zero.reuse_buffers: false).
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Protocol

from torch import nn

from shardwise.base.errors import UsageError
from shardwise.comm.flights import PendingCollective
from shardwise.kernels.deferred import ProductQueue
from shardwise.parallel.zero.bucket import BucketState
from shardwise.plan.action import Action
from shardwise.plan.strategy import Strategy
from shardwise.plan.trace import Trace, recorded
from shardwise.plan.unit import Unit
from shardwise.plan.walker import Walker


class WindowState(Enum):
    """Use of a Unit's weights at the moment."""

    CLOSED = auto()
    """The weights are not in use."""
    FORWARD = auto()
    BACKWARD = auto()
    RECOMPUTING = auto()
    """A forward pass runs inside the backward pass."""
    DISPLACED = auto()
    """The backward window is open, but the memory is lent to a Unit that recomputes."""

    __hash__ = object.__hash__  # Enum's own runs in Python


_NEXT = {
    WindowState.CLOSED: {WindowState.FORWARD, WindowState.BACKWARD, WindowState.RECOMPUTING},
    WindowState.FORWARD: {WindowState.BACKWARD, WindowState.CLOSED},
    WindowState.BACKWARD: {WindowState.DISPLACED, WindowState.CLOSED, WindowState.FORWARD},
    WindowState.RECOMPUTING: {WindowState.BACKWARD, WindowState.CLOSED},
    WindowState.DISPLACED: {WindowState.BACKWARD, WindowState.CLOSED},
}


@dataclass
class UnitState:
    """A Unit on this rank, with its module, its buckets and the state of its passes."""

    unit: Unit
    module: nn.Module
    buckets: list[BucketState]
    trained_parameters: int
    has_frozen: bool
    strategy: Strategy
    window: WindowState = WindowState.CLOSED
    calls: int = 0
    """Number of running calls of the Unit's forward: more than 1 if the forward calls itself."""
    missing: int = 0
    """Number of gradients that have not been accumulated in this backward pass."""
    is_last: bool = True
    """True if the running backward pass is the step's last one that adds to the Unit's gradients."""
    adds_up: bool = False
    """True if earlier backward passes of the step have left gradients to which the running pass adds."""
    is_reduced: bool = False
    has_passed: bool = False
    """True if the walker has passed the Unit's B of the running backward pass."""
    is_kept: bool = False
    """True if the step's list gathered the Unit for more than one pass."""
    is_ahead: bool = False
    """True if the list gathered the Unit ahead of its backward pass, and its forward runs again before that."""

    @cached_property
    def has_windows(self) -> bool:
        """True if the Unit's weights must be gathered before use."""
        return self.strategy.has_windows

    @cached_property
    def brings_shard(self) -> bool:
        """True if the rank's shard comes from another tier before it is gathered."""
        return self.strategy.brings_shard

    def enter(self, window: WindowState) -> None:
        """Change the window, and check that the change is legal."""
        if window is not self.window:
            before = self.window
            assert window in _NEXT[before], f"{self.unit.title}: {before.name} does not become {window.name}"
            self.window = window

    def gather(self) -> None:
        """Gather the weights of all buckets and wait for them."""
        for bucket in self.buckets:
            bucket.weight.start_unshard()
        for bucket in self.buckets:
            bucket.weight.finish_unshard()

    def flush(self) -> None:
        """Copy the gradients that wait into the buffers of all buckets."""
        for bucket in self.buckets:
            bucket.gradient.flush()

    @property
    def is_in_backward(self) -> bool:
        """True while the Unit's backward window is open."""
        return self.window is WindowState.BACKWARD or self.window is WindowState.DISPLACED

    @property
    def is_sharded(self) -> bool:
        """True if the rank holds only its shard of some weights, and no gather is under way."""
        for bucket in self.buckets:  # noqa: SIM110 (``any`` makes a generator in every window)
            if bucket.weight.is_sharded:
                return True
        return False

    @property
    def is_whole_here(self) -> bool:
        """True if full weights of the Unit are in slots of its window, or on their way there."""
        return any(bucket.weight.is_whole_here for bucket in self.buckets)

    @property
    def is_complete(self) -> bool:
        """True if nothing of the Unit's backward pass can be outstanding."""
        return self.missing == 0 and self.trained_parameters > 0 and not self.has_frozen


class MovedActivations(Protocol):
    """Activations that wait on another tier from a Unit's forward pass to its backward pass."""

    def offload(self, name: str) -> None:
        """Release the device memory of what the forward pass of the Unit ``name`` has saved."""

    def reload(self, name: str) -> None:
        """Begin to bring back what the forward pass of the Unit ``name`` has saved."""


class UnitWindows:
    """The windows of a stage's Units, and the handlers that open and close them.

    Args:
        states: The Units of the stage, in order of their index.
        walker: The walker of the rank's list.
        first: Number of the stage's first Unit in the rank's list.
        keeps: True if the list gathers a Unit once for all passes of a step.
        reductions: Number of Units whose gradients may still be in transfer while the backward pass goes on.
        overlaps: True if gathers after an update run beside the next forward pass.
    """

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
        self.products: ProductQueue | None = None
        """The products that wait for W; None if the schedule has no W."""
        self.on_reduced: Callable[[BucketState, bool], None] = lambda bucket, last: None
        """Callback for a gradient that may leave the device; the flag is True if nothing more is added in this
        step."""
        self.activations: MovedActivations | None = None
        """What the Units' forward passes save on another tier."""
        self._is_held = False
        """True while all Units stay gathered for one backward pass. [Note: second derivatives]"""
        self._deferred: dict[int, int] = {}
        """Rows of the trace of the deferred gathers, by Unit. [Note: deferred gathers]"""
        self._reductions = reductions
        self._overlaps = overlaps
        self._travelling: deque[tuple[UnitState, bool]] = deque()
        """Units whose reduction has begun, oldest first, each with whether the reduction is the step's last one."""
        self._updates: list[PendingCollective] = []
        """Gathers of whole weights that the last step has begun."""
        self._holders: dict[Hashable, UnitState] = {
            bucket.what: state for state in self.states for bucket in state.buckets
        }

    @property
    def trace(self) -> Trace:
        """The trace of the list that is running."""
        return self._walker.trace

    @property
    def adds_up(self) -> bool:
        """True if earlier backward passes of the step have left gradients to which the running pass adds."""
        return any(state.adds_up for state in self.states)

    def is_later(self, state: UnitState) -> bool:
        """Return True if gradients of a Unit wait for W where a backward pass is run in two parts."""
        return self.products is not None and state.unit.index in self.products.units

    def of(self, action: Action) -> UnitState:
        """Return the Unit that an Action of the rank's list names."""
        return self.states[action.unit - self.first]

    # Actions ---------------------------------------------------------------------------------------------------

    @recorded
    def load_weight(self, action: Action) -> None:
        """Run LOAD_WEIGHT: begin to bring the shard that the next gather sends from its tier."""
        state = self.of(action)
        if any(bucket.weight.is_brought for bucket in state.buckets):
            self._walker.diverge(f"{action}: the shard of {state.unit.title} was brought already")
        for bucket in state.buckets:
            bucket.weight.load()

    @recorded
    def unshard(self, action: Action) -> None:
        """Run UNSHARD: begin to gather cut weights, or, at the end of a step, weights that were updated in pieces."""
        state = self.of(action)
        if not state.has_windows:
            trained = [bucket for bucket in state.buckets if bucket.layout.key.trained]
            self._updates += [bucket.weight.gather_updated(self._overlaps) for bucket in trained]
            return
        if not self._is_held:
            self._check_gather(action, state)
        for bucket in state.buckets:
            if bucket.weight.in_the_way is not None:
                # [Note: deferred gathers]; the bytes are counted to this row when the gather runs
                self._deferred[state.unit.index] = len(self.trace.actions) - 1
                return
        state.is_kept = self._keeps and not self._walker.is_aside
        for bucket in state.buckets:
            bucket.weight.start_unshard()

    def _check_gather(self, action: Action, state: UnitState) -> None:
        """Record a divergence if the gather finds another state than the list's Actions before it leave."""
        whole = 0
        for bucket in state.buckets:
            whole += bucket.weight.is_whole_here
            if state.brings_shard and not bucket.weight.is_brought:
                self._walker.diverge(f"{action}: no LOAD_WEIGHT has brought the shard of {state.unit.title}")
                return
        if whole and whole == len(state.buckets):
            self._walker.diverge(f"{action}: the weights of {state.unit.title} are gathered already")

    def finish_updates(self) -> None:
        """Wait for the gathers of the step's end."""
        for pending in self._updates:
            pending.wait()
        self._updates.clear()

    @recorded
    def reshard(self, action: Action) -> None:
        """Run RESHARD: release the gathered memory of a Unit."""
        state = self.of(action)
        if state.is_kept and not self._walker.is_aside:
            state.is_kept = False
        self.close(state)

    @recorded
    def offload(self, action: Action) -> None:
        """Run OFFLOAD: release the device memory of the activations that the Unit's forward pass has saved."""
        if self.activations is not None:
            self.activations.offload(self.of(action).unit.name)

    @recorded
    def reload(self, action: Action) -> None:
        """Run RELOAD: begin to bring back the activations that the Unit's forward pass has saved elsewhere."""
        if self.activations is not None:
            self.activations.reload(self.of(action).unit.name)

    def note_missed_offload(self, name: str) -> None:
        """Report that the saved tensors of a block stayed on the device because no OFFLOAD of the list came."""
        self._walker.diverge(f"no OFFLOAD of the list has released the saved tensors of {name}")

    def note_missed_reload(self, name: str) -> None:
        """Report that the saved tensors of a block are wanted although no RELOAD of the list came first."""
        if not self._is_held:
            self._walker.diverge(
                f"the saved tensors of {name} were wanted before a RELOAD of the list asked for them"
            )

    @recorded
    def reduce(self, action: Action) -> None:
        """Run REDUCE: begin to sum the Unit's gradients over the ranks."""
        state = self.of(action)
        if state.is_reduced:
            self._walker.diverge(f"{action}: the gradients of {state.unit.title} were reduced already")
        for bucket in state.buckets:
            if bucket.layout.key.trained:
                bucket.gradient.reduce()
        state.is_reduced = True
        self._travelling.append((state, state.is_last))
        while len(self._travelling) > self._reductions + 1:
            self._arrive_unlisted()

    @recorded
    def arrive(self, action: Action) -> None:
        """Run ARRIVE: wait for the sum of a Unit's gradients; a gradient for another tier leaves the device."""
        state = self.of(action)
        for place, (each, is_last) in enumerate(self._travelling):
            if each is state:
                del self._travelling[place]
                self._let_arrive(state, is_last)
                return
        self._walker.diverge(f"{action}: no reduction of {state.unit.title} is under way")

    def _arrive_unlisted(self) -> None:
        """Wait for the oldest reduction, because no Action of the list does."""
        state, is_last = self._travelling.popleft()
        self._walker.diverge(f"no ARRIVE of the list has waited for the reduction of {state.unit.title}")
        self._let_arrive(state, is_last)

    def _let_arrive(self, state: UnitState, is_last: bool) -> None:
        for bucket in state.buckets:
            bucket.gradient.arrive()
            if bucket.gradient.leaves:
                self.on_reduced(bucket, is_last)

    # Windows ---------------------------------------------------------------------------------------------------

    def need(self, state: UnitState, recomputes: bool = False, is_listed: bool = True) -> None:
        """Gather the weights of a Unit now; a Unit that was gathered ahead into the same slot is released first.

        Args:
            state: The Unit.
            recomputes: True if the Unit's forward runs inside the backward pass; the Unit may then also
                displace one whose backward window is open.
            is_listed: False if the list has no window of the Unit here, so that the gather was not ordered.
        """
        for bucket in state.buckets:
            holder_name = bucket.weight.in_the_way
            if holder_name is None:
                continue
            holder = self._holders[holder_name]
            if holder.window is WindowState.FORWARD or (holder.is_in_backward and not recomputes):
                break  # acquiring the slot raises the error
            for other in holder.buckets:
                other.weight.reshard()
            if holder.is_in_backward:
                holder.enter(WindowState.DISPLACED)
            else:
                self._deferred[holder.unit.index] = -1  # a second gather, which belongs to no row
        row = self._deferred.pop(state.unit.index, None)
        if row is None:
            if is_listed and not self._is_held and state.is_sharded:
                self._walker.diverge(
                    f"{state.unit.title} was gathered although no UNSHARD of the list came first"
                )
            state.gather()
        elif row < 0:
            state.gather()
        else:
            with self.trace.again(row):
                state.gather()

    def need_if_deferred(self, state: UnitState) -> None:
        """Gather a Unit whose UNSHARD was deferred, because the cursor passes its F or B.

        See [Note: deferred gathers].
        """
        if state.unit.index in self._deferred:
            self.need(state)

    def recompute(self, state: UnitState) -> None:
        """Gather a Unit for a forward pass that runs inside the backward pass."""
        state.is_ahead = state.is_whole_here or state.unit.index in self._deferred
        self.need(state, recomputes=True, is_listed=False)
        state.enter(WindowState.BACKWARD if state.is_in_backward else WindowState.RECOMPUTING)

    def end_recompute(self, state: UnitState) -> None:
        """End the window of a forward pass that ran inside the backward pass.

        The weights stay if the list has gathered them for the backward pass that follows; no other UNSHARD comes.
        """
        if state.is_ahead:
            state.enter(WindowState.CLOSED)
        else:
            self.close(state)

    def close(self, state: UnitState) -> None:
        """End the window of a Unit and release its memory, unless the step's list keeps the weights."""
        if not self._is_held and not state.is_kept:
            for bucket in state.buckets:
                bucket.weight.reshard()
        state.enter(WindowState.CLOSED)
        state.calls = 0

    def close_all(self) -> None:
        """Close every window that an exception or a departure from the list has left open."""
        for state in self.states:
            if state.has_windows:
                self.close(state)

    # Passes ----------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Drop the deferred gathers of the last list, because a new list begins."""
        self._deferred.clear()

    def begin_backward(self, last: bool, holds: bool, is_half: bool = False) -> None:
        """Prepare the windows for a backward pass.

        Args:
            last: True for the last backward pass of the step.
            holds: True to gather all Units for the whole pass. [Note: second derivatives]
            is_half: True for I, which leaves the gradients of some Units to W (``begin_weights``).
        """
        self._deferred.clear()
        for state in self.states:
            state.missing = state.trained_parameters
            state.has_passed = False
            if state.window is not WindowState.CLOSED:
                state.enter(WindowState.CLOSED)
            if not (is_half and self.is_later(state)):
                _begin_gradients(state, last)
        if holds:
            self._hold_all()

    def begin_weights(self, last: bool) -> None:
        """Prepare W, which computes the gradients that I has left.

        Args:
            last: True for the last W of the step.
        """
        for state in self.states:
            if self.is_later(state):
                _begin_gradients(state, last)

    def end_weights(self) -> None:
        """End W: record what no Action of the list has reduced, and let the next W add to the gradients."""
        while len(self._travelling) > self._reductions:
            self._arrive_unlisted()
        for state in self.states:
            if self.is_later(state):
                if not state.is_reduced and (state.is_last or state.strategy.reduces_each):
                    self._walker.diverge(
                        f"no REDUCE of the list has summed the gradients of {state.unit.title}"
                    )
                state.flush()
                state.adds_up = True

    def _hold_all(self) -> None:
        """Gather all Units for the whole pass. See [Note: second derivatives].

        If Units share slots, none is held, and autograd's version check decides whether a stale weight was
        used.
        """
        try:
            for state in self.states:
                state.gather()
        except UsageError:
            self.close_all()
        else:
            self._is_held = True

    def check_backward(self, is_half: bool = False) -> None:
        """Record a divergence for what a backward pass has done though no Action of the list ordered it.

        Args:
            is_half: As in ``begin_backward``.
        """
        while len(self._travelling) > self._reductions:
            self._arrive_unlisted()
        for state in self.states:
            title, has_gradients = state.unit.title, state.missing < state.trained_parameters
            if has_gradients and not state.has_passed:
                self._walker.diverge(f"the backward pass of {title} stands nowhere in the list")
            is_reduced = state.is_reduced or (is_half and self.is_later(state))
            if has_gradients and not is_reduced and (state.is_last or state.strategy.reduces_each):
                self._walker.diverge(f"no REDUCE of the list has summed the gradients of {title}")
            if state.has_windows and not self._is_held and not state.is_kept and state.is_whole_here:
                self._walker.diverge(f"no RESHARD of the list has released the weights of {title}")

    def end_backward(self, is_half: bool = False) -> None:
        """End one of the step's own backward passes: stop holding Units, and let the next pass add to the gradients.

        Args:
            is_half: As in ``begin_backward``.
        """
        for state in self.states:
            if not (is_half and self.is_later(state)):
                state.flush()
                state.adds_up = True
        self._is_held = False

    @property
    def not_reduced(self) -> set[int]:
        """Numbers in the rank's list of the Units whose gradients still have to be reduced at the step.

        These Units keep whole gradients, and the step's last backward pass did not reduce them because it was
        not announced as the last. Cut gradients were reduced in every pass; a second reduction would count them
        twice.
        """
        if not self.adds_up or all(state.is_last for state in self.states):
            return set()
        return {self.first + state.unit.index for state in self.states if not state.strategy.reduces_each}

    def end_step(self) -> None:
        """Make the next backward pass the first of a step."""
        self._end_sums()
        self._travelling.clear()

    def _end_sums(self) -> None:
        for state in self.states:
            state.adds_up = False

    def drop(self) -> None:
        """Reset everything to the state between two steps, whatever happened before."""
        self._deferred.clear()
        self._travelling.clear()
        self._is_held = False
        self._end_sums()
        self._updates.clear()
        for state in self.states:
            state.is_kept = False
        self.close_all()
        for state in self.states:
            for bucket in state.buckets:
                bucket.gradient.drop_gradients()


def _begin_gradients(state: UnitState, last: bool) -> None:
    """Prepare the gradients of a Unit for a pass that adds to them.

    Args:
        state: The Unit.
        last: True for the last such pass of the step.
    """
    state.is_reduced, state.is_last = False, last
    for bucket in state.buckets:
        bucket.gradient.reduces_alone = last and not state.adds_up
