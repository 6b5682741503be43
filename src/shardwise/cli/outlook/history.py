"""The history of this machine's runs: what was foreseen of each beside what it took.

    keep(path, config, outcome, begun)      one small file for each start of a run, written in one rename
    RunHistory.read()                       all of them, the newest last

The files lie beside the calibration of the machine, in the user's cache folder. Runs of different processes never write
the same file. Only the newest ``MOST`` starts are kept. Runs in the system's folder of temporary files are left out,
because nobody finds them again.

Cost: one file of a kilobyte behind every save.
"""

import hashlib
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.base.errors import DataError
from shardwise.base.regular_files import read_small_file, write_small_file
from shardwise.base.strict_json import StrictModel, read_object, validated
from shardwise.base.words import bytes_text, counted, in_words
from shardwise.cli.outlook.outcome import Compared, RunOutcome
from shardwise.config.run import RunConfig
from shardwise.simulate.calibration import calibration_file

MOST = 256
"""Most starts of runs that are kept."""
_LIMIT_BYTES = 1 << 20


class PastRun(StrictModel):
    """One start of a run on this machine."""

    time: str
    """Time of the last write, in UTC."""
    run: str
    """Path of the run's folder."""
    ranks: int
    device: str
    steps: int
    """Steps that were measured."""
    step_s: Compared
    peak_bytes: Compared
    config: dict[str, Any]
    """The keys of the configuration that differ from their defaults."""


def history_folder() -> Path:
    """Return the folder of the history.

    Raises:
        RuntimeError: if the user has no home folder.
    """
    return calibration_file().parent / "history"


def keep(run: Path, config: RunConfig, outcome: RunOutcome, begun: str, folder: Path | None = None) -> None:
    """Write the outcome of a run into the history, in place of what the same start wrote before.

    Args:
        run: Folder of the run.
        config: Configuration of the run.
        outcome: The outcome so far.
        begun: Time of the start, in UTC, by which starts are sorted.
        folder: Folder of the history; None: the user's, in which runs in the system's temporary folder are left out.

    Raises:
        OSError: if the file cannot be written.
        RuntimeError: if the user has no home folder.
    """
    where = run.resolve()
    if folder is None:
        if where.is_relative_to(Path(tempfile.gettempdir()).resolve()):
            return
        folder = history_folder()
    plain = config.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    if config.model is not None:  # without its name, a model would be another one
        plain["model"] = {**plain.get("model", {}), **_name_of(config)}
    past = PastRun(
        time=outcome.time,
        run=str(where),
        ranks=outcome.ranks,
        device=outcome.device,
        steps=outcome.steps,
        step_s=outcome.step_s,
        peak_bytes=outcome.peak_bytes,
        config=plain,
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest = hashlib.sha256(str(where).encode()).hexdigest()[:12]
    name = f"{begun.replace(':', '')}-{digest}.json"
    write_small_file(folder / name, (json.dumps(past.model_dump(mode="json"), indent=2) + "\n").encode())
    for path in _files(folder)[:-MOST]:
        path.unlink(missing_ok=True)


def _name_of(config: RunConfig) -> dict[str, str]:
    """Return the key by which the model is found, ``name`` or ``target``."""
    found = {key: getattr(config.model, key, None) for key in ("name", "target")}
    return {key: value for key, value in found.items() if value is not None}


def _files(folder: Path) -> list[Path]:
    """Return the files of the history, the oldest first."""
    return sorted(path for path in folder.glob("*.json") if not path.name.startswith("."))


class RunHistory(NamedTuple):
    """The runs of this machine, the newest last."""

    runs: tuple[PastRun, ...]
    unreadable: tuple[str, ...] = ()
    """A sentence for each file that cannot be read."""

    @classmethod
    def read(cls, folder: Path | None = None) -> "RunHistory":
        """Read the history.

        Args:
            folder: Folder of the history; None: the user's.
        """
        found: list[PastRun] = []
        unreadable: list[str] = []
        try:
            files = _files(history_folder() if folder is None else folder)
        except RuntimeError:  # a user without a home folder
            files = []
        for path in files:
            try:
                data = read_small_file(path, _LIMIT_BYTES)
                content = read_object(data, str(path), limit_bytes=_LIMIT_BYTES, kind=DataError)
                found.append(validated(PastRun, content, str(path), kind=DataError))
            except FileNotFoundError:
                continue  # another run has just removed it
            except (OSError, DataError) as error:
                unreadable.append(
                    f"{path} is left out: {in_words(error) if isinstance(error, OSError) else error}"
                )
        return cls(tuple(found), tuple(unreadable))

    def plain(self) -> dict[str, Any]:
        """Return the history as values for JSON."""
        return {
            "runs": [run.model_dump(mode="json") for run in self.runs],
            "unreadable": list(self.unreadable),
        }

    def to_json(self) -> str:
        """Return the history as JSON for programs."""
        return json.dumps(self.plain(), indent=2)

    def lines(self) -> list[str]:
        """Return the history as a table for people."""
        if not self.runs:
            return ["no run of shardwise train has ended on this machine yet", *self.unreadable]
        rows = [_HEAD, *(_row(run) for run in self.runs)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        said = [
            "  ".join(
                [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)] + [row[-1]]
            ).rstrip()
            for row in rows
        ]
        for name, of in (("step", lambda run: run.step_s), ("peak", lambda run: run.peak_bytes)):
            said += _summary(name, [of(run) for run in self.runs])
        return [*said, *self.unreadable]


_HEAD = ("date", "ranks", "device", "step", "foreseen", "", "peak", "foreseen", "", "model, run")


def _row(run: PastRun) -> tuple[str, ...]:
    model = run.config.get("model", {})
    name = str(model.get("name") or model.get("target") or "model")
    return (
        run.time.replace("T", " ").removesuffix("Z")[:16],
        str(run.ranks),
        run.device,
        *_compared(run.step_s, lambda seconds: f"{seconds:.3g} s"),
        *_compared(run.peak_bytes, lambda size: bytes_text(int(size))),
        f"{name}, {run.run}",
    )


def _compared(each: Compared, text: Callable[[float], str]) -> tuple[str, str, str]:
    """Return what was measured, what was foreseen, and the ratio of the second to the first."""
    shown = ["-" if value is None else text(value) for value in (each.actual, each.foreseen)]
    return shown[0], shown[1], f"{each.foreseen / each.actual:.2f}" if each.foreseen and each.actual else ""


def _summary(name: str, found: list[Compared]) -> list[str]:
    """Return a line on how well a figure was foreseen; no line if it never was."""
    ratios = [each.foreseen / each.actual for each in found if each.foreseen and each.actual]
    if not ratios:
        return []
    return [
        f"{name}: foreseen at {statistics.median(ratios):.2f} of the measured in the middle of "
        f"{counted(len(ratios), 'run')}, {min(ratios):.2f} to {max(ratios):.2f}"
    ]
