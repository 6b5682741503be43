"""Copies between host and device for tables: one copy for each direction.

[Note: host and device] Keys are inspected on the host, where reading them needs no synchronization: they are checked,
counted, exchanged and converted to indices there. Operations on an accelerator need indices and weights of a batch,
which go there as one copy (``together``), so that no operation on the accelerator has a size that the host must wait
for. Rows of dynamic tables stay on the host with their indexes; their vectors go to the device as one copy, and the
vectors' gradients come back as one for each microbatch, which the host waits for at the end of the step.

Cost: the bytes, packed once in pinned memory on the way to the device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.memory.pinned import pinned_empty
from shardwise.memory.streams import to_device

_ALIGNED = 16
"""Alignment in bytes of the tensors within one copy."""


class SlabRows(NamedTuple):
    """Rows of a slab: int64 [A]."""

    here: Tensor
    """The rows on the host, which counts them."""
    there: Tensor
    """The rows on the device of the slab."""

    def part(self, start: int, stop: int) -> "SlabRows":
        """Return the rows [start, stop)."""
        return SlabRows(self.here[start:stop], self.there[start:stop])


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of one dtype to the host in one transfer, which the host waits for."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors from the host to ``device`` in one asynchronous transfer from pinned memory."""
    if device.type == "cpu" or not tensors:
        return list(tensors)
    spans = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors]
    packed = pinned_empty(sum(spans), torch.uint8)
    for span, tensor in zip(packed.split(spans), tensors, strict=True):
        span[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    there = to_device(packed, device, is_ours=True)
    # ``.data`` gives each view its own version counter: without it, an in-place change of one would make autograd
    # reject the others.
    return [
        span[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).data
        for span, tensor in zip(there.split(spans), tensors, strict=True)
    ]
