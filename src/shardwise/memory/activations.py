"""Activations of blocks in host memory, from a block's forward pass to its backward pass.

What autograd saves inside a block's forward begins to go down as it is saved, and comes back one block ahead:

    compute    F(b0)   F(b1)      F(b2)  loss  B(b2)   B(b1)   B(b0)
    down         b0 .....  b1 .....
    copies                                      b1 ..   b0 ..

The end of b1's forward waits until what b0 saved is down, and lets go of it: a device holds two blocks' activations,
however far the host has run ahead. So the last block's are still there when the backward pass comes; where
no other pass may come between (no pipeline), they do not go down at all.

What moves is a storage, once for each version of it, however many tensors of it are saved and in however many blocks of
a pass. What stays: memory that parameters and buffers show (their version counters are what [Note: stale memory] in
parallel/zero/views.py checks), storages up to ``SMALL_BYTES``, host memory, tensors of classes of their own.

[Note: versions]
autograd does not check versions of what a hook has packed. So the hooks do, of what stays too: a tensor without memory
shares the version counter of a moved one.

[Note: parts along tp]
A storage that is alike on all ranks of "tp" (memory/alike.py), where the sequence is not cut, goes down in parts, one
on each rank. A part comes back two blocks ahead, and is gathered one ahead, so that no exchange of the running block
waits for a copy:

    compute    B(b3)         B(b2)         B(b1)
    up         part of b1    part of b0
    gather           b2            b1            b0

Ranks gather alike: RECALL(u) of the Plan's list gathers all that a block has saved so, in the order in which it was
saved, wanted still or not. Where a pass departs from the list, what is wanted first in a block brings all of it, and of
the one before. What is alike may be known when the block's forward is over alone, as of a
block's input that recomputation saves first; what is not known yet goes down then.

Recomputation has hooks of its own inside of these: they see what it keeps, a block's input under ``full``. A block that
runs inside of other hooks (a user's own checkpoint) leaves all to them.

Cost: bytes of the storages down and up, of those that are alike on tp ranks 1/tp, and (tp-1)/tp of them over tp; some
microseconds a saved tensor; pinned memory, in whole powers of two.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.comm.collectives import Group
from shardwise.memory.absent import Absent
from shardwise.memory.alike import Alike, Key, key_of
from shardwise.memory.offload import OffloadPolicy
from shardwise.memory.streams import begin_down, down_by_now, to_computation
from shardwise.plan.errors import ConfigError

_log = logging.getLogger(__name__)

SMALL_BYTES = 1 << 16
"""A storage up to this size takes longer to be asked for than to be kept."""
_WORD = 16
"""Bytes: parts begin at multiples."""


def check_blocks(names: Sequence[str], policy: OffloadPolicy) -> list[str]:
    """The blocks, out of all of the model's, whose activations move. Errors: ConfigError where there are none."""
    if policy.activations == "device":
        return []
    if not names:
        raise ConfigError(
            "offload.activations: host, but the model's blocks are not found (modules of one class that repeat in a "
            "ModuleList or a Sequential); name them in zero.units: [pattern], or leave offload.activations out"
        )
    return list(names)


class MovedBytes:
    """What blocks of one stage have moved, in bytes."""

    def __init__(self) -> None:
        self.down = 0
        self.up = 0
        self.held = 0
        """In host memory, or on their way."""
        self.most = 0
        """Most that were held when a block's forward pass ended."""
        self.gone: deque[int] = deque()
        """Held no more. Whatever thread drops the last use says so: a sum would need a lock."""

    def count(self) -> None:
        """A block's forward pass is over."""
        while self.gone:
            self.held -= self.gone.popleft()
        self.most = max(self.most, self.held)


class _Moved:
    """A storage: on the device until its copy is down, in host memory then, and on the device again once fetched.

    Of one that is alike on the ranks of ``over`` each has a part: [Note: parts along tp].
    """

    def __init__(self, memory: Tensor, moved_bytes: MovedBytes):
        self._nbytes = memory.nbytes
        self._device = memory.device
        self._here: Tensor | None = memory
        self._part: Tensor | None = None
        """On the device, or on its way."""
        self._there: Tensor | None = None
        self._arrive: Callable[[], object] | None = None
        self._over: Group | None = None
        self._what = ""
        self._held = 0
        self._bytes = moved_bytes

    def begin(self, over: Group | None = None, what: str = "") -> None:
        """Begin to copy it down: all of it, or this rank's part."""
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
        """Whether the ranks gather it."""
        return self._over is not None

    @property
    def _part_bytes(self) -> int:
        """Of every rank but the last, which may have fewer, in whole words."""
        assert self._over is not None, "it is in parts"
        return -(-self._nbytes // (_WORD * self._over.size)) * _WORD

    def release(self) -> None:
        """Its copy is down. What was fetched already stays."""
        if self._there is not None:
            self._here = None

    def fetch(self) -> None:
        """Begin to bring it back, or this rank's part of it."""
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
        """Begin to bring all of it back. In parts: all ranks do so together."""
        self.fetch()
        if self._here is not None or self._over is None:
            return
        assert self._part is not None and self._arrive is not None, "just fetched"
        self._arrive()
        self._here = torch.empty(len(self._part) * self._over.size, dtype=torch.uint8, device=self._device)
        self._arrive = self._over.all_gather(self._here, self._part, self._what, "activations").wait
        self._part = None

    def memory(self) -> Tensor:
        """On the device, for what the current stream does next."""
        self.gather()
        assert self._here is not None, "just fetched"
        if self._arrive is not None:
            self._arrive()
        return self._here

    def __del__(self) -> None:
        self._bytes.gone.append(self._held)


class _BlockPass:
    """One forward pass of one block. ``before``: the call of the block before it in the same pass; ``holds_before``:
    however little is wanted of that one still."""

    def __init__(
        self, place: int, before: "_BlockPass | None", known: dict[Any, Any], holds_before: bool = False
    ):
        self.place = place
        self.known: dict[tuple[StorageWeakRef, int], ref[_Moved]] = known
        """What the pass has moved so far, by storage and version."""
        self.moved: list[ref[_Moved]] = []
        self.undecided: list[tuple[Key, _Moved]] = []
        """What does not go down before it is known whether it is alike on all ranks."""
        self.parts: list[_Moved] = []
        """What is to be gathered: an object that only some ranks have let go would part them."""
        self.is_down: Callable[[], object] = lambda: None
        self._before: Callable[[], _BlockPass | None]
        self._before = (lambda: before) if holds_before or before is None else ref(before)
        self._is_recalled = False

    def release(self) -> None:
        """What it saved has to be down before the computation goes on; the device's memory goes."""
        self.is_down()
        for each in self.moved:
            moved = each()
            if moved is not None:
                moved.release()

    def gather(self) -> None:
        """Begin to bring back what is still wanted of it, and what is in parts."""
        for each in self.moved:
            moved = each()
            if moved is not None:
                moved.gather()
        self.parts.clear()

    def recall(self) -> None:
        """RECALL: what it saved comes, and parts of what the block before it saved."""
        if self._is_recalled:
            return
        self._is_recalled = True
        self.gather()
        before = self._before()
        for moved in () if before is None else before.parts:
            moved.fetch()

    def open(self) -> None:
        """Its backward pass has begun: what it saved is needed, and then what the block before it saved."""
        self.recall()
        before = self._before()
        if before is not None:
            before.recall()


class _Saved(Protocol):
    """What autograd holds in a tensor's place."""

    call: _BlockPass

    def tensor(self) -> Tensor:
        """It again. Errors: RuntimeError where it was changed since."""


class _KeptTensor:
    """A saved tensor that stays where it is."""

    def __init__(self, call: _BlockPass, tensor: Tensor):
        self.call = call
        # A parameter's memory may be another by then; an output would hold the node that saves it.
        self._tensor = tensor if tensor.is_leaf and tensor.requires_grad else tensor.detach()
        self._version = self._tensor._version

    def tensor(self) -> Tensor:
        """See ``_Saved``."""
        _check(self._tensor, self._version, self._tensor.shape)
        return self._tensor


class _MovedTensor:
    """A saved tensor whose storage moves."""

    def __init__(self, call: _BlockPass, tensor: Tensor, moved: _Moved):
        self.call = call
        self._moved = moved
        self._form = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._witness = tensor.detach()
        self._version = self._witness._version
        self._witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def tensor(self) -> Tensor:
        """See ``_Saved``."""
        _check(self._witness, self._version, self._form[1])
        memory = self._moved.memory()
        made = torch.empty(0, dtype=self._witness.dtype, device=memory.device)
        return made.set_(memory.untyped_storage(), *self._form)  # type: ignore[call-overload, no-any-return]


def _check(tensor: Tensor, version: int, shape: torch.Size) -> None:
    """[Note: versions]"""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(shape)} that a block saved (offload.activations: host) is at version {tensor._version}; "
            f"expected version {version} instead"
        )


class Activations:
    """See the module's docstring. Of one stage, ``module``, on ``device``; ``keeps_last``: nothing of the last block
    goes down; ``alike``: what the ranks of "tp" have in common, where they are several."""

    def __init__(self, module: nn.Module, device: torch.device, keeps_last: bool, alike: Alike | None = None):
        self.bytes = MovedBytes()
        self._module = module
        self._device = device
        self._keeps_last = keeps_last
        self._alike = alike
        self._has_parts: dict[int, bool] = {}
        """By place of a block: whether its first pass had the same bits on all ranks in what is alike on them."""
        self._names: list[str] = []
        self.microbatch: Callable[[], int] = lambda: -1
        """The one under way, where several are beside one another."""
        self._calls: dict[tuple[str, int], list[ref[_BlockPass]]] = {}
        """By block and microbatch, those whose backward pass has not been recalled for."""
        self._call: _BlockPass | None = None
        """The last call, of which what it saved is on its way down."""
        self._shown: set[int] = set()
        """Storages of the stage's parameters and buffers, when the pass began."""

    def wrap(self, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        """Let ``blocks``, with their names and in the order in which they run, save so."""
        self._names = [name for name, _ in blocks]
        for place, (_, block) in enumerate(blocks):
            self._wrap(block, place)

    def _wrap(self, block: nn.Module, place: int) -> None:
        inner = block.forward

        @torch.compiler.disable(recursive=False)
        @wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            # Hooks of others that stand already, as those of a checkpoint around this block.
            if not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(False):
                return inner(*args, **kwargs)
            call = self._begin(place)

            def pack(tensor: Tensor) -> _Saved:
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
        if before is None or before.place >= place:  # another pass
            before, self._shown = None, _storages(self._module)
        call = _BlockPass(place, before, {} if before is None else before.known, self._alike is not None)
        calls = self._calls.setdefault((self._names[place], self.microbatch()), [])
        calls[:] = [each for each in calls if each() is not None]
        calls.append(ref(call))
        return call

    def recall(self, name: str) -> None:
        """RECALL: the backward pass of the block comes, the last of its calls first."""
        calls = self._calls.get((name, self.microbatch()), [])
        call = None
        while calls and call is None:
            call = calls.pop()()
        if call is not None:
            with torch.no_grad():
                call.recall()

    def _decide(self, call: _BlockPass) -> None:
        """All that is to be known of what ``call`` saved is known."""
        alike = self._alike
        if alike is None:
            return
        parts = [moved for key, moved in call.undecided if alike.knows(key)]
        if parts and call.place not in self._has_parts:
            self._has_parts[call.place] = self._compare(alike, call.place, parts)
        for key, moved in call.undecided:
            self._go_down(call, moved, alike.knows(key))
        call.undecided.clear()

    def _compare(self, alike: Alike, place: int, parts: Sequence[_Moved]) -> bool:
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

    def _go_down(self, call: _BlockPass, moved: _Moved, is_alike: bool) -> None:
        if self._alike is not None and is_alike and self._has_parts.get(call.place):
            moved.begin(self._alike.group, f"what block {self._names[call.place]} has saved")
            call.parts.append(moved)
        else:
            moved.begin()

    def _end(self, call: _BlockPass) -> None:
        call.is_down = down_by_now(self._device)
        if self._call is not None:
            self._call.release()
        self._call = call
        self.bytes.count()

    def _pack(self, call: _BlockPass, block: nn.Module, tensor: Tensor) -> _Saved:
        is_kept = self._keeps_last and call.place == len(self._names) - 1
        if is_kept or not self._moves(block, tensor):
            return _KeptTensor(call, tensor)
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage), tensor._version
        known = call.known.get(key)
        moved = None if known is None else known()
        if moved is None:
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # type: ignore[call-overload]
            moved = _Moved(memory, self.bytes)
            call.known[key] = ref(moved)
            self._note(call, tensor, moved)
        elif moved.is_in_parts:
            call.parts.append(moved)
        call.moved.append(ref(moved))
        return _MovedTensor(call, tensor, moved)

    def _note(self, call: _BlockPass, tensor: Tensor, moved: _Moved) -> None:
        """``tensor`` is saved, whose storage goes down now or when more is known."""
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

    def _unpack(self, saved: _Saved) -> Tensor:
        with torch.no_grad():
            saved.call.open()
            return saved.tensor()


def _storages(module: nn.Module) -> set[int]:
    """Those that its parameters and buffers show now, there or not; stand-ins for other stages have none."""
    with torch._C.DisableTorchFunctionSubclass():
        held = [*module.parameters(), *module.buffers()]
        return {
            each.untyped_storage()._cdata
            for each in held
            if each.layout is torch.strided and not isinstance(each, Absent)
        }
