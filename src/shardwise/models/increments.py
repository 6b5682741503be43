"""Increments of exported vectors: the rows that came, changed and went between two steps of one run.

    step_00000040_to_00000080/
      increment.json            {"format", "from": {"run", "step"}, "to": {"run", "step"}, "tables", "dense", "sha256"}
      tables.user.safetensors   "keys" int64 [C], "vectors" [C, D], "gone" int64 [G]
      dense.safetensors         the whole dense part of the model at step 80 (dense_part.py)

    vectors of step 40  +  increment from 40 to 80  =  vectors and dense part of step 80, to the byte

An increment is written into a hidden folder beside its place and gets its name in one rename, so that a reader sees a
whole increment or none. ``increment.json`` has the SHA-256 of each file and of itself.

``RowChanges`` holds the rows of one table in which a reader differs from the files that it has mapped.

Cost:   an increment has 8 + D x 4 bytes for each changed row and 8 bytes for each row that went, and the bytes of the
        dense part, however few rows changed; joining it to the changes before sorts both.
Shapes: C rows that came or changed, G rows that went, D width, k keys in which a reader differs from its files.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from shardwise.base.errors import CheckpointError, DamagedError, MismatchError, UsageError
from shardwise.base.policy import nearest
from shardwise.base.regular_files import read_small_file, write_small_file
from shardwise.base.strict_json import JSON_BYTES, Count, StrictModel, read_object, validated
from shardwise.formats.safetensors import SafetensorsWriter, read_header
from shardwise.models.dense_part import (
    DenseEntry,
    DensePart,
    DenseToWrite,
    check_same_model,
    dense_file_stem,
    read_dense,
    sum_of,
    write_dense,
)

INDEX = "increment.json"
_FORMAT = 1
_TEMPORARY = ".increment-"
"""Begin of the name of a folder in which an increment is being written, or that a killed writer left."""


class ExportedStep(StrictModel):
    """The step of a run whose vectors were exported."""

    run: str = Field(max_length=200)
    """Name of the run that made the step, or of the process that exported from a running job."""
    step: Count

    def __str__(self) -> str:
        return f"step {self.step} of run {self.run or 'without a name'}"


class ChangedTable(NamedTuple):
    """The changes of one table, to be written: sizes, and a function that yields the rows."""

    name: str
    changed: int
    """Number of rows that came or changed."""
    gone: Tensor
    """Keys of the rows that went: int64 [G]."""
    total: int
    """Number of rows of the table after the increment."""
    width: int
    is_dynamic: bool
    parts: Callable[[], Iterator[tuple[int, Tensor, Tensor]]]
    """A function that yields consecutive runs of the rows that came or changed: (first row, keys [n], vectors [n, D]).
    """


class _IncrementTable(StrictModel):
    """The entry of one table in ``increment.json``."""

    file: str
    changed: Count
    gone: Count
    total: Count
    width: Count
    dynamic: bool
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class _IncrementIndex(StrictModel):
    """The content of ``increment.json``."""

    format: int
    start: ExportedStep = Field(alias="from")
    end: ExportedStep = Field(alias="to")
    tables: dict[str, _IncrementTable]
    dense: DenseEntry | None = None
    """The dense part; None in increments of versions that did not write it."""


class IncrementRows(NamedTuple):
    """The rows of one table in an increment."""

    keys: np.ndarray
    vectors: np.ndarray
    gone: np.ndarray
    total: int
    """Number of rows of the table after the increment."""
    is_dynamic: bool


class Increment(NamedTuple):
    """An increment that was read and whose checksums are right."""

    path: Path
    start: ExportedStep
    """The step to which the increment is applied."""
    end: ExportedStep
    """The step that results."""
    tables: dict[str, IncrementRows]
    dense: DensePart | None
    """The dense part of the model at the step that results; None in an increment without one."""


def increment_name(start: int, end: int) -> str:
    """Return the folder name of an increment in an export that goes on."""
    return f"step_{start:08d}_to_{end:08d}"


def write_increment(
    place: str | Path,
    tables: Iterable[ChangedTable],
    start: ExportedStep,
    end: ExportedStep,
    dtype: torch.dtype = torch.float32,
    dense: DenseToWrite | None = None,
) -> Path:
    """Write an increment, which appears at its place in one rename. Only one process may write beside a place.

    Args:
        place: The folder that the increment becomes.
        tables: The changes of every table.
        start: The step from which the changes count.
        end: The step after the changes.
        dtype: The dtype of the vectors.
        dense: The dense part of the model after the changes, without which a :class:`shardwise.Scorer` cannot go on;
            None: only rows are written.

    Returns:
        The folder.

    Raises:
        UsageError: before anything is written, if the folder exists, the steps do not rise, or a table's name cannot be
            a file name.
    """
    place, tables = Path(place), list(tables)
    if os.path.lexists(place):
        raise UsageError(f"{place}: exists already; an increment is written into a new folder")
    if end.step <= start.step:
        raise UsageError(
            f"an increment from step {start.step} to step {end.step}: the first must be the older one"
        )
    for table in tables:
        if Path(table.name).name != table.name or table.name.startswith("."):
            raise UsageError(f"table {table.name!r}: its name cannot be a file's; rename the table")
    place.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(place.parent)
    temporary = place.parent / f"{_TEMPORARY}{secrets.token_hex(6)}"
    temporary.mkdir()
    entries = {table.name: _write_table(temporary, table, dtype) for table in tables}
    content: dict[str, Any] = {"format": _FORMAT, "from": start.model_dump(), "to": end.model_dump()}
    content["tables"] = entries
    if dense is not None:
        file = f"{dense_file_stem([table.name for table in tables])}.safetensors"
        digest = write_dense(temporary / file, dense)
        content["dense"] = {"file": file, "sha256": digest, "bytes": dense.nbytes, "about": dense.about}
    write_small_file(temporary / INDEX, _sealed(content))
    sync_folder(temporary)
    temporary.rename(place)
    sync_folder(place.parent)
    return place


def _write_table(folder: Path, table: ChangedTable, dtype: torch.dtype) -> dict[str, Any]:
    """Write the changes of one table, and return its entry of the index."""
    file = f"{table.name}.safetensors"
    shapes = {
        "keys": (table.changed,),
        "vectors": (table.changed, table.width),
        "gone": (len(table.gone),),
    }
    dtypes = {"keys": torch.int64, "vectors": dtype, "gone": torch.int64}
    with SafetensorsWriter(folder / file, shapes, dtypes) as writer:
        writer.write("gone", table.gone)
        for first, keys, vectors in table.parts():
            writer.write_part("keys", first, keys)
            writer.write_part("vectors", first * table.width, vectors)
    return {
        "file": file,
        "changed": table.changed,
        "gone": len(table.gone),
        "total": table.total,
        "width": table.width,
        "dynamic": table.is_dynamic,
        "sha256": sum_of(folder / file),
    }


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished increments that killed writers left in a folder."""
    for path in folder.iterdir():
        if path.name.startswith(_TEMPORARY) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_increment(place: str | Path) -> Increment:
    """Read an increment into memory and check its checksums.

    Raises:
        CheckpointError: if the folder is no increment, or has another format.
        DamagedError: if a file is missing, or its bytes changed after it was written.
    """
    place = Path(place)
    file = place / INDEX
    try:
        text = read_small_file(file, JSON_BYTES)
    except OSError as error:
        raise CheckpointError(
            f"{place}: no {INDEX} ({error.strerror}); expected an increment that shardwise convert --since or "
            "export.every wrote"
        ) from None
    content = read_object(text, str(file))
    if content.get("format") != _FORMAT:
        raise CheckpointError(f"{file}: another format; this version reads format {_FORMAT}")
    said = content.pop("sha256", None)
    if said != _seal_of(content):
        raise DamagedError(f"{file}: its content does not match its SHA-256; it changed after it was written")
    index = validated(_IncrementIndex, content, str(file))
    try:
        rows = {name: _rows_of(place, name, each) for name, each in index.tables.items()}
        dense = None if index.dense is None else read_dense(place, INDEX, index.dense)
    except OSError as error:
        raise DamagedError(
            f"{error.filename or place}: cannot be read ({error.strerror}); the increment is not whole"
        ) from None
    return Increment(place, index.start, index.end, rows, dense)


def _rows_of(place: Path, table: str, entry: _IncrementTable) -> IncrementRows:
    """Return the rows of one table of an increment, after checking the bytes of its file."""
    if Path(entry.file).name != entry.file:
        raise DamagedError(f"{place / INDEX}: table {table!r} names a file outside the folder")
    file = place / entry.file
    if sum_of(file) != entry.sha256:
        raise DamagedError(f"{file} (table {table!r}): its bytes do not match their SHA-256; they changed")
    stored = read_header(file)
    wanted = {"keys": (entry.changed,), "vectors": (entry.changed, entry.width), "gone": (entry.gone,)}
    if any(name not in stored or stored[name].shape != shape for name, shape in wanted.items()):
        raise DamagedError(f"{file} (table {table!r}): its tensors are not those that {INDEX} names")
    keys, vectors, gone = (stored[name].read(0, stored[name].elements) for name in wanted)
    if keys.dtype != torch.int64 or gone.dtype != torch.int64 or not vectors.dtype.is_floating_point:
        raise DamagedError(f"{file} (table {table!r}): expected int64 keys and floating vectors")
    named = torch.cat([keys, gone]).sort().values
    if bool((named[1:] == named[:-1]).any()):
        raise DamagedError(f"{file} (table {table!r}): a key stands twice")
    is_outside = keys.numel() and not 0 <= int(keys.min()) <= int(keys.max()) < entry.total
    if not entry.dynamic and (is_outside or gone.numel()):
        raise DamagedError(
            f"{file} (table {table!r}): keys of a table with keys 0 to {entry.total - 1} are others"
        )
    return IncrementRows(
        keys.numpy(),
        vectors.view(entry.changed, entry.width).numpy(),
        gone.numpy(),
        entry.total,
        entry.dynamic,
    )


def _seal_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _sealed(content: dict[str, Any]) -> bytes:
    """Return the bytes of ``increment.json``, with the SHA-256 of the rest of its content."""
    return (json.dumps({**content, "sha256": _seal_of(content)}, indent=2) + "\n").encode()


# Applying ----------------------------------------------------------------------------------------------------------


class RowChanges(NamedTuple):
    """The rows of one table in which a reader differs from the files that it has mapped."""

    keys: np.ndarray
    """int64 [k], rising."""
    vectors: np.ndarray
    """[k, D]; zeros for rows that went."""
    is_here: np.ndarray
    """bool [k]; False for rows that went."""
    total: int
    """Number of rows of the table."""

    def joined(self, later: IncrementRows) -> "RowChanges":
        """Return these changes and later ones together; the later ones win."""
        width = self.vectors.shape[1]
        keys = np.concatenate([self.keys, later.keys, later.gone])
        gone = np.zeros((later.gone.size, width), self.vectors.dtype)
        vectors = np.concatenate([self.vectors, later.vectors.astype(self.vectors.dtype, copy=False), gone])
        here = np.concatenate([self.is_here, np.ones(later.keys.size, bool), np.zeros(later.gone.size, bool)])
        order = np.argsort(keys, kind="stable")  # of equal keys the later one is last
        keys = keys[order]
        is_last = np.ones(keys.size, bool)
        is_last[:-1] = keys[1:] != keys[:-1]
        order = order[is_last]
        return RowChanges(keys[is_last], vectors[order], here[order], later.total)

    def write_over(self, keys: np.ndarray, rows: np.ndarray, found: np.ndarray) -> None:
        """Write the changed vectors over those read from files.

        Args:
            keys: Keys that were looked up, [n].
            rows: Their vectors, [n, D], which are changed in place.
            found: Which of the keys have a row, bool [n]; changed in place.
        """
        if not self.keys.size:
            return
        places = np.minimum(np.searchsorted(self.keys, keys), self.keys.size - 1)
        hit = self.keys[places] == keys
        rows[hit] = self.vectors[places[hit]]
        found[hit] = self.is_here[places[hit]]


def no_changes(width: int, dtype: np.dtype, total: int) -> RowChanges:
    """Return the changes of a reader that is at the step of its files."""
    return RowChanges(np.empty(0, np.int64), np.empty((0, width), dtype), np.empty(0, bool), total)


def check_follows(
    increment: Increment,
    here: ExportedStep,
    tables: Mapping[str, tuple[int, bool]],
    dense: DensePart | None = None,
) -> None:
    """Check that an increment continues from the step at which a reader stands.

    Args:
        increment: The increment.
        here: The step of the reader.
        tables: (width, whether it is dynamic) of the reader's tables, by name.
        dense: The dense part of the reader; None if it has none.

    Raises:
        MismatchError: if the increment is of another run, of other tables, of another dense part, applied already, or
            out of order.
    """
    start, end = increment.start, increment.end
    what = f"{increment.path}: an increment from {start} to {end}"
    if here.run == end.run and end.step <= here.step:
        raise MismatchError(
            f"{what}, and the reader is at step {here.step}", "It is applied already; apply each once"
        )
    if not start.run or start.run != here.run:
        raise MismatchError(
            f"{what}, for a reader at {here}",
            "Apply increments to vectors of the run that they were made from",
        )
    if start.step != here.step:
        first = (
            "an increment between them is missing"
            if start.step > here.step
            else "the reader has passed its begin"
        )
        raise MismatchError(
            f"{what}, for a reader at step {here.step}: {first}",
            "Apply increments in their order, or open full vectors",
        )
    for name in sorted(increment.tables.keys() ^ tables.keys()):
        raise MismatchError(
            f"{what}: table {name!r} is in one of the increment and the reader{nearest(name, tables)}",
            "Export full vectors anew",
        )
    for name, (width, is_dynamic) in tables.items():
        rows = increment.tables[name]
        if rows.vectors.shape[1] != width or rows.is_dynamic != is_dynamic:
            raise MismatchError(
                f"{what}: table {name!r} has width {rows.vectors.shape[1]}{' and is dynamic' * rows.is_dynamic}; the "
                f"reader's has width {width}{' and is dynamic' * is_dynamic}",
                "Export full vectors anew",
            )
    if dense is not None and increment.dense is not None:
        check_same_model(what, increment.dense, dense)
