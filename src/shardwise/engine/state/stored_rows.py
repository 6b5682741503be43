"""The rows of the tables in which two saved steps differ, read without an engine, for an increment of vectors.

    rows that came      keys of the newer step that the older one does not have
    rows that changed   keys of both, of which a bit of the vector differs
    rows that went      keys of the older step that the newer one does not have

Both steps have their rows in the order of (bucket, key), so that the same buckets of both are compared at a time. A
first pass counts the differences, and a second one reads the rows that are written.

Cost:   both steps read once, and those buckets of the newer one again that have a difference. Beside 8 bytes for each
        changed row, memory holds one chunk of both.
Shapes: M rows of a table, D width, n rows of a chunk.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.base.errors import MismatchError
from shardwise.engine.state.table_notes import counts_of
from shardwise.engine.state.table_rows import open_tables, read_rows
from shardwise.models.increments import ChangedTable, ExportedStep

_CHUNK_ROWS = 1 << 20
"""Rows of both steps that are compared at once."""


class StepRows:
    """The rows of the tables in one saved step.

    Args:
        step: Folder of the step.

    Raises:
        CheckpointError: if the step cannot be read.
    """

    def __init__(self, step: Path) -> None:
        self._tables = open_tables(step)

    @property
    def exported(self) -> ExportedStep:
        """The run and the step, by which increments name them."""
        return ExportedStep(run=self._tables.manifest.run, step=self._tables.manifest.step)

    @property
    def names(self) -> list[str]:
        """Names of the tables."""
        return list(self._tables.notes.tables)

    def kind(self, table: str) -> "TableKind":
        """Return the width of a table, and whether it is dynamic."""
        return TableKind(self._tables.width(table), self._tables.notes.tables[table].buckets is not None)

    def counts(self, table: str) -> Tensor:
        """Return the number of rows of each bucket: int64 [BUCKETS]."""
        return counts_of(self._tables.notes.tables[table])

    def read(self, table: str, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Return the keys [n] and the fp32 vectors [n, D] of the rows in buckets [low, high)."""
        ends = self.counts(table).cumsum(0).tolist()
        within = (ends[low - 1] if low else 0, ends[high - 1])
        keys, vectors = read_rows(self._tables, table, within)
        return keys, vectors.float()


class TableKind(NamedTuple):
    """The properties of a table that two steps must have in common."""

    width: int
    is_dynamic: bool

    def __str__(self) -> str:
        return f"width {self.width}" + " and is dynamic" * self.is_dynamic


def changes_between(older: Path, newer: Path) -> tuple[ExportedStep, ExportedStep, list[ChangedTable]]:
    """Return the two steps, and the differences of every table between them.

    Args:
        older: Folder of the older step.
        newer: Folder of the newer step.

    Raises:
        MismatchError: if the steps have other tables, or a table has another width in one of them.
    """
    before, after = StepRows(older), StepRows(newer)
    for name in sorted(set(before.names) ^ set(after.names)):
        raise MismatchError(
            f"{newer}: table {name!r} is in one of this step and {older}, not in both",
            "Export full vectors anew",
        )
    for name in after.names:
        if before.kind(name) != after.kind(name):
            raise MismatchError(
                f"{newer}: table {name!r} has {after.kind(name)}; in {older} it has {before.kind(name)}",
                "Export full vectors anew",
            )
    return before.exported, after.exported, [_changed(before, after, name) for name in after.names]


def _changed(before: StepRows, after: StepRows, name: str) -> ChangedTable:
    """Compare one table of two steps, and return what differs."""
    places: list[tuple[int, int, Tensor]] = []
    gone: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
    for low, high in _bucket_ranges(before.counts(name) + after.counts(name)):
        old, new = before.read(name, low, high), after.read(name, low, high)
        differs, went = _differences(*old, *new)
        gone.append(went)
        if differs.numel():
            places.append((low, high, differs))

    def parts() -> Iterator[tuple[int, Tensor, Tensor]]:
        first = 0
        for low, high, which in places:
            keys, vectors = after.read(name, low, high)
            yield first, keys[which], vectors[which]
            first += len(which)

    width, is_dynamic = after.kind(name)
    count = sum(len(which) for _, _, which in places)
    total = int(after.counts(name).sum())
    return ChangedTable(name, count, torch.cat(gone), total, width, is_dynamic, parts)


def _differences(
    old_keys: Tensor, old_vectors: Tensor, keys: Tensor, vectors: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the places of rows that came or changed, and the keys of rows that went."""
    if not old_keys.numel():
        return torch.arange(len(keys)), old_keys
    in_order = np.argsort(old_keys.numpy(), kind="stable")
    sorted_keys = old_keys.numpy()[in_order]
    found = np.minimum(np.searchsorted(sorted_keys, keys.numpy()), len(sorted_keys) - 1)
    is_known = sorted_keys[found] == keys.numpy()
    # Bits and not numbers are compared: a zero that became a negative zero has changed, and a NaN has not.
    bits = (old_vectors[torch.from_numpy(in_order[found])].view(torch.uint8), vectors.view(torch.uint8))
    is_equal = (bits[0] == bits[1]).all(1) & torch.from_numpy(is_known)
    is_gone = ~torch.isin(old_keys, keys)
    return (~is_equal).nonzero()[:, 0], old_keys[is_gone]


def _bucket_ranges(counts: Tensor) -> Iterator[tuple[int, int]]:
    """Yield ranges of buckets [low, high) that together have about ``_CHUNK_ROWS`` rows."""
    low, held = 0, 0
    for bucket, count in enumerate(counts.tolist()):
        if held and held + count > _CHUNK_ROWS:
            yield low, bucket
            low, held = bucket, 0
        held += count
    if held:
        yield low, len(counts)
