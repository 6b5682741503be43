"""Rounds in which contenders take turns, and what was seen of each.

Each contender is a group of rank processes that is started once and sleeps. In every round each contender, in an order
shuffled anew, is woken, runs one step that is not timed and then the timed ones, while all others sleep.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from group import ContenderFailed, Group


@dataclasses.dataclass
class Record:
    """What was seen of one contender."""

    name: str
    samples_s: list[float] = dataclasses.field(default_factory=list)
    before_bytes: list[int] = dataclasses.field(default_factory=list)
    build_peak_bytes: list[int] = dataclasses.field(default_factory=list)
    peak_bytes: list[int] = dataclasses.field(default_factory=list)
    idle_bytes: list[int] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    sent_bytes: list[float] = dataclasses.field(default_factory=list)
    other_bytes: list[float] = dataclasses.field(default_factory=list)
    failure: str | None = None


def prepare(group: Group, record: Record, first_steps: int) -> None:
    """Start, build and run the first steps."""
    group.ask(do="ready")
    record.before_bytes = group.own_bytes()
    group.reset_peaks()
    group.ask(do="build")
    record.build_peak_bytes = growth(group.peak_bytes(), record)
    take_losses(record, group.ask(do="steps", count=first_steps))
    record.peak_bytes = growth(group.peak_bytes(), record)
    group.ask(do="sleep")
    record.idle_bytes = growth(group.own_bytes(), record)


def growth(now_bytes: list[int], record: Record) -> list[int]:
    """Over what each rank held before the model was built."""
    return [now - before for now, before in zip(now_bytes, record.before_bytes, strict=True)]


def take_losses(record: Record, answers: list[dict[str, Any]]) -> None:
    """Losses are means over the ranks that know them."""
    for step in zip(*(a["losses"] for a in answers), strict=True):
        record.losses.append(statistics.fmean(loss for loss in step if loss is not None))


def one_round(
    group: Group, record: Record, steps: int, after_turn: Callable[[Group, Record], None] | None = None
) -> None:
    """One cold step, then the timed ones."""
    take_losses(record, group.ask(do="steps", count=1))
    answers = group.ask(do="steps", count=steps)
    take_losses(record, answers)
    per_step = [max(step) for step in zip(*(a["seconds"] for a in answers), strict=True)]
    record.samples_s.append(statistics.fmean(per_step))
    record.sent_bytes.append(statistics.fmean(sum(a["sent_bytes"]) for a in answers) / steps)
    record.other_bytes.append(statistics.fmean(a["other_bytes"] for a in answers) / steps)
    record.peak_bytes = growth(group.peak_bytes(), record)
    if after_turn is not None:
        after_turn(group, record)
    group.ask(do="sleep")


def interleave(
    records: Sequence[Record],
    start: Callable[[Record, Path], Group],
    label: str,
    *,
    first_steps: int,
    rounds: int,
    steps: int,
    after_turn: Callable[[Group, Record], None] | None = None,
) -> None:
    """All rounds of contenders that are compared with one another. ``start`` is given an empty folder;
    ``after_turn`` is called after each turn's timed steps."""
    groups: dict[str, Group] = {}
    order = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="contenders_") as folder:
        try:
            for record in records:
                say(f"[{label}] {record.name}: start, build, {first_steps} steps")
                groups[record.name] = start(record, Path(folder) / record.name)
                guard(groups, record, prepare, first_steps)
            for number in range(rounds):
                alive = [record for record in records if record.failure is None]
                order.shuffle(alive)
                for record in alive:
                    guard(groups, record, one_round, steps, after_turn)
                say(f"[{label}] round {number + 1} of {rounds} done")
        finally:
            for group in groups.values():
                group.stop()


def guard(groups: dict[str, Group], record: Record, action: Any, *arguments: Any) -> None:
    """One contender's failure is its own: it is recorded and the rest go on."""
    group = groups[record.name]
    try:
        action(group, record, *arguments)
    except ContenderFailed as failure:
        record.failure = str(failure)
        say(f"  {record.name} failed: {failure}")
        group.stop()


def measured(record: Record) -> dict[str, Any]:
    """What was seen, for a row of a JSON file."""
    samples = record.samples_s
    quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else [float("nan")] * 3
    return {
        "step_s": statistics.median(samples) if samples else None,
        "step_s_quartiles": [quartiles[0], quartiles[2]] if len(samples) > 1 else None,
        "step_s_rounds": samples,
        "peak_bytes_per_rank": record.peak_bytes,
        "build_peak_bytes_per_rank": record.build_peak_bytes,
        "idle_bytes_per_rank": record.idle_bytes,
        "loss": record.losses[-1],
        "losses": record.losses,
        "sent_bytes_per_rank_and_step": statistics.median(record.sent_bytes) if samples else None,
        "other_bytes_per_rank_and_step": statistics.median(record.other_bytes) if samples else None,
    }


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)
