"""One Unit on this rank: its buckets, and the window in which its weights are used.

    CLOSED -> FORWARD -> CLOSED -> BACKWARD -> CLOSED     a Unit in a step
    CLOSED -> RECOMPUTING -> CLOSED                      its forward inside the backward pass
    BACKWARD -> DISPLACED -> BACKWARD                    its memory is another's for a while
    FORWARD -> BACKWARD -> FORWARD                       autograd.grad inside a forward pass

A window says what the Unit is used for, not where its weights are: that a bucket knows (weights gathered ahead are
there before the window opens; a step that gathers once keeps them after it closes).
"""

from dataclasses import dataclass
from enum import Enum, auto

from torch import nn

from shardwise.parallel.zero.bucket import BucketState
from shardwise.plan.lists import Strategy
from shardwise.plan.unit import Unit


class Window(Enum):
    """What a Unit's weights are used for now."""

    CLOSED = auto()
    """Nothing."""
    FORWARD = auto()
    BACKWARD = auto()
    RECOMPUTING = auto()
    """A forward pass inside the backward pass."""
    DISPLACED = auto()
    """BACKWARD, but the memory is lent to a Unit that recomputes."""

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
    """See the module's docstring."""

    unit: Unit
    module: nn.Module
    buckets: list[BucketState]
    trained_parameters: int
    has_frozen: bool
    strategy: Strategy
    window: Window = Window.CLOSED
    calls: int = 0
    """Calls of its forward that are under way: more than one where it calls itself."""
    missing: int = 0
    """Gradients that have not landed in this backward pass."""
    is_reduced: bool = False
    is_kept: bool = False
    """The step's list gathered it for more than one pass."""

    @property
    def has_windows(self) -> bool:
        """Whether its weights must be gathered before use."""
        return self.strategy.has_windows

    def enter(self, window: Window) -> None:
        """The window changes."""
        if window is not self.window:
            before = self.window
            assert window in _NEXT[before], f"{self.unit.title}: {before.name} does not become {window.name}"
            self.window = window

    def gather(self) -> None:
        """UNSHARD, finished."""
        for bucket in self.buckets:
            bucket.weight.start_unshard()
        for bucket in self.buckets:
            bucket.weight.finish_unshard()

    @property
    def is_in_backward(self) -> bool:
        """Whether its backward window is open."""
        return self.window is Window.BACKWARD or self.window is Window.DISPLACED

    @property
    def is_complete(self) -> bool:
        """True when nothing of the Unit's backward pass can be outstanding."""
        return self.missing == 0 and self.trained_parameters > 0 and not self.has_frozen
