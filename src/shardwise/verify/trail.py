"""The order of Actions, collectives and recorded tensors on one rank in a step, for ``--explain``.

    action       each row of the step's trace (plan/trace.py)
    collective   each call that the rank's counter of traffic sees (comm/trace.py)
    tensor       each tensor of a pass as it was recorded, each own gradient, the summed gradients, the step's end

What stands between the last right tensor and the first wrong one is all that the layout did in between.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from shardwise.engine.parts.parts import EngineParts

SUMMED = "summed gradients"
END = "end of the step"


class TrailEntry(NamedTuple):
    """One Action, collective or recorded tensor."""

    kind: str
    text: str


class StepTrail:
    """Writes down what one rank does in a step.

    Args:
        parts: The parts of the engine.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._rows = 0
        self.entries: list[TrailEntry] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the step that runs inside the context."""
        traffic = self._parts.dp.traffic
        self.entries, self._rows = [], 0
        before, traffic.listener = traffic.listener, self._called
        try:
            yield
        finally:
            traffic.listener = before
        self.mark(END, self._parts.walker.last.actions)

    def _called(self, operation: str, what: str, axis: str) -> None:
        self._take()
        self.entries.append(TrailEntry("collective", f"{operation} of {what or 'a tensor'} on {axis}"))

    def mark(self, tensor: str, actions: Sequence[object] | None = None) -> None:
        """Note that a tensor was recorded.

        Args:
            tensor: Description of the tensor.
            actions: The rows of the step's trace; None: those of the running trace.
        """
        self._take(actions)
        self.entries.append(TrailEntry("tensor", tensor))

    def _take(self, actions: Sequence[object] | None = None) -> None:
        """Append the rows of the trace that are new."""
        rows = self._parts.walker.trace.actions if actions is None else actions
        self.entries += [TrailEntry("action", str(row)) for row in rows[self._rows :]]
        self._rows = max(self._rows, len(rows))


def entries_between(
    trail: Sequence[Sequence[str]], wrong: str, all_wrong: Collection[str], first: str = ""
) -> list[TrailEntry]:
    """Return the Actions and collectives between the last right tensor and a wrong one, with these two.

    Args:
        trail: The trail of one rank.
        wrong: The mark of the wrong tensor.
        all_wrong: The marks of all wrong tensors.
        first: The mark at which to begin; "": the last right tensor before.
    """
    entries = [TrailEntry(*each) for each in trail]
    stop = next((i for i, each in enumerate(entries) if each == ("tensor", wrong)), None)
    if stop is None:
        return []
    start = 0
    for place in range(stop - 1, -1, -1):
        entry = entries[place]
        is_wanted = entry.text == first if first else entry.text not in all_wrong
        if entry.kind == "tensor" and is_wanted:
            start = place
            break
    inner = [each for each in entries[start + 1 : stop] if each.kind != "tensor"]
    ends = entries[start : start + 1] if entries[start].kind == "tensor" else []
    return [*ends, *inner, entries[stop]]
