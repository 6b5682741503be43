"""Report: everything that is foreseen of a job, as one object that ``shardwise plan`` and ``train --check`` print.

    fits, margin          the bytes that a rank needs beside those that it has, by tier
    classes               memory of each class of ranks, by row and phase, and what one rank sends in a step
    why                   every byte at the peak, with what removes it
    time, flops           seconds of a step by use, and operations
    changes, search       configurations that fit, and that are faster
    diff                  what differs from another job

The parts come from the modules that compute them (``foresee.py``, ``fits.py``, ``simulate/``). This module only puts
them together, so the text for people and the JSON for programs cannot differ.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwise.base.words import bytes_text, counted
from shardwise.config.run import RunConfig
from shardwise.engine.fit.fits import ConfigChange
from shardwise.engine.fit.foresee import JobFacts, MemoryEstimate
from shardwise.engine.fit.hosts import notes_of_planned_axes
from shardwise.engine.fit.search import SearchReport
from shardwise.engine.fit.solve import SolvedKey
from shardwise.observe.flops import flops_text
from shardwise.observe.progress import count_text
from shardwise.plan.placement import Tier
from shardwise.plan.plan import bytes_by_tier, class_of
from shardwise.simulate.exchanges import totals
from shardwise.simulate.sent import sent
from shardwise.simulate.step_flops import RunTime, StepFlops
from shardwise.simulate.timeline import StepMemory
from shardwise.simulate.why import MemoryReason

_DAY_S = 86_400
_RESTART_S = 60.0
"""Seconds from a failure to the first step of the next start, without reading the checkpoint; an assumption."""


class JobSeconds(NamedTuple):
    """Seconds of one step, foreseen or given, and what follows from them for the whole run."""

    run: RunTime
    low_s: float
    high_s: float
    """Bounds of the range in which steps are expected."""
    spent: Mapping[str, float]
    """Seconds of the slowest rank by use; they add up to the step, and are empty if the seconds were given."""
    exposed: Mapping[str, float]
    """Seconds in which the computation waits for other ranks, by axis."""
    flops: StepFlops
    """Operations of a step."""
    given: str = ""
    """What replaced the price: ``--mfu`` or ``--step-s``; empty if nothing did."""
    pace: "SavePace | None" = None
    """Best interval of checkpoints under failures, if their number is given."""

    def plain(self) -> dict[str, Any]:
        """Return the seconds as values for JSON."""
        run = self.run._asdict()
        return {
            "step_s": run.pop("step_s"),
            "low_s": self.low_s,
            "high_s": self.high_s,
            "spent": dict(self.spent),
            "exposed": dict(self.exposed),
            **run,
        }


class SavePace(NamedTuple):
    """The interval of checkpoints that loses least time under failures (Young 1974, Daly 2006).

    With a save of δ seconds and a failure every M seconds the interval is √(2·δ·M), and the share of the time that
    trains is 1 - δ/interval - (interval/2 + restart)/M.
    """

    save_s: float
    interval_s: float
    steps: int
    """The interval in steps."""
    goodput: float
    """Share of the time that trains."""


def save_pace(save_s: float, restart_s: float, step_s: float, failures_per_day: float) -> SavePace:
    """Return the best interval of checkpoints.

    Args:
        save_s: Seconds that training stands still for a save.
        restart_s: Seconds from a failure to the first new step.
        step_s: Seconds of a step.
        failures_per_day: Failures of the whole job in a day.
    """
    between_s = _DAY_S / failures_per_day
    interval_s = max(math.sqrt(2 * save_s * between_s), step_s)
    lost = save_s / interval_s + (interval_s / 2 + restart_s) / between_s
    return SavePace(save_s, interval_s, max(round(interval_s / step_s), 1), max(1 - lost, 0.0))


def restart_seconds(read_s: float) -> float:
    """Return the seconds from a failure to the first new step, of which ``read_s`` read the checkpoint."""
    return _RESTART_S + read_s


@dataclass(frozen=True)
class JobReport:
    """Holds everything that is foreseen of a job."""

    known: JobFacts
    ranks: int
    device: str
    """Name of the device, as ``--device`` takes it."""
    memory: Mapping[Tier, int]
    """Bytes that a rank has, by tier."""
    outlook: MemoryEstimate
    choices: tuple[str, ...] = ()
    """Values that followed from the ranks, in words."""
    assumes: tuple[str, ...] = ()
    """Assumptions, each a sentence."""
    seconds: JobSeconds | None = None
    """Seconds and operations of a step; None if the pass needs numbers."""
    changes: tuple[ConfigChange, ...] = ()
    """Configurations that fit, the cheapest first, if this one does not."""
    why: tuple[tuple[MemoryReason, Mapping[str, Any]], ...] = ()
    """Composition of the peak, with what removes each entry: ``removed_by``, ``saves_bytes`` and ``price_s``."""
    search: SearchReport | None = None
    """With ``--search``: the fastest layouts that fit."""
    solved: SolvedKey | None = None
    """With ``--solve``: the largest value of a key with which the job fits."""
    diff: Mapping[str, Any] | None = None
    """With ``--against``: what differs, theirs minus ours."""
    outcome: Mapping[str, Any] | None = None
    """Of a run that has ended: foreseen and actual."""

    @property
    def config(self) -> RunConfig:
        """The resolved configuration."""
        return self.known.settings

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(math.prod(info.shape) for info in self.outlook.plan.registry.of_kind("parameter"))

    @property
    def needs(self) -> Mapping[Tier, int]:
        """Bytes that the rank that needs most of each tier needs, in any phase."""
        found: Mapping[Tier, int] = self.outlook.bytes_by_tier
        return found or bytes_by_tier(self.outlook.bytes_per_rank())

    @property
    def margins(self) -> dict[Tier, int]:
        """Bytes that are left on each tier whose size is known; negative if the job does not fit."""
        return {tier: size - self.needs.get(tier, 0) for tier, size in self.memory.items()}

    @property
    def answers(self) -> bool:
        """True if the report has what was asked for: a job that fits, or what a search or ``--solve`` found."""
        if self.search is not None or self.solved is not None:
            has_layout = self.search is None or bool(self.search.best)
            return has_layout and (self.solved is None or self.solved.value is not None)
        return self.fits

    @property
    def fits(self) -> bool:
        """True if every class of ranks fits every tier in every phase."""
        return all(margin >= 0 for margin in self.margins.values())

    def classes(self) -> list[dict[str, Any]]:
        """Return what each class of ranks holds and sends, as values for JSON."""
        plan = self.outlook.plan
        steps = {step.rank: step for step in self.outlook.steps}
        found = []
        for first in plan.mesh.ranks("pp", 0):
            state = plan.bytes_per_rank(first)
            memory: dict[str, Any] = {
                "rows": state,
                "phases": {},
                "peak_bytes": sum(state.values()),
                "peak": None,
                "by_tier": bytes_by_tier(state),
            }
            if first in steps:
                step = steps[first]
                peak = step.peak
                memory = {
                    "rows": step.rows,
                    "phases": dict(step.phases),
                    "peak_bytes": step.bytes_by_tier["device"],
                    "peak": {
                        "phase": peak.phase,
                        "action": None if peak.action is None else str(peak.action),
                        "unit": peak.unit,
                        "rows": dict(peak.rows),
                    },
                    "by_tier": dict(step.bytes_by_tier),
                }
            found.append(
                {
                    "name": class_of(plan.mesh, first),
                    "ranks": plan.mesh.world_size // plan.mesh.pp,
                    "memory": memory,
                    "sent": self.sent(first),
                }
            )
        return found

    def sent(self, rank: int) -> list[dict[str, Any]]:
        """Return what one rank sends in a step, by operation, purpose and axis; an empty list without a pass."""
        if not self.known.passed:
            return []
        counts = totals(sent(self.outlook.plan, self.known.passed, rank))
        return [
            {
                "operation": operation,
                "purpose": purpose,
                "axis": axis,
                "calls": count.calls,
                "elements": count.elements,
                "bytes": count.bytes,
            }
            for (operation, purpose, axis), count in counts.items()
        ]

    @property
    def warnings(self) -> list[str]:
        """Sentences on axes whose ranks would lie on several hosts, each with a mesh that avoids it."""
        return notes_of_planned_axes(self.outlook.plan.mesh, self.known.per_host)

    def plain(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        mesh, seconds = self.outlook.plan.mesh, self.seconds
        flops, pace = (None, None) if seconds is None else (seconds.flops, seconds.pace)
        steps = self.config.train.steps
        return {
            "fits": self.fits,
            "margin_bytes": min(self.margins.values(), default=None),
            "parameters": self.parameters,
            "ranks": self.ranks,
            "mesh": {axis: mesh.size(axis) for axis in (*mesh.axes, "ep", "etp")},
            "device": self.device,
            "assumes": list(self.assumes),
            "warnings": self.warnings,
            "classes": self.classes(),
            "why": [reason.plain() | dict(removal) for reason, removal in self.why],
            "flops": None
            if flops is None
            else {**flops._asdict(), "total": flops.total(steps), "pf_days": flops.pf_days(steps)},
            "time": None if seconds is None else seconds.plain(),
            "pace": None if pace is None else pace._asdict(),
            "changes": [change.plain() for change in self.changes],
            "search": None if self.search is None else self.search.plain(),
            "solved": None if self.solved is None else self.solved.plain(),
            "diff": self.diff,
            "outcome": self.outcome,
        }

    def to_json(self) -> str:
        """Return the report as JSON for programs."""
        return json.dumps(self.plain(), indent=2)

    def lines(self) -> list[str]:
        """Return the report as lines for people."""
        mesh = self.outlook.plan.mesh
        said = [
            f"{count_text(self.parameters)} parameters on {counted(self.ranks, 'rank')} of {self.device}: {mesh}"
        ]
        said += self.choices
        for tier, margin in self.margins.items():
            word = "free" if margin >= 0 else "missing"
            said.append(
                f"{tier}: {bytes_text(self.needs.get(tier, 0))} of {bytes_text(self.memory[tier])}, "
                f"{bytes_text(abs(margin))} {word}"
            )
        said += _memory_lines(self.outlook.step)
        if self.seconds is not None:
            said += _time_lines(self.seconds, self.config.train.steps)
        said += [f"warning: {each}" for each in self.warnings]
        said += [f"assumed: {each}" for each in self.assumes]
        return said + self._further_lines()

    def _further_lines(self) -> list[str]:
        """Return lines on the parts that options ask for."""
        said: list[str] = []
        if self.changes:
            said.append("what makes it fit, the cheapest first:")
            said += [f"  {change.line()}" for change in self.changes[:_SHOWN]]
        elif not self.fits:
            said.append("nothing known makes it fit")
        if self.why:
            said.append("every byte at the peak:")
            said += [f"  {_why_line(reason, removal)}" for reason, removal in self.why]
        if self.search is not None:
            said += self.search.lines()
        if self.solved is not None:
            said.append(_solved_line(self.solved))
        if self.diff is not None:
            said.append("what differs, theirs minus ours:")
            said += _difference_lines(self.diff)
        return said


_KEYS = re.compile(r" (?=[\w.]+=)")
"""Gaps between the overrides in ``removed_by``."""
_SHOWN = 4
"""Number of changes that the text for people names."""


def _memory_lines(step: StepMemory | None) -> list[str]:
    """Return the phases of a rank and the rows of its peak, the largest first."""
    if step is None:
        return []
    phases = ", ".join(f"{phase} {bytes_text(size)}" for phase, size in step.phases.items())
    peak = step.peak
    where = "" if peak.action is None else f", at {peak.action} of {peak.unit}"
    rows = sorted(peak.rows.items(), key=lambda row: -row[1])
    return [
        f"rank {step.rank} holds at most: {phases}",
        f"the peak is in the phase {peak.phase}{where}:",
        *(f"  {row:<24} {bytes_text(size):>10}" for row, size in rows if size),
    ]


def _time_lines(seconds: JobSeconds, steps: int) -> list[str]:
    run, spent = (
        seconds.run,
        ", ".join(f"{name} {each_s:.3g}" for name, each_s in seconds.spent.items() if each_s),
    )
    given = f", from {seconds.given}" if seconds.given else f" ({seconds.low_s:.3g} to {seconds.high_s:.3g})"
    said = [f"a step takes {run.step_s:.3g} s{given}" + (f": {spent}" if spent else "")]
    exposed = {axis: each_s for axis, each_s in seconds.exposed.items() if each_s}
    if exposed:
        said.append(
            "of it waits for ranks: " + ", ".join(f"{axis} {each_s:.3g}" for axis, each_s in exposed.items())
        )
    rates = [f"MFU {run.mfu:.1%}"] if run.mfu is not None else []
    rates += [f"{count_text(run.tokens_per_s)} tokens/s"] if run.tokens_per_s is not None else []
    if run.days is not None and run.device_hours is not None:
        rates.append(f"the run takes {run.days * 24:.3g} hours and {run.device_hours:.3g} device hours")
    said += [", ".join(rates)] if rates else []
    total, days = seconds.flops.total(steps), seconds.flops.pf_days(steps)
    said.append(f"{flops_text(total)} in {counted(steps, 'step')}: {days:.3g} PF-days")
    if seconds.pace is not None:
        pace = seconds.pace
        said.append(
            f"checkpoints every {pace.interval_s:.3g} s ({counted(pace.steps, 'step')}): "
            f"{pace.goodput:.1%} of the time trains"
        )
    return said


def _why_line(reason: MemoryReason, removal: Mapping[str, Any]) -> str:
    where = f" {reason.line}" if reason.line else ""
    said = f"{bytes_text(reason.bytes):>10}  {reason.row}: {reason.what}"
    said += f" of {reason.unit}" * bool(reason.unit) + where
    said += f", {reason.copies} copies" * (reason.copies > 1)
    said += f", until {reason.until}" * (reason.until is not None)
    if removal.get("removed_by"):
        words = " ".join(f"--set {each}" for each in _KEYS.split(removal["removed_by"]))
        said += f"; {words} saves {bytes_text(removal['saves_bytes'])} for {removal['price_s']:+.3g} s a step"
    return said


def _solved_line(solved: SolvedKey) -> str:
    if solved.value is None:
        return f"no value of {solved.key} makes the job fit"
    word = "fewest" if solved.key == "ranks" else "largest"
    beyond = "" if solved.beyond is None else f"; {solved.beyond} does not fit"
    return f"{solved.key}: {solved.value} is the {word} that fits{beyond}"


def _difference_lines(diff: Mapping[str, Any]) -> list[str]:
    said = [f"  {line}" for line in diff["set"]]
    said += [f"  {row}: {size:+,.0f} bytes" for row, size in diff["rows"].items()]
    said += [f"  {kind}: {count:+d} Actions" for kind, count in diff["actions"].items()]
    said += [
        f"  {row['operation']} of {row['purpose']} over {row['axis']}: {row['calls']:+d} calls, "
        f"{row['bytes']:+,d} bytes"
        for row in diff["sent"]
    ]
    return said + [f"  {use}: {seconds:+.3g} s a step" for use, seconds in diff["spent"].items()]
