"""The order of Actions, collectives and recorded tensors on one rank in a step, for ``--explain``.

    action       each row of the step's trace (plan/trace.py)
    collective   each call that the rank's counter of traffic sees (comm/trace.py)
    tensor       each tensor of a pass as it was recorded, each own gradient, the summed gradients, the step's end

What stands between the last right tensor and the first wrong one is all that the layout did in between.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from shardwise.engine.parts.parts import EngineParts
from shardwise.verify.activations import PassKey
from shardwise.verify.tensors import ComparedTensor

_MOST = 60
"""Lines that are shown."""
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


def marks_of(wrong: ComparedTensor) -> tuple[str, str]:
    """Return the mark of a tensor in the trail, and the mark at which the search for its cause begins; "": any.

    Args:
        wrong: The tensor.
    """
    place = wrong.name.rpartition("microbatch ")[2]
    if wrong.what == "activation gradient":
        return f"gradient {wrong.key}", ""
    if " step " in wrong.key:
        return f"{'input' if '#' in wrong.key else 'output'} {wrong.key}", ""
    if "in the forward pass" in wrong.name:
        return f"output {PassKey(wrong.module, wrong.step + 1, int(place))}", ""
    if wrong.what == "gradient":
        return SUMMED, f"own gradient of {wrong.name}"
    return (SUMMED, "") if wrong.what in ("norm", "loss") else (END, SUMMED)


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
    start = -1
    for place in range(stop - 1, -1, -1):
        entry = entries[place]
        is_wanted = entry.text == first if first else entry.text not in all_wrong
        if entry.kind == "tensor" and is_wanted:
            start = place
            break
    inner = [each for each in entries[start + 1 : stop] if each.kind != "tensor"]
    ends = entries[start : start + 1] if start >= 0 else []
    return [*ends, *inner, entries[stop]]


def cause_lines(wrong: Sequence[ComparedTensor], by_rank: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what a rank did between the last right tensor and the first wrong one, as lines.

    Args:
        wrong: All wrong tensors in causal order.
        by_rank: The records of the ranks.
    """
    first, marks = wrong[0], {marks_of(each)[0] for each in wrong}
    mark, begin = marks_of(first)
    for rank in dict.fromkeys([*reversed(first.ranks), *range(len(by_rank))]):
        trails = by_rank[rank].get("held", {}).get("trails", ())
        found = entries_between(trails[first.step], mark, marks, begin) if len(trails) > first.step else []
        if found:
            shown = found if len(found) <= _MOST else [*found[: _MOST - 1], found[-1]]
            said = [f"rank {rank}, step {first.step}:", *(f"  {each.kind}: {each.text}" for each in shown)]
            left = len(found) - len(shown)
            said += [f"  and {left} more before the last"] if left else []
            if all(each.kind == "tensor" for each in found):
                said.append("  no Action and no collective ran in between")
            return said
    return []
