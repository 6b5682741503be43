"""Memory of gradients between the steps of a CPU rank: given back, or kept.

Given back, it serves the activations of the next forward pass. But what the system has taken back it hands out anew
page by page, each zeroed: 5 ms for 10 MB, longer than copying gradients into it. Kept, it costs the activations' bytes
A on top of the gradients' G, and no time. So it is kept where A is at most G / 8.

A is what resident memory has grown by, from the end of a step to the first gradient of the next one. Only buffers count
that the system takes back at once: smaller ones lie in the heap, whose pages stay. Accelerators' memory stays in
torch's cache either way.

Cost: one line of /proc a step; memory up to an eighth of the gradients.
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from shardwise.observe.memory import resident_bytes

_MAPPED_BYTES = 32 << 20
"""From here on glibc gives memory back to the system as soon as it is free, on 64 bits."""
_SHARE = 8


class GradientMemory:
    """Of all buckets of a rank. Owners are any hashable names; each has one buffer at a time, of one size."""

    def __init__(self, device: torch.device, mapped_bytes: int | None = None):
        self._device = device
        self._mapped_bytes = _MAPPED_BYTES if mapped_bytes is None else mapped_bytes
        self._kept: dict[Hashable, Tensor] = {}
        self._taken: dict[Hashable, Tensor] = {}
        self._step_bytes = 0
        """Of the buffers of the running step, or of the last one."""
        self._resting: int | None = None
        """Resident bytes between two steps; None where nobody knows, and nothing is kept."""
        self._keeps = False

    @property
    def kept_bytes(self) -> int:
        """Kept for owners that have no buffer now."""
        return sum(buffer.nbytes for buffer in self._kept.values())

    def take(self, owner: Hashable, elements: int, dtype: torch.dtype) -> Tensor:
        """A buffer for ``owner``, with any numbers in it."""
        if self._device.type != "cpu" or elements * dtype.itemsize < self._mapped_bytes:
            return torch.empty(elements, dtype=dtype, device=self._device)
        if not self._taken:
            self._begin_step()
        buffer = self._kept.pop(owner, None)
        if buffer is None:
            buffer = torch.empty(elements, dtype=dtype)
        self._taken[owner] = buffer
        self._step_bytes += buffer.nbytes
        return buffer

    def give(self, owner: Hashable) -> None:
        """The step is over, and nobody holds the owner's buffer any more. Without one nothing happens."""
        if owner not in self._taken:
            return
        buffer = self._taken.pop(owner)
        if self._keeps:
            self._kept[owner] = buffer
        del buffer
        if not self._taken:
            self._resting = resident_bytes()

    def empty(self) -> None:
        """What is kept is given back."""
        self._kept.clear()
        self._resting = None

    def _begin_step(self) -> None:
        """Decide for the end of this step, by the one before it."""
        now = resident_bytes()
        if now is not None and self._resting is not None:
            self._keeps = (now - self._resting) * _SHARE <= self._step_bytes
            if not self._keeps:
                self._kept.clear()
        self._step_bytes = 0
