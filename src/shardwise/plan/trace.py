"""Trace: the Actions of a rank in a step, one by one, and their differences from the Plan.

    Plan.actions   F(0,0)  UNSHARD(u0,0)  F(u0,0) ...      what is to be done
    trace.actions  F(0,0)  UNSHARD(u0,0)  F(u0,0) ...      what was done: equal if the model follows the Plan

The function that does an Action writes the row (``recorded``), not the walker that calls it: an Action that nobody has
done has no row, and the walker reports it. A pass that the user's model computes is written when its hook reports it.
``divergences`` describes each departure from the list (a Unit that the data skipped, another order, a second use, a
gather that no UNSHARD of the list asked for): at most 100 of a step, while ``diverged`` counts all.

Every byte that the rank sends belongs to one row: the row that began last and has not ended, or the pass of the Unit
that the model computes then. Bytes that are sent outside of every row are ``outside_bytes``, so that

    sum(trace.bytes) + trace.outside_bytes = bytes that the transports counted since the trace began

Times are marks of a ``TraceClock``. A mark of a CPU's clock is a number, the host's time. A device runs behind the
host: a mark is an event on the device (memory/streams.py), whose time is known after the device has passed it, so a
call that reads times of the running step may wait. ``seconds`` never waits: the passes that it measures are over before
the norm, which the host reads.

Cost: two marks and four appends per Action; a step's trace is kept until the next step is over.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple, Protocol, TypeVar

from shardwise.plan.action import Action, Kind
from shardwise.plan.timeline import Span
from shardwise.plan.waits import StepWaits

_MOST = 100
"""Divergences of one step that are kept."""


class SentBytes(Protocol):
    """A counter of the bytes that this rank sends."""

    bytes: int
    """Bytes sent so far."""


class TraceClock(Protocol):
    """A clock that marks points of the work and returns their times."""

    runs_behind: bool
    """True if work that the host starts runs later, on a device."""

    def mark(self) -> Any:
        """Return a mark of the current point of the work."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Return the time at which the work passed each mark, in seconds of the host's monotonic clock.

        Waits for the marks that the work has not passed.
        """

    def anchor(self, mark: Any) -> None:
        """Align the device's times with the host's: the host has just read what was computed at ``mark``."""


class HostClock:
    """Clock of a device whose work is done when a call returns."""

    runs_behind = False
    mark = staticmethod(time.perf_counter)

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """Return ``marks``, which are host times already."""
        return list(marks)

    def anchor(self, mark: float) -> None:
        """Do nothing, because marks are host times."""


class TraceRow(NamedTuple):
    """One Action that ran, with its times and the bytes that it sent."""

    action: Action
    start_s: float
    stop_s: float
    bytes: int


class PassSeconds(NamedTuple):
    """Seconds that one rank spent in the parts of a step."""

    forward_s: float
    backward_s: float
    update_s: float
    """Seconds of the update. On a device, those of the step before, because this step's update still runs."""


@dataclass
class Trace:
    """The trace of the running step. ``sent`` is None if nothing is sent."""

    sent: SentBytes | None = None
    clock: TraceClock = field(default_factory=HostClock)
    actions: list[Action] = field(default_factory=list)
    """Actions in the order in which they began."""
    starts: list[Any] = field(default_factory=list)
    """Marks of ``clock`` at which the Actions began, as ``stops`` for their ends."""
    stops: list[Any] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    """Bytes that each Action sent, without the Actions inside."""
    outside_bytes: int = 0
    """Bytes that were sent while no Action ran."""
    divergences: list[str] = field(default_factory=list)
    ahead: list[TraceRow] = field(default_factory=list)
    """Actions that ran ahead of the step from a list of their own (INPUT_DIST) and whose results the step used."""
    diverged: int = 0
    """Number of divergences of the step, including those that are not kept."""
    update_before: tuple[Any, Any] | None = None
    """Marks at which the update of the step before began and ended."""
    waits: StepWaits = None  # type: ignore[assignment]  # made in __post_init__
    """Waits of the computation for other ranks; without rows if nobody measures them (``engine.measure_waits``)."""
    _owner: int = -1
    """Row to which bytes are counted now; -1: none."""
    _outer: list[int] = field(default_factory=list)
    """Row to which bytes are counted after each row."""
    _counted: int = 0
    """Bytes of ``sent`` that are counted already."""

    def __post_init__(self) -> None:
        self._counted = 0 if self.sent is None else self.sent.bytes
        if self.waits is None:
            self.waits = StepWaits(self.clock)

    def begin(self) -> "Trace":
        """Return a new trace for the next step; this trace stays as it is."""
        self._count()
        update = (self._update() or self.update_before) if self.clock.runs_behind else None
        return Trace(self.sent, self.clock, update_before=update, waits=self.waits.following())

    def _count(self) -> None:
        """Count the bytes that were sent since the last call to the row that owns them."""
        if self.sent is None or self.sent.bytes == self._counted:
            return
        new = self.sent.bytes - self._counted
        self._counted += new
        if self._owner < 0:
            self.outside_bytes += new
        else:
            self.bytes[self._owner] += new

    def finish(self) -> None:
        """Count the last bytes, before another list runs."""
        self._count()

    def resume(self) -> None:
        """Continue the trace after another list ran in between, whose bytes its own trace has counted."""
        self._counted = 0 if self.sent is None else self.sent.bytes

    def start(self, action: Action) -> int:
        """Record that ``action`` begins, and return its position for ``stop``."""
        if self.sent is not None and self.sent.bytes != self._counted:
            self._count()
        place = len(self.actions)
        self.actions.append(action)
        now = self.clock.mark()
        self.starts.append(now)
        self.stops.append(now)
        self.bytes.append(0)
        self._outer.append(self._owner)
        self._owner = place
        return place

    def stop(self, place: int) -> None:
        """Record that the Action at position ``place`` is over."""
        self.stops[place] = self.clock.mark()
        if self.sent is not None and self.sent.bytes != self._counted:
            self._count()
        self._owner = self._outer[place]

    @contextmanager
    def again(self, place: int) -> Iterator[None]:
        """Count the bytes that are sent inside the ``with`` block to the row at position ``place``, which is over."""
        self._count()
        before, self._owner = self._owner, place
        try:
            yield
        finally:
            self._count()
            self._owner = before

    def passed(self, action: Action) -> None:
        """Record a Unit's pass, which the user's model computes; its time is the time until the next Action begins."""
        self.start(action)

    def passed_at(self, place: int) -> None:
        """Record that the pass at position ``place``, which ``passed`` began, is over."""
        self.stop(place)

    def diverge(self, text: str) -> None:
        """Record a departure from the list, described by ``text``."""
        self.diverged += 1
        if len(self.divergences) < _MOST:
            self.divergences.append(text)

    def news(self, before: "Trace") -> tuple[str, ...]:
        """Return the divergences that the step ``before`` did not have, each once."""
        return tuple(dict.fromkeys(text for text in self.divergences if text not in before.divergences))

    def cut(self, actions: int, diverged: int) -> None:
        """Keep only the first ``actions`` Actions and the first ``diverged`` divergences."""
        self._count()
        self.outside_bytes += sum(self.bytes[actions:])
        for column in (self.actions, self.starts, self.stops, self.bytes, self._outer):
            del column[actions:]
        self._owner = -1
        del self.divergences[diverged:]
        self.diverged = diverged

    @property
    def starts_s(self) -> list[float]:
        """Start of each Action, in seconds of the host's monotonic clock."""
        return self.clock.seconds(self.starts)

    @property
    def stops_s(self) -> list[float]:
        """End of each Action, in seconds of the host's monotonic clock."""
        return self.clock.seconds(self.stops)

    def rows(self) -> Iterator[TraceRow]:
        """Yield the Actions with their times and bytes."""
        times = self.clock.seconds(
            [*self.starts, *self.stops]
        )  # one call for both, because the clock may be anchored anew between two calls
        return map(TraceRow, self.actions, times, times[len(self.actions) :], self.bytes)

    def seconds(self) -> "PassSeconds":
        """Return the seconds of the step's forward passes, backward passes and update.

        In a user's own loop a pass lasts until its hooks have run; the time between passes is not counted.
        """
        passes = [
            place for place, action in enumerate(self.actions) if action.unit < 0 and action.kind.computes
        ]
        update = self.update_before if self.clock.runs_behind else self._update()
        marks = [
            *(self.starts[place] for place in passes),
            *(self.stops[place] for place in passes),
            *(update or ()),
        ]
        times = self.clock.seconds(marks)
        spent = dict.fromkeys("FB", 0.0)
        for place, start_s, stop_s in zip(passes, times, times[len(passes) :], strict=False):
            spent["F" if self.actions[place].kind is Kind.F else "B"] += stop_s - start_s
        return PassSeconds(spent["F"], spent["B"], times[-1] - times[-2] if update else 0.0)

    def update_start(self) -> Any:
        """Return the mark at which the first Action that ends the step began; None before it."""
        found = self._update()
        return None if found is None else found[0]

    def _update(self) -> tuple[Any, Any] | None:
        """Return the marks from the start of the first Action that ends the step to the end of the last Action."""
        first = next((place for place, action in enumerate(self.actions) if action.kind.ends_step), None)
        return None if first is None else (self.starts[first], self.stops[-1])

    def spans(self, rank: int) -> list[Span]:
        """Return the Actions and the waits for other ranks as spans of ``rank``, each on its lane.

        Times are seconds of the host's monotonic clock. Waits are those that were measured (``engine.measure_waits``).
        """
        found = [
            Span(rank, done.action, done.start_s, done.stop_s, done.action.kind.lane) for done in self.rows()
        ]
        starts = [span.start_s for span in found]
        for wait in self.waits.spans() if found else ():
            # The row that began last and has not ended is the Action that waits.
            before = range(bisect_right(starts, wait.start_s) - 1, -1, -1)
            place = next((i for i in before if found[i].stop_s >= wait.start_s), 0)
            action = found[place].action
            found.append(Span(rank, action, wait.start_s, wait.stop_s, "wait", wait.axis, is_exposed=True))
        return found


class Recording(Protocol):
    """An object with a walker, in whose running trace the methods of the object write their rows."""

    @property
    def trace(self) -> Trace:
        """The trace of the list that is running."""


_Actor = TypeVar("_Actor", bound=Recording)


def recorded(act: Callable[[_Actor, Action], None]) -> Callable[[_Actor, Action], None]:
    """Return the method ``act``, which does an Action, so that it writes the Action's row in the running trace."""

    @wraps(act)
    def handler(self: _Actor, action: Action) -> None:
        trace = self.trace
        place = trace.start(action)
        act(self, action)
        trace.stop(place)

    return handler
