"""What of a block's forward pass is known to be alike on all ranks of "tp", so that each may keep a part of it.

Nothing is guessed from values. Tensor parallelism itself is right only where certain tensors are alike on its ranks:
what enters cut layers from a whole sequence, and what goes into modules that hold whole parameters between the cut
layers (norms, dropouts). Where such a module is called, its tensors are noted (parallel/tensor/apply.py): those that it
is given and gives back, and whatever autograd saves inside of one that has no modules in it and one tensor to start
from, for that is a function of this tensor and of whole parameters.

A note is of a storage at a version, and only where the tensor is all of it. The memory of a block's first pass is
compared besides (``are_alike``): kernels that add in any order may part ranks by a last digit.

Cost: some microseconds a note, one read of the noted memory and one small all-reduce for each block's first pass.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.comm.collectives import Group

Key = tuple[int, int]
"""(storage, version)."""
_WORDS = 1 << 18
"""Words of a digest that are multiplied at once."""


def key_of(tensor: Tensor) -> Key:
    """Of what ``tensor`` shows, as it is now."""
    return tensor.untyped_storage()._cdata, tensor._version


class Alike:
    """Storages that are alike on the ranks of ``group``, in the forward pass of the block that runs."""

    def __init__(self, group: Group):
        self.group = group
        self._inside = 0
        self._noted: dict[Key, StorageWeakRef] | None = None
        """The reference keeps an address from being another storage's. None outside of blocks."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A block's forward pass runs: notes are taken."""
        self._inside, self._noted = 0, {}
        try:
            yield
        finally:
            self._noted = None

    def note(self, tensor: Tensor) -> None:
        """``tensor`` is alike on all ranks."""
        if self._noted is None or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        is_all_of_it = storage.nbytes() == tensor.numel() * tensor.itemsize
        if is_all_of_it and torch.ops.aten.is_non_overlapping_and_dense(tensor):
            self._noted[key_of(tensor)] = StorageWeakRef(storage)

    def enter(self) -> None:
        """What is saved from now on is computed from what is alike alone."""
        self._inside += 1

    def leave(self) -> None:
        """No more."""
        self._inside = max(self._inside - 1, 0)

    def saved(self, tensor: Tensor) -> None:
        """autograd saves ``tensor``."""
        if self._inside:
            self.note(tensor)

    def knows(self, key: Key) -> bool:
        """Whether it was noted in this pass of the block."""
        return self._noted is not None and key in self._noted

    def are_alike(self, memories: Iterable[Tensor], what: str) -> bool:
        """Whether all ranks hold the same bits in ``memories`` [bytes]; one answer on all."""
        total = 0
        device = None
        for memory in memories:
            device = memory.device
            total = total * 31 + _digest(memory)
        return self.group.all_equal(total & (1 << 64) - 1, what, device)


def _digest(memory: Tensor) -> int:
    """A sum of its words, each times an odd number of its place, modulo 2^64."""
    bytes_in_words = memory.numel() // 8 * 8
    total = memory[bytes_in_words:].sum(dtype=torch.int64)
    words = memory[:bytes_in_words].view(torch.int64)
    for start in range(0, len(words), _WORDS):
        part = words[start : start + _WORDS]
        total += (part * torch.arange(2 * start + 1, 2 * (start + len(part)), 2, device=memory.device)).sum()
    return int(total)
