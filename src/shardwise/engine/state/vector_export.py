"""VectorExport: vectors for serving from a running job, full ones first and increments from then on.

    export of step 40      FOLDER/tables.json and its files                            full, of a new run name
    export of step 80      FOLDER/increments/RUN/step_00000040_to_00000080/            rows that came, changed and went
    ``full_every`` later   FOLDER/tables.json and its files                            full, of a new run name

Each appears in one rename (models/vectors.py, models/increments.py), and each has the whole dense part of the model of
its step, in the pieces that a save writes (pieces.py). A process begins with full vectors, and goes on with full
vectors after it has loaded a step: a reader may have applied increments of steps that are taken back.

The ranks agree on each phase as in a save (checkpoint/peers.py). With several ranks each writes its rows and its
pieces of the dense part into a part file, from which rank 0 writes what readers open, one tensor of a rank at a time.

Cost:   what increments.py says on the disk, twice with several ranks; training waits for it.
Shapes: C rows that are written, D width, G keys of rows that went.
"""

import json
import logging
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.base.errors import UsageError
from shardwise.base.words import bytes_text, counted, plain_name
from shardwise.checkpoint import FlatSlice, TensorPieces
from shardwise.checkpoint.peers import CheckpointCoordinator
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.state.pieces import CheckpointState, model_items
from shardwise.engine.state.state import finish_updates, settle
from shardwise.formats.safetensors import CODES, DTYPES, SafetensorsWriter, read_header
from shardwise.models.ctr.build import described
from shardwise.models.dense_part import DenseToWrite
from shardwise.models.increments import ChangedTable, ExportedStep, increment_name, write_increment
from shardwise.models.vectors import INCREMENTS, StoredTable, check_table_name, write_vectors

_log = logging.getLogger(__name__)
_PARTS = ".export-"
"""Begin of the name of a folder with the part files of an export."""
_ELEMENTS = 1 << 22
"""Elements of the dense part that are read from a device or a disk at once."""


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


class _ExportHere(NamedTuple):
    """The part of an export that this rank writes."""

    rows: list[_ExportedRows]
    dense: list[TensorPieces]
    """All weights and buffers of the model, with the pieces that this rank writes."""
    about: dict[str, Any]
    """What says which model it is, for the dense part."""

    @property
    def notes(self) -> dict[str, Any]:
        """Names and sizes, which all ranks exchange."""
        dense = [[each.name, list(each.shape), CODES[each.dtype]] for each in self.dense]
        return {"tables": [each.note for each in self.rows], "dense": dense}


class VectorExport:
    """The exports of one engine.

    Args:
        parts: The running parts of the engine.

    Raises:
        UsageError: if ``export`` is configured, and the name of a table cannot be that of a file.
    """

    def __init__(self, parts: EngineParts) -> None:
        if parts.config.export is not None:
            for name, _, _ in parts.tables.each():
                check_table_name(name)
        self._parts = parts
        self._last: _Exported | None = None

    def forget(self) -> None:
        """Begin with full vectors again, because the steps that follow may not continue those that were exported."""
        self._last = None
        self._parts.tables.gone.drop()

    def write(self, folder: Path) -> bool:
        """Export the vectors and the dense part of this step. Implements ``Engine.export``.

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
        kept = parts.folders.exchange("keys of rows that went", json.dumps(parts.tables.gone.are_kept))
        if not all(map(json.loads, kept)):
            last = None  # a rank has dropped keys that an increment would have to name
        self._last = None  # an export that fails is followed by full vectors
        each_here = [each for each in parts.tables.each() if parts.tables.is_here(each[1])]
        since = {name: collection.steps for name, collection, _ in each_here}
        with parts.tables.deferred_faults():
            rows = self._rows(last)
        parts.tables.raise_faults()
        about = {
            "click_model": described(parts.model),
            "target": getattr(parts.config.model, "target", None),
            "step": step,
        }
        coordinator = parts.folders.coordinator(f"export of step {step}")
        with closing(CheckpointState(parts, changes=False)) as opened, coordinator.at_work():
            try:
                dense = [item._replace(name=plain_name(item.name)) for item in model_items(parts, opened)]
                now = _together(coordinator, folder, _ExportHere(rows, dense, about), step, last)
            finally:
                coordinator.end()
        parts.tables.gone.begin()
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
    here: _ExportHere,
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

    def write_part() -> dict[str, Any]:
        if not is_alone:
            _write_part(place / _part_name(coordinator.rank), here)
        return here.notes

    notes = [json.loads(text) for text in coordinator.gather("rows", write_part)]
    run = token if last is None else last.step.run
    now = ExportedStep(run=run, step=step)

    def commit() -> None:
        if leads:
            _commit(_PartFiles(place, notes, here, is_alone), folder, now, last)
            if not is_alone:
                shutil.rmtree(place)

    coordinator.gather("commit", commit)
    return now


def _commit(read: "_PartFiles", folder: Path, now: ExportedStep, last: _Exported | None) -> None:
    """Write, on rank 0, what readers open, and remove the increments that no new reader can apply."""
    dense = read.dense()
    if last is None:
        stored = [read.stored(name) for name in read.names]
        write_vectors(folder, stored, now.step, dense=dense, run=now.run)
        _remove_others(folder / INCREMENTS, now.run)
        rows = f"full vectors, {counted(sum(table.rows for table in stored), 'row')}"
    else:
        target = folder / INCREMENTS / now.run / increment_name(last.step.step, now.step)
        tables = [read.changed(name) for name in read.names]
        write_increment(target, tables, last.step, now, dense=dense)
        changed, gone = sum(table.changed for table in tables), sum(len(table.gone) for table in tables)
        rows = f"an increment, {counted(changed, 'row')} that came or changed and {gone} that went"
    size = bytes_text(dense.nbytes)
    _log.info("exported step %d to %s: %s; %s of the dense part", now.step, folder, rows, size)


def _part_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _write_part(file: Path, here: _ExportHere) -> None:
    """Write the rows of this rank, and its pieces of the dense part, into a file of its own."""
    tensors = {
        f"{label}/{each.name}": tensor
        for each in here.rows
        for label, tensor in (("keys", each.keys), ("vectors", each.vectors), ("gone", each.gone))
    }
    dense = [item for item in here.dense if item.pieces]
    tensors |= {
        f"ranges/{item.name}": torch.tensor([(piece.start, piece.stop) for piece in item.pieces])
        for item in dense
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    shapes |= {
        f"dense/{item.name}": (sum(piece.stop - piece.start for piece in item.pieces),) for item in dense
    }
    dtypes |= {f"dense/{item.name}": item.dtype for item in dense}
    with SafetensorsWriter(file, shapes, dtypes) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        for item in dense:
            place = 0
            for piece in item.pieces:
                for _, values in _elements(piece):
                    writer.write_part(f"dense/{item.name}", place, values)
                    place += values.numel()


def _elements(piece: FlatSlice) -> Iterator[tuple[int, Tensor]]:
    """Yield (first element, elements) of a piece, at most ``_ELEMENTS`` at a time."""
    for start in range(0, piece.stop - piece.start, _ELEMENTS):
        yield piece.start + start, piece.tensor[start : start + _ELEMENTS].cpu()


def _remove_others(folder: Path, run: str) -> None:
    """Remove the increments of other runs, which no new reader can apply."""
    for each in folder.iterdir() if folder.is_dir() else ():
        if each.name != run and each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)


class _PartFiles:
    """The parts of an export that all ranks wrote, read by rank 0.

    Args:
        place: Folder of the part files.
        notes: Notes of each rank's part.
        here: The part of rank 0 itself.
        is_alone: True if there is one rank, which then writes no part file.
    """

    def __init__(
        self, place: Path, notes: Sequence[dict[str, Any]], here: _ExportHere, is_alone: bool
    ) -> None:
        self._place, self._own, self._about = place, here if is_alone else None, here.about
        self._ranks = len(notes)
        self._dense = {
            name: (tuple(shape), DTYPES[code]) for of_rank in notes for name, shape, code in of_rank["dense"]
        }
        self._notes: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        for rank, of_rank in enumerate(notes):
            for note in of_rank["tables"]:
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

    def dense(self) -> DenseToWrite:
        """Return the dense part of the model."""
        shapes = {name: shape for name, (shape, _) in self._dense.items()}
        dtypes = {name: dtype for name, (_, dtype) in self._dense.items()}
        return DenseToWrite(shapes, dtypes, self._about, self._read_dense)

    def _read_dense(self) -> Iterator[tuple[str, int, Tensor]]:
        if self._own is not None:
            for item in self._own.dense:
                for piece in item.pieces:
                    yield from ((item.name, start, values) for start, values in _elements(piece))
            return
        for rank in range(self._ranks):
            stored = read_header(self._place / _part_name(rank))
            for name in self._dense:
                if f"dense/{name}" not in stored:
                    continue
                ranges, flat = stored[f"ranges/{name}"], stored[f"dense/{name}"]
                values, place = flat.read(0, flat.elements), 0
                for start, stop in ranges.read(0, ranges.elements).view(-1, 2).tolist():
                    yield name, start, values[place : place + stop - start]
                    place += stop - start

    def _sum(self, name: str, what: str) -> int:
        return sum(int(note[what]) for _, note in self._notes[name])

    def _read(self, name: str) -> Iterator[tuple[int, Tensor, Tensor]]:
        for rank, note in self._notes[name]:
            if note["rows"]:
                yield note["first"], self._tensor(rank, "keys", name), self._tensor(rank, "vectors", name)

    def _tensor(self, rank: int, label: str, name: str) -> Tensor:
        if self._own is not None:
            part = next(each for each in self._own.rows if each.name == name)
            return {"keys": part.keys, "vectors": part.vectors, "gone": part.gone}[label]
        stored = read_header(self._place / _part_name(rank))[f"{label}/{name}"]
        return stored.read(0, stored.elements).view(stored.shape)
