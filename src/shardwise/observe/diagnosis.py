"""Diagnosis of a step: its seconds by phase on every rank, the first cause of what is lost, and the rank to blame.

The ranks of a step meet, so a rank that is slow in its own work appears twice: with more seconds of its own, and with
seconds of waiting on the ranks that are not slow. For each rank r

    own(r)     = data + compute + update + save + rest                 what it does itself
    ahead      = median over ranks of own                              what a rank of this job usually does
    lost(r)    = own(r) - ahead                                        what the others wait for because of r

The causes are tried in this order, and the first that takes at least ``LEAST_SHARE`` of the step is named:

    save       all ranks wait for checkpoints
    data       a rank waits for batches longer than the others, or all ranks do
    straggler  a rank computes longer than the others
    exchange   all ranks wait for one another, and no rank is late: the link is slow
    compute    none of these: the step is the time of its computation

A wait of a stage of a pipeline is part of the schedule (the bubble), so the foreseen wait, if one is given, is
subtracted from the exchange before its share is judged.

Cost: one look at each rank.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple

Cause = Literal["data", "compute", "exchange", "straggler", "save"]
"""The first cause of a step's time."""

LEAST_SHARE = 0.1
"""Share of the step from which a phase, or the difference of a rank, counts as a cause."""

_NOTED = 0.25
"""Share of the foreseen computation from which a difference is said."""
_OWN = ("data", "compute", "update", "save", "rest")
_AXES = ("dp", "tp", "pp", "ep")


class StepDiagnosis(NamedTuple):
    """The parts of a measured step and their cause."""

    cause: Cause
    rank: int | None
    """The rank that causes it; None if no rank differs from the others."""
    step_s: float
    """Mean seconds of a step."""
    shares: Mapping[str, float]
    """Shares of the step by phase; they add up to 1. The phase ``waiting`` is the part of the exchange that the rank
    named by ``rank`` causes."""
    sentence: str
    """The cause in words."""

    def plain(self) -> dict[str, object]:
        """Return the diagnosis as values for JSON."""
        return {
            "cause": self.cause,
            "rank": self.rank,
            "step_s": self.step_s,
            "shares": dict(self.shares),
            "sentence": self.sentence,
        }


def diagnose(
    ranks: Sequence[Mapping[str, float]], foreseen: Mapping[str, float] | None = None
) -> StepDiagnosis:
    """Return the diagnosis of a step.

    Args:
        ranks: Mean seconds of a step by phase, for each rank: ``data``, ``compute``, ``update``, ``save``, ``rest`` and
            the waits ``dp``, ``tp``, ``pp`` and ``ep``.
        foreseen: Foreseen seconds by phase, where they are known: of ``compute`` and of the axes.
    """
    foreseen = foreseen or {}
    steps = [sum(row.values()) for row in ranks]
    step_s = median(steps)
    means = {name: sum(row.get(name, 0.0) for row in ranks) / len(ranks) for name in (*_OWN, *_AXES)}
    late, phase, late_s = _latest(ranks)
    waiting_s = min(late_s * (len(ranks) - 1) / len(ranks), sum(means[axis] for axis in _AXES))
    seconds = _without_waiting(means, waiting_s)
    whole = sum(seconds.values()) or 1.0
    shares = {name: each / whole for name, each in seconds.items()}
    is_late = late_s >= LEAST_SHARE * step_s and len(ranks) > 1
    bubble = sum(foreseen.get(axis, 0.0) for axis in _AXES)
    exchange_s = max(sum(seconds[axis] for axis in _AXES) - bubble, 0.0)

    def found(cause: Cause, rank: int | None, sentence: str) -> StepDiagnosis:
        return StepDiagnosis(cause, rank, step_s, shares, sentence)

    if not is_late and shares["save"] >= LEAST_SHARE:
        return found("save", None, f"{shares['save']:.0%} of the time is waited for checkpoints")
    if is_late and phase == "data":
        return found("data", late, f"rank {late} waits {late_s:.3g} s a step longer for data than the others")
    if not is_late and shares["data"] >= LEAST_SHARE:
        return found("data", None, f"{shares['data']:.0%} of the time is waited for data, on all ranks")
    if is_late:
        what = {"save": "save", "update": "straggler", "rest": "straggler", "compute": "straggler"}[phase]
        words = {"save": "waits for checkpoints", "update": "updates", "rest": "does other work"}
        verb = words.get(phase, "computes")
        sentence = f"rank {late} {verb} {late_s:.3g} s a step longer than the others, which wait for it"
        return found(what, late, sentence)  # type: ignore[arg-type]
    if exchange_s >= LEAST_SHARE * step_s:
        axis = max(_AXES, key=lambda each: seconds[each] - foreseen.get(each, 0.0))
        return found(
            "exchange", None, f"{exchange_s / whole:.0%} of the time is waited for ranks, most along {axis}"
        )
    sentence = f"{shares['compute']:.0%} of the time is computation"
    ratio = seconds["compute"] / foreseen["compute"] if foreseen.get("compute") else 1.0
    if ratio >= 1 + _NOTED:
        sentence += f", which takes {ratio:.2g} times as long as foreseen"
    return found("compute", None, sentence)


def _latest(ranks: Sequence[Mapping[str, float]]) -> tuple[int, str, float]:
    """Return the rank whose own work takes longest, the phase in which it differs most, and by how many seconds."""
    own = [sum(row.get(name, 0.0) for name in _OWN) for row in ranks]
    late = max(range(len(ranks)), key=own.__getitem__)
    others = [row for rank, row in enumerate(ranks) if rank != late]
    if not others:
        return late, "compute", 0.0
    usual = {name: median(row.get(name, 0.0) for row in others) for name in _OWN}
    phase = max(_OWN, key=lambda name: ranks[late].get(name, 0.0) - usual[name])
    return late, phase, own[late] - median(own[:late] + own[late + 1 :])


def _without_waiting(means: Mapping[str, float], waiting_s: float) -> dict[str, float]:
    """Return the phases with the part of the exchange that one late rank causes as a phase of its own."""
    exchange = sum(means[axis] for axis in _AXES)
    rest = 1 - waiting_s / exchange if exchange else 1.0
    return {
        **{name: means[name] for name in _OWN},
        **{axis: means[axis] * rest for axis in _AXES},
        "waiting": waiting_s,
    }
