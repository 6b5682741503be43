"""Saving and loading of steps: the engine's flat buffers as pieces of whole tensors (pieces.py).

    weight   whole tensors in the compute dtype                     every rank writes the range of its shard index; of
                                                                    ranks with the same elements only the first writes
    buffer   values of the first rank that holds it                 (batch statistics are per rank by default)
    master   only if the master is not the weight itself
    moments  ``exp_avg`` ...; left out for parameters that never got a gradient
    table    rows of embedding tables: saved_tables.py

On loading each rank requests the elements that it owns. Weights are rounded from the masters again, so nothing is read
twice and a change of precision needs no conversion: from a step without masters the weights fill the masters, from a
step with masters the masters do.

Single numbers of the optimizer (step counts) are the same for almost every parameter; ``trainer.json`` holds the common
numbers once, and the exceptions by name.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.base.errors import CheckpointError, MismatchError
from shardwise.base.strict_json import read_object
from shardwise.base.words import plain_name
from shardwise.checkpoint import Manifest, TensorPieces
from shardwise.checkpoint.load import StepReader
from shardwise.checkpoint.manifest import TRAINER
from shardwise.checkpoint.piece import Flat
from shardwise.compose.spec import ModelSpec
from shardwise.engine.parts.folders import check_folder
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.parts.tables import ModelTables
from shardwise.engine.state import saved_tables, table_notes
from shardwise.engine.state.differences import StepDifferences
from shardwise.engine.state.loaders import EngineLoaders
from shardwise.engine.state.pieces import CheckpointState, Pieces, add_pieces, buffer_items, items_to_save
from shardwise.engine.state.saved_state import SavedState, best_steps
from shardwise.engine.state.state import buckets, finish_updates, settle
from shardwise.engine.state.table_increments import TableIncrements, TablesSave
from shardwise.engine.state.table_rows import with_base
from shardwise.models.ctr.build import described
from shardwise.optim.average import EMA
from shardwise.plan.registry import Registry, TensorInfo

_log = logging.getLogger(__name__)

_OURS = ("weight", "buffer", "master")


class LoadedStep(NamedTuple):
    """The results of a load beside the restored state."""

    user: dict[str, Any]
    """The mapping that ``save`` was given as ``trainer``."""
    not_loaded: list[str]
    """Names of tensors that keep their start values."""


def save(
    parts: EngineParts,
    loaders: EngineLoaders,
    increments: TableIncrements,
    folder: Path,
    trainer: dict[str, Any],
    **options: Any,
) -> None:
    """Save the engine's state as a step. Implements ``Engine.save``."""
    settle(parts, "save")
    finish_updates(parts)
    part = increments.next(folder)
    parts.folders.join()  # a save reads the tables while steps go on, so the one before it ends first
    tables = saved_tables.items_to_save(parts.tables, part.since) if parts.tables else None
    try:
        parts.tables.raise_faults()
        _save(parts, loaders, part, folder, trainer, tables, options)
    except BaseException:
        if tables is not None:
            parts.folders.join()  # an interrupt may come when the thread that reads the tables runs already
            tables.close()
        raise


def _save(
    parts: EngineParts,
    loaders: EngineLoaders,
    part: TablesSave,
    folder: Path,
    trainer: dict[str, Any],
    tables: saved_tables.TablesToSave | None,
    options: dict[str, Any],
) -> None:
    """Save the engine's state, and the rows of tables that are given."""
    progress = parts.progress
    common, stateless, labels = _agree_on_scalars(parts, "" if tables is None else tables.fault)
    state = {
        "step": progress.step_count,
        "applied": progress.applied_steps,
        "skipped_in_a_row": progress.skipped_in_a_row,
        "groups": parts.optimizer_groups.state(),
        "best": progress.best,
        "loaders": loaders.positions(),
        "reference": parts.accumulation.reference,
        "loss_scale": None if parts.loss_scale is None else parts.loss_scale.state(),
        "optimizer": {
            "common": common[0],
            "exceptions": {plain_name(name): each for name, each in common[1].items()},
        },
        "click_model": described(parts.model),
        "layout": {"mesh": str(parts.mesh), "zero_stage": parts.config.zero.stage},
    }
    if tables is not None:
        # Rank 0 writes the notes of all stages, and its own stage may have no tables.
        notes = tables.notes
        state["tables"] = notes if parts.stage_group.size == 1 else _of_all_stages(parts, notes)
    aliases = {
        plain_name(e.name): [plain_name(alias) for alias in e.aliases]
        for e in parts.spec.parameters.values()
        if e.aliases
    }
    with closing(CheckpointState(parts, changes=False)) as opened:
        items = [
            item._replace(name=plain_name(item.name))
            for item in items_to_save(parts, labels, stateless, opened)
        ]
        # An asynchronous save would copy the disk's state into memory.
        if _is_on_disk(parts):
            options["asynchronous"] = False
        parts.folders.at(folder).save(
            progress.step_count,
            items,
            {"engine": state, "user": trainer},
            aliases=aliases,
            copies=() if tables is None else tables.items,
            base=part.base,
            mark=part.mark,
            on_end=None if tables is None else tables.close,
            best=[step for step, _ in progress.best],
            **options,
        )


def _is_on_disk(parts: EngineParts) -> bool:
    """Return whether state of any rank is on a disk."""
    return any(
        row.tier == "disk"
        for ranks in parts.program.plan.classes.values()
        for rows in ranks.buffers.values()
        for row in rows
    )


def _of_all_stages(parts: EngineParts, notes: dict[str, Any]) -> dict[str, Any]:
    """Return the notes of the tables on every stage."""
    found: dict[str, Any] = {}
    for text in parts.folders.exchange("tables", json.dumps(notes)):
        for what, by_name in json.loads(text).items():
            found.setdefault(what, {}).update(by_name)
    return found


def load(
    parts: EngineParts,
    loaders: EngineLoaders,
    folder: Path,
    weights_only: bool,
    missing: Sequence[str] = (),
    unexpected: Sequence[str] = (),
    required: bool | None = None,
) -> LoadedStep | None:
    """Load a step. Implements ``Engine.load``.

    Returns:
        The step's user state and the names that were not loaded; None if the folder holds no step.
    """
    is_step = (folder / "manifest.json").is_file()
    settle(parts, "load")
    finish_updates(parts)
    step = _StepToLoad(parts, weights_only, missing, unexpected)
    checkpoints = parts.folders.at(folder.parent if is_step else folder)
    with closing(step.opened):
        loaded = checkpoints.load(
            step.choose,
            path=folder if is_step else None,
            examine=step.examine,
            look_first=None if required is False else lambda: check_folder(folder),
        )
    if loaded is None:
        if required:
            raise CheckpointError(
                f"load: {folder} holds no step; give the folder that engine.save was given, or leave out required=True"
            )
        return None
    for bucket in buckets(parts):
        bucket.settle()
    if parts.tables:
        notes = table_notes.notes_of(loaded.trainer, str(loaded.path))
        stored = with_base(loaded.path, loaded.manifest, notes)
        saved_tables.load(parts.tables, checkpoints, stored, weights_only, step.found.kept)
    if parts.world.rank == 0:
        for line in step.found.lines():
            _log.warning("step %d: %s", loaded.step, line)
    if weights_only:
        for bucket, optimizer in parts.trained if parts.config.ema is not None else ():
            with bucket.opened(changes=True):
                optimizer.state.restart_average()
    else:
        notes = loaded.trainer.get("engine", {})
        _restore(parts, loaders, notes, loaded.manifest, step.moments, step.found)
    return LoadedStep(dict(step.saved.user), [*step.found.kept, *step.found.grown])


class _StepToLoad:
    """The step that a load tries: the notes in it, its differences from the model, and the moments to fill.

    A load of a folder may try several steps; the attributes describe the newest of them.
    """

    def __init__(
        self, parts: EngineParts, weights_only: bool, missing: Sequence[str], unexpected: Sequence[str]
    ) -> None:
        self._parts = parts
        self._weights_only = weights_only
        self._patterns = missing, unexpected
        self.opened = CheckpointState(parts, changes=True)
        self.saved = SavedState()
        self.found = StepDifferences(missing, unexpected)
        self.moments: dict[int, dict[str, Flat]] = {}

    def examine(self, reader: StepReader) -> None:
        """Check the notes of a step before any tensor is filled."""
        trainer = read_object(reader.text(TRAINER), f"{reader.path / TRAINER}")
        self.saved = SavedState.of(trainer, reader.path)
        if not self._weights_only:
            self._parts.optimizer_groups.check_state(self.saved.engine.groups)
        if self._parts.tables:
            table_notes.examine(reader, (self._parts.world.rank, self._parts.world.size))

    def choose(self, manifest: Manifest) -> list[TensorPieces]:
        """Compare a step with the model, and return the tensors to load from the step."""
        parts, differences = self._parts, StepDifferences(*self._patterns)
        self.found = compare(parts.spec, parts.tables, manifest, self._weights_only, differences)
        self.moments = {} if self._weights_only else _empty_moments(parts, manifest, self.opened)
        return _items_to_load(parts, manifest, self.moments, self.found, self.opened)


def compare(
    spec: ModelSpec, tables: ModelTables, manifest: Manifest, weights_only: bool, found: StepDifferences
) -> StepDifferences:
    """Compare the tensors of a step with the model's, with the same result on every rank.

    Returns:
        The differences.

    Raises:
        MismatchError: if a difference is not allowed, or if a pattern matches nothing.
    """
    ours = {entry.name: (entry.shape, entry.aliases) for entry in spec.parameters.values()}
    buffers = {name: (shape, ()) for name, (shape, _, is_saved) in spec.buffers.items() if is_saved}
    known = {*spec.canonical, *ours, *buffers, *(name for name, _, _ in tables.each())}
    held = {name for tensor in manifest.tensors for name in manifest.names_of(tensor.name)}
    found.check_patterns(known, held, f"step {manifest.step}")
    for kind, entries in (("weight", ours), ("buffer", buffers)):
        plain = set(map(plain_name, entries))
        for name, (shape, aliases) in entries.items():
            stored = manifest.find(kind, name)
            if stored is None:
                found.lacks(kind, name, f"{tuple(shape)} is not in the checkpoint", *aliases)
            elif tuple(stored.shape) != tuple(shape):
                how = f"is {tuple(stored.shape)} in the checkpoint and {tuple(shape)} in this model"
                found.lacks(kind, name, how, *aliases)
        for tensor in manifest.tensors:
            if tensor.kind == kind and plain.isdisjoint(map(plain_name, manifest.names_of(tensor.name))):
                found.holds(kind, tensor.name, tensor.shape)
    if tables:
        saved_tables.compare(tables, manifest, weights_only, found)
    found.check(f"step {manifest.step}")
    return found


def moments_of(manifest: Manifest, registry: Registry) -> tuple[list[str], str]:
    """Return the kinds of optimizer state that a step holds and this optimizer can take.

    Returns:
        (labels of the moments, a sentence if optimizer state is dropped or starts fresh).

    Raises:
        MismatchError: if another optimizer made the state.
    """
    kinds = {tensor.kind for tensor in manifest.tensors if not table_notes.is_of_tables(tensor.kind)}
    labels = sorted(kinds - {*_OURS, EMA})
    expected = sorted({info.label for info in registry.of_kind("moment")} - {EMA})
    averages = any(info.label == EMA for info in registry.of_kind("moment"))
    average, note = ([EMA] if averages and EMA in kinds else []), ""
    if averages != (EMA in kinds):
        how = "starts with the weights that are loaded" if averages else "is dropped"
        note = (
            f"step {manifest.step} holds {'no' if averages else 'an'} average of the weights (ema): it {how}"
        )
    held, kept = ", ".join(labels) or "none", ", ".join(expected) or "none"
    if labels == expected:
        return labels + average, note
    if labels and expected:
        raise MismatchError(
            f"step {manifest.step} holds the optimizer state {held}; this optimizer keeps {kept}",
            "Use the optimizer it was saved with, or load(..., weights_only=True)",
        )
    what = "starts fresh" if expected else "is dropped"
    said = f"step {manifest.step} holds the optimizer state {held}; this optimizer keeps {kept}: it {what}"
    return labels + average, f"{said}; {note}" if note else said


# Saving ------------------------------------------------------------------------------------------------------------


def _agree_on_scalars(
    parts: EngineParts, fault: str = ""
) -> tuple[tuple[dict[str, float], dict[str, dict[str, float]]], frozenset[str], dict[str, list[str]]]:
    """Exchange the optimizer's single numbers between all ranks.

    Args:
        parts: The running parts of the engine.
        fault: The reason why no load would accept the rows that this rank is about to save; empty if a load would.

    Returns:
        ((common scalars, exceptions by name), parameters without state, labels of moments by name), over all ranks.

    Raises:
        CheckpointError: on all ranks, if a rank has a ``fault`` or if ranks count differently; nothing is written.
    """
    own: dict[str, dict[str, float] | None] = {}
    labels: dict[str, list[str]] = {}
    for bucket, optimizer in parts.trained:
        kept = optimizer.state.labels
        labels |= {slot.name: kept for slot in bucket.layout.slots}
        rows = optimizer.state.scalars()
        for slot, start, stop, local in bucket.layout.overlaps(*bucket.owned_range):
            row = next(row for row in rows if row.start < local + stop - start and local < row.stop)
            own[slot.name] = row.scalars if row.has_state else None
    mine = json.dumps({"scalars": own, "labels": labels, "fault": fault})
    answers: list[dict[str, Any]] = [json.loads(text) for text in parts.folders.exchange("scalars", mine)]
    for rank, answer in enumerate(answers):
        if answer["fault"]:
            raise CheckpointError(
                f"save: no load would take the rows of rank {rank}, so nothing is written: {answer['fault']}. Save "
                "between two steps"
            )
    told: dict[str, dict[str, float] | None] = {}
    for rank, answer in enumerate(answers):
        for name, scalars in answer["scalars"].items():
            if told.setdefault(name, scalars) != scalars:
                raise CheckpointError(
                    f"optimizer: rank {rank} counts {scalars} for its part of {name}, another rank {told[name]}"
                )
    counted = Counter(json.dumps(scalars, sort_keys=True) for scalars in told.values() if scalars is not None)
    common: dict[str, float] = json.loads(counted.most_common(1)[0][0]) if counted else {}
    exceptions = {name: scalars for name, scalars in told.items() if scalars not in (None, common)}
    stateless = frozenset(name for name, scalars in told.items() if scalars is None)
    return (common, exceptions), stateless, {k: v for answer in answers for k, v in answer["labels"].items()}


# Loading -----------------------------------------------------------------------------------------------------------


def _items_to_load(
    parts: EngineParts,
    manifest: Manifest,
    moments: Mapping[int, Mapping[str, Flat]],
    found: StepDifferences,
    opened: CheckpointState,
) -> list[TensorPieces]:
    """Return every tensor of the whole model, with the pieces to fill: masters if the model has them, else weights.

    Tensors that keep their values, or that are passed over, are requested in the step's own shape without pieces, so
    nothing of them is read.
    """
    held: Pieces = {}
    for bucket in buckets(parts):
        layout = bucket.layout
        target: Flat = opened.of(bucket, "weight") if bucket.holds("weight") else bucket.weight.shard
        first = bucket.weight.first
        if bucket.weight.master is not None:
            target = bucket.weight.master if bucket.state is None else opened.of(bucket, bucket.state.master)
            first = bucket.owned_range[0] * bucket.owned_elements
        add_pieces(parts, held, "state", layout.slots, first, target, None)
        for label, flat in moments.get(id(bucket), {}).items():
            add_pieces(parts, held, label, layout.slots, first, flat, None)
    left = set(map(plain_name, (*found.kept, *found.passed_over)))
    labels = {label for flats in moments.values() for label in flats}
    items = [
        TensorPieces(tensor.kind, tensor.name, tuple(tensor.shape), tensor.torch_dtype, [])
        for tensor in manifest.tensors
        if plain_name(tensor.name) in left and tensor.kind in (*_OURS, *labels)
    ]
    for info in parts.registry.of_kind("parameter"):
        if plain_name(info.name) in left:
            continue
        dtype = _state_dtype(parts, info)
        state = held.get(("state", info.name), [])
        has_master = manifest.find("master", info.name) is not None
        items.append(TensorPieces("master" if has_master else "weight", info.name, info.shape, dtype, state))
        if has_master:
            items.append(TensorPieces("weight", info.name, info.shape, dtype, []))
        for label in sorted(labels):
            if manifest.find(label, info.name) is not None:
                items.append(
                    TensorPieces(label, info.name, info.shape, dtype, held.get((label, info.name), []))
                )
    return items + [item for item in buffer_items(parts, to_write=False) if plain_name(item.name) not in left]


def _state_dtype(parts: EngineParts, info: TensorInfo) -> torch.dtype:
    """Return the dtype that the optimizer updates: the master's, or that of a frozen weight."""
    trained = parts.spec.parameters[info.name].trained
    return parts.registry.get("master", info.name).dtype if trained else info.dtype


def _empty_moments(
    parts: EngineParts, manifest: Manifest, opened: CheckpointState
) -> dict[int, dict[str, Flat]]:
    """Return flat buffers for the moments in the step, by bucket.

    Raises:
        MismatchError: if another optimizer made the moments.
    """
    labels, note = moments_of(manifest, parts.registry)
    if note and parts.world.rank == 0:
        _log.warning("%s", note)
    return {
        id(bucket): {
            label: torch.zeros_like(bucket.weight.master)
            if bucket.state is None and optimizer.state.coded is None
            else opened.of(bucket, label)
            for label in labels
            if any(manifest.find(label, slot.name) is not None for slot in bucket.layout.slots)
        }
        for bucket, optimizer in parts.trained
        if bucket.weight.master is not None
    }


def _restore(
    parts: EngineParts,
    loaders: EngineLoaders,
    state: Mapping[str, Any],
    manifest: Manifest,
    moments: Mapping[int, Mapping[str, Flat]],
    found: StepDifferences,
) -> None:
    progress = parts.progress
    progress.step_count = int(state.get("step", manifest.step))
    progress.applied_steps = int(state.get("applied", progress.step_count))
    progress.skipped_in_a_row = int(state.get("skipped_in_a_row", 0))
    parts.optimizer_groups.load_state(state.get("groups"))
    progress.best = best_steps(state.get("best"))
    loaders.move_to(state.get("loaders", []))
    parts.accumulation.reference = float(state.get("reference", 0.0))
    if parts.loss_scale is not None and state.get("loss_scale"):
        parts.loss_scale.load_state(state["loss_scale"])
    told = state.get("optimizer", {"common": {}, "exceptions": {}})
    exceptions = {plain_name(name): each for name, each in told["exceptions"].items()}
    for bucket, optimizer in parts.trained:
        flats = moments[id(bucket)]
        pieces: list[tuple[int, dict[str, float] | None]] = []
        for slot, start, stop, local in bucket.layout.overlaps(*bucket.owned_range):
            has_state = any(manifest.find(label, slot.name) is not None for label in flats)
            others = {*flats, *optimizer.state.labels} - {EMA}
            counts_alone = bool(told["common"]) and not others
            known = (has_state or counts_alone) and slot.name not in found.kept
            pieces.append(
                (
                    local + stop - start,
                    exceptions.get(plain_name(slot.name), told["common"]) if known else None,
                )
            )
        if bucket.state is None:
            optimizer.state.restore(
                {label: flat for label, flat in flats.items() if isinstance(flat, Tensor)}, pieces
            )
            if EMA not in flats:
                optimizer.state.restart_average()
            continue
        is_new = optimizer.state.coded is not None or any(scalars is None for _, scalars in pieces)
        is_new = is_new or (optimizer.state.average is not None and EMA not in flats)
        with bucket.opened(changes=is_new, kinds=None if is_new else ()):  # else all is loaded
            tensors = bucket.state.tensors
            labels = () if optimizer.state.coded is not None else optimizer.state.labels
            optimizer.state.restore({label: tensors[label] for label in labels}, pieces)
            if EMA not in flats:
                optimizer.state.restart_average()
