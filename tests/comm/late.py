"""Collectives at their latest: a machine that finishes them early hides a wait that is missing.

gloo and shared memory have read their inputs, and often written their outputs, when a call returns; NCCL has done
neither before its stream comes to it. Between start and ``wait`` a late transport therefore holds

    outputs    poisoned: NaN, or 0x5A in every byte; the true result comes in ``wait``
    inputs     compared in ``wait`` with what they were: whoever writes into one in flight is told

and so does a late wire with what it receives and what it sends. The bytes travel at once and in the
order of the calls, between copies, so results are those of the plain transport to the bit.

``late`` makes any transport late, ``installed`` all that are made inside it; ``pytest --late`` those of all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shardwise.base.errors import CommError
from shardwise.comm.collectives import Group
from shardwise.comm.flights import PendingCollective
from shardwise.comm.peers import PointToPoint

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class InFlight(CommError):
    """A tensor was written to that belonged to a collective."""


class Held:
    """Tensors of one call, as they were when it began."""

    def __init__(self, what: str, **tensors: Tensor):
        self._what = what
        self._tensors = [(name, each.data, each.data.clone()) for name, each in tensors.items()]

    def changed(self) -> list[str]:
        return [
            f"{self._what}: its {name} of {now.numel()} {now.dtype} changed between start and wait; wait before the "
            "tensor is used again"
            for name, now, before in self._tensors
            if not torch.equal(_bits(now), _bits(before))
        ]


class _Late:
    """The calls of a transport, of the rank with this ``index``. Tensors are touched behind autograd's back."""

    def __init__(self, transport: Any, index: int):
        self._index = index
        for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"):
            setattr(self, f"_{name}", getattr(transport, name))

    def all_gather(self, output: Tensor, shard: Tensor, timeout_s: float, what: str) -> PendingCollective:
        sent, arrived = shard.data.clone(), torch.empty_like(output.data)
        begun = self._all_gather(arrived, sent, timeout_s, what)
        poison(output)
        shard.data.copy_(sent)  # it may lie in the output, and may be read
        held = Held(f"all_gather of {what}", shard=shard, output=output)
        return _ends(begun, held, partial(output.data.copy_, arrived))

    def reduce_scatter(
        self, shard_out: Tensor, full: Tensor, timeout_s: float, what: str, accumulate: bool = False
    ) -> PendingCollective:
        sent, total = full.data.clone(), shard_out.data.clone()
        begun = self._reduce_scatter(total, sent, timeout_s, what, accumulate)
        poison(shard_out)
        held = Held(f"reduce_scatter of {what}", input=full, output=shard_out)
        return _ends(begun, held, partial(shard_out.data.copy_, total))

    def all_reduce(self, tensor: Tensor, timeout_s: float, what: str) -> PendingCollective:
        total = tensor.data.clone()
        begun = self._all_reduce(total, timeout_s, what)
        poison(tensor)
        return _ends(begun, Held(f"all_reduce of {what}", tensor=tensor), partial(tensor.data.copy_, total))

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float, what: str) -> PendingCollective:
        arrived = tensor.data.clone()
        begun = self._broadcast(arrived, root, timeout_s, what)
        if root != self._index:
            poison(tensor)
        return _ends(begun, Held(f"broadcast of {what}", tensor=tensor), partial(tensor.data.copy_, arrived))

    def all_to_all(
        self, output: Tensor, sent: Tensor, counts: Sequence[Sequence[int]], timeout_s: float, what: str
    ) -> PendingCollective:
        leaving, arrived = sent.data.clone(), torch.empty_like(output.data)
        begun = self._all_to_all(arrived, leaving, counts, timeout_s, what)
        poison(output)
        held = Held(f"all_to_all of {what}", input=sent, output=output)
        return _ends(begun, held, partial(output.data.copy_, arrived))


def late(transport: Any, index: int) -> Any:
    """``transport`` itself, whose collectives are late from here on; ``index`` is this rank's place in its group."""
    calls = _Late(transport, index)
    for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"):
        setattr(transport, name, getattr(calls, name))
    return transport


def late_wire(wire: Any) -> Any:
    """``wire`` itself, whose sends read their tensors at once and compare them at the end, and whose tensors that are
    received hold poison until they are waited for."""
    send, receive = wire.send, wire.receive

    def begin(header: bytes, tensors: Sequence[Tensor], call: Any) -> PendingCollective:
        begun = send(header, [each.clone() for each in tensors], call)
        held = Held(f"send of {call.what}", **{f"tensor {i}": each for i, each in enumerate(tensors)})
        return _ends(begun, held, lambda: None)

    def begin_to_receive(call: Any, allocate: Any, meanwhile: Any) -> PendingCollective:
        wanted: list[Tensor] = []
        arrived: list[Tensor] = []

        def stand_ins(header: bytes) -> list[Tensor]:
            wanted.extend(allocate(header))
            arrived.extend(torch.empty_like(each) for each in wanted)
            return arrived

        begun = receive(call, stand_ins, meanwhile)
        for each in wanted:
            poison(each)
        held = Held(f"receive of {call.what}", **{f"tensor {i}": each for i, each in enumerate(wanted)})

        def write() -> None:
            for each, came in zip(wanted, arrived, strict=True):
                each.data.copy_(came)

        return _ends(begun, held, write)

    wire.send, wire.receive = begin, begin_to_receive
    return wire


@contextmanager
def installed() -> Iterator[None]:
    """Inside, the transport of every new Group and the wires of all new PointToPoint are late."""

    def group(self: Group, *args: Any, **keys: Any) -> None:
        make_group(self, *args, **keys)
        if self.transport is not None and "all_gather" not in vars(self.transport):
            late(self.transport, self.index)

    def peers(self: PointToPoint, group: Group, wires: dict[int, Any], device: torch.device) -> None:
        for wire in wires.values():
            if "send" not in vars(wire):
                late_wire(wire)
        make_peers(self, group, wires, device)

    make_group, make_peers = Group.__init__, PointToPoint.__init__
    with patch.object(Group, "__init__", group), patch.object(PointToPoint, "__init__", peers):
        yield


def poison(tensor: Tensor) -> None:
    """What nobody may take for a result."""
    if tensor.is_floating_point():
        tensor.data.fill_(float("nan"))
    else:
        _bits(tensor.data).fill_(int.from_bytes(b"\x5a" * tensor.itemsize, "big"))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.itemsize])


def _ends(begun: PendingCollective | None, held: Held, write: Callable[[], Any]) -> PendingCollective:
    def finish() -> None:
        changed = held.changed()
        if begun is not None:
            begun.wait()  # also after a fault: its peers must not wait for a message that was dropped
        if changed:
            raise InFlight(changed[0])
        write()

    return PendingCollective(finish)
