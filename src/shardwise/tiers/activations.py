"""Activations of blocks in host memory, from a block's forward pass to its backward pass.

Tensors that autograd saves inside a block's forward begin to go down as they are saved, and come back one block ahead:

    compute    F(b0)   F(b1)      F(b2)  loss  B(b2)   B(b1)   B(b0)
    down         b0 .....  b1 .....
    copies                                      b1 ..   b0 ..

OFFLOAD(b0) of the Plan's list, behind b1's forward, waits until b0's saved tensors are down and releases their device
memory: a device holds two blocks' activations, however far the host has run ahead. So the last block's activations are
still on the device when the backward pass begins. If no other pass comes between (``RankClass.turning_stages``), they
do not go down at all. A block that is no Unit of its own (``zero.units``) has no OFFLOAD: the end of the next block's
forward does the same.

The unit of a move is a storage, once for each version of it, however many tensors of it are saved and in however many
blocks of a pass. These stay on the device: memory that parameters and buffers show (their version counters are checked
by [Note: stale memory] in parallel/zero/views.py), storages up to ``SMALL_BYTES``, and tensors of subclasses. Host
memory stays too.

[Note: versions]
autograd does not check versions of tensors that a hook has packed. So the hooks check versions, of tensors that stay
too: a tensor without memory shares the version counter of a moved tensor.

[Note: parts along tp]
A storage that is equal on all ranks of "tp" (tiers/alike.py), with an uncut sequence, goes down in parts, one on each
rank. A part comes back two blocks ahead, and is gathered one block ahead, so that no exchange of the running block
waits for a copy:

    compute    B(b3)         B(b2)         B(b1)
    up         part of b1    part of b0
    gather           b2            b1            b0

Ranks gather alike: RELOAD(u) of the Plan's list gathers all that a block has saved in parts, in the order in which it
was saved, whether still wanted or not. If a pass departs from the list, the first tensor wanted in a block brings all
of the block's tensors, and those of the block before. Some storages are known to be equal only when the block's forward
is over, for example a block's input, which recomputation saves first; such storages go down at the end of the forward.

Recomputation has hooks of its own inside these hooks, which get the tensors that recomputation keeps: a block's input
under ``full``. A block that runs inside other hooks (a user's own checkpoint) leaves all tensors to those.

Cost: bytes of the storages down and up, of those that are equal on tp ranks 1/tp, and (tp-1)/tp of them over tp; some
microseconds a saved tensor; pinned memory, in whole powers of two.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.base.errors import ConfigError
from shardwise.comm.collectives import Group
from shardwise.memory.streams import begin_down, down_by_now, to_computation
from shardwise.passes.absent import AbsentTensor
from shardwise.tiers.alike import AlikeStorages, Key, key_of
from shardwise.tiers.offload import OffloadPolicy

_log = logging.getLogger(__name__)

SMALL_BYTES = 1 << 16
"""Largest storage that always stays on the device, because moving a small storage is not worth its overhead."""
_WORD = 16
"""Alignment of parts in bytes."""


def check_blocks(names: Sequence[str], policy: OffloadPolicy) -> list[str]:
    """Return the names of the blocks whose activations move.

    Args:
        names: Names of all blocks of the model.
        policy: The offload keys of the run.

    Returns:
        All names, or none if activations stay on the device.

    Raises:
        ConfigError: If activations are to move and the model has no blocks.
    """
    if policy.activations == "device":
        return []
    if not names:
        raise ConfigError(
            "offload.activations: host, but the model's blocks are not found (modules of one class that repeat in a "
            "ModuleList or a Sequential); name them in zero.units: [pattern], or leave offload.activations out"
        )
    return list(names)


class MovedBytes:
    """Bytes that blocks of one stage have moved."""

    def __init__(self) -> None:
        self.down = 0
        self.up = 0
        self.held = 0
        """Bytes in host memory or in flight."""
        self.most = 0
        """Most bytes that were held when a block's forward pass ended."""
        self.gone: deque[int] = deque()
        """Bytes that are no longer held. Any thread may drop the last use, and a sum would need a lock."""
        self.unused: deque[tuple[Callable[[], object], Tensor]] = deque()
        """Device memory into which a copy was begun that nothing has waited for, with the function that waits."""

    def count(self) -> None:
        """Update ``held`` and ``most`` at the end of a block's forward pass."""
        self.drop_unused()
        while self.gone:
            self.held -= self.gone.popleft()
        self.most = max(self.most, self.held)

    def drop_unused(self) -> None:
        """Let the computation wait for copies that nobody used, and drop their memory."""
        while self.unused:
            arrive, _ = self.unused.popleft()
            arrive()


class _MovedStorage:
    """A storage that moves from the device to host memory and back.

    The storage stays on the device until its copy is down, and is on the device again once fetched. Of a
    storage that is equal on the ranks of ``over`` each rank holds a part. See [Note: parts along tp].
    """

    def __init__(self, memory: Tensor, moved_bytes: MovedBytes):
        self._nbytes = memory.nbytes
        self._device = memory.device
        self._here: Tensor | None = memory
        self._part: Tensor | None = None
        """This rank's part on the device, or in flight."""
        self._there: Tensor | None = None
        self._arrive: Callable[[], object] | None = None
        self._over: Group | None = None
        self._what = ""
        self._held = 0
        self._bytes = moved_bytes

    def begin(self, over: Group | None = None, what: str = "") -> None:
        """Begin to copy the storage, or this rank's part of it, to host memory."""
        assert self._here is not None, "it has not left the device"
        self._over, self._what = over, what
        if over is None:
            self._there = begin_down(self._here)
        else:
            first = min(over.index * self._part_bytes, self._nbytes)
            self._there = begin_down(self._here[first : first + self._part_bytes])
        self._held = self._there.nbytes
        self._bytes.down += self._held
        self._bytes.held += self._held

    @property
    def is_in_parts(self) -> bool:
        """True if the ranks gather the storage."""
        return self._over is not None

    @property
    def _part_bytes(self) -> int:
        """Bytes of each rank's part, in whole words; the last rank may have fewer."""
        assert self._over is not None, "it is in parts"
        return -(-self._nbytes // (_WORD * self._over.size)) * _WORD

    def release(self) -> None:
        """Drop the device memory, because the copy is down; a storage that was fetched again stays."""
        if self._there is not None:
            self._here = None

    def fetch(self) -> None:
        """Begin to bring the storage, or this rank's part of it, back to the device."""
        if self._here is not None or self._there is None:
            return
        size = self._nbytes if self._over is None else self._part_bytes
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._arrive = to_computation(self._there, memory[: self._there.nbytes])
        self._bytes.up += self._there.nbytes
        self._there = None
        if self._over is None:
            self._here = memory
        else:
            self._part = memory

    def gather(self) -> None:
        """Begin to bring the full storage back; for parts, all ranks call this together."""
        self.fetch()
        if self._here is not None or self._over is None:
            return
        assert self._part is not None and self._arrive is not None, "just fetched"
        self._arrive()
        self._here = torch.empty(len(self._part) * self._over.size, dtype=torch.uint8, device=self._device)
        self._arrive = self._over.all_gather(self._here, self._part, self._what, "activations").wait
        self._part = None

    def memory(self) -> Tensor:
        """Return the storage's memory on the device, for later work on the current stream."""
        self.gather()
        assert self._here is not None, "just fetched"
        if self._arrive is not None:
            self._arrive()
            self._arrive = None
        return self._here

    def __del__(self) -> None:
        self._bytes.gone.append(self._held)
        memory = self._here if self._part is None else self._part
        if self._arrive is not None and memory is not None:
            self._bytes.unused.append((self._arrive, memory))


class _BlockPass:
    """One forward pass of one block.

    Args:
        place: Index of the block.
        before: The pass of the block before in the same pass of the model, or None.
        known: Storages that the pass of the model has moved so far.
        holds_before: True to keep ``before`` alive, even if none of its tensors is wanted any more.
    """

    def __init__(
        self, place: int, before: "_BlockPass | None", known: dict[Any, Any], holds_before: bool = False
    ):
        self.place = place
        self.known: dict[tuple[StorageWeakRef, int], ref[_MovedStorage]] = known
        """Storages that the pass of the model has moved so far, by storage and version."""
        self.moved: list[ref[_MovedStorage]] = []
        self.undecided: list[tuple[Key, _MovedStorage]] = []
        """Storages that go down when it is known whether they are equal on all ranks."""
        self.parts: list[_MovedStorage] = []
        """Storages to gather, kept alive so that all ranks gather the same even if some ranks have dropped a
        tensor."""
        self.is_down: Callable[[], object] = lambda: None
        self._before: Callable[[], _BlockPass | None]
        self._before = (lambda: before) if holds_before or before is None else ref(before)
        self._is_recalled = False
        self.is_expected = False
        """True after RELOAD of this pass, and after the report that it is missing."""

    @property
    def is_wanted(self) -> bool:
        """True if autograd holds any of the saved tensors that move."""
        return any(each() is not None for each in self.moved)

    def release(self) -> None:
        """Wait until the saved tensors are down, and drop their device memory."""
        self.is_down()
        for each in self.moved:
            moved = each()
            if moved is not None:
                moved.release()

    def gather(self) -> None:
        """Begin to bring back the storages that are still wanted, and all that are in parts."""
        for each in self.moved:
            moved = each()
            if moved is not None:
                moved.gather()
        self.parts.clear()

    def reload(self) -> None:
        """Run RELOAD: bring back the saved tensors, and this rank's parts of those of the block before."""
        if self._is_recalled:
            return
        self._is_recalled = True
        self.gather()
        before = self._before()
        for moved in () if before is None else before.parts:
            moved.fetch()

    def open(self) -> None:
        """Bring back the saved tensors and those of the block before, because the backward pass has begun."""
        self.reload()
        before = self._before()
        if before is not None:
            before.reload()


class _SavedTensor(Protocol):
    """The object that autograd holds in place of a saved tensor."""

    call: _BlockPass

    def tensor(self) -> Tensor:
        """Return the saved tensor.

        Raises:
            RuntimeError: If the tensor was changed since it was saved.
        """


class _KeptTensor:
    """A saved tensor that stays where it is."""

    def __init__(self, call: _BlockPass, tensor: Tensor):
        self.call = call
        # A parameter is kept itself, because its memory may be another in the backward pass. Any other tensor is
        # detached: an output would hold the node that saves it, which is a reference cycle.
        self._tensor = tensor if tensor.is_leaf and tensor.requires_grad else tensor.detach()
        self._version = self._tensor._version

    def tensor(self) -> Tensor:
        """Return the saved tensor, after the check of its version."""
        _check(self._tensor, self._version, self._tensor.shape)
        return self._tensor


class _MovedTensor:
    """A saved tensor whose storage moves."""

    def __init__(self, call: _BlockPass, tensor: Tensor, moved: _MovedStorage):
        self.call = call
        self._moved = moved
        self._form = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._witness = tensor.detach()
        self._version = self._witness._version
        self._witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def tensor(self) -> Tensor:
        """Return the saved tensor in the memory of its storage, after the check of its version."""
        _check(self._witness, self._version, self._form[1])
        memory = self._moved.memory()
        made = torch.empty(0, dtype=self._witness.dtype, device=memory.device)
        return made.set_(memory.untyped_storage(), *self._form)  # type: ignore[call-overload, no-any-return]


def _check(tensor: Tensor, version: int, shape: torch.Size) -> None:
    """Raise an error if a saved tensor has another version than when it was saved. See [Note: versions]."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(shape)} that a block saved (offload.activations: host) is at version {tensor._version}; "
            f"expected version {version} instead"
        )


class ActivationOffload:
    """The hooks that move the saved tensors of one stage's blocks.

    Args:
        module: The stage.
        device: The device of the computation.
        keeps_last: True to leave everything that the last block saves on the device.
        alike: Record of the tensors that are equal on the ranks of "tp", or None for a single rank.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, keeps_last: bool, alike: AlikeStorages | None = None
    ):
        self.bytes = MovedBytes()
        self._module = module
        self._device = device
        self._keeps_last = keeps_last
        self._alike = alike
        self._has_parts: dict[int, bool] = {}
        """By index of a block: whether the noted storages of its first pass had the same bits on all ranks."""
        self._names: list[str] = []
        self.microbatch: Callable[[], int] = lambda: -1
        """Function that returns the running microbatch, if several are in flight."""
        self.listed: Collection[str] = ()
        """Names of the blocks that have OFFLOAD and RELOAD in the Plan's list."""
        self.on_missed_offload: Callable[[str], None] = lambda name: None
        """Function that is told the name of a listed block whose tensors were left on the device by the list."""
        self.on_missed_reload: Callable[[str], None] = lambda name: None
        """Function that is told the name of a listed block whose tensors are wanted before its RELOAD."""
        self._calls: dict[tuple[str, int], list[ref[_BlockPass]]] = {}
        """Passes whose backward pass has not been recalled, by block and microbatch."""
        self._call: _BlockPass | None = None
        """The last pass of a block."""
        self._leaving: list[_BlockPass] = []
        """Passes whose saved tensors are going down and still have device memory, the oldest first."""
        self._shown: set[int] = set()
        """Storages of the stage's parameters and buffers at the beginning of the pass."""

    def wrap(self, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        """Wrap the forward of the blocks, so that their saved tensors move.

        Args:
            blocks: The blocks with their names, in the order in which they run.
        """
        self._names = [name for name, _ in blocks]
        for place, (_, block) in enumerate(blocks):
            self._wrap(block, place)

    def _wrap(self, block: nn.Module, place: int) -> None:
        inner = block.forward

        @torch.compiler.disable(recursive=False)
        @wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            # If other hooks are active, as those of a checkpoint around this block, they handle the saved tensors.
            if not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(False):
                return inner(*args, **kwargs)
            call = self._begin(place)

            def pack(tensor: Tensor) -> _SavedTensor:
                with torch.no_grad():
                    return self._pack(call, block, tensor)

            with nullcontext() if self._alike is None else self._alike.listening():
                with saved_tensors_hooks(pack, self._unpack):
                    output = inner(*args, **kwargs)
                self._decide(call)
            self._end(call)
            return output

        block.forward = forward  # type: ignore[method-assign]

    def _begin(self, place: int) -> _BlockPass:
        before = self._call
        for call in [each for each in self._leaving if each is not before and self._is_listed(each)]:
            self._let_go(call, self.on_missed_offload)
        if before is None or before.place >= place:  # another pass
            before, self._shown = None, _storages(self._module)
        call = _BlockPass(place, before, {} if before is None else before.known, self._alike is not None)
        calls = self._calls.setdefault((self._names[place], self.microbatch()), [])
        calls[:] = [each for each in calls if each() is not None]
        calls.append(ref(call))
        return call

    def offload(self, name: str) -> None:
        """Run OFFLOAD of a block: wait until its saved tensors are down, and release their device memory."""
        for call in [each for each in self._leaving if self._names[each.place] == name]:
            self._let_go(call)

    def _let_go(self, call: _BlockPass, report: Callable[[str], None] | None = None) -> None:
        """Release the device memory of a pass, and report its block if any of its tensors is still wanted."""
        self._leaving.remove(call)
        if report is not None and call.is_wanted:
            report(self._names[call.place])
        call.release()

    def _is_listed(self, call: _BlockPass) -> bool:
        return self._names[call.place] in self.listed

    def reload(self, name: str) -> None:
        """Run RELOAD of a block ahead of its backward pass, for its last pass that is still alive."""
        calls = self._calls.get((name, self.microbatch()), [])
        call = None
        while calls and call is None:
            call = calls.pop()()
        if call is not None:
            call.is_expected = True
            if call in self._leaving:
                self._leaving.remove(call)
                call.is_down()  # else the backward pass could free memory that the copy still reads
                if call is not self._call and self._is_listed(call):
                    self.on_missed_offload(name)
            with torch.no_grad():
                call.reload()

    def _decide(self, call: _BlockPass) -> None:
        """Let the undecided storages go down, in full or in parts, at the end of a block's forward."""
        alike = self._alike
        if alike is None:
            return
        parts = [moved for key, moved in call.undecided if alike.knows(key)]
        if parts and call.place not in self._has_parts:
            self._has_parts[call.place] = self._compare(alike, call.place, parts)
        for key, moved in call.undecided:
            self._go_down(call, moved, alike.knows(key))
        call.undecided.clear()

    def _compare(self, alike: AlikeStorages, place: int, parts: Sequence[_MovedStorage]) -> bool:
        what = f"what block {self._names[place]} has saved"
        same = alike.are_alike((moved.memory() for moved in parts), what)
        if not same and alike.group.index == 0:
            _log.warning(
                "offload.activations: %s should be alike on the ranks of tp, and is not, to the bit: each keeps all of "
                "it. Kernels that add in any order do that; so does a tensor.table that takes a cut input for a whole "
                "one (style sequence)",
                what,
            )
        return same

    def _go_down(self, call: _BlockPass, moved: _MovedStorage, is_alike: bool) -> None:
        if self._alike is not None and is_alike and self._has_parts.get(call.place):
            moved.begin(self._alike.group, f"what block {self._names[call.place]} has saved")
            call.parts.append(moved)
        else:
            moved.begin()

    def _end(self, call: _BlockPass) -> None:
        call.is_down = down_by_now(self._device)
        for before in [each for each in self._leaving if not self._is_listed(each)]:
            self._let_go(before)
        self._leaving.append(call)
        self._call = call
        self.bytes.count()

    def _pack(self, call: _BlockPass, block: nn.Module, tensor: Tensor) -> _SavedTensor:
        is_kept = self._keeps_last and call.place == len(self._names) - 1
        if is_kept or not self._moves(block, tensor):
            return _KeptTensor(call, tensor)
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage), tensor._version
        known = call.known.get(key)
        moved = None if known is None else known()
        if moved is None:
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # type: ignore[call-overload]
            moved = _MovedStorage(memory, self.bytes)
            call.known[key] = ref(moved)
            self._note(call, tensor, moved)
        elif moved.is_in_parts:
            call.parts.append(moved)
        call.moved.append(ref(moved))
        return _MovedTensor(call, tensor, moved)

    def _note(self, call: _BlockPass, tensor: Tensor, moved: _MovedStorage) -> None:
        """Let the storage of ``tensor`` go down now, or leave it undecided until more is known."""
        if self._alike is None:
            moved.begin()
            return
        self._alike.saved(tensor)
        key = key_of(tensor)
        if call.place in self._has_parts and self._alike.knows(key):
            self._go_down(call, moved, is_alike=True)
        else:
            call.undecided.append((key, moved))

    def _moves(self, block: nn.Module, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device != self._device:
            return False
        if tensor.is_conj() or tensor.is_neg() or isinstance(tensor._base, nn.Parameter):
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() <= SMALL_BYTES or storage._cdata in self._shown:
            return False
        return storage._cdata not in _storages(block)  # gathered for this block

    def _unpack(self, saved: _SavedTensor) -> Tensor:
        call = saved.call
        if not call.is_expected:
            call.is_expected = True
            if self._is_listed(call):
                self.on_missed_reload(self._names[call.place])
        with torch.no_grad():
            call.open()
            return saved.tensor()


def _storages(module: nn.Module) -> set[int]:
    """Return the storages that parameters and buffers show now; stand-ins for other stages are left out."""
    with torch._C.DisableTorchFunctionSubclass():
        held = [*module.parameters(), *module.buffers()]
        return {
            each.untyped_storage()._cdata
            for each in held
            if each.layout is torch.strided and not isinstance(each, AbsentTensor)
        }
