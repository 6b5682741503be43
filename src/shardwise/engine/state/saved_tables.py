"""Embedding tables in checkpoints, beside the dense state and with the same pieces, checksums and commit.

    table           weights, [M, width]                     every table; rows ordered by (bucket, key)
    table_<state>   optimizer state, [M, width] or [M, 1]   as the row optimizer keeps it
    table_key       int64 [M]                               dynamic tables
    table_score     int64 [M]                               dynamic tables: the numbers by which eviction chooses
    table_waiting   int64 [m, 2]                            keys that wait for admission, and their counts

``trainer.json`` has for each dynamic table the number of rows of each bucket, from which a rank computes what to read,
and the table's type of eviction; for each collection it has the number of steps.

A checksum does not prove that a file was written correctly. So before any row is touched the notes are checked against
a schema and against the tensors, and every key against its bucket, each key by one of the ranks. If a rank refuses a
step, all ranks turn to the next older step.

Loading goes table by table in chunks, so that beside the tables themselves no more than one chunk is held.
"""

import logging
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import torch
from pydantic import Field
from torch import Tensor

from shardwise.base.errors import DamagedError
from shardwise.base.strict_json import Count, StrictModel, read_object, validated
from shardwise.checkpoint import Checkpoints, FlatSlice, Manifest, TensorPieces
from shardwise.checkpoint.files import FileSystem
from shardwise.checkpoint.load import StepReader
from shardwise.checkpoint.manifest import TRAINER
from shardwise.checkpoint.steps import open_step
from shardwise.engine.parts.tables import ModelTables
from shardwise.engine.state.differences import StepDifferences
from shardwise.models.vectors import StoredTable
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.dynamic import count_of, step_of
from shardwise.parallel.embedding.layout import BUCKETS, dynamic_bucket
from shardwise.parallel.embedding.policy import TablePolicy
from shardwise.parallel.embedding.registered import state_names
from shardwise.parallel.embedding.rows import KeyedRows
from shardwise.parallel.embedding.rules import dtypes_of
from shardwise.parallel.embedding.saved import (
    Range,
    SavedRowRange,
    chunks,
    ranges_to_read,
    static_counts,
    static_keys_at,
)

_log = logging.getLogger(__name__)

KIND = "table"
_KEY, _SCORE, _WAITING = f"{KIND}_key", f"{KIND}_score", f"{KIND}_waiting"
_CHUNK_BYTES = 256 * 2**20
"""Bytes of rows that are read at once."""


_Buckets = Annotated[list[Count], Field(min_length=BUCKETS, max_length=BUCKETS)]


class CollectionNote(StrictModel):
    """The state of one collection that is not in its rows."""

    steps: Count
    lr_factors: list[Annotated[float, Field(ge=0)]]


class TableNote(StrictModel):
    """The entry of one table in ``trainer.json``."""

    rows: Count
    buckets: _Buckets | None = None
    """Rows of each bucket, for dynamic tables."""
    waiting: _Buckets | None = None
    """Keys of each bucket that wait for admission."""
    eviction: Literal["none", "lru", "lfu", "age"] | None = None
    """Type of eviction, which gives the scores their meaning; None in steps of versions that did not write the type."""


class TableNotes(StrictModel):
    """The entries of all tables in ``trainer.json``."""

    collections: dict[str, CollectionNote]
    tables: dict[str, TableNote]


def is_of_tables(kind: str) -> bool:
    """Return True for the kinds of tensors that this module saves."""
    return kind == KIND or kind.startswith(f"{KIND}_")


# Saving ------------------------------------------------------------------------------------------------------------


class TablesToSave(NamedTuple):
    """Rows of the tables on this rank for a checkpoint."""

    items: list[TensorPieces]
    notes: dict[str, Any]
    """Entries for ``trainer.json``."""
    fault: str
    """The reason why no load would accept the rows; empty if a load would."""


def items_to_save(tables: ModelTables) -> TablesToSave:
    """Return the rows that this rank writes, as the last step left them. Collective.

    Of ranks along "tp" that hold the same rows only the first writes them.
    """
    items: list[TensorPieces] = []
    notes: dict[str, Any] = {"collections": {}, "tables": {}}
    fault = ""
    if not tables.is_first_copy:
        return TablesToSave(items, notes, fault)
    notes["collections"] = {name: each.saved.progress() for name, each in tables.collections.items()}
    steps = max((each["steps"] for each in notes["collections"].values()), default=0)
    for name, collection, table in tables.each():
        if not tables.is_here(collection):
            continue
        stretch, waiting = collection.saved.rows_to_write(table.name)
        items += _items_of(name, table, stretch)
        note: dict[str, Any] = {"rows": stretch.total}
        if table.dynamic is not None:
            note["buckets"] = stretch.counts.tolist()
            note["eviction"] = table.dynamic.eviction.type
            assert stretch.rows.scores is not None, "rows of a dynamic table have scores"
            wrong = _fault_of_rows(
                stretch.rows.keys, stretch.rows.scores, stretch.counts, stretch.first, steps, note["eviction"]
            )
            fault = fault or (wrong and f"table {name!r}: {wrong}")
        if waiting is not None:
            assert waiting.rows.scores is not None, "those who wait have a count"
            pairs = torch.stack([waiting.rows.keys, waiting.rows.scores], 1)
            items.append(_item(_WAITING, name, (waiting.total, 2), waiting.first, pairs))
            note["waiting"] = waiting.counts.tolist()
            wrong = _fault_of_waiting(pairs, waiting.counts, waiting.first, steps)
            fault = fault or (wrong and f"table {name!r}: {wrong}")
        notes["tables"][name] = note
    return TablesToSave(items, notes, fault)


def _items_of(name: str, table: TablePolicy, stretch: SavedRowRange) -> list[TensorPieces]:
    rows, total, first = stretch.rows, stretch.total, stretch.first
    found = [_item(KIND, name, (total, table.width), first, rows.weights)]
    for label, state in rows.state.items():
        found.append(_item(f"{KIND}_{label}", name, (total, state.shape[1]), first, state))
    if table.dynamic is not None:
        assert rows.scores is not None, "rows of a dynamic table have scores"
        found.append(_item(_KEY, name, (total,), first, rows.keys))
        found.append(_item(_SCORE, name, (total,), first, rows.scores))
    return found


def _item(kind: str, name: str, shape: tuple[int, ...], first: int, rows: Tensor) -> TensorPieces:
    """Return one tensor, of which this rank has ``rows`` from row ``first`` on."""
    flat = rows.cpu().contiguous().view(-1)
    start = first * prod(shape[1:])
    pieces = [FlatSlice(start, start + flat.numel(), flat)] if flat.numel() else []
    return TensorPieces(kind, name, shape, rows.dtype, pieces)


# Loading -----------------------------------------------------------------------------------------------------------


def compare(tables: ModelTables, manifest: Manifest, weights_only: bool, found: StepDifferences) -> None:
    """Report the differences between the tables of a step and of the model to ``found``, before any row is touched.

    If a table may be missing and the step has fewer rows, the first rows are loaded and the last rows start fresh. With
    any other difference the whole table starts fresh.
    """
    _check_tensors(manifest)
    stored = {tensor.name: tensor.shape for tensor in manifest.tensors if tensor.kind == KIND}
    here = {name for name, _, _ in tables.each()}
    for name, shape in stored.items():
        if name not in here:
            found.holds(KIND, name, shape)
    for name, collection, table in tables.each():
        if name not in stored:
            found.lacks(KIND, name, "is not in the checkpoint")
            continue
        keys = manifest.find(_KEY, name) is not None
        rows, width = stored[name]
        if keys != (table.dynamic is not None):
            kinds = ("static", "dynamic")
            found.lacks(KIND, name, f"is {kinds[keys]} in the checkpoint and {kinds[not keys]} in this model")
            continue
        grows = width == table.width and table.rows is not None and rows < table.rows
        if grows and found.may_lack(name):
            found.grown.append(f"{name} rows {rows} to {(table.rows or 0) - 1}")
        elif width != table.width or table.rows not in (None, rows):
            hint = " (its first rows would load)" if grows else ""
            how = f"is {rows} x {width} in the checkpoint and {table.rows or 'dynamic'} x {table.width} in this model"
            found.lacks(KIND, name, how + hint)
            continue
        most = collection.saved.most_rows(table.name) if tables.is_here(collection) else None
        if most is not None and rows > most:
            found.fault(
                f"table {name!r} has {rows} rows in the checkpoint, may hold {most} here and evicts none, so that "
                "every later step would be refused; raise dynamic.capacity (or budget_bytes), or set "
                "dynamic.eviction.type"
            )
        if not weights_only:
            theirs = [label.removeprefix(f"{KIND}_") for label in _labels(manifest, name)]
            ours = sorted(state_names(table, collection.optimizer))
            if theirs != ours:
                found.fault(
                    f"table {name!r} has the optimizer state {', '.join(theirs) or 'none'}, and this optimizer keeps "
                    f"{', '.join(ours) or 'none'}; use the one it was saved with, or load(..., weights_only=True)"
                )


def examine(reader: StepReader, part: tuple[int, int] = (0, 1)) -> TableNotes:
    """Check the entries of ``trainer.json`` against the stored tensors, and keys against their buckets.

    Only keys and scores are read.

    Args:
        reader: Reader of the step.
        part: (i, n): check only the i-th of n parts of all keys.

    Returns:
        The entries of all tables.

    Raises:
        DamagedError: if the step is not as a save writes it.
    """
    where, manifest = f"{reader.path / TRAINER}", reader.manifest
    notes = notes_of(read_object(reader.text(TRAINER), where), where)
    stored = {tensor.name: tensor for tensor in manifest.tensors if tensor.kind == KIND}
    if stored.keys() != notes.tables.keys():
        name = sorted(stored.keys() ^ notes.tables.keys())[0]
        raise DamagedError(f"{where}: table {name[:80]!r} is noted there or stored, but not both")
    for name, collection in notes.collections.items():
        if collection.steps > manifest.step:
            raise DamagedError(
                f"{where}: {collection.steps} steps in collection {name[:80]!r} at step {manifest.step}"
            )
        if len(collection.lr_factors) not in (0, collection.steps):
            raise DamagedError(
                f"{where}: {len(collection.lr_factors)} rates of {collection.steps} steps in collection {name[:80]!r}"
            )
    steps = max((each.steps for each in notes.collections.values()), default=0)
    for name, note in notes.tables.items():
        _check_note(reader, name, note)
        if note.buckets is not None:
            _check_keys(reader, name, note, part, steps)
        if note.waiting is not None:
            _check_waiting(reader, name, note.waiting, part, steps)
    return notes


def notes_of(trainer: Mapping[str, Any], where: str) -> TableNotes:
    """Return the entries of tables in ``trainer.json``; empty ones if the file has none."""
    engine = trainer.get("engine")
    found = engine.get("tables") if isinstance(engine, Mapping) else None
    return validated(
        TableNotes, {"collections": {}, "tables": {}} if found is None else found, f"{where}: tables"
    )


def _check_tensors(manifest: Manifest) -> None:
    """Check that shapes and dtypes of all stored tensors of tables are those that a save writes."""
    stored = {tensor.name: tensor for tensor in manifest.tensors if tensor.kind == KIND}
    for tensor in manifest.tensors:
        if not is_of_tables(tensor.kind):
            continue
        shape, table = tensor.shape, stored.get(tensor.name)
        if table is None or len(table.shape) != 2 or not table.torch_dtype.is_floating_point:
            _refuse(tensor.kind, tensor.name, "no rows of floating-point numbers, [rows, width], beside it")
        rows, width = table.shape
        if tensor.kind in (_KEY, _SCORE, _WAITING):
            fits = len(shape) == 2 and shape[1] == 2 if tensor.kind == _WAITING else shape == [rows]
            if not fits or tensor.torch_dtype != torch.int64:
                _refuse(tensor.kind, tensor.name, f"{tensor.dtype} {shape} beside rows {table.shape}")
        elif shape not in ([rows, width], [rows, 1]) or not tensor.torch_dtype.is_floating_point:
            _refuse(tensor.kind, tensor.name, f"{tensor.dtype} {shape} beside rows {table.shape}")


def _refuse(kind: str, name: str, what: str) -> NoReturn:
    raise DamagedError(f"manifest.json: {kind} {name[:80]!r}: {what}; no save wrote that")


def _check_note(reader: StepReader, name: str, note: TableNote) -> None:
    manifest = reader.manifest
    table = manifest.find(KIND, name)
    waiting = manifest.find(_WAITING, name)
    assert table is not None, "the names were compared"
    is_dynamic = note.buckets is not None
    kinds = [manifest.find(kind, name) is not None for kind in (_KEY, _SCORE)]
    wrong = ""
    if note.rows != table.shape[0]:
        wrong = f"{note.rows} rows noted, {table.shape[0]} stored"
    elif kinds != [is_dynamic] * 2 or (waiting is not None) != (note.waiting is not None):
        wrong = "keys, scores, keys that wait and their buckets do not go together"
    elif note.buckets is not None and sum(note.buckets) != note.rows:
        wrong = f"buckets of {sum(note.buckets)} rows, {note.rows} stored"
    elif note.waiting is not None and waiting is not None and sum(note.waiting) != waiting.shape[0]:
        wrong = f"buckets of {sum(note.waiting)} keys that wait, {waiting.shape[0]} stored"
    if wrong:
        raise DamagedError(f"{reader.path / TRAINER}: table {name[:80]!r}: {wrong}")


def _check_keys(reader: StepReader, name: str, note: TableNote, part: tuple[int, int], steps: int) -> None:
    """Check the keys and scores of this rank's part of the chunks."""
    counts = torch.tensor(note.buckets)
    for number, (start, stop) in enumerate(chunks(counts, _CHUNK_BYTES // 16)):
        if number % part[1] != part[0]:
            continue
        keys, scores = (torch.empty(stop - start, dtype=torch.int64) for _ in range(2))
        reader.fill(
            [
                TensorPieces(kind, name, (note.rows,), torch.int64, [FlatSlice(start, stop, held)])
                for kind, held in ((_KEY, keys), (_SCORE, scores))
            ]
        )
        _refuse_rows(reader, name, _fault_of_rows(keys, scores, counts, start, steps, note.eviction))


def _check_waiting(
    reader: StepReader, name: str, buckets: Sequence[int], part: tuple[int, int], steps: int
) -> None:
    counts = torch.tensor(buckets)
    total = int(counts.sum())
    for number, (start, stop) in enumerate(chunks(counts, _CHUNK_BYTES // 16)):
        if number % part[1] != part[0]:
            continue
        pairs = torch.empty((stop - start) * 2, dtype=torch.int64)
        reader.fill(
            [TensorPieces(_WAITING, name, (total, 2), torch.int64, [FlatSlice(start * 2, stop * 2, pairs)])]
        )
        _refuse_rows(reader, name, _fault_of_waiting(pairs.view(-1, 2), counts, start, steps))


def _refuse_rows(reader: StepReader, name: str, fault: str) -> None:
    if fault:
        raise DamagedError(f"{reader.path}: table {name[:80]!r}: {fault}")


def _fault_of_rows(
    keys: Tensor, scores: Tensor, counts: Tensor, start: int, steps: int, eviction: str | None
) -> str:
    """Return why rows of a dynamic table cannot be the rows after ``steps`` steps; empty if they can.

    ``start`` is the number of the first row. A save makes the same check as a load.
    """
    most = torch.iinfo(torch.int64).max if eviction in ("lfu", None) else steps
    if keys.numel() and not 0 <= int(scores.min()) <= int(scores.max()) <= most:
        return f"scores from {int(scores.min())} to {int(scores.max())} after {steps} steps"
    return _fault_of_buckets(keys, counts, start)


def _fault_of_waiting(pairs: Tensor, counts: Tensor, start: int, steps: int) -> str:
    """Return why keys that wait for admission cannot be those after ``steps`` steps; empty if they can.

    ``pairs`` holds keys and scores, [m, 2].
    """
    keys, scores = pairs.unbind(1)
    last, count = step_of(scores), count_of(scores)
    if bool(((last > steps) | (count < 1) | (count > last)).any()):
        return f"keys wait with counts and steps that {steps} steps do not give"
    return _fault_of_buckets(keys, counts, start)


def _fault_of_buckets(keys: Tensor, counts: Tensor, start: int) -> str:
    """Return why keys do not lie in their buckets in rising order; empty if they do."""
    ends = counts.cumsum(0)
    place = torch.arange(start, start + keys.numel())
    buckets = torch.searchsorted(ends, place, right=True)
    follows = (keys[1:] > keys[:-1]) | (buckets[1:] != buckets[:-1])
    if bool((dynamic_bucket(keys) == buckets).all()) and bool(follows.all()):
        return ""
    return (
        f"keys of rows {start} to {start + keys.numel() - 1} are not those of their buckets in rising order"
    )


def load(
    tables: ModelTables,
    checkpoints: Checkpoints,
    step: Path,
    manifest: Manifest,
    notes: TableNotes,
    weights_only: bool,
    left: Container[str] = (),
) -> None:
    """Fill every table except ``left`` from a step that ``compare`` and ``examine`` have accepted. Collective."""
    for (
        name,
        collection,
    ) in tables.collections.items():  # other ranks read the other collections, in as many steps
        collection.saved.clear()
        if not weights_only and name in notes.collections:
            collection.saved.load_progress(notes.collections[name].model_dump())
    wishes: list[_RowRequest] = []
    held = 0
    for name, collection, table in tables.each():
        note = None if name in left else notes.tables.get(name)
        is_here = tables.is_here(collection)
        if is_here and table.rows is not None and (note is None or note.rows < table.rows):
            collection.saved.restart(table.name)
        if note is None:
            continue
        counts = static_counts(note.rows) if note.buckets is None else torch.tensor(note.buckets)
        labels = () if weights_only else _labels(manifest, name)
        line = sum(_row_bytes(manifest, kind, name) for kind in (KIND, *labels))
        keeps_scores = _keeps_scores(name, table, note, weights_only)
        for within in chunks(counts, max(_CHUNK_BYTES // max(line, 1), 1)):
            size = (within[1] - within[0]) * line
            if wishes and held + size > _CHUNK_BYTES:
                _read(wishes, checkpoints, step)
                wishes, held = [], 0
            wish = (manifest, counts, within, labels, keeps_scores)
            wishes.append(_RowRequest(name, collection if is_here else None, table, *wish))
            held += size
        if note.waiting is not None and not weights_only:
            waiting = torch.tensor(note.waiting)
            all_of_them = (0, int(waiting.sum()))
            wishes.append(
                _AdmissionRequest(
                    name, collection if is_here else None, table, manifest, waiting, all_of_them
                )
            )
    if wishes:
        _read(wishes, checkpoints, step)


def _keeps_scores(name: str, table: TablePolicy, note: TableNote, weights_only: bool) -> bool:
    """Return whether the stored scores of a table's rows are loaded.

    Scores of another eviction type have another meaning, and steps are counted anew if only weights are loaded.
    """
    if table.dynamic is None:
        return False
    ours = table.dynamic.eviction.type
    if note.eviction is not None and note.eviction != ours:
        _log.warning(
            "table %s was saved with eviction %s and now has %s: its rows count as used in this step, once",
            name,
            note.eviction,
            ours,
        )
        return False
    return ours == "lfu" or not weights_only


class _RowRequest:
    """A request for some rows of one table; without a collection no rows are requested."""

    def __init__(
        self,
        name: str,
        collection: EmbeddingCollection | None,
        table: TablePolicy,
        manifest: Manifest,
        counts: Tensor,
        within: Range,
        labels: Iterable[str] = (),
        keeps_scores: bool = True,
    ):
        self._collection, self._table = collection, table.name
        self._keeps_scores = keeps_scores
        self._ranges: list[Range] = []
        if collection is not None:
            place, group = collection.saved.place_of(table.name)
            self._ranges = ranges_to_read(counts, place, group.index, group.size, within)
        self._keys = static_keys_at(counts, self._ranges) if table.rows is not None else None
        self.items: list[TensorPieces] = []
        self._read: dict[str, Tensor] = {}
        for kind in self._kinds(table, labels):
            self._add(kind, name, table, manifest)

    def _kinds(self, table: TablePolicy, labels: Iterable[str]) -> list[str]:
        return [KIND, *labels, *((_KEY, _SCORE) if table.dynamic is not None else ())]

    def _add(self, kind: str, name: str, table: TablePolicy, manifest: Manifest) -> None:
        stored = manifest.find(kind, name)
        assert stored is not None, "checked before"
        shape = tuple(stored.shape)
        inner = prod(shape[1:])
        rows = sum(stop - start for start, stop in self._ranges)
        dtype = stored.torch_dtype
        if dtype.is_floating_point and self._collection is not None:
            held = dtypes_of(table, self._collection.dtype)
            dtype = held.weights if kind == KIND else held.state
        flat = torch.empty(rows * inner, dtype=dtype)
        pieces, at = [], 0
        for start, stop in self._ranges:
            size = (stop - start) * inner
            pieces.append(FlatSlice(start * inner, stop * inner, flat[at : at + size]))
            at += size
        self.items.append(TensorPieces(kind, name, shape, dtype, pieces))
        self._read[kind] = flat.view(rows, *shape[1:])

    def take(self) -> None:
        """Write the rows that were read into the collection."""
        if self._collection is None:
            return
        keys = self._read[_KEY] if self._keys is None else self._keys
        state = {
            kind.removeprefix(f"{KIND}_"): tensor
            for kind, tensor in self._read.items()
            if kind not in (KIND, _KEY, _SCORE)
        }
        scores = self._read.get(_SCORE) if self._keeps_scores else None
        rows = KeyedRows(keys, self._read[KIND], state, scores)
        self._collection.load_rows(self._table, rows)


class _AdmissionRequest(_RowRequest):
    """A request for keys that wait for admission."""

    def _kinds(self, table: TablePolicy, labels: Iterable[str]) -> list[str]:
        return [_WAITING]

    def take(self) -> None:
        if self._collection is not None:
            self._collection.saved.load_candidates(self._table, self._read[_WAITING])


# Without an engine -------------------------------------------------------------------------------------------------


def open_tables(step: Path) -> tuple[Manifest, TableNotes]:
    """Return the manifest of a step and its entries of tables, checked against each other."""
    reader = StepReader(step, open_step(step, FileSystem()), FileSystem())
    _check_tensors(reader.manifest)
    return reader.manifest, examine(reader)


def tables_in(step: Path) -> tuple[int, list[StoredTable]]:
    """Return (step, tables) of a checkpoint, read in chunks, for an export to serving."""
    manifest, notes = open_tables(step)
    return manifest.step, [_stored(step, manifest, name, note) for name, note in notes.tables.items()]


def counts_of(note: TableNote) -> Tensor:
    """Return the number of rows of each bucket of a table: int64 [BUCKETS]."""
    return static_counts(note.rows) if note.buckets is None else torch.tensor(note.buckets)


def _stored(step: Path, manifest: Manifest, name: str, note: TableNote) -> StoredTable:
    stored = manifest.find(KIND, name)
    assert stored is not None, "a table that is noted is stored"
    width = stored.shape[1]

    def parts() -> Iterator[tuple[int, Tensor, Tensor]]:
        for within in chunks(counts_of(note), max(_CHUNK_BYTES // (width * stored.torch_dtype.itemsize), 1)):
            yield within[0], *read_rows(step, manifest, name, note, within)

    return StoredTable(name, note.rows, width, note.buckets is not None, parts)


def read_rows(
    step: Path, manifest: Manifest, name: str, note: TableNote, within: Range
) -> tuple[Tensor, Tensor]:
    """Return the keys [n] and the vectors [n, D] of a range of rows in the order of (bucket, key)."""
    stored = manifest.find(KIND, name)
    assert stored is not None, "a table that is noted is stored"
    width, (start, stop) = stored.shape[1], within
    vectors = torch.empty((stop - start) * width, dtype=stored.torch_dtype)
    pieces = [FlatSlice(start * width, stop * width, vectors)]
    items = [TensorPieces(KIND, name, tuple(stored.shape), stored.torch_dtype, pieces)]
    keys = static_keys_at(counts_of(note), [within])
    if note.buckets is not None:
        items.append(TensorPieces(_KEY, name, (note.rows,), torch.int64, [FlatSlice(start, stop, keys)]))
    Checkpoints(step.parent).load(items, path=step, partial=True, is_checked=True)
    return keys, vectors.view(-1, width)


def _read(wishes: list[_RowRequest], checkpoints: Checkpoints, step: Path) -> None:
    """Read the requested rows and write them into their collections.

    Every block was checked when the step was chosen, and is checked once more as it is read.
    """
    items: dict[tuple[str, str], TensorPieces] = {}
    for wish in wishes:
        for item in wish.items:
            known = items.get((item.kind, item.name))
            items[item.kind, item.name] = (
                item if known is None else known._replace(pieces=known.pieces + item.pieces)
            )
    checkpoints.load(list(items.values()), path=step, partial=True, is_checked=True)
    for wish in wishes:
        wish.take()


def _labels(manifest: Manifest, name: str) -> list[str]:
    """Return the kinds of optimizer state that the step has for a table."""
    kinds = {tensor.kind for tensor in manifest.tensors if tensor.name == name}
    return sorted(kind for kind in kinds if is_of_tables(kind) and kind not in (KIND, _KEY, _SCORE, _WAITING))


def _row_bytes(manifest: Manifest, kind: str, name: str) -> int:
    stored = manifest.find(kind, name)
    assert stored is not None, "its kind was found in the manifest"
    return prod(stored.shape[1:]) * stored.torch_dtype.itemsize
