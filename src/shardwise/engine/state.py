"""Looking at model state from outside: bytes, gradients, whole parameters. Every function is collective.

Whole tensors are put together one Unit at a time, so that a rank never holds more than one Unit beyond its own state
(``full_parameters`` alone holds all).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardwise.engine.parts import Parts
from shardwise.parallel.zero.bucket import BucketState
from shardwise.plan.errors import UsageError


def buckets(parts: Parts) -> list[BucketState]:
    """All buckets, frozen ones too, in order of Units."""
    return [bucket for state in parts.executor.states for bucket in state.buckets]


def bytes_by_kind(parts: Parts) -> dict[str, int]:
    """Bytes of weights, gradients, masters and moments on this rank; shared memory counts once."""
    total = {"weight": 0, "grad": 0, "master": 0, "moments": 0}
    for bucket in buckets(parts):
        total["weight"] += bucket.weight.nbytes
        total["grad"] += 0 if bucket.grad is None else bucket.grad.nbytes
        own_master = bucket.master is not None and bucket.dtypes.master != bucket.dtypes.compute
        total["master"] += bucket.master.nbytes if own_master and bucket.master is not None else 0
    total["moments"] = sum(optimizer.state_bytes for _, optimizer in parts.trained)
    return total


def gradients(parts: Parts, weight: float, scale: float) -> dict[str, Tensor]:
    """Mean gradients by name."""
    votes = [float(used) for bucket, _ in parts.trained for used in bucket.used]
    vector = torch.tensor([weight, *votes], dtype=torch.float64, device=parts.device)
    parts.both.all_reduce(vector, "the summed weights", purpose="control").wait()
    total, *used = vector.tolist()
    found: dict[str, Tensor] = {}
    place = 0
    for bucket, _ in parts.trained:
        bucket.finish_reduce()
        full = bucket.gathered_copy(bucket.owned_grad)
        for slot, view in zip(bucket.layout.slots, bucket.fresh_views(full), strict=True):
            if used[place]:
                found[slot.name] = view / (total * scale)
            place += 1
    return found


@contextmanager
def full_parameters(parts: Parts, write: bool) -> Iterator[dict[str, nn.Parameter]]:
    """See ``Engine.full_parameters``."""
    lent = []
    for bucket in buckets(parts):
        full = bucket.gathered_copy()
        bucket.lend(full)
        lent.append((bucket, full))
    edited: list[str] = []
    try:
        with torch.no_grad():
            yield dict(parts.model.named_parameters(remove_duplicate=False))
    finally:
        for bucket, full in lent:
            edited += bucket.reclaim(full, keep=write)
    if edited and not write:
        raise UsageError(
            f"full_parameters: {', '.join(edited[:5])} was edited in a context for reading, in which some ranks "
            "and stages lose the edit; use full_parameters(write=True)"
        )


def state_dict(parts: Parts) -> dict[str, Tensor]:
    """See ``Engine.state_dict``. Parameters are copies; buffers too."""
    whole: dict[str, Tensor] = {}
    for bucket in buckets(parts):
        full = bucket.gathered_copy()
        for slot, view in zip(bucket.layout.slots, bucket.fresh_views(full), strict=True):
            tensor = view.detach().to("cpu", copy=True)
            for name in (slot.name, *slot.aliases):
                whole[name] = tensor
    order = list(parts.model.state_dict(keep_vars=True))
    buffers = {name: buffer for name, buffer in parts.model.named_buffers(remove_duplicate=False)}
    return {
        name: whole[name] if name in whole else buffers[name].detach().to("cpu", copy=True)
        for name in order
        if name in whole or name in buffers
    }
