"""Sinks of a run's records: ``metrics.csv``, TensorBoard events, pictures, Weights & Biases, Comet, printed lines.

With ``monitor.unit_norms`` the gradient norms of Units follow each record: into ``unit_norms.csv`` beside
``metrics.csv``, and to all sinks of named numbers.

A sink that fails must not end the training: if its ``write`` raises, a warning is logged once and the sink is not used
any more. The exception is ``metrics.csv``, the run's own record, whose errors are raised.
"""

import contextlib
import importlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, PositiveInt

from shardwise.base.errors import ConfigError, DataError
from shardwise.base.policy import Policy
from shardwise.base.regular_files import read_small_text
from shardwise.observe.metrics import NO_SCALARS, ClickRecord, MetricsFile, Record, Sink, StepRecord, read
from shardwise.observe.picture import AucPicture, LossPicture
from shardwise.observe.range_picture import RangePicture
from shardwise.observe.unit_norms import NAME, UnitNormsFile

_log = logging.getLogger(__name__)


class MonitorPolicy(Policy):
    """Keys under ``monitor:``: the files, pictures and services that a run's numbers are sent to.

    ``shardwise train`` uses all keys, defaults included. An engine in a loop of your own uses only the keys that are
    set.
    """

    csv: bool | str = True
    """Write ``metrics.csv`` into ``output_dir``, or into this folder."""
    tensorboard: bool | str = True
    """Write TensorBoard events into ``tensorboard/`` of ``output_dir``, or into this folder."""
    csv_per_tag: str | None = None
    """Folder that gets a CSV file for each number that TensorBoard gets, with two columns, ``step`` (steps or samples,
    by ``axis``) and the number, as DeepSpeed's ``csv_monitor`` writes them."""
    picture: bool = True
    """Draw ``loss.png`` into ``output_dir``; for a click-through model also ``auc.png`` and ``lanes.png``, with a range
    test also ``lr_range.png``. ``shardwise train`` also draws ``step.png``, the lanes of the last step."""
    wandb: str | None = None
    """Project at Weights & Biases that gets the numbers; needs the package wandb and an account that is logged in."""
    wandb_group: str | None = None
    """Group of the run at Weights & Biases."""
    wandb_team: str | None = None
    """Team at Weights & Biases that owns the project."""
    comet: str | None = None
    """Project at Comet that gets the numbers; needs the package comet_ml, which reads its key itself
    (COMET_API_KEY)."""
    comet_workspace: str | None = None
    """Workspace at Comet that owns the project."""
    comet_experiment: str | None = None
    """Name of the experiment at Comet."""
    print_every: PositiveInt | None = None
    """Steps between two lines that rank 0 prints; if left out, ``shardwise train`` prints at intervals of time."""
    progress: bool | PositiveInt = False
    """Show the progress of a loop of your own and the time that is left: a bar on a terminal, lines elsewhere. true: of
    ``train.steps`` steps, which must then be given; a number: of that many steps. ``shardwise train`` always shows
    it."""
    breakdown: bool = False
    """Print in each line how long forward, backward and update took."""
    unit_norms: bool = False
    """Report the norm of each Unit's gradient before clipping, every step: in ``unit_norms.csv`` beside
    ``metrics.csv``, as ``unit_norm/NAME`` in the other monitors that are on, and as ``unit_norms`` of the result of a
    step. NAME is the name of the Unit in the printed Plan; all embedding tables together have one norm,
    ``(tables)``."""
    rank_seconds: bool | None = None
    """Exchange in every step how long each rank waited for data, computed, waited for others and updated, with the
    numbers that the ranks exchange anyway. ``shardwise doctor`` reads the result. If left out, ``shardwise train`` does
    it and an engine in a loop of your own does not."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Columns of ``metrics.csv`` and the names under which the other monitors get them; columns without a name are then
    not sent. If left out, all columns are sent, as ``loss/train``, ``step/lr`` ..."""
    axis: Literal["steps", "samples"] = "steps"
    """Axis of the monitors other than ``metrics.csv``: steps, or samples (steps times ``batch.global_size``, also if
    the caller ends steps)."""

    def of_train(self) -> "MonitorPolicy":
        """Return this policy with the defaults of ``shardwise train`` for keys that are left out."""
        return self if self.rank_seconds is not None else self.model_copy(update={"rank_seconds": True})

    def asked(self) -> "MonitorPolicy":
        """Return this policy without the files that are on by default and that nobody has set."""
        off = {key: False for key in ("csv", "tensorboard", "picture") if key not in self.model_fields_set}
        return self.model_copy(update=off)

    @property
    def is_silent(self) -> bool:
        """True if no sink is on."""
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


class MetricNames(NamedTuple):
    """The names of numbers in monitors, and the axis that they are plotted on."""

    tags: Mapping[str, str] = {}
    """Names by column; if empty, all columns are sent under default names."""
    samples_per_step: int | None = None
    """Samples of a step if the axis is samples; None for steps."""

    def scalars(self, record: Record) -> dict[str, float]:
        """Return the numbers of a step that are known, by name, without the step itself."""
        known = {name: value for name, value in record._asdict().items() if name not in NO_SCALARS}
        if self.tags:
            known = {name: known.get(name) for name in self.tags}
        names = {**_TAGS, **self.tags}
        return {names.get(name, f"step/{name}"): float(v) for name, v in known.items() if v is not None}

    def place(self, step: int) -> int:
        """Return the position of a step on the axis."""
        return step * (self.samples_per_step or 1)


OURS = MetricNames()


class ScalarSink(ABC):
    """Base class of sinks that send named numbers.

    Args:
        naming: the names of the numbers, and the axis.
    """

    def __init__(self, naming: MetricNames) -> None:
        self.naming = naming

    def write(self, record: Record) -> None:
        """Send the numbers of one step."""
        if found := self.naming.scalars(record):
            self.send(found, self.naming.place(record.step))

    @abstractmethod
    def send(self, scalars: Mapping[str, float], place: int) -> None:
        """Send named numbers to the monitor.

        Args:
            scalars: numbers by name.
            place: position on the axis.
        """

    @abstractmethod
    def close(self) -> None:
        """Send buffered numbers and close the sink."""


class TensorBoardEvents(ScalarSink):
    """Sink that writes scalars through TensorBoard's own writer, in a separate thread."""

    def __init__(
        self, folder: str | os.PathLike[str], resume_step: int = 0, naming: MetricNames = OURS
    ) -> None:
        # torch.utils.tensorboard takes most of a second to import, so tensorboard is used directly.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

        super().__init__(naming)
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(os.fspath(folder), flush_secs=10)
        # With this event, readers drop the numbers that the run wrote before a resume for steps computed again now.
        start = SessionLog(status=SessionLog.START)
        first = naming.place(resume_step + 1)
        self._writer.add_event(Event(wall_time=time.time(), step=first, session_log=start))

    def send(self, scalars: Mapping[str, float], place: int) -> None:
        """Queue numbers for the writer's thread."""
        values = [self._summary.Value(tag=t, simple_value=v) for t, v in scalars.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=place, summary=summary))

    def close(self) -> None:
        """Write the queued numbers and close the file."""
        self._writer.close()


class TagFiles(ScalarSink):
    """Sink that adds a line to one CSV file for each number.

    ``Train/Samples/lr`` is written to ``Train_Samples_lr.csv``, whose header is ``step,lr``. Lines of steps that are
    computed again after a resume are dropped.
    """

    def __init__(
        self, folder: str | os.PathLike[str], resume_step: int = 0, naming: MetricNames = OURS
    ) -> None:
        super().__init__(naming)
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._last = naming.place(resume_step)
        self._begun: set[Path] = set()

    def send(self, scalars: Mapping[str, float], place: int) -> None:
        """Append one line to the file of each number."""
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
        """Do nothing, because each line is written at once."""


class WandbRun(ScalarSink):
    """Sink that sends numbers to Weights & Biases.

    A resumed run continues the same page; the id of the page is stored in the run's folder.
    """

    def __init__(
        self, policy: MonitorPolicy, folder: Path, settings: dict[str, Any], naming: MetricNames = OURS
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
        """Send numbers to the run's page."""
        self._run.log(dict(scalars), step=place)

    def close(self) -> None:
        """Finish the run's page."""
        self._run.finish()


class CometExperiment(ScalarSink):
    """Sink that sends numbers to Comet.

    A resumed run continues the same experiment; the key of the experiment is stored in the run's folder.
    """

    def __init__(
        self, policy: MonitorPolicy, folder: Path, settings: dict[str, Any], naming: MetricNames = OURS
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
        """Send numbers to the experiment."""
        self._experiment.log_metrics(dict(scalars), step=place)

    def close(self) -> None:
        """End the experiment."""
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


class AllSinks:
    """All sinks of a run, written to together.

    Args:
        certain: sinks whose errors are raised.
        optional: sinks that are left out after an error.
        unit_norms: file of the gradient norms of Units, or None.
    """

    def __init__(
        self, certain: Sequence[Sink], optional: Sequence[Sink], unit_norms: UnitNormsFile | None = None
    ) -> None:
        self._certain, self._optional = list(certain), list(optional)
        self._unit_norms = unit_norms

    def add(self, sink: Sink) -> None:
        """Add an optional sink."""
        self._optional.append(sink)

    def write(self, record: Record) -> None:
        """Write one record to every sink; an optional sink that fails is logged and left out from then on."""
        for sink in self._certain:
            sink.write(record)
        for sink in tuple(self._optional):
            try:
                sink.write(record)
            except Exception:
                self._leave_out(sink)

    def send(self, scalars: Mapping[str, float], place: int) -> None:
        """Send the user's own numbers to all sinks of named numbers.

        Args:
            scalars: numbers by name.
            place: position on the axis.
        """
        for sink in tuple(self._optional):
            if isinstance(sink, ScalarSink):
                try:
                    sink.send(scalars, place)
                except Exception:
                    self._leave_out(sink)

    def write_unit_norms(self, step: int, norms: Mapping[str, float]) -> None:
        """Write the gradient norms of one step, by Unit, to their file and to all sinks of named numbers."""
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
        """Close every sink, also if one of them fails; a second call does nothing."""
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
    naming: MetricNames = OURS,
    tests_range: bool = False,
) -> AllSinks:
    """Open the sinks of a run folder for records of one kind.

    Args:
        folder: folder of the run.
        policy: the sinks to open.
        resume_step: step that the run continues from; 0 for a new run.
        settings: the resolved configuration, which services store.
        kind: class of the records.
        best_auc: AUC of the best possible model, or None if it is not known.
        naming: names of the numbers, and the axis.
        tests_range: True in a range test, where the learning rate grows until training fails.

    Raises:
        ConfigError: if the package of a service is not installed.
        DataError: if a file of the folder cannot be continued.
    """
    folder = Path(folder)
    sinks = AllSinks([], [])
    try:
        earlier: list[Record] = []
        if policy.csv:
            place = Path(policy.csv) if isinstance(policy.csv, str) else folder
            metrics = MetricsFile(place / "metrics.csv", resume_step, kind)
            sinks = AllSinks([metrics], [])
            norms = place / NAME
            if policy.unit_norms:
                sinks = AllSinks([metrics], [], UnitNormsFile(norms, resume_step))
            elif norms.exists():
                # Opening the file drops its rows of steps that are computed again now.
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
        for sink in _services(folder, policy, resume_step, settings or {}, naming):
            sinks.add(sink)
    except BaseException:
        sinks.close()
        raise
    return sinks


def _services(
    folder: Path, policy: MonitorPolicy, resume_step: int, settings: dict[str, Any], naming: MetricNames
) -> Iterator[Sink]:
    """Open and yield the sinks that write in the form of another program."""
    if policy.tensorboard:
        events = Path(policy.tensorboard) if isinstance(policy.tensorboard, str) else folder / "tensorboard"
        yield TensorBoardEvents(events, resume_step, naming)
    if policy.csv_per_tag is not None:
        yield TagFiles(policy.csv_per_tag, resume_step, naming)
    if policy.wandb is not None:
        yield WandbRun(policy, folder, settings, naming)
    if policy.comet is not None:
        yield CometExperiment(policy, folder, settings, naming)
