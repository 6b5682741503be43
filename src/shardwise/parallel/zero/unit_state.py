"""One Unit on this rank: its buckets, and the window in which its weights are used.

    CLOSED -> FORWARD -> CLOSED -> BACKWARD -> CLOSED     a Unit in a step
    CLOSED -> RECOMPUTING -> CLOSED                      its forward inside the backward pass
    BACKWARD -> DISPLACED -> BACKWARD                    its memory is used by another Unit for a while
    FORWARD -> BACKWARD -> FORWARD                       autograd.grad inside a forward pass

A window states what the Unit is used for. Whether the weights are in memory is the state of each bucket: weights that
were gathered ahead are in memory before the window opens, and a step that gathers once keeps them after it closes.
"""

from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

from torch import nn

from shardwise.parallel.zero.bucket import BucketState
from shardwise.plan.lists import Strategy
from shardwise.plan.unit import Unit


class Window(Enum):
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
    Window.CLOSED: {Window.FORWARD, Window.BACKWARD, Window.RECOMPUTING},
    Window.FORWARD: {Window.BACKWARD, Window.CLOSED},
    Window.BACKWARD: {Window.DISPLACED, Window.CLOSED, Window.FORWARD},
    Window.RECOMPUTING: {Window.BACKWARD, Window.CLOSED},
    Window.DISPLACED: {Window.BACKWARD, Window.CLOSED},
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
    window: Window = Window.CLOSED
    calls: int = 0
    """Number of running calls of the Unit's forward: more than 1 if the forward calls itself."""
    missing: int = 0
    """Number of gradients that have not been accumulated in this backward pass."""
    is_reduced: bool = False
    is_kept: bool = False
    """True if the step's list gathered the Unit for more than one pass."""

    @cached_property
    def has_windows(self) -> bool:
        """True if the Unit's weights must be gathered before use."""
        return self.strategy.has_windows

    def enter(self, window: Window) -> None:
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

    @property
    def is_in_backward(self) -> bool:
        """True while the Unit's backward window is open."""
        return self.window is Window.BACKWARD or self.window is Window.DISPLACED

    @property
    def is_complete(self) -> bool:
        """True if nothing of the Unit's backward pass can be outstanding."""
        return self.missing == 0 and self.trained_parameters > 0 and not self.has_frozen
