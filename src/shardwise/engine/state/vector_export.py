"""VectorExport: vectors for serving from a running job, full ones first and increments from then on.

    export of step 40      FOLDER/tables.json and its files                            full, of a new run name
    export of step 80      FOLDER/increments/RUN/step_00000040_to_00000080/            rows that came, changed and went
    ``full_every`` later   FOLDER/tables.json and its files                            full, of a new run name

Each appears in one rename (models/vectors.py, models/increments.py). A process begins with full vectors, and goes on
with full vectors after it has loaded a step: a reader may have applied increments of steps that are taken back.

The ranks agree on each phase as in a save (checkpoint/peers.py). With several ranks each writes its rows into a part
file, from which rank 0 writes what readers open.

Cost:   what increments.py says on the disk, twice with several ranks; training waits for it.
Shapes: C rows that are written, D width, G keys of rows that went.
"""

import json
import logging
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.base.errors import UsageError
from shardwise.checkpoint.peers import CheckpointCoordinator
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.state.state import finish_updates, settle
from shardwise.formats.safetensors import SafetensorsWriter, read_header
from shardwise.models.increments import ChangedTable, ExportedStep, increment_name, write_increment
from shardwise.models.vectors import INCREMENTS, StoredTable, write_vectors

_log = logging.getLogger(__name__)
_PARTS = ".export-"
"""Begin of the name of a folder with the part files of an export."""


class _Exported(NamedTuple):
    """The last export of this process."""

    folder: Path
    step: ExportedStep
    since: dict[str, int]
    """Number of steps that the collection of each table had done."""
    increments: int
    """Number of increments since full vectors were written."""


class _ExportedRows(NamedTuple):
    """The rows of one table that this rank writes."""

    name: str
    width: int
    is_dynamic: bool
    first: int
    """Index of the first row among those of all ranks."""
    keys: Tensor
    vectors: Tensor
    gone: Tensor
    total: int
    """Rows of the whole table that count on this rank."""

    @property
    def note(self) -> dict[str, Any]:
        """Name and sizes of this part, which all ranks exchange."""
        sizes = {"first": self.first, "rows": len(self.keys), "gone": len(self.gone), "total": self.total}
        return {"name": self.name, "width": self.width, "dynamic": self.is_dynamic, **sizes}


class VectorExport:
    """The exports of one engine.

    Args:
        parts: The running parts of the engine.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._last: _Exported | None = None

    def forget(self) -> None:
        """Begin with full vectors again, because the steps that follow may not continue those that were exported."""
        self._last = None

    def write(self, folder: Path) -> bool:
        """Export the vectors of this step. Implements ``Engine.export``.

        Returns:
            True if full vectors were written, False for an increment, or if this step was exported before.
        """
        parts, folder = self._parts, folder.absolute()
        self._check()
        settle(parts, "export")
        finish_updates(parts)
        step, last = parts.progress.step_count, self._last
        if last is not None and last.folder == folder and last.step.step == step:
            return False
        policy = parts.config.export
        if last is not None and (
            last.folder != folder or (policy is not None and last.increments >= policy.full_every)
        ):
            last = None
        self._last = None  # an export that fails is followed by full vectors
        each_here = [each for each in parts.tables.each() if parts.tables.is_here(each[1])]
        since = {name: collection.steps for name, collection, _ in each_here}
        with parts.tables.deferred_faults():
            rows = self._rows(last)
        parts.tables.raise_faults()
        coordinator = parts.folders.coordinator(f"export of step {step}")
        with coordinator.at_work():
            try:
                now = _together(coordinator, folder, rows, step, last)
            finally:
                coordinator.end()
        for each in parts.tables.collections.values():
            each.saved.forget_gone()
        self._last = _Exported(folder, now, since, 0 if last is None else last.increments + 1)
        return last is None

    def _check(self) -> None:
        """Raise UsageError if the model has no tables, or if they keep no marks."""
        tables = self._parts.tables
        if not tables:
            raise UsageError("export: the model has no embedding tables, whose vectors would be written")
        if self._parts.config.export is None:
            raise UsageError(
                "export: the tables keep no marks of the rows that change, from which increments follow; set "
                "export.every in the configuration, as in export: {every: 1000}"
            )

    def _rows(self, last: _Exported | None) -> list[_ExportedRows]:
        """Return the rows that this rank writes: all of them, or those that changed since ``last``. Collective."""
        tables = self._parts.tables
        found: list[_ExportedRows] = []
        for name, collection, table in tables.each() if tables.is_first_copy else ():
            if not tables.is_here(collection):
                continue
            since = None if last is None else last.since[name]
            saved = collection.saved
            stretch, _ = saved.rows_to_write(table.name, since, weights_only=True)
            none = torch.empty(0, dtype=torch.int64)
            found.append(
                _ExportedRows(
                    name,
                    table.width,
                    table.dynamic is not None,
                    stretch.first,
                    stretch.rows.keys,
                    stretch.rows.weights.cpu().float(),
                    none if last is None else saved.gone_here(table.name),
                    saved.rows_counted(table.name),
                )
            )
        return found


def _together(
    coordinator: CheckpointCoordinator,
    folder: Path,
    rows: Sequence[_ExportedRows],
    step: int,
    last: _Exported | None,
) -> ExportedStep:
    """Write one export with all ranks, and return its step."""
    leads, is_alone = coordinator.rank == 0, coordinator.size == 1

    def begin() -> str:
        if not leads:
            return ""
        folder.mkdir(parents=True, exist_ok=True)
        for each in folder.glob(f"{_PARTS}*"):
            shutil.rmtree(each)  # of a job that was killed
        token = secrets.token_hex(8)
        if not is_alone:
            (folder / f"{_PARTS}{token}").mkdir()
        return token

    token = str(json.loads(coordinator.gather("begin", begin)[0]))
    place = folder / f"{_PARTS}{token}"

    def write_part() -> list[dict[str, Any]]:
        if not is_alone:
            _write_part(place / _part_name(coordinator.rank), rows)
        return [each.note for each in rows]

    notes = [json.loads(text) for text in coordinator.gather("rows", write_part)]
    run = token if last is None else last.step.run
    now = ExportedStep(run=run, step=step)

    def commit() -> None:
        if not leads:
            return
        read = _PartFiles(place, notes, rows if is_alone else None)
        if last is None:
            write_vectors(folder, [read.stored(name) for name in read.names], step, run=run)
            _remove_others(folder / INCREMENTS, run)
        else:
            target = folder / INCREMENTS / run / increment_name(last.step.step, step)
            write_increment(target, [read.changed(name) for name in read.names], last.step, now)
        if not is_alone:
            shutil.rmtree(place)

    coordinator.gather("commit", commit)
    _log.info("exported step %d to %s: %s", step, folder, "full vectors" if last is None else "an increment")
    return now


def _part_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _write_part(file: Path, rows: Sequence[_ExportedRows]) -> None:
    """Write the rows of this rank into a file of its own."""
    tensors = {
        f"{label}/{each.name}": tensor
        for each in rows
        for label, tensor in (("keys", each.keys), ("vectors", each.vectors), ("gone", each.gone))
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with SafetensorsWriter(file, shapes, {name: tensor.dtype for name, tensor in tensors.items()}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def _remove_others(folder: Path, run: str) -> None:
    """Remove the increments of other runs, which no new reader can apply."""
    for each in folder.iterdir() if folder.is_dir() else ():
        if each.name != run and each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)


class _PartFiles:
    """The rows that all ranks wrote, read by rank 0.

    Args:
        place: Folder of the part files.
        notes: Notes of each rank's parts.
        rows: The rows themselves if there is one rank; None reads them from the files.
    """

    def __init__(
        self, place: Path, notes: Sequence[Sequence[dict[str, Any]]], rows: Sequence[_ExportedRows] | None
    ):
        self._place, self._rows = place, rows
        self._notes: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        for rank, of_rank in enumerate(notes):
            for note in of_rank:
                self._notes.setdefault(note["name"], []).append((rank, note))
        for of_table in self._notes.values():
            of_table.sort(key=lambda each: int(each[1]["first"]))

    @property
    def names(self) -> list[str]:
        """Names of all tables."""
        return list(self._notes)

    def stored(self, name: str) -> StoredTable:
        """Return a table of which all rows are written."""
        note = self._notes[name][0][1]
        return StoredTable(
            name, self._sum(name, "rows"), note["width"], note["dynamic"], lambda: self._read(name)
        )

    def changed(self, name: str) -> ChangedTable:
        """Return a table of which the changes are written."""
        note = self._notes[name][0][1]
        gone = torch.cat([self._tensor(rank, "gone", name) for rank, _ in self._notes[name]])
        return ChangedTable(
            name,
            self._sum(name, "rows"),
            gone,
            self._sum(name, "total"),
            note["width"],
            note["dynamic"],
            lambda: self._read(name),
        )

    def _sum(self, name: str, what: str) -> int:
        return sum(int(note[what]) for _, note in self._notes[name])

    def _read(self, name: str) -> Iterator[tuple[int, Tensor, Tensor]]:
        for rank, note in self._notes[name]:
            if note["rows"]:
                yield note["first"], self._tensor(rank, "keys", name), self._tensor(rank, "vectors", name)

    def _tensor(self, rank: int, label: str, name: str) -> Tensor:
        if self._rows is not None:
            part = next(each for each in self._rows if each.name == name)
            return {"keys": part.keys, "vectors": part.vectors, "gone": part.gone}[label]
        stored = read_header(self._place / _part_name(rank))[f"{label}/{name}"]
        return stored.read(0, stored.elements).view(stored.shape)
