"""The tensors of a block's forward pass that are equal on all ranks of "tp", so that each rank may keep a part of them.

Nothing is guessed from values. Tensor parallelism itself is right only if certain tensors are equal on its ranks:
inputs of cut layers from a whole sequence, and inputs of modules that hold whole parameters between the cut layers
(norms, dropouts). When such a module is called, its tensors are noted (parallel/tensor/apply.py): its inputs and
outputs, and everything that autograd saves inside a module without children and with a single input tensor, because
that is a function of this tensor and of whole parameters.

A note is of a storage at a version, and is taken only if the tensor covers the whole storage. The memory of a block's
first pass is compared too (``are_alike``): kernels that add in any order may make ranks differ in a last digit.

Cost: some microseconds a note, one read of the noted memory and one small all-reduce for each block's first pass.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.comm.collectives import Group
from shardwise.memory.digest import digest

Key = tuple[int, int]
"""(storage, version) of a tensor."""


def key_of(tensor: Tensor) -> Key:
    """Return the storage and the present version of a tensor."""
    return tensor.untyped_storage()._cdata, tensor._version


class AlikeStorages:
    """Storages that are equal on the ranks of a group, in the forward pass of the running block.

    Args:
        group: The "tp" ranks.
    """

    def __init__(self, group: Group):
        self.group = group
        self._inside = 0
        self._noted: dict[Key, StorageWeakRef] | None = None
        """Noted storages, or None outside of blocks.

        The weak reference detects that another storage has taken the address."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take notes inside the context, while a block's forward pass runs."""
        self._inside, self._noted = 0, {}
        try:
            yield
        finally:
            self._noted = None

    def note(self, tensor: Tensor) -> None:
        """Note that ``tensor`` is equal on all ranks."""
        if self._noted is None or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        is_all_of_it = storage.nbytes() == tensor.numel() * tensor.itemsize
        if is_all_of_it and torch.ops.aten.is_non_overlapping_and_dense(tensor):
            self._noted[key_of(tensor)] = StorageWeakRef(storage)

    def enter(self) -> None:
        """Begin a module in which all saved tensors are computed only from equal tensors."""
        self._inside += 1

    def leave(self) -> None:
        """End the module that ``enter`` began."""
        self._inside = max(self._inside - 1, 0)

    def saved(self, tensor: Tensor) -> None:
        """Note ``tensor``, which autograd saves, if the running module computes only from equal tensors."""
        if self._inside:
            self.note(tensor)

    def knows(self, key: Key) -> bool:
        """Return True if the key was noted in this pass of the block."""
        return self._noted is not None and key in self._noted

    def are_alike(self, memories: Iterable[Tensor], what: str) -> bool:
        """Return True if all ranks hold the same bits. Collective, with the same answer on all ranks.

        Args:
            memories: Flat tensors of bytes.
            what: Name of the memory in errors and traces.

        Returns:
            True if all bits are equal.
        """
        total = 0
        device = None
        for memory in memories:
            device = memory.device
            total = total * 31 + int(digest(memory))
        return self.group.all_equal(total & (1 << 64) - 1, what, device)
