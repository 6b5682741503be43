"""Timeline: the times at which Actions ran on each rank, on each of its lanes, predicted or measured.

A rank is busy while a stage computes (F, B, I or W of a whole stage); all other time between the first Action of any
rank and the last is idle, including waits for a message:

    idle share = 1 - busy seconds of all ranks / (ranks * makespan)

An activation lives from the F of a microbatch on a stage until its B (or its W) is over.

Lanes work beside one another: ``compute``, ``exchange`` by axis, ``update`` (on another tier), ``disk``, ``down``,
``up``, ``data``. Of the computation's own time each moment counts once, for the first of these that holds:

    exchange, waits, bubble, data    the computation stands, for ranks of an axis, another tier, other stages, batches
    update                           an Action that ends the step runs on the lane "compute"
    compute                          a pass runs on the lane "compute"
    rest                             none of these: Python, and what the user's loop does
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from shardwise.plan.action import Action, Kind
from shardwise.plan.kinds import Lane

Use = Literal["compute", "update", "exchange", "waits", "bubble", "data", "rest"]
"""Use of the computation's time."""
USES: tuple[Use, ...] = get_args(Use)
_STAGES = ("pp", "model")
"""Axes on which a wait without an exchange is a wait for other stages."""


class Span(NamedTuple):
    """One Action on one lane of one rank, in seconds of a clock that the ranks of one host share."""

    rank: int
    action: Action
    start_s: float
    stop_s: float
    lane: Lane = "compute"
    axis: str = ""
    """Axis of an exchange, or of the ranks that a wait is for; ``data`` in a wait for batches; empty: another tier."""
    is_exposed: bool = False
    """True if the computation stands meanwhile."""

    @property
    def is_pass(self) -> bool:
        """True if a whole stage computes."""
        return self.lane == "compute" and self.action.kind.computes and self.action.unit < 0

    @property
    def use(self) -> tuple[Use, str] | None:
        """Use of the computation's time, and the axis of ranks that it is for; None if the computation goes on."""
        if self.is_exposed:
            if self.axis == "data":
                return "data", ""
            if self.lane == "wait" and self.axis in _STAGES:
                return "bubble", self.axis
            return ("exchange", self.axis) if self.axis else ("waits", "")
        if self.lane != "compute":
            return None
        return ("update", "") if self.action.kind.ends_step else ("compute", "")


@dataclass(frozen=True)
class Timeline:
    """Spans of all ranks of a run, predicted or measured."""

    spans: Mapping[int, tuple[Span, ...]]
    """Spans by rank, in the order in which they ran."""
    windows: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Start and stop of the step on each rank; of a rank that is left out, those of its spans."""

    @classmethod
    def of(cls, spans: Iterable[Span]) -> "Timeline":
        """Build a timeline from spans of any ranks in any order; the spans of a rank are sorted by their start."""
        by_rank: dict[int, list[Span]] = {}
        for span in spans:
            by_rank.setdefault(span.rank, []).append(span)
        return cls(
            {
                rank: tuple(sorted(by_rank[rank], key=lambda s: (s.start_s, s.stop_s)))
                for rank in sorted(by_rank)
            }
        )

    @cached_property
    def start_s(self) -> float:
        """Start of the first Action, in seconds."""
        return min((span.start_s for row in self.spans.values() for span in row), default=0.0)

    @cached_property
    def stop_s(self) -> float:
        """Stop of the last Action, in seconds."""
        return max((span.stop_s for row in self.spans.values() for span in row), default=0.0)

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last stop."""
        return self.stop_s - self.start_s

    def passes(self, rank: int) -> list[Span]:
        """Return the spans in which a stage of ``rank`` computes."""
        return [span for span in self.spans[rank] if span.is_pass]

    def typical_pass_s(self) -> dict[tuple[Kind, int], float]:
        """Return the median seconds of each kind of pass on each stage."""
        seconds: dict[tuple[Kind, int], list[float]] = {}
        for rank in self.spans:
            for span in self.passes(rank):
                seconds.setdefault((span.action.kind, span.action.stage), []).append(
                    span.stop_s - span.start_s
                )
        return {key: sorted(values)[len(values) // 2] for key, values in seconds.items()}

    def busy_s(self, rank: int) -> float:
        """Return the seconds in which a stage of ``rank`` computes."""
        return sum(span.stop_s - span.start_s for span in self.passes(rank))

    def idle(self, rank: int) -> float:
        """Return the share of the makespan in which ``rank`` computes nothing."""
        return 1 - self.busy_s(rank) / self.makespan_s if self.makespan_s else 0.0

    @property
    def idle_share(self) -> float:
        """Share of all ranks' time in which nothing is computed: the bubble."""
        return sum(map(self.idle, self.spans)) / len(self.spans) if self.spans else 0.0

    def window(self, rank: int) -> tuple[float, float]:
        """Return the start and the stop of the step on ``rank``."""
        spans = self.spans.get(rank, ())
        start, stop = (
            min((s.start_s for s in spans), default=0.0),
            max((s.stop_s for s in spans), default=0.0),
        )
        return self.windows.get(rank, (start, stop))

    @property
    def slowest(self) -> int:
        """The rank whose step takes longest."""
        return max({*self.spans, *self.windows}, key=lambda rank: self.window(rank)[1] - self.window(rank)[0])

    def lanes(self, rank: int) -> dict[str, float]:
        """Return the seconds of each lane of ``rank``, with exchanges by axis, as ``exchange dp``."""
        found = dict.fromkeys(("compute", "update"), 0.0)
        for (use, _), seconds in self.uses(rank).items():
            if use in found:
                found[use] += seconds
        for span in self.spans.get(rank, ()):
            if span.lane not in ("compute", "wait"):
                name = f"{span.lane} {span.axis}".rstrip()
                found[name] = found.get(name, 0.0) + span.stop_s - span.start_s
        return {lane: seconds for lane, seconds in found.items() if seconds}

    def uses(self, rank: int) -> dict[tuple[Use, str], float]:
        """Return the uses of the computation's time on ``rank``, with the axis of exchanges; they sum to the step."""
        start_s, stop_s = self.window(rank)
        found: dict[tuple[Use, str], float] = {}
        used_s = 0.0
        for use, from_s, to_s in _innermost(self.spans.get(rank, ())):
            seconds = min(to_s, stop_s) - max(from_s, start_s)
            if seconds > 0:
                found[use] = found.get(use, 0.0) + seconds
                used_s += seconds
        found["rest", ""] = max(stop_s - start_s - used_s, 0.0)
        return found

    def peak_live(self, rank: int) -> int:
        """Return the most activations that live at once on ``rank``; the unit is one microbatch of one stage."""
        live, most = set(), 0
        for span in self.passes(rank):
            kind, place = span.action.kind, (span.action.stage, span.action.microbatch)
            if kind is Kind.F:
                live.add(place)
                most = max(most, len(live))
            elif kind in (Kind.B, Kind.W):
                live.discard(place)
        return most

    def __str__(self) -> str:
        ranks = ", ".join(f"rank {rank} {self.idle(rank):.1%}" for rank in self.spans)
        return f"{self.makespan_s:.6g} s, idle {self.idle_share:.1%} ({ranks})"


_RANKS = {
    use: place for place, use in enumerate(("waits", "exchange", "bubble", "data", "update", "compute"))
}


def _innermost(spans: Iterable[Span]) -> Iterator[tuple[tuple[Use, str], float, float]]:
    """Yield (use, start, stop) of disjoint ranges of the computation's time, each with the use that comes first."""
    marks: list[tuple[float, int, tuple[Use, str]]] = []
    for span in spans:
        use = span.use
        if use is not None and span.stop_s > span.start_s:
            marks += [(span.start_s, 1, use), (span.stop_s, -1, use)]
    marks.sort(key=lambda mark: mark[0])
    open_: dict[tuple[Use, str], int] = {}
    before_s = 0.0
    for time_s, step, use in marks:
        if open_ and time_s > before_s:
            yield min(open_, key=lambda each: _RANKS[each[0]]), before_s, time_s
        before_s = time_s
        count = open_.get(use, 0) + step
        if count:
            open_[use] = count
        else:
            del open_[use]
