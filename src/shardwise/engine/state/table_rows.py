"""Rows of tables read from a saved step, of which the full step before it may hold those that did not change.

    step 80   table_changed [M]   0 1 0 0 1        rows in the order of (bucket, key) at step 80
              table [m, width]      a     b        the rows that changed since step 40
    step 40   table [M', width]   x   y z   w      all rows at step 40, in the same order
    result                        x a y z b        of step 40 only the keys that step 80 still has

Both steps order their rows alike: the unchanged rows of a range of buckets are, in their order, rows of the same
buckets of the full step.

Cost:   of both steps the rows in the range that is read.
Shapes: M rows of a table, m changed rows, n rows of a range.
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.base.errors import DamagedError
from shardwise.base.strict_json import read_object
from shardwise.checkpoint import Checkpoints, FlatSlice, Manifest, TensorPieces
from shardwise.checkpoint.files import FileSystem
from shardwise.checkpoint.load import StepReader
from shardwise.checkpoint.manifest import TRAINER
from shardwise.checkpoint.steps import base_of, open_step
from shardwise.engine.state.table_notes import (
    CHANGED,
    KEY,
    KIND,
    SCORE,
    TableNotes,
    check_tensors,
    counts_of,
    examine,
    notes_of,
)
from shardwise.parallel.embedding.saved import Range, static_keys_at


class StoredTables(NamedTuple):
    """The tables of a saved step, with the full step that holds the rows which did not change."""

    path: Path
    manifest: Manifest
    notes: TableNotes
    base: "StoredTables | None"
    """None if the step holds all rows."""

    def width(self, name: str) -> int:
        """Return the width of a table."""
        stored = self.manifest.find(KIND, name)
        assert stored is not None, "a table that is noted is stored"
        return stored.shape[1]


def with_base(path: Path, manifest: Manifest, notes: TableNotes) -> StoredTables:
    """Return the tables of a step that was checked, with those of the full step that it needs.

    Raises:
        DamagedError: if the full step is not as a save writes it, or lacks a table.
    """
    place = base_of(path, manifest, FileSystem())
    if place is None:
        return StoredTables(path, manifest, notes, None)
    reader = StepReader(place, open_step(place, FileSystem()), FileSystem())
    check_tensors(reader.manifest)
    where = f"{place / TRAINER}"
    base = StoredTables(
        place, reader.manifest, notes_of(read_object(reader.text(TRAINER), where), where), None
    )
    for name, note in notes.tables.items():
        full = base.notes.tables.get(name)
        if note.changed is None:
            continue
        is_alike = full is not None and (full.buckets is None) == (note.buckets is None)
        if full is None or not is_alike or base.width(name) != manifest.find(KIND, name).shape[1]:  # type: ignore[union-attr]
            raise DamagedError(
                f"{path}: table {name[:80]!r} holds the rows that changed since {place.name}, which has no such table"
            )
    return StoredTables(path, manifest, notes, base)


def open_tables(step: Path) -> StoredTables:
    """Return the tables of a step, checked, for a reader without an engine."""
    reader = StepReader(step, open_step(step, FileSystem()), FileSystem())
    check_tensors(reader.manifest)
    return with_base(step, reader.manifest, examine(reader))


def read_rows(tables: StoredTables, name: str, within: Range) -> tuple[Tensor, Tensor]:
    """Return the keys [n] and the vectors [n, D] of a range of whole buckets."""
    wanted = RowsToRead(tables, name, [within], [KIND])
    checkpoints = Checkpoints(tables.path.parent)
    checkpoints.load(wanted.items, path=tables.path, partial=True, is_checked=True)
    if tables.base is not None:
        checkpoints.load(wanted.base_items, path=tables.base.path, partial=True, is_checked=True)
    found = wanted.rows()
    return wanted.keys, found[KIND]


class RowsToRead:
    """Some rows of one table: what is to be read of the step and of its base, and the rows that follow from it.

    Args:
        tables: The tables of the step.
        name: Name of the table.
        ranges: Ranges of rows [start, stop), each of whole buckets; empty to read nothing.
        kinds: Kinds of tensors with one line for each row that are read.
        dtypes: Dtype of each kind; kinds that are left out keep the stored one.
        with_scores: True reads the scores of a dynamic table.
    """

    def __init__(
        self,
        tables: StoredTables,
        name: str,
        ranges: Sequence[Range],
        kinds: Sequence[str],
        dtypes: Mapping[str, torch.dtype] | None = None,
        with_scores: bool = False,
    ) -> None:
        note = tables.notes.tables[name]
        self._name, self._kinds, self._dtypes, self._where = name, list(kinds), dtypes or {}, tables.path
        counts, self._is_dynamic = counts_of(note), note.buckets is not None
        self.items: list[TensorPieces] = []
        """What is read of the step."""
        self.base_items: list[TensorPieces] = []
        """What is read of its base."""
        self._read: dict[str, Tensor] = {}
        self._from_base: dict[str, Tensor] = {}
        full = None if tables.base is None or note.changed is None else tables.base
        self._is_cut = full is not None
        own = list(ranges)
        if full is not None:
            assert note.changed is not None, "cut tables have changed rows"
            own = _same_buckets(counts, torch.tensor(note.changed), ranges)
            self._add(CHANGED, tables.manifest, ranges, self.items, self._read)
            theirs = _same_buckets(counts, counts_of(full.notes.tables[name]), ranges)
            for kind in (*kinds, *([KEY] if self._is_dynamic else [])):
                self._add(kind, full.manifest, theirs, self.base_items, self._from_base)
        for kind in kinds:
            self._add(kind, tables.manifest, own, self.items, self._read)
        if self._is_dynamic:
            for kind in (KEY, *([SCORE] if with_scores else [])):
                self._add(kind, tables.manifest, ranges, self.items, self._read)
        self._static_keys = None if self._is_dynamic else static_keys_at(counts, list(ranges))

    def _add(
        self,
        kind: str,
        manifest: Manifest,
        ranges: Sequence[Range],
        items: list[TensorPieces],
        read: dict[str, Tensor],
    ) -> None:
        stored = manifest.find(kind, self._name)
        if stored is None:
            raise DamagedError(
                f"{self._where}: table {self._name[:80]!r} has no {kind} in the step that it continues"
            )
        shape = tuple(stored.shape)
        inner = prod(shape[1:])
        dtype = self._dtypes.get(kind, stored.torch_dtype)
        rows = sum(stop - start for start, stop in ranges)
        flat = torch.empty(rows * inner, dtype=dtype)
        pieces, at = [], 0
        for start, stop in ranges:
            size = (stop - start) * inner
            if size:
                pieces.append(FlatSlice(start * inner, stop * inner, flat[at : at + size]))
            at += size
        items.append(TensorPieces(kind, self._name, shape, dtype, pieces))
        read[kind] = flat.view(rows, *shape[1:])

    @property
    def keys(self) -> Tensor:
        """Keys of the rows: int64 [n]."""
        return self._read[KEY] if self._static_keys is None else self._static_keys

    @property
    def scores(self) -> Tensor | None:
        """Scores of the rows: int64 [n]; None if they were not asked for."""
        return self._read.get(SCORE)

    def rows(self) -> dict[str, Tensor]:
        """Return the lines of each kind that was asked for: [n, columns].

        Raises:
            DamagedError: if the base does not have a row that the step did not change.
        """
        if not self._is_cut:
            return {kind: self._read[kind] for kind in self._kinds}
        is_changed = self._read[CHANGED]
        kept = self._kept(~is_changed)
        found = {}
        for kind in self._kinds:
            own, base = self._read[kind], self._from_base[kind]
            if int(is_changed.sum()) != len(own):
                self._refuse()
            lines = torch.empty(len(is_changed), *own.shape[1:], dtype=own.dtype)
            lines[is_changed] = own
            lines[~is_changed] = base[kept].to(own.dtype)
            found[kind] = lines
        return found

    def _kept(self, is_same: Tensor) -> Tensor:
        """Return which rows of the base, in their order, are the unchanged rows of the step: bool [n']."""
        if not self._is_dynamic:
            if any(len(each) != len(is_same) for each in self._from_base.values()):
                self._refuse()
            return is_same
        keys, theirs = self.keys[is_same], self._from_base[KEY]
        kept = torch.isin(theirs, keys)
        if not torch.equal(theirs[kept], keys):
            self._refuse()
        return kept

    def _refuse(self) -> None:
        raise DamagedError(
            f"{self._where}: table {self._name[:80]!r}: the rows that did not change are not those of the full step "
            "that it continues"
        )


def _same_buckets(counts: Tensor, others: Tensor, ranges: Sequence[Range]) -> list[Range]:
    """Return the ranges of other rows in the same buckets.

    Args:
        counts: Rows of each bucket in which ``ranges`` count.
        others: Rows of each bucket in which the result counts.
        ranges: Ranges of whole buckets.
    """
    ends, theirs = counts.cumsum(0), [0, *others.cumsum(0).tolist()]
    found = []
    for start, stop in ranges:
        if start == stop:
            found.append((0, 0))
            continue
        first, last = torch.searchsorted(ends, torch.tensor([start, stop - 1]), right=True).tolist()
        found.append((theirs[first], theirs[last + 1]))
    return found
