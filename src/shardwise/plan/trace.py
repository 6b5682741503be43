"""Trace: what a rank did in a step, Action by Action, and where that differs from the Plan.

    Plan.actions   F(0,0)  UNSHARD(u0,0)  F(u0,0) ...      what is to be done
    trace.actions  F(0,0)  UNSHARD(u0,0)  F(u0,0) ...      what was done: equal where the model keeps to the Plan

Whoever acts writes into it, through the walker. A departure from the list (a Unit that the data skipped, another
order, a second use) stands in ``divergences`` in words: 100 of a step at most, and their number.

Times are marks of a ``TraceClock``. That of a CPU is the host's, a mark of which is a number. A device runs behind the
host: a mark is an event there (memory/streams.py), whose time is known when the device has come past it, so what asks
for times of the running step may wait. ``seconds`` never does: its passes are over behind the norm, which is read.

Cost: two marks and four appends per Action; a step's trace lives until the next one is over.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from shardwise.plan.action import Action, Kind
from shardwise.plan.timeline import Span

_MOST = 100
"""Divergences of one step that are kept."""


class SentBytes(Protocol):
    """Counts what this rank sends."""

    bytes: int
    """All so far."""


class TraceClock(Protocol):
    """Says when work was done."""

    runs_behind: bool
    """Whether what the host has just asked for is done later."""

    def mark(self) -> Any:
        """This point of the work."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """When the work came past each, in seconds of the host's monotonic clock; waits for those that it has not."""

    def anchor(self, mark: Any) -> None:
        """The host has just read what was computed at ``mark``."""


class HostClock:
    """Of a device whose work is done when a call returns."""

    runs_behind = False
    mark = staticmethod(time.perf_counter)

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """See ``TraceClock``."""
        return list(marks)

    def anchor(self, mark: float) -> None:
        """See ``TraceClock``."""


class Done(NamedTuple):
    """One Action that ran: when, and what it sent."""

    action: Action
    start_s: float
    stop_s: float
    bytes: int


class PassSeconds(NamedTuple):
    """A step's seconds on one rank."""

    forward_s: float
    backward_s: float
    update_s: float
    """On a device that of the step before: this one's still runs there."""


@dataclass
class Trace:
    """The running step. ``sent``: None where nothing is sent."""

    sent: SentBytes | None = None
    clock: TraceClock = field(default_factory=HostClock)
    actions: list[Action] = field(default_factory=list)
    """In the order in which they began."""
    starts: list[Any] = field(default_factory=list)
    """Marks of ``clock``, as in ``stops``."""
    stops: list[Any] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    """What each Action sent, those inside it included: a pass contains what its Units do."""
    divergences: list[str] = field(default_factory=list)
    ahead: list[Done] = field(default_factory=list)
    """What was done for the step ahead of it, in a list of its own (ASK), as far as the step made use of it."""
    diverged: int = 0
    """Divergences of the step, also those that are not kept."""
    update_before: tuple[Any, Any] | None = None
    """Where the update of the step before began and ended."""

    def begin(self) -> "Trace":
        """A new trace for the next step; this one stays as it is."""
        update = (self._update() or self.update_before) if self.clock.runs_behind else None
        return Trace(self.sent, self.clock, update_before=update)

    def start(self, action: Action) -> int:
        """``action`` begins; returns its place, for ``stop``."""
        self.actions.append(action)
        now = self.clock.mark()
        self.starts.append(now)
        self.stops.append(now)
        self.bytes.append(0 if self.sent is None else -self.sent.bytes)
        return len(self.actions) - 1

    def stop(self, place: int) -> None:
        """The Action at ``place`` is over."""
        self.stops[place] = self.clock.mark()
        if self.sent is not None:
            self.bytes[place] += self.sent.bytes

    def passed(self, action: Action) -> None:
        """A Unit's pass, which the user's model computes: its time is that until the next Action begins."""
        self.actions.append(action)
        now = self.clock.mark()
        self.starts.append(now)
        self.stops.append(now)
        self.bytes.append(0)

    def passed_at(self, place: int) -> None:
        """The pass at ``place``, which ``passed`` began, is over."""
        self.stops[place] = self.clock.mark()

    def diverge(self, text: str) -> None:
        """Something was done otherwise than the list had it."""
        self.diverged += 1
        if len(self.divergences) < _MOST:
            self.divergences.append(text)

    def news(self, before: "Trace") -> tuple[str, ...]:
        """Divergences that the step ``before`` did not have, each once."""
        return tuple(dict.fromkeys(text for text in self.divergences if text not in before.divergences))

    def cut(self, actions: int, diverged: int) -> None:
        """Keep the first Actions and divergences alone."""
        for column in (self.actions, self.starts, self.stops, self.bytes):
            del column[actions:]
        del self.divergences[diverged:]
        self.diverged = diverged

    @property
    def starts_s(self) -> list[float]:
        """When each Action began."""
        return self.clock.seconds(self.starts)

    @property
    def stops_s(self) -> list[float]:
        """When each Action was over."""
        return self.clock.seconds(self.stops)

    def rows(self) -> Iterator[Done]:
        """The Actions, one by one."""
        times = self.clock.seconds(
            [*self.starts, *self.stops]
        )  # at once: between two calls the clock may be set
        return map(Done, self.actions, times, times[len(self.actions) :], self.bytes)

    def seconds(self) -> "PassSeconds":
        """Where the step's time went. In a user's own loop a pass lasts until its hooks are through; what the loop does
        between passes is nobody's."""
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

    def _update(self) -> tuple[Any, Any] | None:
        """From the first Action that ends the step to the last."""
        first = next((place for place, action in enumerate(self.actions) if action.kind.ends_step), None)
        return None if first is None else (self.starts[first], self.stops[-1])

    def spans(self, rank: int) -> list[Span]:
        """The Actions as spans of ``rank``, in seconds of the host's monotonic clock."""
        return [Span(rank, done.action, done.start_s, done.stop_s) for done in self.rows()]
