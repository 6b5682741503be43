"""Slots: a few fixed pieces of memory in which many Units take turns.

A Unit always returns to the slot that it was given first. Views that autograd saved in the forward pass point into the
slot and read the right bytes again when the Unit is gathered for its backward pass. Addresses never change, nothing is
allocated after the first step, and no allocator can give the memory to other code in between.

Two Units may share a slot only if they are never needed at the same time. In the first pass a Unit takes the free slot
that was released longest ago, so with k slots the Units i and i+k share one. Units of different sizes never share.

Cost: bytes of the largest set of Units that are gathered at once; of each size as many as are gathered ahead.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.base.errors import UsageError
from shardwise.memory.direct_io import aligned_empty


@dataclass(eq=False)
class _PoolSlot:
    memory: Tensor
    row: "list[_PoolSlot]"
    """All slots of the same size, the least recently released first."""
    holder: Hashable | None = None
    zeros: tuple[tuple[int, int], ...] | None = None
    """The ranges [start, stop) that holders leave zero, or None if the memory is poisoned."""


class SlotPool:
    """Slots of one device. Owners are any hashable names.

    Args:
        device: The device of the memory.
        ahead_bytes: Bytes of slots of one size that may wait for their use beside one in use; a larger slot may
            wait if it is the only one.
        poison: True to fill released slots with NaN.
    """

    def __init__(self, device: torch.device, ahead_bytes: int = 0, poison: bool = False):
        self._device = device
        self._ahead_bytes = ahead_bytes
        self._poison = poison
        self._slots: dict[tuple[int, torch.dtype, Hashable], list[_PoolSlot]] = {}
        self._home: dict[Hashable, _PoolSlot] = {}

    def acquire(
        self,
        owner: Hashable,
        elements: int,
        dtype: torch.dtype,
        movable: bool = False,
        apart: Hashable = None,
    ) -> Tensor:
        """Return flat memory for an owner, at the same address every time.

        Args:
            owner: Name of the owner.
            elements: Number of elements.
            dtype: Dtype of the memory.
            movable: True if no views of the memory remain outside, so that the owner may get another slot if
                its own is taken.
            apart: Owners with different values never share a slot.

        Returns:
            The memory.

        Raises:
            UsageError: If the slot is taken and the owner cannot move.
        """
        slot = self._home.get(owner)
        if slot is None or (movable and slot.holder is not None):
            slot = self._home[owner] = self._free_slot(elements, dtype, apart)
        elif slot.holder is not None:
            raise UsageError(
                f"memory: {owner} is needed while {slot.holder}, which shares its memory, is still in use; the model "
                "runs its blocks in an order that sharing cannot serve. Set zero.reuse_buffers: false"
            )
        slot.holder = owner
        return slot.memory

    def holder_in_the_way(self, owner: Hashable) -> Hashable | None:
        """Return the present holder of the owner's slot, or None if the slot is free."""
        slot = self._home.get(owner)
        return None if slot is None else slot.holder

    def release(self, owner: Hashable) -> None:
        """Release the owner's slot."""
        slot = self._home[owner]
        assert slot.holder == owner, f"slot of {owner} is held by {slot.holder}"
        slot.holder = None
        slot.row.remove(slot)
        slot.row.append(slot)
        if self._poison and slot.memory.dtype.is_floating_point:
            slot.memory.fill_(float("nan"))
            slot.zeros = None

    def change_zeros(self, owner: Hashable, zeros: tuple[tuple[int, int], ...]) -> bool:
        """Return True if the owner must fill ranges of its slot with zeros, because earlier holders did not.

        Args:
            owner: Name of the owner, which holds its slot and writes into none of the ranges.
            zeros: The ranges [start, stop) that are to be zero.
        """
        slot = self._home[owner]
        before, slot.zeros = slot.zeros, zeros
        return before != zeros

    def empty(self) -> None:
        """Release all memory; later owners get new memory.

        The caller ensures that no slot is held and that no view of a slot is used any more.
        """
        held = [slot.holder for row in self._slots.values() for slot in row if slot.holder is not None]
        assert not held, f"slots are held by {held}"
        self._slots.clear()
        self._home.clear()

    @property
    def bytes(self) -> int:
        """Bytes of all slots, in use or not."""
        return sum(slot.memory.nbytes for row in self._slots.values() for slot in row)

    def owners_by_slot(self) -> list[tuple[int, list[Hashable]]]:
        """Return the bytes of each slot with the owners that take turns in it."""
        return [
            (slot.memory.nbytes, [owner for owner, home in self._home.items() if home is slot])
            for row in self._slots.values()
            for slot in row
        ]

    def _free_slot(self, elements: int, dtype: torch.dtype, apart: Hashable) -> _PoolSlot:
        kind = elements, dtype, apart
        row = self._slots.setdefault(kind, [])
        free = [slot for slot in row if slot.holder is None]
        spare = max(self._ahead_bytes // max(elements * dtype.itemsize, 1), 1) if self._ahead_bytes else 0
        if free and len(row) > spare:
            return free[0]
        with torch.inference_mode(
            False
        ):  # the first pass may be an evaluation, and autograd cannot save a tensor made in inference mode
            slot = _PoolSlot(self._new(elements, dtype), row)
        row.append(slot)
        return slot

    def _new(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeros; on a CPU in memory that a disk can read into without a copy."""
        if self._device.type != "cpu":
            return torch.zeros(elements, dtype=dtype, device=self._device)
        return aligned_empty(elements, dtype).zero_()
