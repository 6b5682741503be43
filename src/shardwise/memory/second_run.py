"""What a piece that runs again finds as its first run did: states of torch's generators, and a block's buffers.

Both are contexts, entered around the first run; ``again`` gives one for every further run, which leaves behind what it
found. The engine's own random numbers come back by ``replay.py``.

Cost: torch's states are read twice a pass (5 kB on a CPU), and kept where something was drawn; small buffers, and those
      that change, are copied once a pass.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.plan.errors import UsageError

_SMALL_BYTES = 1 << 16
"""Buffers up to this size are copied in every pass, whether they have changed before or not."""


class TorchDraws(AbstractContextManager[None]):
    """What a piece draws from torch's generators, its second run draws, too. Entered around the first run, ``again``
    around every further one.

    Keyed dropout draws nothing there, so most pieces leave the states alone; then the second run does, too. torch's own
    checkpoint sets and restores the states of host and device in any case.
    """

    def __init__(self, devices: Iterable[torch.device]):
        self._devices = list(devices)
        self._before: list[Tensor] = []
        """States that the first run began with, where it has drawn."""

    def __enter__(self) -> None:
        self._before = self._states()

    def __exit__(self, *exception: Any) -> None:
        if all(map(torch.equal, self._before, self._states())):
            self._before = []

    def again(self) -> "_Redrawn":
        """With the states as they were."""
        return _Redrawn(self)

    def rewind(self) -> list[Tensor]:
        """To where the first run began, if it drew; returns the states now, for ``put``."""
        held = self._states() if self._before else []
        self.put(self._before)
        return held

    def _states(self) -> list[Tensor]:
        on_devices = (torch.get_device_module(each).get_rng_state(each) for each in self._devices)
        return [torch.get_rng_state(), *on_devices]

    def put(self, states: Sequence[Tensor]) -> None:
        """Let the generators stand there; nothing where ``states`` is empty."""
        if states:
            torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=False):
            torch.get_device_module(device).set_rng_state(state, device)


class _Redrawn(AbstractContextManager[None]):
    def __init__(self, draws: TorchDraws):
        self._draws = draws
        self._held: list[list[Tensor]] = []

    def __enter__(self) -> None:
        self._held.append(self._draws.rewind())

    def __exit__(self, *exception: Any) -> None:
        self._draws.put(self._held.pop())


class BlockBuffers:
    """The buffers of one block: batch statistics, counters, codebooks, the vectors of a spectral norm.

    What the forward pass changes in them stands once: a second run begins with the values that the first one saw, or
    it would compute other numbers, and what it changes is dropped. The first pass shows which buffers change; of those,
    and of all that are small, a pass keeps a copy until its backward pass.
    """

    def __init__(self, block: nn.Module, name: str):
        self._block = block
        self._name = name
        self._modules: list[nn.Module] = []
        self._changing: set[tuple[int, str]] | None = None
        """(module by its place, name) of what a pass has changed; None before the first pass."""

    def before(self) -> "_Snapshot":
        """The values now, at the beginning of a pass."""
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
        return _Snapshot(self, kept, versions, keeps_all)

    def note(self, snapshot: "_Snapshot") -> None:
        """After the first run: which buffers has it changed?

        Errors: UsageError where a large one changes that did not change in the first pass.
        """
        changing = set() if self._changing is None else self._changing
        for place, name, buffer in self._each():
            key = (place, name)
            before, version = snapshot.versions.get(key, (None, 0))
            changed = buffer is not before or buffer._version != version
            # A write by way of .data counts no version.
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
        """Let the block hold ``values``; returns what it held in their places."""
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
class _Snapshot(AbstractContextManager[None]):
    """A pass: entered around its first run; ``again`` around every further one."""

    buffers: BlockBuffers
    kept: dict[tuple[int, str], Tensor]
    versions: dict[tuple[int, str], tuple[Tensor, int]]
    is_first: bool

    def __enter__(self) -> None:
        """The values were taken already."""

    def __exit__(self, kind: Any, *exception: Any) -> None:
        if kind is None:
            self.buffers.note(self)
        self.versions.clear()

    def again(self) -> "_Before":
        """With the buffers as they were."""
        return _Before(self)


class _Before(AbstractContextManager[None]):
    def __init__(self, snapshot: _Snapshot):
        self._snapshot = snapshot
        self._held: list[dict[tuple[int, str], Tensor]] = []

    def __enter__(self) -> None:
        snapshot = self._snapshot
        self._held.append(snapshot.buffers.put({key: kept.clone() for key, kept in snapshot.kept.items()}))

    def __exit__(self, *exception: Any) -> None:
        self._snapshot.buffers.put(self._held.pop())
