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

Recomputation has hooks of its own inside of these: they see what it keeps, a block's input under ``full``. A block that
runs inside of other hooks (a user's own checkpoint) leaves all to them.

Cost: bytes of the storages down and up; some microseconds a saved tensor; pinned memory, in whole powers of two.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.memory.absent import Absent
from shardwise.memory.offload import OffloadPolicy
from shardwise.memory.streams import begin_down, down_by_now, to_computation
from shardwise.plan.errors import ConfigError

SMALL_BYTES = 1 << 16
"""A storage up to this size takes longer to be asked for than to be kept."""


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
    """A storage: on the device until its copy is down, in host memory then, and on the device again once fetched."""

    def __init__(self, memory: Tensor, moved_bytes: MovedBytes):
        self._nbytes = memory.nbytes
        self._device = memory.device
        self._here: Tensor | None = memory
        self._there: Tensor | None = begin_down(memory)
        self._arrive: Callable[[], object] | None = None
        self._bytes = moved_bytes
        moved_bytes.down += self._nbytes
        moved_bytes.held += self._nbytes

    def release(self) -> None:
        """Its copy is down. What was fetched already stays."""
        if self._there is not None:
            self._here = None

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self._here is not None:
            return
        assert self._there is not None, "what left the device is in host memory"
        self._here = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        self._arrive = to_computation(self._there, self._here)
        self._there = None
        self._bytes.up += self._nbytes

    def memory(self) -> Tensor:
        """On the device, for what the current stream does next."""
        self.fetch()
        assert self._here is not None, "just fetched"
        if self._arrive is not None:
            self._arrive()
        return self._here

    def __del__(self) -> None:
        self._bytes.gone.append(self._nbytes)


class _BlockPass:
    """One forward pass of one block. ``before``: the call of the block before it in the same pass."""

    def __init__(self, place: int, before: "_BlockPass | None", known: dict[Any, Any]):
        self.place = place
        self.known: dict[tuple[StorageWeakRef, int], ref[_Moved]] = known
        """What the pass has moved so far, by storage and version."""
        self.moved: list[ref[_Moved]] = []
        self.is_down: Callable[[], object] = lambda: None
        self._before = None if before is None else ref(before)
        self._is_open = False

    def release(self) -> None:
        """What it saved has to be down before the computation goes on; the device's memory goes."""
        self.is_down()
        for each in self.moved:
            moved = each()
            if moved is not None:
                moved.release()

    def fetch(self) -> None:
        """Begin to bring back what is still wanted of it."""
        for each in self.moved:
            moved = each()
            if moved is not None:
                moved.fetch()

    def open(self) -> None:
        """Its backward pass begins: what it saved comes, and then what the block before it saved."""
        if self._is_open:
            return
        self._is_open = True
        self.fetch()
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()


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
    goes down."""

    def __init__(self, module: nn.Module, device: torch.device, keeps_last: bool):
        self.bytes = MovedBytes()
        self._module = module
        self._device = device
        self._keeps_last = keeps_last
        self._last = -1
        """Place of the last block."""
        self._call: _BlockPass | None = None
        """The last call, of which what it saved is on its way down."""
        self._shown: set[int] = set()
        """Storages of the stage's parameters and buffers, when the pass began."""

    def wrap(self, blocks: Sequence[nn.Module]) -> None:
        """Let ``blocks``, in the order in which they run, save so."""
        self._last = len(blocks) - 1
        for place, block in enumerate(blocks):
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

            with saved_tensors_hooks(pack, self._unpack):
                output = inner(*args, **kwargs)
            self._end(call)
            return output

        block.forward = forward  # type: ignore[method-assign]

    def _begin(self, place: int) -> _BlockPass:
        before = self._call
        if before is None or before.place >= place:  # another pass
            before, self._shown = None, _storages(self._module)
        return _BlockPass(place, before, {} if before is None else before.known)

    def _end(self, call: _BlockPass) -> None:
        call.is_down = down_by_now(self._device)
        if self._call is not None:
            self._call.release()
        self._call = call
        self.bytes.count()

    def _pack(self, call: _BlockPass, block: nn.Module, tensor: Tensor) -> _Saved:
        if (self._keeps_last and call.place == self._last) or not self._moves(block, tensor):
            return _KeptTensor(call, tensor)
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage), tensor._version
        known = call.known.get(key)
        moved = None if known is None else known()
        if moved is None:
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # type: ignore[call-overload]
            moved = _Moved(memory, self.bytes)
            call.known[key] = ref(moved)
        call.moved.append(ref(moved))
        return _MovedTensor(call, tensor, moved)

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
