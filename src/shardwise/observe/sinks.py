"""Where the records of a run go: ``metrics.csv`` always, TensorBoard events, pictures, Weights & Biases.

A sink that fails must not end the training that it watches: one whose ``write`` raises is reported once and left out
from then on. The exception is ``metrics.csv``, the run's own record.
"""

import importlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.observe.metrics import ClickRecord, MetricsFile, Record, Sink, StepRecord, read
from shardwise.observe.picture import AucPicture, LossPicture
from shardwise.plan.errors import ConfigError
from shardwise.plan.policy import Policy

_log = logging.getLogger(__name__)


class MonitorPolicy(Policy):
    """Where a run's numbers are sent besides ``metrics.csv``."""

    tensorboard: bool = True
    """Write TensorBoard events into ``tensorboard/`` of the run folder."""
    picture: bool = True
    """Draw ``loss.png`` into the run folder, and for a click-through model ``auc.png`` and ``lanes.png``."""
    wandb: str | None = None
    """Project at Weights & Biases to send to; needs the package wandb and an account that is logged in."""


_TAGS = {
    "loss": "loss/train",
    "val_loss": "loss/validation",
    "log_loss": "loss/validation",
    "auc": "auc/validation",
    "rows": "tables/rows",
    "inserted": "tables/inserted",
    "evicted": "tables/evicted",
}


def _scalars(record: Record) -> dict[str, float]:
    """Everything known of a step except its number, under the names that monitors group by."""
    known = record._asdict()
    del known["step"]
    return {_TAGS.get(name, f"step/{name}"): float(v) for name, v in known.items() if v is not None}


class TensorBoardEvents:
    """Sink that writes scalars through TensorBoard's own writer, in a thread of its own."""

    def __init__(self, folder: str | os.PathLike[str], resume_step: int = 0) -> None:
        # tensorboard itself and not torch.utils.tensorboard, which needs most of a second to import.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(os.fspath(folder), flush_secs=10)
        # Readers drop what an earlier life of the run wrote for the steps that are now computed again.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    def write(self, record: Record) -> None:
        """Queue one step."""
        values = [self._summary.Value(tag=t, simple_value=v) for t, v in _scalars(record).items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=record.step, summary=summary))

    def close(self) -> None:
        """Write the queue out."""
        self._writer.close()


class WandbRun:
    """Sink that sends to Weights & Biases. A resumed run continues the same page: its id is kept in the folder."""

    def __init__(self, project: str, folder: str | os.PathLike[str], settings: dict[str, Any]) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ImportError:
            raise ConfigError(
                f"monitor.wandb: {project!r} was given but the package wandb is not installed; "
                f"pip install wandb, or remove the key"
            ) from None
        note = Path(folder) / "wandb_run.txt"
        known = note.read_text(encoding="utf-8").strip() if note.exists() else None
        self._run = wandb.init(
            project=project, dir=os.fspath(folder), config=settings, id=known, resume="allow"
        )
        note.write_text(f"{self._run.id}\n", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Send one step."""
        self._run.log(_scalars(record), step=record.step)

    def close(self) -> None:
        """Finish the page."""
        self._run.finish()


class Sinks:
    """All sinks of a run behind one."""

    def __init__(self, certain: Sequence[Sink], optional: Sequence[Sink]) -> None:
        self._certain, self._optional = list(certain), list(optional)

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
                _log.warning("%s failed and is switched off for this run", type(sink).__name__, exc_info=True)
                self._optional.remove(sink)

    def close(self) -> None:
        """Close every sink, also after one of them failed."""
        for sink in self._optional:
            try:
                sink.close()
            except Exception:
                _log.warning("%s could not be closed", type(sink).__name__, exc_info=True)
        for sink in self._certain:
            sink.close()


def open_sinks(
    folder: str | os.PathLike[str],
    policy: MonitorPolicy,
    resume_step: int = 0,
    settings: dict[str, Any] | None = None,
    kind: type[Record] = StepRecord,
    best_auc: float | None = None,
) -> Sinks:
    """The sinks of a run folder for records of one kind, continued from ``resume_step``.

    ``settings``: the resolved configuration; ``best_auc``: that of the best possible model, where it is known.
    """
    folder = Path(folder)
    metrics = MetricsFile(folder / "metrics.csv", resume_step, kind)
    sinks = Sinks([metrics], [])
    try:
        if policy.picture:
            earlier = read(metrics.path)
            sinks.add(LossPicture(folder / "loss.png", folder.name, earlier))
            if kind is ClickRecord:
                sinks.add(AucPicture(folder / "auc.png", folder.name, earlier, best_auc))
        if policy.tensorboard:
            sinks.add(TensorBoardEvents(folder / "tensorboard", resume_step))
        if policy.wandb is not None:
            sinks.add(WandbRun(policy.wandb, folder, settings or {}))
    except BaseException:
        sinks.close()
        raise
    return sinks
