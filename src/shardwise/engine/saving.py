"""Saving and loading: the engine's flat buffers as pieces of whole tensors.

    weight   whole tensors in the compute dtype                     every rank writes the range of its shard index
    buffer   rank 0's                                               (batch statistics are per rank by default)
    master   only where it is not the weight itself
    moments  ``exp_avg`` ...; left out for parameters that never got a gradient

On loading each rank asks for the elements it owns. Weights are rounded from the masters again, so nothing is read twice
and a change of precision needs no conversion: a step without masters gives its weights, one with masters gives those.

Single numbers of the optimizer (step counts) are the same for almost every parameter; ``trainer.json`` holds the common
ones and the exceptions by name.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.checkpoint import Checkpoints, Item, Manifest, Piece, Solo
from shardwise.engine.parts import Parts
from shardwise.engine.state import buckets
from shardwise.plan.errors import CheckpointError, MismatchError
from shardwise.plan.unit import Slot

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

_OURS = ("weight", "buffer", "master")


def checkpoints_in(engine: "Engine", parts: Parts, folder: Path) -> Checkpoints:
    """The one ``Checkpoints`` of a folder."""
    key = folder.absolute()
    if key not in parts.checkpoints:
        peers = parts.world if parts.world.size > 1 else Solo()
        parts.checkpoints[key] = Checkpoints(key, peers, engine.config.checkpoint)
    return parts.checkpoints[key]


def save(engine: "Engine", parts: Parts, folder: Path, trainer: dict[str, Any], **options: Any) -> None:
    """See ``Engine.save``."""
    common, stateless, labels = _agree_on_scalars(engine, parts)
    state = {
        "step": engine.step_count,
        "reference": engine.weight_reference,
        "loss_scale": None if parts.loss_scale is None else parts.loss_scale.state(),
        "optimizer": {"common": common[0], "exceptions": common[1]},
        "layout": {"mesh": str(parts.plan.mesh), "zero_stage": engine.config.zero.stage},
    }
    aliases = {s.name: list(s.aliases) for b in buckets(parts) for s in b.layout.slots if s.aliases}
    checkpoints_in(engine, parts, folder).save(
        engine.step_count,
        _items_to_save(parts, labels, stateless),
        {"engine": state, "user": trainer},
        aliases=aliases,
        **options,
    )


def load(engine: "Engine", parts: Parts, folder: Path, weights_only: bool) -> dict[str, Any] | None:
    """See ``Engine.load``. None where the folder holds no step."""
    is_step = (folder / "manifest.json").is_file()
    moments: dict[int, dict[str, Tensor]] = {}

    def choose(manifest: Manifest) -> list[Item]:
        moments.clear()
        moments.update({} if weights_only else _empty_moments(parts, manifest))
        return _items_to_load(parts, manifest, moments)

    checkpoints = checkpoints_in(engine, parts, folder.parent if is_step else folder)
    loaded = checkpoints.load(choose, path=folder if is_step else None)
    if loaded is None:
        return None
    for bucket in buckets(parts):
        bucket.publish()
        bucket.gather_update().wait()
    if not weights_only:
        _restore(engine, parts, loaded.trainer.get("engine", {}), loaded.manifest, moments)
    return dict(loaded.trainer.get("user", {}))


# Saving ------------------------------------------------------------------------------------------------------------


def _items_to_save(parts: Parts, labels: Sequence[str], stateless: frozenset[str]) -> list[Item]:
    """Every tensor of the model state, with the pieces that this rank writes."""
    items = []
    writes = parts.replicate.index == 0
    optimizers = {id(bucket): optimizer for bucket, optimizer in parts.trained}
    for bucket in buckets(parts):
        layout = bucket.layout
        piece = layout.shard_elements
        window = (parts.shard.index * piece, (parts.shard.index + 1) * piece) if writes else (0, 0)
        held = (window[0] if bucket.weight.numel() < layout.elements else 0, bucket.weight)
        items += _items("weight", bucket.dtypes.compute, layout.slots, [held], window)
        if bucket.master is None:
            continue
        first = bucket.owned_range[0] * bucket.master.numel()
        if bucket.dtypes.master != bucket.dtypes.compute:
            items += _items("master", bucket.dtypes.master, layout.slots, [(first, bucket.master)], window)
        with_state = [slot for slot in layout.slots if slot.name not in stateless]
        moments: dict[str, list[tuple[int, Tensor]]] = {label: [] for label in labels}
        for label, start, _, tensor in optimizers[id(bucket)].moments():
            moments[label].append((first + start, tensor))
        for label, held_moments in moments.items():
            items += _items(label, bucket.dtypes.master, with_state, held_moments, window)
    persistent = parts.model.state_dict(keep_vars=True)
    for name, buffer in parts.model.named_buffers():
        if name in persistent:
            flat = buffer.detach().contiguous().view(-1)
            pieces = [Piece(0, flat.numel(), flat)] if parts.world.rank == 0 else []
            items.append(Item("buffer", name, tuple(buffer.shape), buffer.dtype, pieces))
    return items


def _items(
    kind: str,
    dtype: torch.dtype,
    slots: Iterable[Slot],
    held: Sequence[tuple[int, Tensor]],
    window: tuple[int, int],
) -> list[Item]:
    """Items of ``slots``: what of them lies in ``held`` ((first element in the bucket, flat tensor)) and ``window``."""
    items = []
    for slot in slots:
        pieces = []
        for first, tensor in held:
            start = max(slot.offset, first, window[0])
            stop = min(slot.offset + slot.elements, first + tensor.numel(), window[1])
            if start < stop:
                part = tensor.detach()[start - first : stop - first]
                pieces.append(Piece(start - slot.offset, stop - slot.offset, part))
        items.append(Item(kind, slot.name, slot.shape, dtype, pieces))
    return items


def _agree_on_scalars(
    engine: "Engine", parts: Parts
) -> tuple[tuple[dict[str, float], dict[str, dict[str, float]]], frozenset[str], list[str]]:
    """((common scalars, exceptions by name), parameters without state, labels of moments) over all ranks."""
    own: dict[str, dict[str, float] | None] = {}
    labels: set[str] = set()
    for bucket, optimizer in parts.trained:
        labels |= {label for label, *_ in optimizer.moments()}
        rows = optimizer.scalars()
        for slot, start, stop, local in bucket.layout.overlaps(*bucket.owned_range):
            row = next(row for row in rows if row.start < local + stop - start and local < row.stop)
            own[slot.name] = row.scalars if row.has_state else None
    counted = Counter(json.dumps(scalars, sort_keys=True) for scalars in own.values() if scalars is not None)
    common: dict[str, float] = json.loads(counted.most_common(1)[0][0]) if counted else {}
    told: dict[str, Any] = {
        "common": common,
        "exceptions": {name: scalars for name, scalars in own.items() if scalars not in (None, common)},
        "stateless": [name for name, scalars in own.items() if scalars is None],
        "labels": sorted(labels),
    }
    answers = [told]
    if parts.world.size > 1:
        parts.saves += 1
        key = f"engine/{parts.number}/scalars/{parts.saves}"
        parts.world.post(key, json.dumps(told))
        answers = [json.loads(text) for text in parts.world.collect(key, engine.config.checkpoint.timeout_s)]
    common = next((answer["common"] for answer in answers if answer["common"]), {})
    exceptions: dict[str, dict[str, float]] = {}
    for rank, answer in enumerate(answers):
        if answer["common"] not in ({}, common):
            raise CheckpointError(
                f"optimizer: rank {rank} counts {answer['common']} where rank 0 counts {common}"
            )
        exceptions |= answer["exceptions"]
    stateless = frozenset(name for answer in answers for name in answer["stateless"])
    return (
        (common, exceptions),
        stateless,
        sorted({label for answer in answers for label in answer["labels"]}),
    )


# Loading -----------------------------------------------------------------------------------------------------------


def _items_to_load(
    parts: Parts, manifest: Manifest, moments: Mapping[int, Mapping[str, Tensor]]
) -> list[Item]:
    """Every tensor that the model has, with the pieces to fill: masters where there are any, else weights."""
    items = []
    everything = (0, 1 << 62)
    for bucket in buckets(parts):
        layout = bucket.layout
        target, first = bucket.weight, 0
        if bucket.master is not None:
            target, first = bucket.master, bucket.owned_range[0] * bucket.master.numel()
        elif target.numel() < layout.elements:
            first = parts.shard.index * layout.shard_elements
        for slot in layout.slots:
            has_master = manifest.find("master", slot.name) is not None
            filled = _items(
                "master" if has_master else "weight", target.dtype, [slot], [(first, target)], everything
            )
            items += filled
            if has_master:
                items += _items("weight", target.dtype, [slot], [], everything)
        for label, flat in moments.get(id(bucket), {}).items():
            slots = [slot for slot in layout.slots if manifest.find(label, slot.name) is not None]
            items += _items(label, flat.dtype, slots, [(first, flat)], everything)
    persistent = parts.model.state_dict(keep_vars=True)
    for name, buffer in parts.model.named_buffers():
        if name in persistent:
            flat = buffer.detach().view(-1)
            items.append(
                Item("buffer", name, tuple(buffer.shape), buffer.dtype, [Piece(0, flat.numel(), flat)])
            )
    return items


def _empty_moments(parts: Parts, manifest: Manifest) -> dict[int, dict[str, Tensor]]:
    """Flat buffers for the moments in the step, by bucket. Errors: MismatchError where another optimizer made them."""
    labels = sorted({tensor.kind for tensor in manifest.tensors} - set(_OURS))
    expected = sorted({info.label for info in parts.plan.registry.of_kind("moment")})
    if labels and expected and labels != expected:
        raise MismatchError(
            f"step {manifest.step} holds the optimizer state {', '.join(labels)}; this optimizer keeps "
            f"{', '.join(expected)}. Use the optimizer it was saved with, or load(..., weights_only=True)"
        )
    return {
        id(bucket): {label: torch.zeros_like(bucket.master) for label in labels}
        for bucket, _ in parts.trained
        if bucket.master is not None
    }


def _restore(
    engine: "Engine",
    parts: Parts,
    state: Mapping[str, Any],
    manifest: Manifest,
    moments: Mapping[int, Mapping[str, Tensor]],
) -> None:
    engine.step_count = int(state.get("step", manifest.step))
    engine.weight_reference = float(state.get("reference", 0.0))
    if parts.loss_scale is not None and state.get("loss_scale"):
        parts.loss_scale.load_state(state["loss_scale"])
    told = state.get("optimizer", {"common": {}, "exceptions": {}})
    for bucket, optimizer in parts.trained:
        flats = moments[id(bucket)]
        pieces: list[tuple[int, dict[str, float] | None]] = []
        for slot, start, stop, local in bucket.layout.overlaps(*bucket.owned_range):
            has_state = any(manifest.find(label, slot.name) is not None for label in flats)
            known = has_state or bool(told["common"] and not flats)
            pieces.append(
                (local + stop - start, told["exceptions"].get(slot.name, told["common"]) if known else None)
            )
        optimizer.restore(flats, pieces)
