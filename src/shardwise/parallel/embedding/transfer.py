"""What goes between host and device for tables, each way as one copy.

[Note: host and device] Keys are looked at where looking is free, on the host: checked, counted, exchanged, made into
places. What an accelerator needs of a batch is places and weights, and they go there as one copy (``together``), so
that no operation on it has a size which the host must ask for. Rows of dynamic tables stay on the host with their
indexes; their vectors go to the device as one copy, and the vectors' gradients come back as one.

Cost: the bytes, packed once in pinned memory on the way to the device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.memory.pinned import pinned_empty
from shardwise.memory.streams import to_device

_ALIGNED = 16
"""Bytes at whose multiples tensors of one copy begin."""


class SlabRows(NamedTuple):
    """Rows of a slab: int64 [A]."""

    here: Tensor
    """On the host, which counts them."""
    there: Tensor
    """Where the slab is."""

    def part(self, start: int, stop: int) -> "SlabRows":
        """Some of them, in a row."""
        return SlabRows(self.here[start:stop], self.there[start:stop])


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one dtype there: one copy for all, which the host waits for."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the host on ``device``: one copy for all, from pinned memory, which nobody waits for."""
    if device.type == "cpu" or not tensors:
        return list(tensors)
    spans = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors]
    packed = pinned_empty(sum(spans), torch.uint8)
    for span, tensor in zip(packed.split(spans), tensors, strict=True):
        span[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    there = to_device(packed, device, is_ours=True)
    # Each with a version of its own: who changes one in place has not changed the others.
    return [
        span[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).data
        for span, tensor in zip(there.split(spans), tensors, strict=True)
    ]
