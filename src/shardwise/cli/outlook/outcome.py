"""``outcome.json``: what was foreseen of a run beside what it took, and the seconds of every rank by phase.

    rows, peak_bytes     bytes of rank 0 by row of the ledger, and the most at once
    lanes, step_s        mean seconds of a step by phase, over the ranks
    phases               the same for each rank, which ``shardwise doctor`` reads

Rank 0 writes the file behind every save and at the end of the run, in one rename. A copy of the forecast stands in the
file from the first write on, so a run that dies keeps it.
"""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from shardwise.base.errors import DataError, UsageError
from shardwise.base.regular_files import read_small_file, write_small_file
from shardwise.base.strict_json import StrictModel, read_object, validated
from shardwise.base.words import bytes_text, in_words

_LIMIT_BYTES = 64 << 20
_VERSION = 1


class Compared(StrictModel):
    """A number that was foreseen, and the number that came of it."""

    foreseen: float | None = None
    actual: float | None = None


class RunOutcome(StrictModel):
    """The content of ``outcome.json``."""

    version: int = Field(ge=1)
    time: str
    """Time of the write, in UTC."""
    ranks: int = Field(ge=1)
    device: str
    steps: int = Field(ge=0)
    """Steps whose phases were measured."""
    peak_bytes: Compared
    step_s: Compared
    rows: dict[str, Compared] = {}
    """Bytes of rank 0 by row of the ledger."""
    lanes: dict[str, Compared] = {}
    """Seconds of a step by phase."""
    phases: list[dict[str, float]] = []
    """Mean seconds of a step by phase, for each rank."""

    def plain(self) -> dict[str, Any]:
        """Return the part that ``shardwise plan`` prints as ``outcome``."""
        whole: dict[str, Any] = self.model_dump(mode="json")
        return {name: whole[name] for name in ("rows", "lanes", "peak_bytes", "step_s")}

    def lines(self) -> list[str]:
        """Return the outcome as lines of text for people."""
        said = [_line("step", self.step_s, _seconds), _line("peak", self.peak_bytes, bytes_text)]
        for found, text in ((self.rows, bytes_text), (self.lanes, _seconds)):
            said += [_line(name, each, text) for name, each in found.items() if each.foreseen or each.actual]
        return [f"{'':<24} {'foreseen':>12} {'actual':>12}", *said]


def _line(name: str, each: Compared, text: Any) -> str:
    shown = ["-" if value is None else text(value) for value in (each.foreseen, each.actual)]
    ratio = f"  {each.actual / each.foreseen:.2f}" if each.foreseen and each.actual is not None else ""
    return f"{name:<24} {shown[0]:>12} {shown[1]:>12}{ratio}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def outcome_of(
    *,
    ranks: int,
    device: str,
    forecast: Mapping[str, Any] | None,
    held: Mapping[str, int],
    peak_bytes: int | None,
    phases: Sequence[Mapping[str, float]],
    steps: int,
) -> RunOutcome:
    """Return the outcome of a run so far.

    Args:
        ranks: Ranks of the run.
        device: Name of the device.
        forecast: What was foreseen: ``rows``, ``lanes``, ``peak_bytes`` and ``step_s``; None if nothing was.
        held: Bytes of rank 0 by row of the ledger.
        peak_bytes: Most bytes of rank 0's device at once; None if unknown.
        phases: Mean seconds of a step by phase, for each rank.
        steps: Steps in ``phases``.
    """
    forecast = forecast or {}
    rows, lanes = forecast.get("rows", {}), forecast.get("lanes", {})
    names = dict.fromkeys([*held, *rows])
    spent = {name: statistics.fmean(row[name] for row in phases) for name in (phases[0] if phases else {})}
    step_s = sum(spent.values()) if spent else None
    return RunOutcome(
        version=_VERSION,
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        ranks=ranks,
        device=device,
        steps=steps,
        peak_bytes=Compared(foreseen=forecast.get("peak_bytes"), actual=peak_bytes),
        step_s=Compared(foreseen=forecast.get("step_s"), actual=step_s),
        rows={name: Compared(foreseen=rows.get(name), actual=held.get(name)) for name in names},
        lanes={
            name: Compared(foreseen=lanes.get(name), actual=spent.get(name))
            for name in dict.fromkeys([*spent, *lanes])
        },
        phases=[dict(row) for row in phases],
    )


def write_outcome(path: Path, outcome: RunOutcome) -> None:
    """Write the outcome in one rename."""
    write_small_file(path, (json.dumps(outcome.model_dump(mode="json"), indent=2) + "\n").encode())


def read_outcome(path: Path) -> RunOutcome:
    """Read an ``outcome.json``.

    Raises:
        UsageError: if the run has none.
        DataError: if the file is damaged.
    """
    try:
        data = read_small_file(path, _LIMIT_BYTES)
    except FileNotFoundError:
        raise UsageError(
            f"{path.parent} has no {path.name}: shardwise train writes it behind the first save and at the end of a "
            "run; let the run save once, or look at its metrics.csv"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {in_words(error)}") from None
    found = read_object(data, str(path), limit_bytes=_LIMIT_BYTES, kind=DataError)
    return validated(RunOutcome, found, str(path), kind=DataError)
