"""Timeline: the times at which Actions ran on each rank, predicted or measured.

A rank is busy while a stage computes (F, B, I or W of a whole stage); all other time between the first Action of any
rank and the last is idle, including waits for a message:

    idle share = 1 - busy seconds of all ranks / (ranks * makespan)

An activation lives from the F of a microbatch on a stage until its B (or its W) is over.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwise.plan.action import Action, Kind


class Span(NamedTuple):
    """One Action on one rank, in seconds of a clock that the ranks of one host share."""

    rank: int
    action: Action
    start_s: float
    stop_s: float

    @property
    def is_pass(self) -> bool:
        """True if a whole stage computes."""
        return self.action.kind.computes and self.action.unit < 0


@dataclass(frozen=True)
class Timeline:
    """Spans of all ranks of a run, predicted or measured."""

    spans: Mapping[int, tuple[Span, ...]]
    """Spans by rank, in the order in which they ran."""

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
