"""Embedding tables in checkpoints, beside the dense state and with the same pieces, checksums and commit.

    table           weights, [M, width]                     every table; rows ordered by (bucket, key)
    table_<state>   optimizer state, [M, width] or [M, 1]   as the row optimizer keeps it
    table_key       int64 [M]                               dynamic tables
    table_score     int64 [M]                               dynamic tables: the numbers by which eviction chooses
    table_waiting   int64 [m, 2]                            keys that wait for admission, and their counts
    table_changed   bool [M]                                with ``checkpoint.tables_full_every``, between two full
                                                            saves: the rows of which ``table`` and ``table_<state>``
                                                            hold a line, because they changed since the full save

``trainer.json`` has for each dynamic table the number of rows of each bucket, from which a rank computes what to read,
and the table's type of eviction; for each collection it has the number of steps (table_notes.py). Rows that did not
change are read from the full step that the manifest names (table_rows.py).

If a rank refuses a step, all ranks turn to the next older step.

Loading goes table by table in chunks, so that beside the tables themselves no more than one chunk is held.
"""

import logging
from collections.abc import Callable, Container, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.checkpoint import Checkpoints, FlatSlice, Manifest, TensorPieces
from shardwise.engine.parts.tables import ModelTables
from shardwise.engine.state.differences import StepDifferences
from shardwise.engine.state.table_items import StreamedItems
from shardwise.engine.state.table_notes import (
    CHANGED,
    KEY,
    KIND,
    SCORE,
    WAITING,
    TableNote,
    check_tensors,
    counts_of,
    fault_of_rows,
    fault_of_waiting,
    labels_of,
    total_of,
)
from shardwise.engine.state.table_rows import RowsToRead, StoredTables, open_tables, read_rows
from shardwise.models.vectors import StoredTable
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.layout import BUCKETS, writer_of
from shardwise.parallel.embedding.policy import TablePolicy
from shardwise.parallel.embedding.registered import state_names
from shardwise.parallel.embedding.rows.keyed_rows import KeyedRows
from shardwise.parallel.embedding.rules import dtypes_of
from shardwise.parallel.embedding.saved import (
    Range,
    SavedRowRange,
    StreamedRows,
    chunks,
    ranges_to_read,
    static_counts,
)

_log = logging.getLogger(__name__)
CHUNK_BYTES = 64 * 2**20
"""Bytes of rows, over all ranks, that are read at once."""

# Saving ------------------------------------------------------------------------------------------------------------


class TablesToSave(NamedTuple):
    """Rows of the tables on this rank for a checkpoint."""

    items: list[TensorPieces]
    notes: dict[str, Any]
    """Entries for ``trainer.json``."""
    fault: str
    """The reason why no load would accept the rows; empty if a load would. Rows that are read when they are written
    are checked then.
    """
    close: Callable[[], None]
    """Function to call when the items are written, or will not be."""


def items_to_save(tables: ModelTables, since: Mapping[str, int] | None = None) -> TablesToSave:
    """Return the rows that this rank writes, as the last step left them. Collective.

    Of ranks along "tp" that hold the same rows only the first writes them. An error of the disk below tables with tiers
    is kept: ``ModelTables.raise_faults`` follows on all ranks.

    Args:
        tables: The tables of the model.
        since: Number of steps that the collection of each table had done at the full save that this one continues; None
            saves all rows.
    """
    items: list[TensorPieces] = []
    notes: dict[str, Any] = {"collections": {}, "tables": {}}
    saved = [collection.saved for collection in tables.collections.values()]

    def close() -> None:
        for each in saved:
            each.close()

    if not tables.is_first_copy:
        return TablesToSave(items, notes, "", close)
    for each in saved:
        each.begin_save()
    notes["collections"] = {name: each.saved.progress() for name, each in tables.collections.items()}
    steps = max((each["steps"] for each in notes["collections"].values()), default=0)
    fault = ""
    try:
        for name, collection, table in tables.each():
            if not tables.is_here(collection):
                continue
            streamed = collection.saved.rows_to_stream(table.name) if since is None else None
            if streamed is not None:
                found = _items_later(name, table, steps, streamed)
            else:
                with tables.deferred_faults():
                    found = _items_now(name, collection, table, steps, None if since is None else since[name])
            items += found.items
            notes["tables"][name] = found.note
            fault = fault or (found.fault and f"table {name!r}: {found.fault}")
    except BaseException:
        close()
        raise
    return TablesToSave(items, notes, fault, close)


class _TableToSave(NamedTuple):
    """Rows of one table for a checkpoint."""

    items: list[TensorPieces]
    note: dict[str, Any]
    """Entry of the table in ``trainer.json``."""
    fault: str
    """The reason why no load would accept the rows; empty if a load would, or if the rows are read later."""


def _items_now(
    name: str, collection: EmbeddingCollection, table: TablePolicy, steps: int, since: int | None
) -> _TableToSave:
    """Return the tensors of a table of which the rows, or those that changed after step ``since``, are copied."""
    stretch, waiting = collection.saved.rows_to_write(table.name, since)
    items = _items_of(name, table, stretch)
    note: dict[str, Any] = {"rows": stretch.total}
    fault = ""
    keys = stretch
    if since is not None:
        note["changed"] = stretch.counts.tolist()
        if table.dynamic is not None:
            keys = collection.saved.keys_to_write(table.name)
        note["rows"] = keys.total if table.rows is None else table.rows
        items.append(_changed(name, collection, table, stretch, keys))
    if table.dynamic is not None:
        eviction = table.dynamic.eviction.type
        note |= {"buckets": keys.counts.tolist(), "eviction": eviction}
        assert keys.rows.scores is not None, "rows of a dynamic table have scores"
        items.append(_item(KEY, name, (keys.total,), keys.first, keys.rows.keys))
        items.append(_item(SCORE, name, (keys.total,), keys.first, keys.rows.scores))
        fault = fault_of_rows(keys.rows.keys, keys.rows.scores, keys.counts, keys.first, steps, eviction)
    if waiting is not None:
        assert waiting.rows.scores is not None, "those who wait have a count"
        pairs = torch.stack([waiting.rows.keys, waiting.rows.scores], 1)
        items.append(_item(WAITING, name, (waiting.total, 2), waiting.first, pairs))
        note["waiting"] = waiting.counts.tolist()
        fault = fault or fault_of_waiting(pairs, waiting.counts, waiting.first, steps)
    return _TableToSave(items, note, fault)


def _items_later(
    name: str, table: TablePolicy, steps: int, streamed: tuple[StreamedRows, StreamedRows | None]
) -> _TableToSave:
    """Return the tensors of a table whose rows are read when they are written."""
    rows, waiting = streamed
    eviction = None if table.dynamic is None else table.dynamic.eviction.type
    note: dict[str, Any] = {"rows": rows.total}
    if eviction is not None:
        note |= {"buckets": rows.counts.tolist(), "eviction": eviction}
    found = StreamedItems(name, eviction, steps)
    items = found.of(rows)
    if waiting is not None:
        note["waiting"] = waiting.counts.tolist()
        items += found.of(waiting)
    return _TableToSave(items, note, "")


def _items_of(name: str, table: TablePolicy, stretch: SavedRowRange) -> list[TensorPieces]:
    rows, total, first = stretch.rows, stretch.total, stretch.first
    found = [_item(KIND, name, (total, table.width), first, rows.weights)]
    for label, state in rows.state.items():
        found.append(_item(f"{KIND}_{label}", name, (total, state.shape[1]), first, state))
    return found


def kinds_read_from_base(tables: ModelTables) -> list[str]:
    """Return the kinds of tensors that are read of the full step of an increment, over all tables of the model."""
    labels = {
        label for _, collection, table in tables.each() for label in state_names(table, collection.optimizer)
    }
    return [KIND, KEY, *(f"{KIND}_{label}" for label in sorted(labels))]


def _changed(
    name: str,
    collection: EmbeddingCollection,
    table: TablePolicy,
    stretch: SavedRowRange,
    keys: SavedRowRange,
) -> TensorPieces:
    """Return which rows of a table changed, of which this rank writes those in the buckets that it writes."""
    if table.rows is None:
        return _item(CHANGED, name, (keys.total,), keys.first, torch.isin(keys.rows.keys, stretch.rows.keys))
    place, group = collection.saved.place_of(table.name)
    counts = static_counts(table.rows)
    ends = counts.cumsum(0)
    starts = ends - counts
    mine = torch.ones(BUCKETS, dtype=torch.bool)
    if place.placement == "table":
        mine[:] = place.owner == group.index
    else:
        mine = writer_of(torch.arange(BUCKETS), group.size) == group.index
    first = int(starts[mine][0]) if bool(mine.any()) else 0
    changed = torch.zeros(int(counts[mine].sum()), dtype=torch.bool)
    bucket = stretch.rows.keys % BUCKETS
    changed[starts[bucket] + torch.div(stretch.rows.keys, BUCKETS, rounding_mode="floor") - first] = True
    return _item(CHANGED, name, (table.rows,), first, changed)


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
    check_tensors(manifest)
    stored = {
        tensor.name: [total_of(manifest, tensor.name), *tensor.shape[1:]]
        for tensor in manifest.tensors
        if tensor.kind == KIND
    }
    here = {name for name, _, _ in tables.each()}
    for name, shape in stored.items():
        if name not in here:
            found.holds(KIND, name, shape)
    for name, collection, table in tables.each():
        if name not in stored:
            found.lacks(KIND, name, "is not in the checkpoint")
            continue
        keys = manifest.find(KEY, name) is not None
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
            theirs = [label.removeprefix(f"{KIND}_") for label in labels_of(manifest, name)]
            ours = sorted(state_names(table, collection.optimizer))
            if theirs != ours:
                found.fault(
                    f"table {name!r} has the optimizer state {', '.join(theirs) or 'none'}, and this optimizer keeps "
                    f"{', '.join(ours) or 'none'}; use the one it was saved with, or load(..., weights_only=True)"
                )


def load(
    tables: ModelTables,
    checkpoints: Checkpoints,
    stored: StoredTables,
    weights_only: bool,
    left: Container[str] = (),
) -> None:
    """Fill every table except ``left`` from a step that ``compare`` and ``examine`` have accepted. Collective.

    Raises:
        TierError: on all ranks, if the disk below tables with tiers fails on any; the tables are in part those of the
            step then.
    """
    with tables.deferred_faults():
        _load(tables, checkpoints, stored, weights_only, left)
    tables.raise_faults()


def _load(
    tables: ModelTables,
    checkpoints: Checkpoints,
    stored: StoredTables,
    weights_only: bool,
    left: Container[str],
) -> None:
    """Fill every table except ``left``; an error of the disk below the tables is kept."""
    notes, manifest = stored.notes, stored.manifest
    # Other ranks read the other collections, in as many steps.
    for name, collection in tables.collections.items():
        collection.saved.clear()
        if not weights_only and name in notes.collections:
            collection.saved.load_progress(notes.collections[name].model_dump())
    wishes: list[_RowRequest | _AdmissionRequest] = []
    held = 0
    for name, collection, table in tables.each():
        note = None if name in left else notes.tables.get(name)
        is_here = tables.is_here(collection)
        if is_here and table.rows is not None and (note is None or note.rows < table.rows):
            collection.saved.restart(table.name)
        if note is None:
            continue
        labels = [] if weights_only else labels_of(manifest, name)
        line = sum(_row_bytes(manifest, kind, name) for kind in (KIND, *labels))
        keeps_scores = _keeps_scores(name, table, note, weights_only)
        here = collection if is_here else None
        for within in chunks(counts_of(note), max(CHUNK_BYTES // max(line, 1), 1)):
            size = (within[1] - within[0]) * line
            if wishes and held + size > CHUNK_BYTES:
                _read(wishes, checkpoints, stored)
                wishes, held = [], 0
            wishes.append(_RowRequest(name, here, table, stored, within, labels, keeps_scores))
            held += size
        if note.waiting is not None and not weights_only:
            wishes.append(_AdmissionRequest(name, here, table, manifest, torch.tensor(note.waiting)))
    if wishes:
        _read(wishes, checkpoints, stored)


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
        stored: StoredTables,
        within: Range,
        labels: list[str],
        keeps_scores: bool,
    ):
        self._collection, self._table = collection, table.name
        self._keeps_scores = keeps_scores
        dtypes: dict[str, torch.dtype] = {}
        if collection is not None:
            held = dtypes_of(table, collection.dtype)
            dtypes = {KIND: held.weights, **dict.fromkeys(labels, held.state)}
        ranges = _ranges(collection, table, counts_of(stored.notes.tables[name]), within)
        self._rows = RowsToRead(stored, name, ranges, [KIND, *labels], dtypes, table.dynamic is not None)
        self.items, self.base_items = self._rows.items, self._rows.base_items

    def take(self) -> None:
        """Write the rows that were read into the collection."""
        if self._collection is None:
            return
        found = self._rows.rows()
        state = {kind.removeprefix(f"{KIND}_"): lines for kind, lines in found.items() if kind != KIND}
        scores = self._rows.scores if self._keeps_scores else None
        self._collection.load_rows(self._table, KeyedRows(self._rows.keys, found[KIND], state, scores))


class _AdmissionRequest:
    """A request for keys that wait for admission; without a collection none are requested."""

    def __init__(
        self,
        name: str,
        collection: EmbeddingCollection | None,
        table: TablePolicy,
        manifest: Manifest,
        counts: Tensor,
    ):
        self._collection, self._table = collection, table.name
        stored = manifest.find(WAITING, name)
        assert stored is not None, "checked before"
        ranges = _ranges(collection, table, counts, (0, int(counts.sum())))
        self._pairs = torch.empty(sum(stop - start for start, stop in ranges) * 2, dtype=torch.int64)
        pieces, at = [], 0
        for start, stop in ranges:
            size = (stop - start) * 2
            pieces.append(FlatSlice(start * 2, stop * 2, self._pairs[at : at + size]))
            at += size
        self.items = [TensorPieces(WAITING, name, tuple(stored.shape), torch.int64, pieces)]
        self.base_items: list[TensorPieces] = []

    def take(self) -> None:
        """Add the keys that were read to the collection."""
        if self._collection is not None:
            self._collection.saved.load_candidates(self._table, self._pairs.view(-1, 2))


def _ranges(
    collection: EmbeddingCollection | None, table: TablePolicy, counts: Tensor, within: Range
) -> list[Range]:
    """Return the ranges of rows, or of waiting keys, that this rank holds; empty without a collection."""
    if collection is None:
        return []
    place, group = collection.saved.place_of(table.name)
    return ranges_to_read(counts, place, group.index, group.size, within)


def _read(
    wishes: list[_RowRequest | _AdmissionRequest], checkpoints: Checkpoints, stored: StoredTables
) -> None:
    """Read the requested rows and write them into their collections.

    Every block was checked when the step was chosen, and is checked once more as it is read.
    """
    own = [item for wish in wishes for item in wish.items]
    checkpoints.load(_joined(own), path=stored.path, partial=True, is_checked=True)
    if stored.base is not None:
        theirs = [item for wish in wishes for item in wish.base_items]
        checkpoints.load(_joined(theirs), path=stored.base.path, partial=True, is_checked=True)
    for wish in wishes:
        wish.take()


# Without an engine -------------------------------------------------------------------------------------------------


def tables_in(step: Path) -> tuple[int, list[StoredTable]]:
    """Return (step, tables) of a checkpoint, read in chunks, for an export to serving."""
    tables = open_tables(step)
    return tables.manifest.step, [_stored(tables, name, note) for name, note in tables.notes.tables.items()]


def _stored(tables: StoredTables, name: str, note: TableNote) -> StoredTable:
    stored = tables.manifest.find(KIND, name)
    assert stored is not None, "a table that is noted is stored"
    width, row_bytes = stored.shape[1], stored.shape[1] * stored.torch_dtype.itemsize

    def parts() -> Iterator[tuple[int, Tensor, Tensor]]:
        for within in chunks(counts_of(note), max(CHUNK_BYTES // row_bytes, 1)):
            yield within[0], *read_rows(tables, name, within)

    return StoredTable(name, note.rows, width, note.buckets is not None, parts)


def _joined(items: list[TensorPieces]) -> list[TensorPieces]:
    """Return the items with all pieces of a tensor in one item."""
    found: dict[tuple[str, str], TensorPieces] = {}
    for item in items:
        known = found.get((item.kind, item.name))
        found[item.kind, item.name] = (
            item if known is None else known._replace(pieces=known.pieces + item.pieces)
        )
    return list(found.values())


def _row_bytes(manifest: Manifest, kind: str, name: str) -> int:
    stored = manifest.find(kind, name)
    assert stored is not None, "its kind was found in the manifest"
    return prod(stored.shape[1:]) * stored.torch_dtype.itemsize
