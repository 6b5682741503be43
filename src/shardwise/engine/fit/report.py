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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardwise.base.words import bytes_text, counted
from shardwise.config.run import RunConfig
from shardwise.engine.fit.fits import FitReport
from shardwise.engine.fit.foresee import MemoryEstimate
from shardwise.observe.flops import flops_text, pf_days
from shardwise.observe.progress import count_text
from shardwise.plan.placement import Tier

_DAY_S = 86_400
_HOUR_S = 3_600
_RESTART_S = 60.0
"""Seconds from a failure to the first step of the next start, without reading the checkpoint; an assumption."""


class JobFlops(NamedTuple):
    """Floating-point operations of a job."""

    model_per_token: float | None
    """Operations that the model needs for one token, as if attention were not causal; None without a formula."""
    model_per_step: float | None
    """The same for one step; for a model without a formula what one step executes without recomputation."""
    hardware_per_step: float
    """``model_per_step`` with the forward passes that are computed again."""
    executed_per_step: float
    """Operations that all ranks execute in one step, as counted on shapes."""
    total: float | None
    """``model_per_step`` of all steps; None if the number of steps is unknown."""

    def plain(self) -> dict[str, Any]:
        """Return the operations as values for JSON."""
        return {**self._asdict(), "pf_days": None if self.total is None else pf_days(self.total)}


class JobTime(NamedTuple):
    """Seconds of one step, and of the whole run."""

    step_s: float
    low_s: float
    high_s: float
    """Bounds of the range in which 90 % of steps are expected."""
    spent: Mapping[str, float]
    """Seconds of the slowest rank by use; they add up to ``step_s``."""
    exposed: Mapping[str, float]
    """Seconds in which the computation waits for other ranks, by axis."""
    mfu: float | None
    hfu: float | None
    tokens_per_s: float | None
    days: float | None
    """Days of all steps; None if the number of steps is unknown."""
    device_hours: float | None
    given: str = ""
    """What replaced the price: ``--mfu`` or ``--step-s``; empty if nothing did."""

    def plain(self) -> dict[str, Any]:
        """Return the times as values for JSON."""
        found = self._asdict()
        del found["given"]
        return {**found, "spent": dict(self.spent), "exposed": dict(self.exposed)}


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

    config: RunConfig
    ranks: int
    device: str
    """Name of the device, as ``--device`` takes it."""
    per_host: int
    """Ranks of one host."""
    parameters: int
    memory: Mapping[Tier, int]
    """Bytes that a rank has, by tier."""
    outlook: MemoryEstimate
    choices: tuple[str, ...] = ()
    """Values that followed from the ranks, in words."""
    assumes: tuple[str, ...] = ()
    """Assumptions, each a sentence."""
    fit: FitReport | None = None
    """Memory and seconds of a step, and changes that make it fit; None if the pass needs numbers."""
    flops: JobFlops | None = None
    time: JobTime | None = None
    pace: SavePace | None = None
    """With ``--failures-per-day``."""
    diff: Mapping[str, Any] | None = None
    """With ``--against``: what differs, theirs minus ours."""
    outcome: Mapping[str, Any] | None = None
    """Of a run that has ended: foreseen and actual."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further parts for JSON: ``search`` and ``solved``."""

    @property
    def needs(self) -> Mapping[Tier, int]:
        """Bytes that the rank that needs most of each tier needs."""
        found: Mapping[Tier, int] = self.outlook.bytes_by_tier
        if found:
            return found
        from shardwise.plan.plan import bytes_by_tier

        return bytes_by_tier(self.outlook.bytes_per_rank())

    @property
    def margins(self) -> dict[Tier, int]:
        """Bytes that are left on each tier whose size is known; negative if the job does not fit."""
        return {tier: size - self.needs.get(tier, 0) for tier, size in self.memory.items()}

    @property
    def fits(self) -> bool:
        """True if every class of ranks fits every tier in every phase."""
        return all(margin >= 0 for margin in self.margins.values())

    def plain(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        mesh = self.outlook.plan.mesh
        return {
            "fits": self.fits,
            "margin_bytes": min(self.margins.values(), default=None),
            "parameters": self.parameters,
            "ranks": self.ranks,
            "mesh": {axis: mesh.size(axis) for axis in (*mesh.axes, "ep", "etp")},
            "device": self.device,
            "assumes": list(self.assumes),
            "classes": [],
            "why": [],
            "flops": None if self.flops is None else self.flops.plain(),
            "time": None if self.time is None else self.time.plain(),
            "changes": [] if self.fit is None else self.fit.plain()["changes"],
            "search": self.extra.get("search"),
            "solved": self.extra.get("solved"),
            "diff": self.diff,
            "outcome": self.outcome,
        }

    def to_json(self) -> str:
        """Return the report as JSON for programs."""
        return json.dumps(self.plain(), indent=2)

    def lines(self, why: bool = False) -> list[str]:
        """Return the report as lines for people.

        Args:
            why: Explain the bytes at the peak.
        """
        mesh = self.outlook.plan.mesh
        said = [
            f"{count_text(self.parameters)} parameters on {counted(self.ranks, 'rank')} of {self.device}: {mesh}"
        ]
        said += [*self.choices]
        for tier, margin in self.margins.items():
            word = "free" if margin >= 0 else "missing"
            said.append(
                f"{tier}: {bytes_text(self.needs.get(tier, 0))} of {bytes_text(self.memory[tier])}, "
                f"{bytes_text(abs(margin))} {word}"
            )
        if self.time is not None:
            said += _time_lines(self.time)
        if self.flops is not None and self.flops.total is not None:
            said.append(f"{flops_text(self.flops.total)} in all: {pf_days(self.flops.total):.3g} PF-days")
        if self.pace is not None:
            pace = self.pace
            said.append(
                f"checkpoints every {pace.interval_s:.3g} s ({counted(pace.steps, 'step')}): "
                f"{pace.goodput:.1%} of the time trains"
            )
        said += [f"assumed: {each}" for each in self.assumes]
        return said


def _time_lines(time: JobTime) -> list[str]:
    spent = ", ".join(f"{name} {each_s:.3g}" for name, each_s in time.spent.items() if each_s)
    given = f", from {time.given}" if time.given else f" ({time.low_s:.3g} to {time.high_s:.3g})"
    said = [f"a step takes {time.step_s:.3g} s{given}" + (f": {spent}" if spent else "")]
    exposed = {axis: each_s for axis, each_s in time.exposed.items() if each_s}
    if exposed:
        said.append(
            "of it waits for ranks: " + ", ".join(f"{axis} {each_s:.3g}" for axis, each_s in exposed.items())
        )
    if time.days is not None and time.device_hours is not None:
        said.append(
            f"the run: {time.days * _DAY_S / _HOUR_S:.3g} hours, {time.device_hours:.3g} device hours"
        )
    return said
