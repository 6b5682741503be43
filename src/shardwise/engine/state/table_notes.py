"""The entries of tables in a step's ``trainer.json``, and the checks that a step is as a save writes it.

    {"collections": {"tables": {"steps", "lr_factors"}},
     "tables": {"tables.user": {"rows", "buckets", "waiting", "changed", "eviction"}}}

A checksum does not prove that a file was written correctly. So before any row is touched the notes are checked against
a schema and against the tensors, and every key against its bucket, each key by one of the ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn

import torch
from pydantic import Field
from torch import Tensor

from shardwise.base.errors import DamagedError
from shardwise.base.strict_json import Count, StrictModel, read_object, validated
from shardwise.checkpoint import FlatSlice, Manifest, TensorPieces
from shardwise.checkpoint.load import StepReader
from shardwise.checkpoint.manifest import TRAINER
from shardwise.parallel.embedding.layout import BUCKETS, dynamic_bucket
from shardwise.parallel.embedding.rows.dynamic import count_of, step_of
from shardwise.parallel.embedding.saved import chunks, static_counts

KIND = "table"
KEY, SCORE, WAITING, CHANGED = f"{KIND}_key", f"{KIND}_score", f"{KIND}_waiting", f"{KIND}_changed"
_CHUNK_ROWS = 1 << 24
"""Keys and scores that are checked at once."""


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
    changed: _Buckets | None = None
    """Changed rows of each bucket, if the step holds only those; None if the step holds all rows."""
    eviction: Literal["none", "lru", "lfu", "age"] | None = None
    """Type of eviction, which gives the scores their meaning; None in steps of versions that did not write the type."""


class TableNotes(StrictModel):
    """The entries of all tables in ``trainer.json``."""

    collections: dict[str, CollectionNote]
    tables: dict[str, TableNote]


def is_of_tables(kind: str) -> bool:
    """Return True for the kinds of tensors that this module saves."""
    return kind == KIND or kind.startswith(f"{KIND}_")


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


def check_tensors(manifest: Manifest) -> None:
    """Check that shapes and dtypes of all stored tensors of tables are those that a save writes."""
    stored = {tensor.name: tensor for tensor in manifest.tensors if tensor.kind == KIND}
    for tensor in manifest.tensors:
        if not is_of_tables(tensor.kind):
            continue
        shape, table = tensor.shape, stored.get(tensor.name)
        if table is None or len(table.shape) != 2 or not table.torch_dtype.is_floating_point:
            _refuse(tensor.kind, tensor.name, "no rows of floating-point numbers, [rows, width], beside it")
        rows, width = table.shape
        total = total_of(manifest, tensor.name)
        if tensor.kind == CHANGED:
            fits = len(shape) == 1 and shape[0] >= rows and manifest.base is not None
            if not fits or tensor.torch_dtype != torch.bool:
                _refuse(tensor.kind, tensor.name, f"{tensor.dtype} {shape} beside rows {table.shape}")
        elif tensor.kind in (KEY, SCORE, WAITING):
            fits = len(shape) == 2 and shape[1] == 2 if tensor.kind == WAITING else shape == [total]
            if not fits or tensor.torch_dtype != torch.int64:
                _refuse(tensor.kind, tensor.name, f"{tensor.dtype} {shape} beside rows {table.shape}")
        elif shape not in ([rows, width], [rows, 1]) or not tensor.torch_dtype.is_floating_point:
            _refuse(tensor.kind, tensor.name, f"{tensor.dtype} {shape} beside rows {table.shape}")


def total_of(manifest: Manifest, name: str) -> int:
    """Return the number of rows of a table, of which a step may hold only those that changed."""
    changed, stored = manifest.find(CHANGED, name), manifest.find(KIND, name)
    assert stored is not None, "asked of tables that are stored"
    return changed.shape[0] if changed is not None and len(changed.shape) == 1 else stored.shape[0]


def labels_of(manifest: Manifest, name: str) -> list[str]:
    """Return the kinds of optimizer state that the step has for a table."""
    kinds = {tensor.kind for tensor in manifest.tensors if tensor.name == name}
    return sorted(
        kind for kind in kinds if is_of_tables(kind) and kind not in (KIND, KEY, SCORE, WAITING, CHANGED)
    )


def counts_of(note: TableNote) -> Tensor:
    """Return the number of rows of each bucket of a table: int64 [BUCKETS]."""
    return static_counts(note.rows) if note.buckets is None else torch.tensor(note.buckets)


def _refuse(kind: str, name: str, what: str) -> NoReturn:
    raise DamagedError(f"manifest.json: {kind} {name[:80]!r}: {what}; no save wrote that")


def _check_note(reader: StepReader, name: str, note: TableNote) -> None:
    manifest = reader.manifest
    table = manifest.find(KIND, name)
    waiting = manifest.find(WAITING, name)
    assert table is not None, "the names were compared"
    is_dynamic = note.buckets is not None
    kinds = [manifest.find(kind, name) is not None for kind in (KEY, SCORE)]
    wrong = ""
    total = total_of(manifest, name)
    if note.rows != total:
        wrong = f"{note.rows} rows noted, {total} stored"
    elif (note.changed is not None) != (manifest.find(CHANGED, name) is not None):
        wrong = "changed rows and their buckets do not go together"
    elif note.changed is not None and sum(note.changed) != table.shape[0]:
        wrong = f"buckets of {sum(note.changed)} changed rows, {table.shape[0]} stored"
    elif note.changed is not None and bool((torch.tensor(note.changed) > counts_of(note)).any()):
        wrong = "more changed rows in a bucket than rows"
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
    for number, (start, stop) in enumerate(chunks(counts, _CHUNK_ROWS)):
        if number % part[1] != part[0]:
            continue
        keys, scores = (torch.empty(stop - start, dtype=torch.int64) for _ in range(2))
        reader.fill(
            [
                TensorPieces(kind, name, (note.rows,), torch.int64, [FlatSlice(start, stop, held)])
                for kind, held in ((KEY, keys), (SCORE, scores))
            ]
        )
        _refuse_rows(reader, name, fault_of_rows(keys, scores, counts, start, steps, note.eviction))


def _check_waiting(
    reader: StepReader, name: str, buckets: Sequence[int], part: tuple[int, int], steps: int
) -> None:
    counts = torch.tensor(buckets)
    total = int(counts.sum())
    for number, (start, stop) in enumerate(chunks(counts, _CHUNK_ROWS)):
        if number % part[1] != part[0]:
            continue
        pairs = torch.empty((stop - start) * 2, dtype=torch.int64)
        reader.fill(
            [TensorPieces(WAITING, name, (total, 2), torch.int64, [FlatSlice(start * 2, stop * 2, pairs)])]
        )
        _refuse_rows(reader, name, fault_of_waiting(pairs.view(-1, 2), counts, start, steps))


def _refuse_rows(reader: StepReader, name: str, fault: str) -> None:
    if fault:
        raise DamagedError(f"{reader.path}: table {name[:80]!r}: {fault}")


def fault_of_rows(
    keys: Tensor, scores: Tensor, counts: Tensor, start: int, steps: int, eviction: str | None
) -> str:
    """Return why rows of a dynamic table cannot be the rows after ``steps`` steps; empty if they can.

    ``start`` is the number of the first row. A save makes the same check as a load.
    """
    return fault_of_scores(scores, steps, eviction) or fault_of_buckets(keys, counts, start)


def fault_of_scores(scores: Tensor, steps: int, eviction: str | None) -> str:
    """Return why scores cannot be those after ``steps`` steps; empty if they can."""
    most = torch.iinfo(torch.int64).max if eviction in ("lfu", None) else steps
    if scores.numel() and not 0 <= int(scores.min()) <= int(scores.max()) <= most:
        return f"scores from {int(scores.min())} to {int(scores.max())} after {steps} steps"
    return ""


def fault_of_waiting(pairs: Tensor, counts: Tensor, start: int, steps: int) -> str:
    """Return why keys that wait for admission cannot be those after ``steps`` steps; empty if they can.

    ``pairs`` holds keys and scores, [m, 2].
    """
    keys, scores = pairs.unbind(1)
    last, count = step_of(scores), count_of(scores)
    if bool(((last > steps) | (count < 1) | (count > last)).any()):
        return f"keys wait with counts and steps that {steps} steps do not give"
    return fault_of_buckets(keys, counts, start)


def fault_of_buckets(keys: Tensor, counts: Tensor, start: int) -> str:
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
