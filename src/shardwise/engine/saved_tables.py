"""Embedding tables in checkpoints, beside the dense state and by the same pieces, checksums and commit.

    table           weights, [M, width]                     every table; rows ordered by (bucket, key)
    table_<state>   optimizer state, [M, width] or [M, 1]   as the row optimizer keeps it
    table_key       int64 [M]                               dynamic tables
    table_score     int64 [M]                               dynamic tables: what eviction goes by
    table_waiting   int64 [m, 2]                            keys that wait for admission, and their counts

``trainer.json`` has for each dynamic table how many rows each bucket has, from which a rank knows what to read, and
for each collection its steps.

Loading goes table by table in chunks, so that beside the tables themselves no more than one chunk is held.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import Checkpoints, Item, Manifest, Piece
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.load import Reader
from shardwise.checkpoint.manifest import TRAINER
from shardwise.checkpoint.steps import open_step
from shardwise.engine.tables import Tables
from shardwise.models.vectors import StoredTable
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import TablePolicy
from shardwise.parallel.embedding.rows import Rows
from shardwise.parallel.embedding.saved import (
    Range,
    Stretch,
    chunks,
    ranges_to_read,
    static_counts,
    static_keys_at,
)
from shardwise.plan.errors import MismatchError

KIND = "table"
_KEY, _SCORE, _WAITING = f"{KIND}_key", f"{KIND}_score", f"{KIND}_waiting"
_CHUNK_BYTES = 256 * 2**20
"""Rows read at once."""


def is_of_tables(kind: str) -> bool:
    """True for the kinds of this module."""
    return kind == KIND or kind.startswith(f"{KIND}_")


# Saving ------------------------------------------------------------------------------------------------------------


def items_to_save(tables: Tables) -> tuple[list[Item], dict[str, Any]]:
    """What this rank writes of every table, and what ``trainer.json`` is to say of them. Collective."""
    items: list[Item] = []
    notes: dict[str, Any] = {
        "collections": {name: each.progress() for name, each in tables.collections.items()},
        "tables": {},
    }
    for name, collection, table in tables.each():
        stretch, waiting = collection.rows_to_write(table.name)
        items += _items_of(name, table, stretch)
        note: dict[str, Any] = {"rows": stretch.total}
        if table.dynamic is not None:
            note["buckets"] = stretch.counts.tolist()
        if waiting is not None:
            assert waiting.rows.scores is not None, "those who wait have a count"
            pairs = torch.stack([waiting.rows.keys, waiting.rows.scores], 1)
            items.append(_item(_WAITING, name, (waiting.total, 2), waiting.first, pairs))
            note["waiting"] = waiting.counts.tolist()
        notes["tables"][name] = note
    return items, notes


def _items_of(name: str, table: TablePolicy, stretch: Stretch) -> list[Item]:
    rows, total, first = stretch.rows, stretch.total, stretch.first
    found = [_item(KIND, name, (total, table.width), first, rows.weights)]
    for label, state in rows.state.items():
        found.append(_item(f"{KIND}_{label}", name, (total, state.shape[1]), first, state))
    if table.dynamic is not None:
        assert rows.scores is not None, "rows of a dynamic table have scores"
        found.append(_item(_KEY, name, (total,), first, rows.keys))
        found.append(_item(_SCORE, name, (total,), first, rows.scores))
    return found


def _item(kind: str, name: str, shape: tuple[int, ...], first: int, rows: Tensor) -> Item:
    """One tensor, of which this rank has ``rows`` from row ``first`` on."""
    flat = rows.cpu().contiguous().view(-1)
    start = first * prod(shape[1:])
    pieces = [Piece(start, start + flat.numel(), flat)] if flat.numel() else []
    return Item(kind, name, shape, rows.dtype, pieces)


# Loading -----------------------------------------------------------------------------------------------------------


def check(tables: Tables, manifest: Manifest, weights_only: bool) -> None:
    """Refuse a step whose tables are not those of the model, before anything is touched."""
    stored = {tensor.name: tensor.shape for tensor in manifest.tensors if tensor.kind == KIND}
    here = {name for name, _, _ in tables.each()}
    wrong = [f"table {name!r} is not in this model" for name in stored if name not in here]
    for name, collection, table in tables.each():
        if name not in stored:
            wrong.append(f"table {name!r} is not in the checkpoint")
            continue
        keys = manifest.find(_KEY, name) is not None
        rows, width = stored[name]
        if keys != (table.dynamic is not None):
            kinds = ("static", "dynamic")
            wrong.append(
                f"table {name!r} is {kinds[keys]} in the checkpoint and {kinds[not keys]} in this model"
            )
        elif width != table.width or (table.rows is not None and rows != table.rows):
            wrong.append(
                f"table {name!r} is {rows} x {width} in the checkpoint and {table.rows or 'dynamic'} x "
                f"{table.width} in this model"
            )
        elif not weights_only:
            theirs = [label.removeprefix(f"{KIND}_") for label in _labels(manifest, name)]
            ours = sorted(collection.state_names(table.name))
            if theirs != ours:
                wrong.append(
                    f"table {name!r} has the optimizer state {', '.join(theirs) or 'none'}, and this optimizer keeps "
                    f"{', '.join(ours) or 'none'}; use the one it was saved with, or load(..., weights_only=True)"
                )
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise MismatchError(
            f"step {manifest.step}: a checkpoint of another model: {'; '.join(wrong[:5])}{more}"
        )


def load(
    tables: Tables,
    checkpoints: Checkpoints,
    step: Path,
    manifest: Manifest,
    notes: Mapping[str, Any],
    weights_only: bool,
) -> None:
    """Fill every table from a step that :func:`check` passed. Collective."""
    for name, collection in tables.collections.items():
        collection.clear()
        if not weights_only:
            collection.load_progress(notes["collections"][name])
    wishes: list[_Wish] = []
    held = 0
    for name, collection, table in tables.each():
        note = notes["tables"][name]
        counts = static_counts(note["rows"]) if table.rows is not None else torch.tensor(note["buckets"])
        labels = () if weights_only else _labels(manifest, name)
        line = sum(_row_bytes(manifest, kind, name) for kind in (KIND, *labels))
        for within in chunks(counts, max(_CHUNK_BYTES // max(line, 1), 1)):
            size = (within[1] - within[0]) * line
            if wishes and held + size > _CHUNK_BYTES:
                _read(wishes, checkpoints, step)
                wishes, held = [], 0
            wishes.append(_Wish(name, collection, table, manifest, counts, within, labels))
            held += size
        if "waiting" in note and not weights_only:
            waiting = torch.tensor(note["waiting"])
            wishes.append(_Waiting(name, collection, table, manifest, waiting, (0, int(waiting.sum()))))
    if wishes:
        _read(wishes, checkpoints, step)


class _Wish:
    """Some rows of one table that this rank is to hold, before and after they are read."""

    def __init__(
        self,
        name: str,
        collection: EmbeddingCollection,
        table: TablePolicy,
        manifest: Manifest,
        counts: Tensor,
        within: Range,
        labels: Iterable[str] = (),
    ):
        self._collection, self._table = collection, table.name
        place, group = collection.place_of(table.name)
        self._ranges = ranges_to_read(counts, place, group.index, group.size, within)
        self._keys = static_keys_at(counts, self._ranges) if table.rows is not None else None
        self.items: list[Item] = []
        self._read: dict[str, Tensor] = {}
        for kind in self._kinds(table, labels):
            self._add(kind, name, manifest)

    def _kinds(self, table: TablePolicy, labels: Iterable[str]) -> list[str]:
        return [KIND, *labels, *((_KEY, _SCORE) if table.dynamic is not None else ())]

    def _add(self, kind: str, name: str, manifest: Manifest) -> None:
        stored = manifest.find(kind, name)
        assert stored is not None, "checked before"
        shape = tuple(stored.shape)
        inner = prod(shape[1:])
        rows = sum(stop - start for start, stop in self._ranges)
        dtype = stored.torch_dtype
        if dtype.is_floating_point:
            dtype = self._collection.dtype
        flat = torch.empty(rows * inner, dtype=dtype)
        pieces, at = [], 0
        for start, stop in self._ranges:
            size = (stop - start) * inner
            pieces.append(Piece(start * inner, stop * inner, flat[at : at + size]))
            at += size
        self.items.append(Item(kind, name, shape, dtype, pieces))
        self._read[kind] = flat.view(rows, *shape[1:])

    def take(self) -> None:
        """Hand over what was read."""
        keys = self._read[_KEY] if self._keys is None else self._keys
        state = {
            kind.removeprefix(f"{KIND}_"): tensor
            for kind, tensor in self._read.items()
            if kind not in (KIND, _KEY, _SCORE)
        }
        rows = Rows(keys, self._read[KIND], state, self._read.get(_SCORE))
        self._collection.load_rows(self._table, rows)


class _Waiting(_Wish):
    """Keys that wait for admission."""

    def _kinds(self, table: TablePolicy, labels: Iterable[str]) -> list[str]:
        return [_WAITING]

    def take(self) -> None:
        self._collection.load_candidates(self._table, self._read[_WAITING])


# Without an engine -------------------------------------------------------------------------------------------------


def tables_in(step: Path) -> tuple[int, list[StoredTable]]:
    """(step, tables) of a checkpoint, read in chunks: what is exported for serving."""
    manifest = open_step(step, Files())
    trainer = json.loads(Reader(step, manifest, Files()).text(TRAINER))
    notes = trainer.get("engine", {}).get("tables", {"tables": {}})["tables"]
    return manifest.step, [_stored(step, manifest, name, note) for name, note in notes.items()]


def _stored(step: Path, manifest: Manifest, name: str, note: Mapping[str, Any]) -> StoredTable:
    stored = manifest.find(KIND, name)
    assert stored is not None, "a table that is noted is stored"
    rows, width = stored.shape
    is_dynamic = "buckets" in note
    counts = torch.tensor(note["buckets"]) if is_dynamic else static_counts(rows)

    def parts() -> Iterator[tuple[int, Tensor, Tensor]]:
        checkpoints = Checkpoints(step.parent)
        for start, stop in chunks(counts, max(_CHUNK_BYTES // (width * stored.torch_dtype.itemsize), 1)):
            vectors = torch.empty((stop - start) * width, dtype=stored.torch_dtype)
            pieces = [Piece(start * width, stop * width, vectors)]
            items = [Item(KIND, name, (rows, width), stored.torch_dtype, pieces)]
            keys = static_keys_at(counts, [(start, stop)])
            if is_dynamic:
                items.append(Item(_KEY, name, (rows,), torch.int64, [Piece(start, stop, keys)]))
            checkpoints.load(items, path=step, partial=True, is_checked=True)
            yield start, keys, vectors.view(-1, width)

    return StoredTable(name, rows, width, is_dynamic, parts)


def _read(wishes: list[_Wish], checkpoints: Checkpoints, step: Path) -> None:
    """Every block was checked when the step was chosen, and what is read is checked once more."""
    items: dict[tuple[str, str], Item] = {}
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
    """Kinds of the optimizer state that the step has for a table."""
    kinds = {tensor.kind for tensor in manifest.tensors if tensor.name == name}
    return sorted(kind for kind in kinds if is_of_tables(kind) and kind not in (KIND, _KEY, _SCORE, _WAITING))


def _row_bytes(manifest: Manifest, kind: str, name: str) -> int:
    stored = manifest.find(kind, name)
    assert stored is not None, "its kind was found in the manifest"
    return prod(stored.shape[1:]) * stored.torch_dtype.itemsize
