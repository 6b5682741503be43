"""Where the records of a run go: ``metrics.csv``, TensorBoard events, pictures, Weights & Biases, Comet, printed lines.

Gradient norms of Units follow each record, if they are asked for: into ``unit_norms.csv`` beside ``metrics.csv``, and
to all that take named numbers.

A sink that fails must not end the training that it watches: one whose ``write`` raises is reported once and left out
from then on. The exception is ``metrics.csv``, the run's own record.
"""

import contextlib
import importlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, PositiveInt

from shardwise.observe.metrics import NO_SCALARS, ClickRecord, MetricsFile, Record, Sink, StepRecord, read
from shardwise.observe.picture import AucPicture, LossPicture
from shardwise.observe.range_picture import RangePicture
from shardwise.observe.unit_norms import NAME, UnitNormsFile
from shardwise.plan.errors import ConfigError, DataError
from shardwise.plan.policy import Policy
from shardwise.plan.regular_files import read_small_text

_log = logging.getLogger(__name__)


class MonitorPolicy(Policy):
    """Where a run's numbers go. ``shardwise train`` does what stands here, defaults included; an engine in a loop of
    your own writes what you set, and nothing else."""

    csv: bool | str = True
    """Write ``metrics.csv`` into ``output_dir``, or into this folder."""
    tensorboard: bool | str = True
    """Write TensorBoard events into ``tensorboard/`` of ``output_dir``, or into this folder."""
    csv_per_tag: str | None = None
    """Folder that gets a CSV file for each number that TensorBoard is sent, with two columns, ``step`` on the axis and
    the number: what ``csv_monitor`` of DeepSpeed writes."""
    picture: bool = True
    """Draw ``loss.png`` into ``output_dir``, for a click-through model ``auc.png`` and ``lanes.png``, with a range test
    ``lr_range.png``."""
    wandb: str | None = None
    """Project at Weights & Biases to send to; needs the package wandb and an account that is logged in."""
    wandb_group: str | None = None
    """Group of the run there."""
    wandb_team: str | None = None
    """Team that owns the project."""
    comet: str | None = None
    """Project at Comet to send to; needs the package comet_ml, which finds its key itself (COMET_API_KEY)."""
    comet_workspace: str | None = None
    """Workspace that owns the project."""
    comet_experiment: str | None = None
    """Name of the experiment there."""
    print_every: PositiveInt | None = None
    """Steps between two lines that rank 0 prints; left out, ``shardwise train`` prints by the clock."""
    progress: bool | PositiveInt = False
    """Show how far a loop of your own is and how long the rest takes: a bar on a terminal, lines elsewhere. true: of
    ``train.steps`` steps, which must then be given; a number: of so many steps. ``shardwise train`` always does."""
    breakdown: bool = False
    """Say in the lines how long forward, backward and update took."""
    unit_norms: bool = False
    """Report the norm of each Unit's gradient before clipping, every step: in ``unit_norms.csv`` beside
    ``metrics.csv``, as ``unit_norm/NAME`` in the other monitors that are on, and as ``unit_norms`` of the result of a
    step. NAME is the name of the Unit in the printed Plan; embedding tables have one together, ``(tables)``."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Columns of ``metrics.csv`` and the names under which the other monitors get them; those without one are then not
    sent. Left out, all are, as ``loss/train``, ``step/lr`` ..."""
    axis: Literal["steps", "samples"] = "steps"
    """What monitors other than ``metrics.csv`` count by: steps, or samples (steps times ``batch.global_size``, even
    where the caller ends steps)."""

    def asked(self) -> "MonitorPolicy":
        """This without what nobody set: no default writes a file."""
        off = {key: False for key in ("csv", "tensorboard", "picture") if key not in self.model_fields_set}
        return self.model_copy(update=off)

    @property
    def is_silent(self) -> bool:
        """True where no number goes anywhere."""
        places = (
            self.csv,
            self.csv_per_tag,
            self.tensorboard,
            self.picture,
            self.wandb,
            self.comet,
            self.print_every,
            self.progress,
        )
        return not any(places)


_CSV_BYTES = 64 << 20
_TAGS = {
    "loss": "loss/train",
    "val_loss": "loss/validation",
    "log_loss": "loss/validation",
    "auc": "auc/validation",
    "accuracy": "accuracy/validation",
    "rows": "tables/rows",
    "inserted": "tables/inserted",
    "evicted": "tables/evicted",
}


class Naming(NamedTuple):
    """What monitors call the numbers, and where they put them."""

    tags: Mapping[str, str] = {}
    """By column; empty: all columns, under names of ours."""
    samples_per_step: int | None = None
    """Where samples are counted."""

    def scalars(self, record: Record) -> dict[str, float]:
        """What is known of a step, except its number."""
        known = {name: value for name, value in record._asdict().items() if name not in NO_SCALARS}
        if self.tags:
            known = {name: known.get(name) for name in self.tags}
        names = {**_TAGS, **self.tags}
        return {names.get(name, f"step/{name}"): float(v) for name, v in known.items() if v is not None}

    def place(self, step: int) -> int:
        """Where a step stands on the axis."""
        return step * (self.samples_per_step or 1)


OURS = Naming()


class ScalarSink(ABC):
    """Sink of named numbers. Subclasses send them."""

    def __init__(self, naming: Naming) -> None:
        self.naming = naming

    def write(self, record: Record) -> None:
        """Send one step."""
        if found := self.naming.scalars(record):
            self.send(found, self.naming.place(record.step))

    @abstractmethod
    def send(self, scalars: Mapping[str, float], place: int) -> None:
        """Numbers at a place of the axis."""

    @abstractmethod
    def close(self) -> None:
        """Send what is still held back."""


class TensorBoardEvents(ScalarSink):
    """Sink that writes scalars through TensorBoard's own writer, in a thread of its own."""

    def __init__(self, folder: str | os.PathLike[str], resume_step: int = 0, naming: Naming = OURS) -> None:
        # tensorboard itself and not torch.utils.tensorboard, which needs most of a second to import.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

        super().__init__(naming)
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(os.fspath(folder), flush_secs=10)
        # Readers drop what an earlier life of the run wrote for the steps that are now computed again.
        start = SessionLog(status=SessionLog.START)
        first = naming.place(resume_step + 1)
        self._writer.add_event(Event(wall_time=time.time(), step=first, session_log=start))

    def send(self, scalars: Mapping[str, float], place: int) -> None:
        """Queue them."""
        values = [self._summary.Value(tag=t, simple_value=v) for t, v in scalars.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=place, summary=summary))

    def close(self) -> None:
        """Write the queue out."""
        self._writer.close()


class TagFiles(ScalarSink):
    """Sink that adds a line to a file for each number: ``Train/Samples/lr`` to ``Train_Samples_lr.csv``, whose header
    is ``step,lr``. Lines of steps that are computed again are dropped."""

    def __init__(self, folder: str | os.PathLike[str], resume_step: int = 0, naming: Naming = OURS) -> None:
        super().__init__(naming)
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._last = naming.place(resume_step)
        self._begun: set[Path] = set()

    def send(self, scalars: Mapping[str, float], place: int) -> None:
        """Write them."""
        for tag, value in scalars.items():
            path = self._folder / f"{tag.replace('/', '_').replace(' ', '_')}.csv"
            if path not in self._begun:
                self._begin(path, tag.rpartition("/")[2])
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{place},{value!r}\n")

    def _begin(self, path: Path, name: str) -> None:
        rows = read_small_text(path, _CSV_BYTES).splitlines()[1:] if path.exists() and self._last else []
        kept = [row for row in rows if int(row.partition(",")[0]) <= self._last]
        path.write_text("".join(f"{row}\n" for row in (f"step,{name}", *kept)), encoding="utf-8")
        self._begun.add(path)

    def close(self) -> None:
        """Nothing: each line is written when it comes."""


class WandbRun(ScalarSink):
    """Sink that sends to Weights & Biases. A resumed run continues the same page: its id is kept in the folder."""

    def __init__(
        self, policy: MonitorPolicy, folder: Path, settings: dict[str, Any], naming: Naming = OURS
    ) -> None:
        super().__init__(naming)
        wandb = _package("wandb", "wandb", policy.wandb)
        self._run = wandb.init(
            project=policy.wandb,
            group=policy.wandb_group,
            entity=policy.wandb_team,
            dir=os.fspath(folder),
            config=settings,
            id=_kept_id(folder / "wandb_run.txt"),
            resume="allow",
        )
        _keep_id(folder / "wandb_run.txt", self._run.id)

    def send(self, scalars: Mapping[str, float], place: int) -> None:
        """Send them."""
        self._run.log(dict(scalars), step=place)

    def close(self) -> None:
        """Finish the page."""
        self._run.finish()


class CometExperiment(ScalarSink):
    """Sink that sends to Comet. A resumed run continues the same experiment: its key is kept in the folder."""

    def __init__(
        self, policy: MonitorPolicy, folder: Path, settings: dict[str, Any], naming: Naming = OURS
    ) -> None:
        super().__init__(naming)
        comet = _package("comet", "comet_ml", policy.comet)
        known = _kept_id(folder / "comet_experiment.txt")
        self._experiment = comet.start(
            project=policy.comet, workspace=policy.comet_workspace, experiment_key=known
        )
        _keep_id(folder / "comet_experiment.txt", self._experiment.get_key())
        if policy.comet_experiment is not None:
            self._experiment.set_name(policy.comet_experiment)
        self._experiment.log_parameters(settings)

    def send(self, scalars: Mapping[str, float], place: int) -> None:
        """Send them."""
        self._experiment.log_metrics(dict(scalars), step=place)

    def close(self) -> None:
        """Finish the experiment."""
        self._experiment.end()


def _package(key: str, name: str, given: Any) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"monitor.{key}: {given!r} was given but the package {name} is not installed; "
            f"pip install {name}, or remove the key"
        ) from None


def _kept_id(note: Path) -> str | None:
    return read_small_text(note).strip() if note.exists() else None


def _keep_id(note: Path, text: str) -> None:
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(f"{text}\n", encoding="utf-8")


class Sinks:
    """All sinks of a run behind one."""

    def __init__(
        self, certain: Sequence[Sink], optional: Sequence[Sink], unit_norms: UnitNormsFile | None = None
    ) -> None:
        self._certain, self._optional = list(certain), list(optional)
        self._unit_norms = unit_norms

    def add(self, sink: Sink) -> None:
        """Join an optional sink."""
        self._optional.append(sink)

    def write(self, record: Record) -> None:
        """Hand one step to every sink; an optional one that fails is reported and left out from now on."""
        for sink in self._certain:
            sink.write(record)
        for sink in tuple(self._optional):
            try:
                sink.write(record)
            except Exception:
                self._leave_out(sink)

    def send(self, scalars: Mapping[str, float], place: int) -> None:
        """Hand numbers of the user's own to those that take them."""
        for sink in tuple(self._optional):
            if isinstance(sink, ScalarSink):
                try:
                    sink.send(scalars, place)
                except Exception:
                    self._leave_out(sink)

    def write_unit_norms(self, step: int, norms: Mapping[str, float]) -> None:
        """Write the gradient norms of one step, by Unit, to all that take them."""
        named = {f"unit_norm/{name}": norm for name, norm in norms.items()}
        for sink in tuple(self._optional):
            if isinstance(sink, ScalarSink):
                try:
                    sink.send(named, sink.naming.place(step))
                except Exception:
                    self._leave_out(sink)
        if self._unit_norms is not None:
            try:
                self._unit_norms.write(step, norms)
            except Exception:
                _log.warning("%s failed and is switched off for this run", NAME, exc_info=True)
                self._close_unit_norms()

    def _close_unit_norms(self) -> None:
        file, self._unit_norms = self._unit_norms, None
        if file is not None:
            try:
                file.close()
            except Exception:
                _log.warning("%s could not be closed", NAME, exc_info=True)

    def _leave_out(self, sink: Sink) -> None:
        _log.warning("%s failed and is switched off for this run", type(sink).__name__, exc_info=True)
        self._optional.remove(sink)

    def close(self) -> None:
        """Close every sink, also after one of them failed; a second time is nothing."""
        optional, self._optional = self._optional, []
        certain, self._certain = self._certain, []
        for sink in optional:
            try:
                sink.close()
            except Exception:
                _log.warning("%s could not be closed", type(sink).__name__, exc_info=True)
        self._close_unit_norms()
        for sink in certain:
            sink.close()


def open_sinks(
    folder: str | os.PathLike[str],
    policy: MonitorPolicy,
    resume_step: int = 0,
    settings: dict[str, Any] | None = None,
    kind: type[Record] = StepRecord,
    best_auc: float | None = None,
    naming: Naming = OURS,
    tests_range: bool = False,
) -> Sinks:
    """The sinks of a run folder for records of one kind, continued from ``resume_step``.

    ``settings``: the resolved configuration; ``best_auc``: that of the best possible model, where it is known;
    ``tests_range``: the learning rate grows until training fails.
    """
    folder = Path(folder)
    sinks = Sinks([], [])
    try:
        earlier: list[Record] = []
        if policy.csv:
            place = Path(policy.csv) if isinstance(policy.csv, str) else folder
            metrics = MetricsFile(place / "metrics.csv", resume_step, kind)
            sinks = Sinks([metrics], [])
            norms = place / NAME
            if policy.unit_norms:
                sinks = Sinks([metrics], [], UnitNormsFile(norms, resume_step))
            elif norms.exists():
                # An earlier life of the run may have written rows of steps that are computed again now.
                with contextlib.suppress(DataError):
                    UnitNormsFile(norms, resume_step)
            earlier = read(metrics.path)
        if policy.picture:
            folder.mkdir(parents=True, exist_ok=True)
            sinks.add(LossPicture(folder / "loss.png", folder.name, earlier))
            if tests_range:
                sinks.add(RangePicture(folder / "lr_range.png", folder.name, earlier))
            if kind is ClickRecord:
                sinks.add(AucPicture(folder / "auc.png", folder.name, earlier, best_auc))
        if policy.tensorboard:
            events = (
                Path(policy.tensorboard) if isinstance(policy.tensorboard, str) else folder / "tensorboard"
            )
            sinks.add(TensorBoardEvents(events, resume_step, naming))
        if policy.csv_per_tag is not None:
            sinks.add(TagFiles(policy.csv_per_tag, resume_step, naming))
        if policy.wandb is not None:
            sinks.add(WandbRun(policy, folder, settings or {}, naming))
        if policy.comet is not None:
            sinks.add(CometExperiment(policy, folder, settings or {}, naming))
    except BaseException:
        sinks.close()
        raise
    return sinks
