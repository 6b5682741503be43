"""What differs between two planned jobs, for ``shardwise plan --against``: theirs minus ours, of the heaviest class."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from shardwise.cli.runs.run_folder import differences
from shardwise.engine.fit.report import JobReport


def difference(ours: JobReport, theirs: JobReport) -> dict[str, Any]:
    """Return what differs between two jobs, of the heaviest class: theirs minus ours."""
    set_keys = differences(
        ours.config.model_dump(mode="json", exclude_none=True),
        theirs.config.model_dump(mode="json", exclude_none=True),
    )
    return {
        "set": set_keys,
        "rows": _minus(_rows(theirs), _rows(ours)),
        "actions": _minus(_actions(theirs), _actions(ours)),
        "sent": _sent_difference(ours, theirs),
        "spent": _minus(_spent(theirs), _spent(ours)),
    }


def _rows(report: JobReport) -> Mapping[str, float]:
    step = report.outlook.step
    return report.outlook.bytes_per_rank() if step is None else step.peak.rows


def _actions(report: JobReport) -> Mapping[str, float]:
    lists = report.outlook.plan.actions.values()
    return Counter(action.kind.name for action in max(lists, key=len))


def _spent(report: JobReport) -> Mapping[str, float]:
    return {} if report.seconds is None else report.seconds.spent


def _sent_difference(ours: JobReport, theirs: JobReport) -> list[dict[str, Any]]:
    """Return the rows of ``sent`` that differ, of the rank that sends most in each job."""
    counts = ("calls", "elements", "bytes")
    sides = []
    for report in (ours, theirs):
        ranks = (report.sent(rank) for rank in report.outlook.plan.mesh.ranks("pp", 0))
        most = max(ranks, key=lambda rows: sum(row["bytes"] for row in rows))
        sides.append({(row["operation"], row["purpose"], row["axis"]): row for row in most})
    found = []
    for key in dict.fromkeys([*sides[1], *sides[0]]):
        here, there = (side.get(key, dict.fromkeys(counts, 0)) for side in sides)
        row = {count: there[count] - here[count] for count in counts}
        if any(row.values()):
            found.append(dict(zip(("operation", "purpose", "axis"), key, strict=True)) | row)
    return found


def _minus(theirs: Mapping[str, float], ours: Mapping[str, float]) -> dict[str, float]:
    """Return the differences of the entries that differ."""
    names = dict.fromkeys([*theirs, *ours])
    found = {name: theirs.get(name, 0) - ours.get(name, 0) for name in names}
    return {name: each for name, each in found.items() if each}
