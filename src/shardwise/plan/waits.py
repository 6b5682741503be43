"""Exposed communication: the waits of the computation for other ranks in one step, by axis.

    start of a collective     nothing is waited for: the computation goes on beside it
    wait for it               a mark, the wait, a mark; nothing else lies between the two marks

    exposed seconds of an axis = Σ (second mark - first mark) over the waits for collectives and messages of the axis

On a device a mark is an event on the current stream, so the difference is the time in which the stream stands: 0 if
the collective was over before the stream came to the wait. On a CPU a mark is the host's time.

[Note: waits behind the norm] The host reads the norm in every step, and only then knows that the device has passed all
marks before. On a device a step therefore counts the waits up to its norm, and the waits behind the norm of the step
before. On a CPU a step counts its own waits.

Cost: two marks and one append per wait while waits are measured (comm/wait_meter.py), else nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol


class MarkClock(Protocol):
    """The part of a ``TraceClock`` that measures waits."""

    runs_behind: bool

    def mark(self) -> Any:
        """Return a mark of the current point of the work."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Return the time at which the work passed each mark."""


class WaitSpan(NamedTuple):
    """One wait for other ranks, in seconds of the host's monotonic clock."""

    axis: str
    start_s: float
    stop_s: float


class StepWaits:
    """The waits of the computation for other ranks in one step.

    Args:
        clock: The clock of the trace.
        carried: Waits of the step before that belong to this step. See [Note: waits behind the norm].
    """

    def __init__(self, clock: MarkClock, carried: Sequence[tuple[str, Any, Any]] = ()):
        self._clock = clock
        self._rows = list(carried)
        self._settled: int | None = None
        """Number of waits before the norm of the step; None before the norm, and on a CPU."""

    def add(self, axis: str, start: Any) -> None:
        """Add a wait for ranks of ``axis`` that began at the mark ``start`` and ends now."""
        self._rows.append((axis, start, self._clock.mark()))

    def settle(self) -> None:
        """Record that the host has read the norm, so the device has passed all marks so far."""
        if self._clock.runs_behind:
            self._settled = len(self._rows)

    def following(self) -> "StepWaits":
        """Return the waits of the next step. See [Note: waits behind the norm]."""
        return StepWaits(self._clock, () if self._settled is None else self._rows[self._settled :])

    def spans(self) -> Iterator[WaitSpan]:
        """Yield the waits that the step counts."""
        rows = self._rows[: self._settled]
        times = self._clock.seconds([mark for _, start, stop in rows for mark in (start, stop)])
        for (axis, *_), start_s, stop_s in zip(rows, times[::2], times[1::2], strict=True):
            yield WaitSpan(axis, start_s, stop_s)

    def seconds(self) -> dict[str, float]:
        """Return the exposed seconds of the step by axis; an axis without a wait is left out."""
        found: dict[str, float] = {}
        for axis, start_s, stop_s in self.spans():
            found[axis] = found.get(axis, 0.0) + stop_s - start_s
        return found
