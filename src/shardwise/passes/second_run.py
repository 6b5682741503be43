"""State that a repeated piece finds as its first run did: states of generators, and a block's buffers.

Both are contexts, entered around the first run; ``again`` returns a context for every further run, which leaves the
state as it found it. The engine's own random numbers are restored by ``replay.py``. Other state that a block keeps from
pass to pass (a counter in an attribute, a tensor of the pass before) cannot be restored. So in the first passes of a
block the tensors that its second run computes for the backward pass are compared with those of the first
(``SavedTensorCheck``), and a block whose runs differ is refused by name.

Cost: torch's states are read twice a pass (5 kB on a CPU), and kept if something was drawn, those of Python and
      numpy in the first passes, and later if these drew; small buffers, and those that change, are copied once a
      pass. Tensors are compared in ``_COMPARED`` passes of each block, by a sample of their elements.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.base.errors import UsageError
from shardwise.passes.generators import RandomGenerators, States

_COMPARED = 4
"""Number of passes of a block whose second run is compared."""
_SAMPLE = 1 << 8
"""Most elements of a tensor that are compared."""
_SMALL_BYTES = 1 << 16
"""Largest buffers that are copied in every pass, whether they have changed before or not."""


class BlockDraws(AbstractContextManager[None]):
    """The context around a piece's first run, whose draws every further run repeats.

    Keyed dropout draws nothing from the generators, so most pieces leave the states unchanged; then the second
    run does so too. torch's own checkpoint sets and restores the states of host and device in any case.

    Args:
        generators: The generators that the piece may draw from.
    """

    def __init__(self, generators: RandomGenerators):
        self._generators = generators
        self._before: States = {}
        """States with which the first run began, if it has drawn."""

    def __enter__(self) -> None:
        self._before = self._generators.look()

    def __exit__(self, *exception: Any) -> None:
        if not self._generators.drawn(self._before):
            self._before = {}

    def again(self) -> "_RepeatedDraws":
        """Return the context for a further run, in which the states are as in the first run."""
        return _RepeatedDraws(self)

    def rewind(self) -> States:
        """Set the states with which the first run began, if it drew.

        Returns:
            The states before the call, for ``put``; empty if the first run did not draw.
        """
        if not self._before:
            return {}
        slow = [name for name in ("python", "numpy") if name in self._before]
        held = self._generators.states(slow)
        self.put(self._before)
        return held

    def put(self, states: States) -> None:
        """Set the generators to ``states``; do nothing if ``states`` is empty."""
        self._generators.put(states)


class _RepeatedDraws(AbstractContextManager[None]):
    def __init__(self, draws: BlockDraws):
        self._draws = draws
        self._held: list[States] = []

    def __enter__(self) -> None:
        self._held.append(self._draws.rewind())

    def __exit__(self, *exception: Any) -> None:
        self._draws.put(self._held.pop())


class BlockBuffers:
    """The buffers of one block: batch statistics, counters, codebooks, the vectors of a spectral norm.

    A change that the forward pass makes must count once. So a second run begins with the values that the first
    run read, or it would compute other numbers, and its changes are dropped. The first pass shows which buffers
    change; a pass keeps a copy of these and of all small buffers until its backward pass.

    Args:
        block: The block.
        name: Name of the block in errors.
    """

    def __init__(self, block: nn.Module, name: str):
        self._block = block
        self._name = name
        self._modules: list[nn.Module] = []
        self._changing: set[tuple[int, str]] | None = None
        """(index of the module, name) of the buffers that a pass has changed; None before the first pass."""

    def before(self) -> "_BufferSnapshot":
        """Return the context around a pass's first run, with copies of the present values."""
        if self._changing is None:
            self._modules = list(self._block.modules())
        held = list(self._each())
        keeps_all = self._changing is None
        kept = {
            (place, name): buffer.detach().clone()
            for place, name, buffer in held
            if keeps_all or buffer.nbytes <= _SMALL_BYTES or (place, name) in (self._changing or ())
        }
        versions = {(place, name): (buffer, buffer._version) for place, name, buffer in held}
        return _BufferSnapshot(self, kept, versions, keeps_all)

    def note(self, snapshot: "_BufferSnapshot") -> None:
        """Record the buffers that the first run has changed.

        Args:
            snapshot: The values before the run.

        Raises:
            UsageError: If a large buffer changed that did not change in the first pass.
        """
        changing = set() if self._changing is None else self._changing
        for place, name, buffer in self._each():
            key = (place, name)
            before, version = snapshot.versions.get(key, (None, 0))
            changed = buffer is not before or buffer._version != version
            # A write through .data does not change the version, so the first pass compares values.
            if not changed and snapshot.is_first:
                changed = not torch.equal(buffer, snapshot.kept[key])
            if not changed:
                if snapshot.is_first and buffer.nbytes > _SMALL_BYTES:
                    del snapshot.kept[key]
                continue
            if before is not None and key not in snapshot.kept:
                raise UsageError(
                    f"recompute: block {self._name} changed its buffer {name!r} ({buffer.nbytes} bytes) in this "
                    "pass and not in its first one, so that no copy was kept for the second run, which would compute "
                    "other numbers. Leave the block out of recompute.blocks, or set recompute: none"
                )
            changing.add(key)
        self._changing = changing

    def put(self, values: Mapping[tuple[int, str], Tensor]) -> dict[tuple[int, str], Tensor]:
        """Set the block's buffers to ``values`` and return the buffers that were replaced."""
        held = {}
        for (place, name), value in values.items():
            buffers = self._modules[place]._buffers
            held[place, name] = buffers[name]
            buffers[name] = value
        return held  # type: ignore[return-value]

    def _each(self) -> Iterator[tuple[int, str, Tensor]]:
        for place, module in enumerate(self._modules):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield place, name, buffer


@dataclass
class _BufferSnapshot(AbstractContextManager[None]):
    """The context around a pass's first run; ``again`` returns the context for every further run."""

    buffers: BlockBuffers
    kept: dict[tuple[int, str], Tensor]
    versions: dict[tuple[int, str], tuple[Tensor, int]]
    is_first: bool

    def __enter__(self) -> None:
        """Do nothing: ``BlockBuffers.before`` has copied the values."""

    def __exit__(self, kind: Any, *exception: Any) -> None:
        if kind is None:
            self.buffers.note(self)
        self.versions.clear()

    def again(self) -> "_BuffersBefore":
        """Return a context in which the buffers are as before the first run."""
        return _BuffersBefore(self)


class _BuffersBefore(AbstractContextManager[None]):
    def __init__(self, snapshot: _BufferSnapshot):
        self._snapshot = snapshot
        self._held: list[dict[tuple[int, str], Tensor]] = []

    def __enter__(self) -> None:
        snapshot = self._snapshot
        self._held.append(snapshot.buffers.put({key: kept.clone() for key, kept in snapshot.kept.items()}))

    def __exit__(self, *exception: Any) -> None:
        self._snapshot.buffers.put(self._held.pop())


# Compared ----------------------------------------------------------------------------------------------------------


class SecondRuns:
    """The second runs of one piece of a model, which are compared in the first passes.

    Args:
        name: Name of the piece in errors.
    """

    def __init__(self, name: str):
        self.name = name
        self._passes = 0

    def next(self) -> "SavedTensorCheck | None":
        """Return the comparison of the pass that begins, or None after the first passes."""
        self._passes += 1
        return SavedTensorCheck(self.name) if self._passes <= _COMPARED else None


class SavedTensorCheck(AbstractContextManager[None]):
    """The comparison of the tensors that the runs of one pass save for the backward pass, by samples.

    The context is entered around the first run, and ``again`` around every further run, inside torch's own
    hooks, which are called too.

    Args:
        name: Name of the piece in errors.
    """

    def __init__(self, name: str):
        self._name = name
        self._first: list[Tensor | None] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        self._first = []
        self._begin(lambda tensor: self._first.append(_sample(tensor)))

    def __exit__(self, *exception: Any) -> None:
        self._hooks.pop().__exit__(*exception)

    def _begin(self, look: Callable[[Tensor], None]) -> None:
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        assert outer is not None, "a checkpoint has put its hooks on before"
        pack, unpack = outer

        def looked(tensor: Tensor) -> Any:
            # Modes are disabled because selective recomputation counts operations.
            with torch.no_grad(), _disable_current_modes():
                look(tensor.detach())
            return pack(tensor)

        hooks = saved_tensors_hooks(looked, unpack)
        hooks.__enter__()
        self._hooks.append(hooks)

    def again(self) -> "_SavedComparison":
        """Return the context for a further run."""
        return _SavedComparison(self)

    def _compare(self, place: int, tensor: Tensor) -> None:
        if place >= len(self._first):
            return  # torch raises the error for another number of saved tensors
        first, now = self._first[place], _sample(tensor)
        if first is None or now is None:
            return
        if first.shape != now.shape or not _are_close(first, now, tensor.dtype):
            raise UsageError(different(self._name, "computes other numbers the second time"))


class _SavedComparison(AbstractContextManager[None]):
    def __init__(self, alike: SavedTensorCheck):
        self._alike = alike

    def __enter__(self) -> None:
        places = iter(range(1 << 62))
        self._alike._begin(lambda tensor: self._alike._compare(next(places), tensor))

    def __exit__(self, *exception: Any) -> None:
        self._alike._hooks.pop().__exit__(*exception)


_SAMPLED = ("cpu", "cuda", "xpu")
"""Types of devices whose tensors are compared."""


def different(name: str, how: str) -> str:
    """Return the text of the error for a piece whose second run differs from its first.

    Args:
        name: Name of the piece.
        how: The difference, as a verb phrase.

    Returns:
        The text, with remedies.
    """
    return (
        f"recompute: {name} {how}, so its gradients would be wrong. It keeps something from one run to the next that "
        "is neither a buffer nor a random generator of torch, Python or numpy in an attribute: a counter or a tensor "
        "in an attribute, a cache, a generator elsewhere, the time. Register it as a buffer (register_buffer), change "
        "it outside of the block's forward, leave the block out (recompute.blocks), or set recompute: none"
    )


def _sample(tensor: Tensor) -> Tensor | None:
    """Return a copy of some elements, evenly spread, or None for a tensor without numbers.

    Backends that dispatch in Python cannot copy inside the hook that autograd calls with a saved tensor.
    """
    if (
        tensor.device.type not in _SAMPLED
        or not tensor.numel()
        or tensor.layout is not torch.strided
        or type(tensor) is not Tensor
    ):
        return None
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.flatten()
    return flat[:: -(-flat.numel() // _SAMPLE)].clone()


def _are_close(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Return True if two samples differ by no more than sums in another order may."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return bool(torch.equal(a, b))
    a, b = (
        torch.nan_to_num(each.to(torch.complex128 if dtype.is_complex else torch.float64)) for each in (a, b)
    )
    limit = 1e-3 if dtype.itemsize >= 4 else 5e-2
    return bool((a - b).norm() <= limit * torch.maximum(a.norm(), b.norm()))
