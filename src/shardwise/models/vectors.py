"""Embedding tables for serving: (key, vector) pairs in plain files, and a reader that needs no engine.

    tables.json            {"format": 1, "step": 500, "tables": {"tables.user": {"file", "rows", "width", "dynamic"}}}
    tables.user.step_500.safetensors    "keys" int64 [M], "vectors" [M, D]; rows in any order

    vectors = Vectors("exported")
    vectors.lookup("tables.user", torch.tensor([7, 12]))           # [2, D]
    model.tables.load_rows("user", vectors.rows("tables.user"))    # back into a table, to train on

The files are memory-mapped: a lookup reads only the pages of its rows, and many processes share one copy in memory.

A folder may be written again while it is being read: new files get new names, one rename switches ``tables.json``
from the old files to the new ones, and then the old files are removed. A reader maps all files when it opens the
folder, so it reads the vectors of a single step, also after the folder has changed. Only one process may write at a
time.

    increments/RUN/step_00000500_to_00000540/   written by a running job: the rows that came, changed and went

``apply`` brings a reader to the step of an increment (increments.py), and ``refresh`` applies all that were written
since. Both put a new state together beside the one that is read, and switch to it by replacing one reference: a lookup
reads one step, and all lookups on the result of ``at_this_step`` read the same one.

Cost: the first lookup in a table sorts its keys by their hashes, 17.5 M bytes beside the map; later ones are one loop
      over the keys of all tables that are asked (mapped_tables.py). Rows that increments changed are held in memory
      until full vectors are written again.
Shapes: M rows of a table, D width, n keys.
"""

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from shardwise.base.errors import CheckpointError, DamagedError, DataError, UsageError
from shardwise.base.policy import nearest
from shardwise.base.regular_files import read_small_file, write_small_file
from shardwise.base.strict_json import JSON_BYTES, Count, StrictModel, read_object, validated
from shardwise.formats.safetensors import SafetensorsWriter, StoredTensor, read_header
from shardwise.kernels.tables.mapped_rows import TableKeys
from shardwise.models.dense_part import (
    DenseEntry,
    DensePart,
    DenseToWrite,
    dense_file_stem,
    read_dense,
    write_dense,
)
from shardwise.models.increments import (
    ExportedStep,
    RowChanges,
    check_follows,
    increment_name,
    no_changes,
    read_increment,
)
from shardwise.models.mapped_tables import MappedTable, TableReader
from shardwise.models.vector_codes import FORMS, coded
from shardwise.parallel.embedding.rows.keyed_rows import KeyedRows

_INDEX = "tables.json"
INCREMENTS = "increments"
"""The folder of the increments inside a folder of vectors that a running job exports."""
_FORMAT = 1
_EARLIER = "removed"
"""The key of an index for files that were removed with it, or were to be removed when the export was killed."""
_CARRIERS = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.int16,
    torch.int8: np.int8,
    torch.int64: np.int64,
}


class StoredTable(NamedTuple):
    """A table to be written, with a function that yields its rows."""

    name: str
    rows: int
    width: int
    is_dynamic: bool
    parts: Callable[[], Iterator[tuple[int, Tensor, Tensor]]]
    """A function that yields consecutive runs of rows until all rows are covered: (first row, keys [n], vectors [n,
    D])."""


def check_table_name(name: str) -> None:
    """Raise UsageError if the name of a table cannot be that of the file of its vectors."""
    if Path(name).name != name or name.startswith("."):
        raise UsageError(f"table {name!r}: its name cannot be a file's; rename the table")


def write_vectors(
    folder: str | Path,
    tables: Iterable[StoredTable],
    step: int,
    dtype: torch.dtype = torch.float32,
    dense: DenseToWrite | None = None,
    run: str = "",
) -> Path:
    """Write tables into a folder, with one run of rows in memory at a time, and remove the files of an earlier export.

    Args:
        folder: The folder; created if it does not exist.
        tables: The tables.
        step: The number of optimizer steps done.
        dtype: The dtype of the vectors: fp64, fp32, fp16, bf16 or int8 (vector_codes.py).
        dense: The dense part of the model, which :class:`shardwise.Scorer` reads; None: only tables are written.
        run: Name of the run, by which a reader knows the increments that continue from these vectors.

    Returns:
        The folder.

    Raises:
        UsageError: before anything is written, if the dtype is another, or a table's name cannot be a file name.
    """
    if dtype not in FORMS.values():
        raise UsageError(f"vectors are written as {', '.join(FORMS)}; given {dtype}")
    folder, tables = Path(folder), list(tables)
    for table in tables:
        check_table_name(table.name)
    folder.mkdir(parents=True, exist_ok=True)
    index, coming = folder / _INDEX, folder / f"{_INDEX}.part"
    earlier = {
        file
        for file in _files_of(index) | _files_of(coming)
        if (folder / file).exists() or (folder / f"{file}.part").exists()
    }
    names = [table.name for table in tables]
    files = _new_files(folder, names if dense is None else [*names, dense_file_stem(names)], step)
    entries = {
        table.name: {"file": file, "rows": table.rows, "width": table.width, "dynamic": table.is_dynamic}
        for table, file in zip(tables, files, strict=False)
    }
    content: dict[str, Any] = {"format": _FORMAT, "run": run, "step": step, "tables": entries}
    content[_EARLIER] = sorted(earlier)
    # Write the list before the files: if this export is killed, the next one reads here which files it may remove.
    if dense is not None:
        content["dense"] = {"file": files[-1], "sha256": "", "bytes": dense.nbytes, "about": dense.about}
    _write_json(coming, content)
    if dense is not None:
        content["dense"]["sha256"] = write_dense(folder / files[-1], dense)
        _write_json(coming, content)
    for table, file in zip(tables, files, strict=False):
        _write_table(folder / file, table, dtype)
    # The rename switches readers to the new files; removing the old files earlier would break the old index.
    os.replace(coming, index)
    for file in earlier:
        (folder / file).unlink(missing_ok=True)
        (folder / f"{file}.part").unlink(missing_ok=True)
    return folder


def _write_table(file: Path, table: StoredTable, dtype: torch.dtype) -> None:
    """Write the keys and vectors of a table, with one run of rows in memory at a time."""
    shapes: dict[str, tuple[int, ...]] = {"keys": (table.rows,), "vectors": (table.rows, table.width)}
    dtypes = {"keys": torch.int64, "vectors": dtype}
    if dtype == torch.int8:
        shapes["scales"], dtypes["scales"] = (table.rows,), torch.float32
    with SafetensorsWriter(file, shapes, dtypes) as writer:
        for first, keys, vectors in table.parts():
            writer.write_part("keys", first, keys)
            if dtype == torch.int8:
                vectors, scales = coded(vectors)
                writer.write_part("scales", first, scales)
            writer.write_part("vectors", first * table.width, vectors)


def _new_files(folder: Path, names: Sequence[str], step: int) -> list[str]:
    """Return file names that do not exist yet, even if the same step was exported before.

    A run that is repeated has other vectors at the same step, and a reader may have mapped the old files.
    """
    for number in itertools.count(1):
        again = f"-{number}" if number > 1 else ""
        files = [f"{name}.step_{step}{again}.safetensors" for name in names]
        if not any((folder / f"{file}{part}").exists() for file in files for part in ("", ".part")):
            break
    return files


def _files_of(index: Path) -> set[str]:
    """Return the files that were written with an index or removed with it; empty if the index cannot be read."""
    try:
        content = json.loads(read_small_file(index, JSON_BYTES))
        files = {*(str(entry["file"]) for entry in content["tables"].values()), *content.get(_EARLIER, [])}
        files |= {str(content["dense"]["file"])} if "dense" in content else set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()
    return {file for file in files if Path(file).name == file and file.endswith(".safetensors")}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    write_small_file(file, (json.dumps(content, indent=2) + "\n").encode())


@dataclass(frozen=True)
class _VectorState:
    """The vectors of one step: mapped files, and the changes since they were written. Never changed."""

    files: ExportedStep
    """The step of the mapped files."""
    now: ExportedStep
    """The step of the vectors."""
    entries: "dict[str, _TablesIndexEntry]"
    maps: dict[str, MappedTable]
    dense: DensePart | None
    """The dense part at the step of the vectors; None if the files, or the last increment, have none."""
    keys: dict[str, TableKeys]
    """The keys of the files, for tables that were looked up."""
    changes: dict[str, RowChanges] = field(default_factory=dict)
    """Changes by table; empty at the step of the files."""
    readers: dict[tuple[str, ...], TableReader] = field(default_factory=dict)
    """Readers of the tables that were looked up together, by their names."""


class Vectors:
    """The tables in a folder that :func:`write_vectors` wrote.

    A reader of a folder that a running job exports to (``export.every``) opens the newest step there. Lookups may run
    in several threads, beside ``apply`` and ``refresh`` in another.

    Raises:
        CheckpointError: if the folder has no readable index.
        DamagedError: if a file is missing or does not fit the index.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._lock = threading.Lock()
        self._state = self._opened()
        self.refresh()

    def _opened(self) -> _VectorState:
        """Map the files that the index names, and return the state at their step."""
        index = self._read_index()
        while True:
            try:
                maps = {name: self._map(name, entry) for name, entry in index.tables.items()}
                dense = None if index.dense is None else read_dense(self.folder, _INDEX, index.dense)
                break
            except FileNotFoundError as error:
                # An export that ended after the index was read has removed its files and written a new index.
                before, index = index, self._read_index()
                if index == before:
                    raise DamagedError(
                        f"{self.folder / _INDEX}: names {error.filename}, which is not there; export again"
                    ) from None
        if len({(each.codes.dtype, each.scales is None) for each in maps.values()}) > 1:
            raise DamagedError(
                f"{self.folder / _INDEX}: the files of its tables hold vectors of different dtypes; export again"
            )
        return _VectorState(index.exported, index.exported, index.tables, maps, dense, {})

    @property
    def step(self) -> int:
        """The number of optimizer steps done when the vectors were saved."""
        return self._state.now.step

    @property
    def run(self) -> str:
        """Name of the run that the vectors are from; empty in folders of versions that did not write the name."""
        return self._state.now.run

    @property
    def dense(self) -> DensePart | None:
        """The dense part of the model, of the step of the vectors; None if that step was written without one."""
        return self._state.dense

    @property
    def tables(self) -> dict[str, tuple[int, int]]:
        """The (rows, width) of each table, by name."""
        state = self._state
        return {
            name: (state.changes[name].total if state.changes else entry.rows, entry.width)
            for name, entry in state.entries.items()
        }

    def at_this_step(self) -> "Vectors":
        """Return a reader of the same vectors that stays at this step, for a request of several lookups."""
        reader = object.__new__(type(self))
        reader.folder, reader._lock, reader._state = self.folder, threading.Lock(), self._state
        return reader

    def continues(self, other: "Vectors") -> bool:
        """Return whether another reader reads the same files, so that ``write_changes`` leads here from its vectors.

        Args:
            other: A reader at an earlier step.
        """
        return self._state.maps is other._state.maps

    def write_changes(self, table: str, keys: np.ndarray, rows: np.ndarray) -> None:
        """Write the vectors that increments changed over vectors of an earlier step of the same files.

        Args:
            table: The name of a table.
            keys: int64 [n].
            rows: The vectors of these keys at the earlier step, [n, D], which are changed in place; a key that has no
                row any longer becomes zeros.
        """
        changes = self._state.changes.get(table)
        if changes is not None:
            changes.write_over(keys, rows, np.ones(keys.size, bool))

    def apply(self, increment: str | Path) -> None:
        """Go on to the step of an increment: the rows that came, changed and went since the step of this reader.

        Lookups that run meanwhile read the step before; later ones read the new step.

        Args:
            increment: A folder that ``shardwise convert --since`` or ``export.every`` wrote.

        Raises:
            MismatchError: if the increment is of another run, of tables of another width, of another dense part,
                applied already, or out of order; the reader stays as it is.
            DamagedError: if a file of the increment changed after it was written; the reader stays as it is.
            CheckpointError: if the folder is no increment.
        """
        with self._lock:
            self._state = self._after(self._state, Path(increment))

    def _after(self, state: _VectorState, path: Path) -> _VectorState:
        """Return the state after an increment."""
        increment = read_increment(path)
        kinds = {name: (entry.width, entry.dynamic) for name, entry in state.entries.items()}
        check_follows(increment, state.now, kinds, state.dense)
        changes = {}
        for name, rows in increment.tables.items():
            entry, held = state.entries[name], state.maps[name]
            before = state.changes.get(name) or no_changes(entry.width, held.dtype, entry.rows)
            changes[name] = before.joined(rows)
        return replace(state, now=increment.end, dense=increment.dense, changes=changes, readers={})

    def refresh(self) -> bool:
        """Apply the increments that were written into the folder since, or open full vectors that were written anew.

        A server calls this method between two requests, or once a second in a thread. Without news it reads one small
        file.

        Returns:
            True if the reader is at another step now.

        Raises:
            CheckpointError: if the folder cannot be read any longer; the reader stays at its step.
        """
        with self._lock:
            before = self._state
            while True:
                index = self._read_index()
                is_same = index.exported == self._state.files and index.tables == self._state.entries
                state = self._state if is_same else self._opened()
                try:
                    while (path := self._next_increment(state.now)) is not None:
                        state = self._after(state, path)
                    break
                except CheckpointError:
                    if self._read_index() == index:
                        raise
                    # The job has written full vectors and removed the increments before them: look again.
            self._state = state
            return state is not before

    def _next_increment(self, now: ExportedStep) -> Path | None:
        """Return the increment in the folder that continues from a step; None if there is none."""
        if not now.run.isalnum():
            return (
                None  # a run without a name exports no increments, and a path may not lead out of the folder
            )
        begin = increment_name(now.step, 0).removesuffix("00000000")
        try:
            names = sorted(
                each for each in os.listdir(self.folder / INCREMENTS / now.run) if each.startswith(begin)
            )
        except OSError:
            return None
        return self.folder / INCREMENTS / now.run / names[-1] if names else None

    def lookup(self, table: str, keys: Tensor) -> Tensor:
        """Look up the vectors of keys.

        Args:
            table: The name of a table.
            keys: int64 [n].

        Returns:
            Vectors [n, D]. A key that a dynamic table does not have reads zeros, as in training.

        Raises:
            UsageError: if there is no such table.
            DataError: if keys are no whole numbers, or if one is outside of a static table.
        """
        if keys.is_floating_point() or keys.is_complex():
            raise DataError(f"table {table!r}: keys are {keys.dtype}; expected whole numbers, as int64")
        asked = keys.detach().cpu().reshape(-1).numpy()
        rows = self.lookup_tables((table,), asked, np.zeros(asked.size, np.int64))
        return torch.from_numpy(rows).view(*keys.shape, rows.shape[1])

    def lookup_tables(self, names: tuple[str, ...], keys: np.ndarray, tables: np.ndarray) -> np.ndarray:
        """Look up the vectors of keys of several tables of one width.

        Args:
            names: The names of the tables.
            keys: int64 [n].
            tables: The place of each key's table in ``names``, int64 [n].

        Returns:
            Vectors [n, D]. A key that a dynamic table does not have reads zeros, as in training.

        Raises:
            UsageError: if there is no such table.
            DataError: if a key is outside of a static table.
        """
        state = self._state
        vectors, found = self._reader(names, state).read(keys, tables)
        if not found.all():
            is_static = np.array([not state.entries[name].dynamic for name in names])
            outside = np.flatnonzero(~found & is_static[tables])
            if outside.size:
                name, key = names[tables[outside[0]]], int(keys[outside[0]])
                total = state.changes[name].total if name in state.changes else state.entries[name].rows
                raise DataError(f"table {name!r}: key {key} of a table with keys 0 to {total - 1}")
        return vectors

    def _reader(self, names: tuple[str, ...], state: _VectorState) -> TableReader:
        """Return the reader of tables that are looked up together."""
        if names not in state.readers:
            for name in names:
                self._check_name(name, state)
            state.readers[names] = TableReader(
                [state.maps[name] for name in names],
                [self._keys_of(name, state) for name in names],
                [state.changes.get(name) for name in names],
            )
        return state.readers[names]

    def _keys_of(self, table: str, state: _VectorState) -> TableKeys:
        """Return the keys of a table's file."""
        if table not in state.keys:
            keys = TableKeys(state.maps[table].keys)
            if not (keys.are_distinct if state.entries[table].dynamic else keys.are_all):
                raise DamagedError(
                    f"{self.folder / state.entries[table].file}: the keys of table {table!r} are not one for each row"
                )
            state.keys[table] = keys
        return state.keys[table]

    def rows(self, table: str) -> KeyedRows:
        """Return all rows of a table, for ``EmbeddingCollection.load_rows``; their optimizer state starts anew.

        Raises:
            UsageError: if there is no such table.
            DamagedError: if increments that were applied do not fit the rows of the files.
        """
        state = self._state
        self._check_name(table, state)
        held, changes = state.maps[table], state.changes.get(table)
        keys, vectors = held.keys.copy(), np.array(held.vectors())
        if changes is not None:
            is_kept = ~np.isin(keys, changes.keys)
            keys = np.concatenate([keys[is_kept], changes.keys[changes.is_here]])
            vectors = np.concatenate([vectors[is_kept], changes.vectors[changes.is_here]])
            if len(keys) != changes.total:
                raise DamagedError(
                    f"{self.folder}: table {table!r} has {len(keys)} rows at step {state.now.step}; the increments "
                    f"name {changes.total}. Export full vectors anew"
                )
        return KeyedRows.of_weights(torch.from_numpy(keys), torch.from_numpy(vectors))

    def _check_name(self, table: str, state: _VectorState) -> None:
        if table not in state.entries:
            raise UsageError(f"{self.folder}: there is no table {table!r}{nearest(table, state.entries)}")

    def _read_index(self) -> "_TablesIndex":
        file = self.folder / _INDEX
        try:
            text = read_small_file(file, JSON_BYTES)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: no {_INDEX} ({error.strerror}); expected a folder that shardwise convert made of a run"
            ) from None
        content = read_object(text, str(file))
        if content.get("format") != _FORMAT:
            raise CheckpointError(f"{file}: another format; this version reads format {_FORMAT}")
        return validated(_TablesIndex, content, str(file))

    def _map(self, table: str, entry: "_TablesIndexEntry") -> MappedTable:
        file = self.folder / entry.file
        if Path(entry.file).name != entry.file:
            raise DamagedError(f"{self.folder / _INDEX}: table {table!r} names a file outside the folder")
        header = read_header(file)
        keys, vectors, scales = header.get("keys"), header.get("vectors"), header.get("scales")
        if (
            keys is None
            or vectors is None
            or tuple(keys.shape) != (entry.rows,)
            or tuple(vectors.shape) != (entry.rows, entry.width)
            or keys.dtype != torch.int64
            or vectors.dtype not in FORMS.values()
            or (vectors.dtype == torch.int8) != (scales is not None)
            or (scales is not None and (scales.shape, scales.dtype) != ((entry.rows,), torch.float32))
        ):
            raise DamagedError(
                f"{file}: expected int64 keys [{entry.rows}] and floating vectors [{entry.rows}, {entry.width}], as "
                f"{_INDEX} says"
            )

        def mapped(stored: StoredTensor) -> np.ndarray:
            if stored.elements == 0:
                return np.zeros(stored.shape, _CARRIERS[stored.dtype])
            held = np.memmap(file, _CARRIERS[stored.dtype], "r", stored.offset, stored.shape)
            return np.asarray(held)  # indexing an np.memmap takes several times as long

        return MappedTable(mapped(keys), mapped(vectors), None if scales is None else mapped(scales))


class _TablesIndexEntry(StrictModel):
    file: str
    rows: Count
    width: Count
    dynamic: bool


class _TablesIndex(StrictModel):
    """The content of ``tables.json``."""

    format: int
    run: Annotated[str, Field(max_length=200)] = ""
    step: Count
    tables: dict[str, _TablesIndexEntry]
    dense: DenseEntry | None = None

    @property
    def exported(self) -> ExportedStep:
        """The step of the vectors."""
        return ExportedStep(run=self.run, step=self.step)
