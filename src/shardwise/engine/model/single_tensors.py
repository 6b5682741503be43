"""Tensors of one parameter, by its name: whole on every rank, or this rank's own elements.

    parameter   the weight, in the compute dtype
    master      the tensor that the optimizer updates; for a frozen parameter its weight
    gradient    the mean over ranks and microbatches before clipping, between a step's last backward and ``step()``
    any other   a moment of the optimizer by torch's name: exp_avg, exp_avg_sq, momentum_buffer, ...

A rank's own elements are flat: its range of the (slice of the) parameter, which may be empty.
Cost: P elements of the parameter to all ranks, in broadcasts; nothing else is gathered.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.base.errors import UsageError
from shardwise.base.policy import nearest
from shardwise.engine.parts.parts import EngineParts, TrainedBucket
from shardwise.engine.state.state import are_alike, assembled, buckets, settle, take
from shardwise.engine.step.last_pass import settled_divisor
from shardwise.parallel.zero.bucket import BucketState
from shardwise.plan.registry import TensorInfo
from shardwise.plan.unit import SlotOverlap

_KINDS = ("parameter", "master", "gradient")


def full_tensor(parts: EngineParts, name: str, of: str) -> Tensor | None:
    """Return a whole tensor of one parameter. Implements ``Engine.full_tensor``."""
    info = _info(parts, name, of)
    if info is None:
        return None
    divisor = _divisor(parts, of, "full_tensor")
    own: dict[str, Tensor] = {}
    for bucket, place in _held(parts, info):
        if of == "gradient" and not _is_used(parts, bucket, place):
            continue
        with bucket.opened():
            own[info.name] = bucket.weight.gathered_slot(place, _source(parts, bucket, of)).clone()
    whole = assembled(parts, own, [info]).get(info.name)
    return whole if whole is None or of != "gradient" else whole / divisor


def set_full_tensor(parts: EngineParts, name: str, value: Tensor, of: str) -> None:
    """Write a whole tensor of one parameter. Implements ``Engine.set_full_tensor``."""
    info = _trained_info(parts, name, of)
    _check_tensor("set_full_tensor", name, value)
    if tuple(value.shape) != info.shape:
        raise UsageError(
            f"set_full_tensor: {name} ({of}) has the shape {info.shape}, given {tuple(value.shape)}"
        )
    if not are_alike(parts, [value]):
        raise UsageError(
            f"set_full_tensor: the ranks gave unlike values for {name} ({of}); give all the same, as "
            "torch.distributed.broadcast leaves them"
        )
    value = value.detach().to(parts.device)
    divisor = _divisor(parts, of, "set_full_tensor")
    for bucket, place in _held(parts, info):
        slot, local = bucket.layout.slots[place], value
        if parts.groups["model"].size > 1:
            local = torch.zeros(slot.shape, dtype=value.dtype, device=value.device)
            take(parts, info.name, value, local)
        flat = local.reshape(-1)
        held = _overlap(bucket, place)
        _write(parts, bucket, place, of, flat[held.start : held.stop] if held else flat[:0], divisor)


def local_tensor(parts: EngineParts, name: str, of: str) -> Tensor | None:
    """Return this rank's own elements of a tensor. Implements ``Engine.local_tensor``."""
    info = _info(parts, name, of)
    if info is None:
        return None
    divisor = settled_divisor(parts) if of == "gradient" else 1.0
    for bucket, place in _held(parts, info):
        if of == "gradient" and not _is_used(parts, bucket, place):
            return None
        held = _overlap(bucket, place)
        with bucket.opened():
            source = _owned(bucket, _source(parts, bucket, "master" if of == "parameter" else of))
            mine = source[held.local : held.local + held.stop - held.start] if held else source[:0]
            if of == "parameter":
                return mine.to(bucket.dtypes.compute, copy=True)
            return mine / divisor if of == "gradient" else mine.clone()
    return None


def set_local_tensor(parts: EngineParts, name: str, value: Tensor, of: str) -> None:
    """Write this rank's own elements of a tensor. Implements ``Engine.set_local_tensor``."""
    info = _trained_info(parts, name, of)
    _check_tensor("set_local_tensor", name, value)
    divisor = _divisor(parts, of, "set_local_tensor")
    for bucket, place in _held(parts, info):
        held = _overlap(bucket, place)
        elements = held.stop - held.start if held else 0
        if value.numel() != elements:
            raise UsageError(
                f"set_local_tensor: this rank has {elements} elements of {name} ({of}), given {value.numel()}"
            )
        _write(parts, bucket, place, of, value.detach().to(parts.device).reshape(-1), divisor)


def _divisor(parts: EngineParts, of: str, call: str) -> float:
    """Return the factor of the stored gradient over the mean gradient; 1 for other tensors. Collective.

    An update that counts one step late is adopted first.
    """
    if of == "gradient":
        return settled_divisor(parts)
    settle(parts, f"{call}({of})")
    return 1.0


def _check_tensor(call: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise UsageError(
            f"{call}: expected a tensor for {name}, given {value!r:.100}; torch.as_tensor makes one"
        )


def _info(parts: EngineParts, name: str, of: str) -> TensorInfo | None:
    """Return the registry's entry of a tensor; None if a frozen parameter has no such tensor.

    Raises:
        UsageError: for an unknown name or moment.
    """
    canonical = parts.spec.canonical
    if name not in canonical:
        raise UsageError(f"no parameter is called {name!r}{nearest(name, [*canonical])}")
    labels = dict.fromkeys(info.label for info in parts.registry.of_kind("moment"))
    labels |= dict.fromkeys(label for _, optimizer in parts.trained for label in optimizer.state.labels)
    if of not in (*_KINDS, *labels):
        raise UsageError(f"no optimizer here has a moment {of!r}{nearest(of, [*_KINDS, *labels])}")
    first = canonical[name]
    if of == "parameter" or (of == "master" and not parts.spec.parameters[first].trained):
        return parts.registry.get("parameter", first)
    if not parts.spec.parameters[first].trained:
        return None
    return parts.registry.get("gradient" if of == "gradient" else "master", first)


def _trained_info(parts: EngineParts, name: str, of: str) -> TensorInfo:
    info = _info(parts, name, of)
    if info is None:
        raise UsageError(f"{name} is frozen: it has no {of}")
    return info


def _held(parts: EngineParts, info: TensorInfo) -> Iterator[tuple[BucketState, int]]:
    """Yield (bucket, index in the bucket) for every bucket on this rank that holds the parameter.

    Several buckets hold it if stages of this rank are tied.
    """
    for bucket in buckets(parts):
        for place, slot in enumerate(bucket.layout.slots):
            if slot.name == info.name:
                yield bucket, place


def _overlap(bucket: BucketState, place: int) -> SlotOverlap | None:
    """Return the range that this rank owns of a parameter; None if it owns no elements."""
    slot = bucket.layout.slots[place]
    owned = bucket.layout.overlaps(*bucket.owned_range)
    return next((overlap for overlap in owned if overlap.slot is slot), None)


def _source(parts: EngineParts, bucket: BucketState, of: str) -> Tensor:
    """Return the wanted tensor of a bucket, flat: all of the bucket, or this rank's range of it."""
    if of == "gradient":
        return bucket.gradient.owned
    if of == "parameter" or bucket.weight.master is None:
        return bucket.weight.shard
    if of == "master":
        return bucket.weight.master.to(parts.device)
    return _trained(parts, bucket).optimizer.state.read(of).to(parts.device)


def _owned(bucket: BucketState, source: Tensor) -> Tensor:
    """Return this rank's range of ``source``, which is either the whole bucket or that range."""
    index, count = bucket.owned_range
    return source if source.numel() < bucket.layout.elements else source.chunk(count)[index]


def _trained(parts: EngineParts, bucket: BucketState) -> TrainedBucket:
    return next(each for each in parts.trained if each.bucket is bucket)


def _is_used(parts: EngineParts, bucket: BucketState, place: int) -> bool:
    vote = torch.tensor([float(bucket.gradient.used[place])], dtype=torch.float64, device=parts.device)
    parts.dp.all_reduce(vote, "whether a parameter was used", purpose="control").wait()
    return bool(vote.item())


def _write(
    parts: EngineParts, bucket: BucketState, place: int, of: str, mine: Tensor, divisor: float
) -> None:
    """Write ``mine``, the elements that this rank owns of a parameter."""
    held, slot = _overlap(bucket, place), bucket.layout.slots[place]
    if of == "gradient":
        bucket.gradient.used[place] = True
        if held:
            bucket.gradient.owned[held.local : held.local + len(mine)].copy_(mine * divisor)
    elif of in ("parameter", "master"):
        if bucket.weight.is_summoned:
            raise UsageError(
                f"{slot.name}: not inside engine.full_parameters(); edit it there, or write it outside"
            )
        bucket.fill(lambda _, start, stop, dtype: mine.to(dtype), lambda each: each is slot)
    elif held is not None:
        with bucket.opened(changes=True):
            _trained(parts, bucket).optimizer.state.write(of, held.local, mine)
