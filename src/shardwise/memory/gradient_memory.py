"""Memory of gradients between the steps of a CPU rank: released, or kept.

Released memory serves the activations of the next forward pass. But the system returns released memory page by page,
each zeroed: 5 ms for 10 MB, longer than copying gradients into it. Kept memory costs the activations' bytes A on top of
the gradients' G, and no time. So memory is kept if A is at most G / 8.

A is the growth of resident memory from the end of a step to the first gradient of the next step. Only buffers count
that the system takes back at once: smaller buffers lie in the heap, whose pages stay. Accelerators' memory stays in
torch's cache either way.

Cost: one line of /proc a step; memory up to an eighth of the gradients.
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from shardwise.observe.memory import resident_bytes

_MAPPED_BYTES = 32 << 20
"""Least size that glibc returns to the system as soon as it is freed, on 64 bits."""
_SHARE = 8


class GradientMemory:
    """Memory of all gradient buffers of a rank.

    Owners are any hashable names; each has one buffer at a time, of one size.

    Args:
        device: The device of the buffers.
        mapped_bytes: Least size of buffers that may be kept; None for the size that glibc returns to the
            system.
    """

    def __init__(self, device: torch.device, mapped_bytes: int | None = None):
        self._device = device
        self._mapped_bytes = _MAPPED_BYTES if mapped_bytes is None else mapped_bytes
        self._kept: dict[Hashable, Tensor] = {}
        self._taken: dict[Hashable, Tensor] = {}
        self._step_bytes = 0
        """Bytes of the buffers of the running step, or of the last step."""
        self._resting: int | None = None
        """Resident bytes between two steps, or None if unknown, in which case nothing is kept."""
        self._keeps = False

    @property
    def kept_bytes(self) -> int:
        """Bytes kept for owners that have no buffer now."""
        return sum(buffer.nbytes for buffer in self._kept.values())

    def take(self, owner: Hashable, elements: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer for ``owner``, with undefined numbers."""
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
        """Take back the owner's buffer after the step; do nothing if the owner has none."""
        if owner not in self._taken:
            return
        buffer = self._taken.pop(owner)
        if self._keeps:
            self._kept[owner] = buffer
        del buffer
        if not self._taken:
            self._resting = resident_bytes()

    def empty(self) -> None:
        """Release the kept memory."""
        self._kept.clear()
        self._resting = None

    def _begin_step(self) -> None:
        """Decide by the last step whether this step's buffers are kept at its end."""
        now = resident_bytes()
        if now is not None and self._resting is not None:
            self._keeps = (now - self._resting) * _SHARE <= self._step_bytes
            if not self._keeps:
                self._kept.clear()
        self._step_bytes = 0
