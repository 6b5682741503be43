"""A saved step of a model with embedding tables as a folder for serving: vectors and the dense part.

    tables.json   which model it is, and the step; the one rename that writes it commits the export
    *.safetensors  keys and vectors of each table (models/vectors.py); parameters and buffers of the dense part

The dense part is stored as it was saved: the weights in the dtype that computes, without masters and optimizer state.
``export_changes`` writes what brings a reader from one step to a later one: the rows that differ, and the dense part.
"""

from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise import checkpoint
from shardwise.base.errors import DamagedError, UsageError
from shardwise.base.strict_json import read_object
from shardwise.checkpoint import Checkpoints, FlatSlice, Manifest, TensorPieces
from shardwise.checkpoint.files import FileSystem
from shardwise.checkpoint.load import StepReader
from shardwise.checkpoint.manifest import TRAINER
from shardwise.checkpoint.piece import MODEL_KINDS
from shardwise.checkpoint.steps import open_step
from shardwise.engine.state.saved_state import SavedState
from shardwise.engine.state.saved_tables import tables_in
from shardwise.engine.state.stored_rows import changes_between
from shardwise.models.dense_part import DensePart
from shardwise.models.increments import ChangedTable, write_increment
from shardwise.models.vectors import StoredTable, write_vectors


class StepToServe(NamedTuple):
    """The content of a saved step for serving."""

    step: int
    tables: list[StoredTable]
    dense: DensePart
    run: str
    """Name of the run that saved the step, by which increments name it."""

    @property
    def rows(self) -> int:
        """Number of rows of all tables."""
        return sum(table.rows for table in self.tables)


def opened_step(step: Path) -> StepToServe:
    """Check every byte of a saved step, and return its content for serving; rows are read when they are written.

    Args:
        step: Folder of the step.

    Raises:
        DamagedError: if the step is damaged.
        UsageError: if its model has no embedding tables.
    """
    if damage := checkpoint.verify(step):
        raise DamagedError(f"{step}: {damage[0]}; nothing was exported")
    manifest = open_step(step, FileSystem())
    if not any(tensor.kind == "table" for tensor in manifest.tensors):
        raise UsageError(
            f"{step} holds no embedding tables; expected a step of a click-through model, or of another model with an "
            "EmbeddingCollection"
        )
    number, tables = tables_in(step)
    return StepToServe(number, tables, dense_in(step, manifest), manifest.run)


def dense_in(step: Path, manifest: Manifest) -> DensePart:
    """Return the dense part of a saved step.

    Args:
        step: Folder of the step.
        manifest: The step's manifest.
    """
    wanted = [tensor for tensor in manifest.tensors if tensor.kind in MODEL_KINDS]
    found: dict[str, Tensor] = {}
    items = []
    for tensor in wanted:
        flat = torch.empty(prod(tensor.shape), dtype=tensor.torch_dtype)
        found[tensor.name] = flat.view(tensor.shape)
        items.append(
            TensorPieces(
                tensor.kind, tensor.name, tuple(tensor.shape), flat.dtype, [FlatSlice(0, flat.numel(), flat)]
            )
        )
    if items:
        Checkpoints(step.parent).load(items, path=step, partial=True, is_checked=True)
    return DensePart(found, {**_about(step, manifest), "step": manifest.step})


def _about(step: Path, manifest: Manifest) -> dict[str, Any]:
    """Return what the step says of its model: the description of a built-in one, or the name of a user's function."""
    text = StepReader(step, manifest, FileSystem()).text(TRAINER)
    saved = SavedState.of(read_object(text, str(step / TRAINER)), step)
    config = saved.user.get("config")
    model = config.get("model") if isinstance(config, dict) else None
    target = model.get("target") if isinstance(model, dict) else None
    return {"click_model": saved.engine.click_model, "target": target if isinstance(target, str) else None}


def export_step(step: Path, out: Path, vectors: torch.dtype = torch.float32) -> StepToServe:
    """Write a saved step as a folder for serving.

    Args:
        step: Folder of the step.
        out: The folder to write.
        vectors: The dtype of the vectors.

    Raises:
        DamagedError: if the step is damaged; nothing is written then.
        UsageError: if its model has no embedding tables, or ``vectors`` is no dtype of vectors.
    """
    found = opened_step(step)
    write_vectors(out, found.tables, found.step, vectors, found.dense.to_write(), found.run)
    return found


class ChangesToServe(NamedTuple):
    """The content of an increment between two saved steps."""

    step: int
    """The step that results."""
    tables: list[ChangedTable]
    dense: DensePart

    @property
    def changed(self) -> int:
        """Number of rows that came or changed."""
        return sum(table.changed for table in self.tables)

    @property
    def gone(self) -> int:
        """Number of rows that went."""
        return sum(len(table.gone) for table in self.tables)


def export_changes(older: Path, newer: Path, out: Path) -> ChangesToServe:
    """Write an increment: the rows in which two saved steps of a run differ, and the dense part of the newer one.

    Args:
        older: Folder of the step from which a reader goes on.
        newer: Folder of the step that results.
        out: The folder to write.

    Raises:
        DamagedError: if a step is damaged; nothing is written then.
        MismatchError: if the steps have other tables, or a table has another width in one of them.
        UsageError: if ``out`` exists.
    """
    for path in (older, newer):
        if damage := checkpoint.verify(path):
            raise DamagedError(f"{path}: {damage[0]}; nothing was exported")
    start, end, tables = changes_between(older, newer)
    dense = dense_in(newer, open_step(newer, FileSystem()))
    write_increment(out, tables, start, end, dense=dense.to_write())
    return ChangesToServe(end.step, tables, dense)
