"""Ranges of a profile that are named after the Actions of a rank's list.

    UNSHARD(u3,0) Unit 3 'blocks.2'     a range around the handler of the Action
    F(u3,0) Unit 3 'blocks.2'           a range from the Unit's forward hook to the next Action
    B(u3,0) Unit 3 'blocks.2'           a mark of no length where the Unit's backward pass begins
    F(0,0), B(0,0)                      a range around a whole pass of a stage

Every range is a ``torch.profiler.record_function``, and on a CUDA device an NVTX range too, if torch has NVTX.

The ranges are installed on the walker and removed from it: the handlers are replaced, and three methods of the walker
are shadowed by attributes of the instance. A walker without ranges is therefore exactly as fast as before.

[Note: a backward pass is marked] Autograd calls a tensor's hooks inside the range of its own node, so a range from one
hook to the next would overlap the ranges of autograd, and a profile shows nested ranges only. On a device a thread of
autograd also begins what the main thread ends, and the stacks of NVTX and CUPTI belong to one thread.

Cost: none without ranges; with ranges, one ``record_function`` per Action.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.profiler import record_function

from shardwise.plan.action import Action, Kind
from shardwise.plan.unit import Unit
from shardwise.plan.walker import Handler, Walker

_SHADOWED = ("enter", "run_to", "finish_pass")
"""Methods of the walker that are replaced while ranges are installed."""


@contextmanager
def action_ranges(walker: Walker, units: Sequence[Unit], device: torch.device) -> Iterator[None]:
    """Name the Actions that ``walker`` runs inside the ``with`` block in the profile that is running.

    Args:
        walker: The walker of this rank's list, between two steps.
        units: The Units of the rank, by the numbers that the Actions contain.
        device: The device on which the rank computes.
    """
    ranges = _WalkerRanges(walker, units, has_nvtx(device))
    handlers = dict(walker.handlers)
    shadowed = {name: value for name, value in vars(walker).items() if name in _SHADOWED}
    walker.handlers.update({kind: ranges.around(handler) for kind, handler in handlers.items()})
    vars(walker).update({name: getattr(ranges, name) for name in _SHADOWED})
    try:
        yield
    finally:
        for name in _SHADOWED:
            del vars(walker)[name]
        vars(walker).update(shadowed)
        walker.handlers.update(handlers)
        ranges.drop()


def has_nvtx(device: torch.device) -> bool:
    """Return True if ``device`` is a CUDA device and torch can write NVTX ranges."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.nvtx.range_push("shardwise")
        torch.cuda.nvtx.range_pop()
    except RuntimeError:
        return False
    return True


class _OpenRange:
    """A range that begins in one call and ends in a later call of the same thread.

    Args:
        around: Function that returns the context of a range with the given name.
    """

    def __init__(self, around: Callable[[str], "_Range"]) -> None:
        self._around = around
        self._stack = ExitStack()
        self._thread: int | None = None
        """The thread that began the range; None if no range is open."""

    def open(self, name: str) -> None:
        """End the open range and begin the next range, unless the open range belongs to another thread."""
        self.close()
        if self._thread is None:
            self._thread = threading.get_ident()
            self._stack.enter_context(self._around(name))

    def close(self) -> None:
        """End the open range, if this thread began it."""
        if self._thread == threading.get_ident():
            self.drop()

    def drop(self) -> None:
        """End the open range, whatever thread began it."""
        self._thread = None
        self._stack.close()


class _Range:
    """Context of one range: ``record_function``, and NVTX if asked for."""

    def __init__(self, name: str, nvtx: bool) -> None:
        self._name, self._nvtx = name, nvtx
        self._recorded = record_function(name)

    def __enter__(self) -> None:
        self._recorded.__enter__()
        if self._nvtx:
            torch.cuda.nvtx.range_push(self._name)

    def __exit__(self, *error: object) -> None:
        if self._nvtx:
            torch.cuda.nvtx.range_pop()
        self._recorded.__exit__(None, None, None)


class _WalkerRanges:
    """The ranges of one walker, and the functions that replace the walker's own.

    Args:
        walker: The walker, whose methods are called as they are now.
        units: The Units of the rank.
        nvtx: True to write NVTX ranges too.
    """

    def __init__(self, walker: Walker, units: Sequence[Unit], nvtx: bool) -> None:
        self._walker, self._units, self._nvtx = walker, units, nvtx
        self._own_enter, self._own_run_to = walker.enter, walker.run_to
        self._own_finish_pass = walker.finish_pass
        self._names: dict[Action, str] = {}
        self._pass = _OpenRange(self._range)
        """The range of a stage's pass in a user's own loop."""
        self._unit = _OpenRange(self._range)
        """The range of a Unit's forward pass, which lies inside the stage's."""

    def around(self, handler: Handler) -> Handler:
        """Return ``handler`` so that it runs inside a range.

        A Unit's pass that reaches a handler was not announced by a hook and is over, so it gets no range.
        """

        def ranged(action: Action) -> None:
            self._unit.close()
            if action.unit >= 0 and action.kind.is_announced:
                handler(action)
                return
            with self._range(self._name(action)):
                try:
                    handler(action)
                finally:
                    self._unit.close()

        return ranged

    def enter(self, kind: Kind, stage: int) -> bool:
        """Begin a pass of a stage in the user's own loop, and its range. See ``Walker.enter``."""
        is_entered = self._own_enter(kind, stage)
        action = self._walker.under_way
        if is_entered and action is not None and not self._walker.is_aside:
            self._unit.close()
            self._pass.open(self._name(action))
        return is_entered

    def run_to(self, kind: Kind, unit: int) -> bool:
        """Run the Actions in front of a Unit's pass, and begin the pass's range. See ``Walker.run_to``.

        See [Note: a backward pass is marked].
        """
        is_next = self._own_run_to(kind, unit)
        if not is_next or self._walker.target is None:
            return is_next
        name = self._name(self._walker.target)
        if kind is not Kind.F:
            with self._range(name):
                pass
        else:
            self._unit.open(name)
        return is_next

    def finish_pass(self) -> None:
        """Run the Actions that are left of the pass, and end its ranges. See ``Walker.finish_pass``."""
        self._unit.close()
        self._own_finish_pass()
        if not self._walker.is_aside:
            self._pass.close()

    def drop(self) -> None:
        """End the ranges that an exception in the middle of a pass has left open."""
        self._unit.drop()
        self._pass.drop()

    def _range(self, name: str) -> _Range:
        return _Range(name, self._nvtx)

    def _name(self, action: Action) -> str:
        """Return the Action's text and the title of its Unit."""
        name = self._names.get(action)
        if name is None:
            name = str(action)
            if action.unit >= 0:
                name += f" Unit {action.unit} '{self._units[action.unit].title}'"
            self._names[action] = name
        return name
