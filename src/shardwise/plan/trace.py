"""Trace: what a rank did in a step, Action by Action, and where that differs from the Plan.

    Plan.actions   F(0,0)  UNSHARD(u0,0)  F(u0,0) ...      what is to be done
    trace.actions  F(0,0)  UNSHARD(u0,0)  F(u0,0) ...      what was done: equal where the model keeps to the Plan

Whoever acts writes into it, through the walker. A departure from the list (a Unit that the data skipped, another
order, a second use) stands in ``divergences`` in words: 100 of a step at most, and their number.

Cost: two looks at a clock and four appends per Action; a step's trace lives until the next one is over.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from shardwise.plan.action import Action, Kind
from shardwise.plan.timeline import Span

_MOST = 100
"""Divergences of one step that are kept."""


class SentBytes(Protocol):
    """Counts what this rank sends."""

    bytes: int
    """All so far."""


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


@dataclass
class Trace:
    """The running step. ``sent``: None where nothing is sent."""

    sent: SentBytes | None = None
    actions: list[Action] = field(default_factory=list)
    """In the order in which they began."""
    starts_s: list[float] = field(default_factory=list)
    stops_s: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    """What each Action sent, those inside it included: a pass contains what its Units do."""
    divergences: list[str] = field(default_factory=list)
    ahead: list[Done] = field(default_factory=list)
    """What was done for the step ahead of it, in a list of its own (ASK), as far as the step made use of it."""
    diverged: int = 0
    """Divergences of the step, also those that are not kept."""

    def begin(self) -> "Trace":
        """A new trace for the next step; this one stays as it is."""
        return Trace(self.sent)

    def start(self, action: Action) -> int:
        """``action`` begins; returns its place, for ``stop``."""
        self.actions.append(action)
        now = time.perf_counter()
        self.starts_s.append(now)
        self.stops_s.append(now)
        self.bytes.append(0 if self.sent is None else -self.sent.bytes)
        return len(self.actions) - 1

    def stop(self, place: int) -> None:
        """The Action at ``place`` is over."""
        self.stops_s[place] = time.perf_counter()
        if self.sent is not None:
            self.bytes[place] += self.sent.bytes

    def passed(self, action: Action) -> None:
        """A Unit's pass, which the user's model computes: its time is that until the next Action begins."""
        self.actions.append(action)
        now = time.perf_counter()
        self.starts_s.append(now)
        self.stops_s.append(now)
        self.bytes.append(0)

    def passed_at(self, place: int) -> None:
        """The pass at ``place``, which ``passed`` began, is over."""
        self.stops_s[place] = time.perf_counter()

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
        for column in (self.actions, self.starts_s, self.stops_s, self.bytes):
            del column[actions:]
        del self.divergences[diverged:]
        self.diverged = diverged

    def rows(self) -> Iterator[Done]:
        """The Actions, one by one."""
        return map(Done, self.actions, self.starts_s, self.stops_s, self.bytes)

    def seconds(self) -> "PassSeconds":
        """Where the step's time went. In a user's own loop a pass lasts until its hooks are through; what the loop does
        between passes is nobody's."""
        spent = dict.fromkeys("FB", 0.0)
        ends_at: float | None = None
        for action, start_s, stop_s, _ in self.rows():
            if action.kind.ends_step and ends_at is None:
                ends_at = start_s
            if action.unit < 0 and action.kind.computes:
                spent["F" if action.kind is Kind.F else "B"] += stop_s - start_s
        update_s = 0.0 if ends_at is None else max(self.stops_s) - ends_at
        return PassSeconds(spent["F"], spent["B"], update_s)

    def spans(self, rank: int) -> list[Span]:
        """The Actions as spans of ``rank``, in seconds of the host's monotonic clock."""
        rows = zip(self.actions, self.starts_s, self.stops_s, strict=True)
        return [Span(rank, action, start_s, stop_s) for action, start_s, stop_s in rows]
