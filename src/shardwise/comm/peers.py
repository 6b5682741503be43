"""Peers: messages between two ranks of one axis, for data that no collective moves: activations and their gradients.

A message is a text and tensors of any number, shape and dtype. It contains its own description, so shapes may change
from one message to the next. Messages from one rank to another arrive in the order in which they were sent. Both ends
name what they exchange ("activation of stage 2, microbatch 5"), and a difference is an error: without this check a rank
could use another microbatch's numbers as its own.

    SharedMemoryWire   two CPU ranks of one host: the sender copies into a ring (shared_ring.py), the receiver out of
                       it. A send returns when its bytes are in the ring; bytes that find no room there wait, and go
                       on whenever this rank sends, receives or waits
    TorchWire          isend and irecv: gloo, or NCCL with one group per ordered pair of ranks, because sends and
                       receives of one communicator would wait for one another

Between devices a header, for which the host would wait, is sent only the first time (agreed.py). Later messages of the
same name and likeness are only their tensors, and the receiver posts their receives ahead.

Cost: the tensors' bytes, sent once, and a header of about 100 bytes + 30 per tensor. Measured one way between two ranks
on two busy cores (median of 60 round trips): 1 KiB 0.13 ms in shared memory and 4.0 ms over gloo, 1.5 MiB 0.5 ms and
4.0 ms, 4 MiB 1.1 ms and 6.0 ms.
"""

import contextlib
import ctypes
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.base.errors import CommError, DeadlineError, UsageError
from shardwise.comm.agreed import MessageHeaders
from shardwise.comm.collectives import Group
from shardwise.comm.faults import cause_of, is_late
from shardwise.comm.flights import DONE, Communicator, PendingCollective
from shardwise.comm.groups import backend_for
from shardwise.comm.shared_ring import CollectiveCall, GroupRings, RingLayout
from shardwise.comm.watching.recorder import NOWHERE, CallPlace, RecordedGroup
from shardwise.plan.exchange_calls import Purpose

RING = RingLayout(ranks=2, slots=64, slot_bytes=256 << 10)
"""Memory of one rank of a pair: the bytes that it may send ahead of the other's receiving."""
_ALIGNMENT_BYTES = 64
_HEADER_BYTES = 512
_LENGTH_BYTES = 8
_TAG = 0x5EED
_IN_FLIGHT = 4
"""Most sends in flight, whose tensors stay alive.

A list that cannot deadlock with blocking sends cannot with this limit.
"""

Allocate = Callable[[bytes], Sequence[Tensor]]
"""Function from a header to the tensors that the message is received into."""


class ReceivedMessage(NamedTuple):
    """A message that arrived."""

    text: str
    tensors: list[Tensor]


class Wire(Protocol):
    """Carries messages between this rank and one other. Tensors are contiguous."""

    def send(self, header: bytes, tensors: Sequence[Tensor], call: CollectiveCall) -> PendingCollective:
        """Start to send; the tensors must not change until the PendingCollective has been waited for."""

    def receive(
        self, call: CollectiveCall, allocate: Allocate, meanwhile: Callable[[], bool]
    ) -> PendingCollective:
        """Receive the next message into the tensors that ``allocate`` makes for its header.

        ``meanwhile`` is as in ``GroupRings.receive``.
        """

    def advance(self) -> bool:
        """Continue earlier sends that found no room, without waiting, and return whether some still find none."""

    def close(self) -> None:
        """Leave the connection."""


class PointToPoint:
    """Messages from and to the other ranks of ``group``, by their index in it. Threads must not share an object.

    Args:
        group: The ranks.
        wires: Connection to each rank, by index; a rank without one cannot be reached.
        device: Device of received tensors.
    """

    def __init__(self, group: Group, wires: dict[int, Wire], device: torch.device):
        self.group = group
        self._wires = wires
        self._device = device
        self._sending: deque[PendingCollective] = deque()
        self._agreed = {
            index: _AgreedConnection(wire, MessageHeaders(), MessageHeaders())
            for index, wire in wires.items()
            if isinstance(wire, TorchWire) and wire.agrees
        }
        self._ahead: deque[_PostedReceive] = deque()
        self._records: dict[tuple[int, int], RecordedGroup] = {}
        """Messages in the records of this rank, by sender and receiver."""

    @property
    def agrees(self) -> bool:
        """True if messages may be sent without a header."""
        return bool(self._agreed)

    def send(
        self,
        text: str,
        tensors: Sequence[Tensor],
        to: int,
        what: str,
        purpose: Purpose,
        like: int | None = None,
        lasting: bool = False,
    ) -> PendingCollective:
        """Start to send a message, without waiting for the receiver.

        The tensors must not change until the send has ended. ``flush`` ends all sends of this rank, so the
        PendingCollective may be dropped.

        Args:
            text: Text of the message.
            tensors: Tensors of the message.
            to: Index of the receiver.
            what: Name of the message, which both ends pass.
            purpose: Kind of traffic.
            like: Likeness, equal on both ends. Two ``lasting`` messages of one name and likeness have the same text,
                shapes and dtypes. None: unknown.
            lasting: Let both ends keep the header.

        Raises:
            PlanError: if two such messages differ.
            CommError: if the message cannot be sent.
        """
        wire, flat = self._wire(to, "send", what), [each.detach().contiguous() for each in tensors]
        kinds = [
            [str(each.dtype).removeprefix("torch."), list(each.shape), each.device.type] for each in flat
        ]
        header = json.dumps([what, text, kinds, lasting], separators=(",", ":")).encode()
        self._count(flat, purpose, what)
        self.group.clock.maybe_delay()
        agreed = self._agreed.get(to)
        is_known = agreed is not None and agreed.outward.is_known(what, like, header)
        place = self._recorded("send", to, what)
        with self._explaining("send", to, what, place) as call:
            for other in self._wires.values():
                other.advance()
            held = [each for each in flat if each.numel()]
            if agreed is not None and is_known:
                pending = agreed.wire.post(held, call, outward=True)
            else:
                pending = wire.send(header, held, call)
        waiting = self._followed(pending, "send", to, what, place)
        if waiting is DONE:
            return DONE
        self._sending.append(waiting)
        if len(self._sending) > _IN_FLIGHT:
            self._sending.popleft().wait()
        return waiting

    def expect(self, source: int, what: str, like: int | None) -> bool:
        """Post the receive of the next message of rank ``source``, if its shapes are known.

        ``receive`` must be called for posted messages in the order of posting, before any other.

        Args:
            source: Index of the sender.
            what: Name of the message.
            like: Likeness of the message.

        Returns:
            True if the receive was posted.
        """
        agreed = self._agreed.get(source)
        header = None if agreed is None else agreed.inward.find(what, like)
        if agreed is None or header is None:
            return False
        text, tensors = self._opened(header, source, what)
        place = self._recorded("receive", source, what)
        with self._explaining("receive", source, what, place) as call:
            pending = agreed.wire.post([each for each in tensors if each.numel()], call, outward=False)
        pending = self._followed(pending, "receive", source, what, place)
        self._ahead.append(_PostedReceive(source, what, like, ReceivedMessage(text, tensors), pending))
        return True

    def receive(self, source: int, what: str | None, like: int | None = None) -> ReceivedMessage:
        """Return the next message of rank ``source``.

        Args:
            source: Index of the sender.
            what: Name that the message must have; None: any.
            like: Likeness of the message.

        Raises:
            CommError: if the message has another name or cannot be received.
        """
        said = what or "the next message"
        wire = self._wire(source, "receive", said)
        if not self._ahead and what is not None:
            self.expect(source, what, like)
        if self._ahead:
            posted = self._ahead.popleft()
            assert posted[:3] == (source, what, like), f"{posted.what} was posted before {said}"
            posted.pending.wait()
            return posted.message
        found: list[ReceivedMessage] = []

        def allocate(header: bytes) -> list[Tensor]:
            found.append(ReceivedMessage(*self._opened(header, source, what)))
            agreed = self._agreed.get(source)
            if agreed is not None and what is not None:
                agreed.inward.agree(what, like, header)
            return [each for each in found[0].tensors if each.numel()]

        mark = self._mark()
        place = self._recorded("receive", source, said)
        with self._explaining("receive", source, said, place) as call:
            self._advance()
            pending = wire.receive(call, allocate, self._advance)
        self._measured(mark)
        self._followed(pending, "receive", source, said, place).wait()
        return found[0]

    def _opened(self, header: bytes, source: int, what: str | None) -> tuple[str, list[Tensor]]:
        """Return the text of a message, and empty tensors for its contents."""
        given, text, kinds, _ = json.loads(header)
        if what is not None and given != what:
            raise CommError(
                f"this rank expects {what!r}, but the next message of rank {self.group.ranks[source]} is "
                f"{given!r}; their lists of Actions do not belong together"
            )
        return text, [self._empty(*kind) for kind in kinds]

    # What went without a header ---------------------------------------------------------------------------------

    def tally(self, told: str) -> str:
        """Return the hashes of messages without headers, for comparison at the end of a walk.

        Args:
            told: The result of ``tally`` on another rank, or "".

        Returns:
            ``told`` with this rank's hashes added; unchanged if all messages have headers.
        """
        if not self._agreed:
            return told
        found: dict[str, int] = json.loads(told or "{}")
        here = self.group.index
        for index, agreed in self._agreed.items():
            found[f"{here}>{index}"] = agreed.outward.hash
            found[f"{index}>{here}"] = agreed.inward.hash
        return json.dumps(found)

    def check_tally(self, told: str) -> None:
        """Compare the hashes of another rank's ``tally`` with this rank's.

        Raises:
            CommError: if a rank received other messages than were sent.
        """
        if not told:
            return
        mine = json.loads(self.tally("") or "{}")
        for way, number in json.loads(told).items():
            if mine.get(way, number) != number:
                raise CommError(
                    f"rank {self.group.ranks[self.group.index]}, step {self.group.clock.step}: ranks {way} of axis "
                    f"{self.group.axis!r} do not agree on the messages that went from one to the other; their lists "
                    "of Actions or their batches differ"
                )

    def condemn(self, words: str) -> None:
        """End all communication of all ranks, with ``words`` as the reason; posted receives will never complete."""
        self._ahead.clear()
        self._sending.clear()
        self.group.clock.condemn(words)

    def flush(self) -> None:
        """Wait until all messages of this rank have been sent. Call it after the rank's last receive."""
        while self._sending:
            self._sending.popleft().wait()

    def _advance(self) -> bool:
        """Continue this rank's sends, also while it receives, because their receiver may be waiting."""
        return any([wire.advance() for wire in self._wires.values()])

    def _wire(self, index: int, operation: str, what: str) -> Wire:
        if index in self._wires:
            return self._wires[index]
        rank = self.group.ranks[self.group.index]
        if index == self.group.index:
            reason = "it is this rank itself; stages of one rank hand their tensors over without a message"
        elif 0 <= index < self.group.size:
            reason = f"only the neighbours {sorted(self._wires)} on the ring can be reached with this backend"
        else:
            reason = f"the axis has {self.group.size} ranks"
        raise UsageError(
            f"rank {rank}: {operation} of {what}: index {index} of axis {self.group.axis!r} cannot be the other end: "
            f"{reason}"
        )

    def _empty(self, dtype: str, shape: list[int], device: str) -> Tensor:
        known = getattr(torch, dtype, None)
        if not isinstance(known, torch.dtype):
            raise CommError(f"a tensor of unknown dtype {dtype!r}")
        return torch.empty(shape, dtype=known, device="cpu" if device == "cpu" else self._device)

    def _count(self, tensors: Sequence[Tensor], purpose: Purpose, what: str) -> None:
        by_size: dict[int, int] = {}
        for each in tensors:
            by_size[each.itemsize] = by_size.get(each.itemsize, 0) + each.numel()
        for itemsize, elements in by_size.items():
            self.group.traffic.add("send", purpose, elements, itemsize, 2, what, self.group.axis)

    def _recorded(self, operation: str, index: int, what: str) -> CallPlace:
        """Record the start of a message, and return its place in the records."""
        recorder, here = self.group.clock.recorder, self.group.index
        if recorder is None:
            return NOWHERE
        ends = (here, index) if operation == "send" else (index, here)
        found = self._records.get(ends)
        if found is None:
            names = self.group.names or self.group.ranks
            name = f"messages from rank {names[ends[0]]} to rank {names[ends[1]]}"
            found = self._records[ends] = recorder.group(name)
        return recorder.start(found, operation, None, 0, what)

    def _followed(
        self, pending: PendingCollective, operation: str, index: int, what: str, place: CallPlace
    ) -> PendingCollective:
        if pending is DONE:
            return DONE
        clock, flight = self.group.clock, None
        if pending.communicator is not None:
            step, timeout_s = clock.step, clock.timeout_s
            flight = clock.follow(
                pending,
                self._waits_for(operation, index, what),
                lambda error: self._explained(error, operation, index, what, step, timeout_s),
                self._ends(index),
                place,
            )

        def finish() -> None:
            mark = self._mark()
            with self._explaining(operation, index, what, place):
                pending.wait()
            self._measured(mark)
            if flight is not None:
                flight.waited(self._device)
                clock.check_intact()

        return PendingCollective(finish)

    def _mark(self) -> Any:
        clock = self.group.clock
        return None if clock.meter is None else clock.mark_wait()

    def _measured(self, mark: Any) -> None:
        if mark is not None and self.group.clock.meter is not None:
            self.group.clock.meter.end(self.group.axis, mark)

    def _waits_for(self, operation: str, index: int, what: str) -> tuple[int, str, str]:
        names = self.group.names or self.group.ranks
        direction = "to" if operation == "send" else "from"
        return names[self.group.index], operation, f"{what} {direction} rank {names[index]}"

    def _ends(self, index: int) -> tuple[int, int]:
        names = self.group.names or self.group.ranks
        return names[self.group.index], names[index]

    @contextlib.contextmanager
    def _explaining(
        self, operation: str, index: int, what: str, place: CallPlace
    ) -> Iterator[CollectiveCall]:
        clock, timeout_s = self.group.clock, self.group.clock.timeout_s
        clock.check_intact()
        give_up = getattr(self._wires.get(index), "give_up", None)
        clock.begin_wait(self._waits_for(operation, index, what), give_up, self._ends(index), place)
        try:
            yield CollectiveCall(operation, what, timeout_s)
        except (RuntimeError, CommError) as error:
            raise self._explained(error, operation, index, what, clock.step, timeout_s) from error
        finally:
            clock.end_wait()

    def _explained(
        self, error: Exception, operation: str, index: int, what: str, step: int, timeout_s: float
    ) -> CommError:
        verdict = self.group.clock.verdict()
        if verdict:
            return DeadlineError(verdict)
        here, _, done = self._waits_for(operation, index, what)
        where = f"rank {here}: {operation} of {done} in step {step} (axis {self.group.axis!r})"
        if isinstance(error, DeadlineError) or is_late(error):
            return DeadlineError(
                f"{where}: the other rank did not arrive within {timeout_s:.0f} s. Look at the last lines of its "
                f"log; a rank that is merely slow needs a larger comm.timeout_s. ({error}){self.group.clock.story}"
            )
        if isinstance(error, CommError):
            return CommError(f"{where} failed: {error}{self.group.clock.advice}")
        return CommError(f"{where} failed; {cause_of(error)}. ({error}){self.group.clock.advice}")


class _AgreedConnection(NamedTuple):
    """A connection, and the headers that both ends have kept."""

    wire: "TorchWire"
    outward: MessageHeaders
    inward: MessageHeaders


class _PostedReceive(NamedTuple):
    """A receive that was posted before its ``receive`` was called."""

    source: int
    what: str
    like: int | None
    message: ReceivedMessage
    pending: PendingCollective


class TorchWire:
    """Messages by isend and irecv of torch.distributed.

    Args:
        rank: Rank of the job at the other end.
        outward: Group for sending; None: torch's default group.
        inward: Group for receiving; None: torch's default group.
        agrees: Send messages without a header if both ends have it, as between devices.
    """

    def __init__(
        self,
        rank: int,
        outward: dist.ProcessGroup | None = None,
        inward: dist.ProcessGroup | None = None,
        agrees: bool = False,
    ):
        self.agrees = agrees
        self._rank = rank
        self._outward = outward
        self._inward = inward
        self._communicators: tuple[Communicator, ...] = Communicator(outward), Communicator(inward)
        self._is_closed = False

    def send(self, header: bytes, tensors: Sequence[Tensor], call: CollectiveCall) -> PendingCollective:
        """Send a message of fixed size with the header's length and beginning, then the rest, then the tensors."""
        body = len(header).to_bytes(_LENGTH_BYTES, "big") + header
        first = body[:_HEADER_BYTES].ljust(_HEADER_BYTES)
        parts = [torch.frombuffer(bytearray(first), dtype=torch.uint8)]
        if len(body) > _HEADER_BYTES:
            parts.append(torch.frombuffer(bytearray(body[_HEADER_BYTES:]), dtype=torch.uint8))
        told = self.post(parts, call, outward=True)
        pending = self.post(tensors, call, outward=True)

        def finish() -> None:
            told.wait()
            pending.wait()

        return PendingCollective(finish, pending.works, pending.communicator)

    def post(self, tensors: Sequence[Tensor], call: CollectiveCall, outward: bool) -> PendingCollective:
        """Start to send only ``tensors``, or to receive into them."""
        parts = [_bytes_of(each) for each in tensors]
        if not parts:
            return DONE
        if self._is_closed:
            raise CommError(f"message to or from rank {self._rank}: the group was closed earlier")
        if outward:
            works = [dist.isend(part, dst=self._rank, group=self._outward, tag=_TAG) for part in parts]
        else:
            works = [dist.irecv(part, src=self._rank, group=self._inward, tag=_TAG) for part in parts]
        on_host = parts[0].device.type == "cpu"

        def finish(_held: Sequence[Tensor] = parts) -> None:
            for work in works:
                assert work is not None, "both ends are in the group"
                if on_host:
                    work.wait(timedelta(seconds=call.timeout_s))
                else:
                    work.wait()

        return (
            PendingCollective(finish)
            if on_host
            else PendingCollective(finish, works, self._communicators[not outward])
        )

    def receive(
        self, call: CollectiveCall, allocate: Allocate, meanwhile: Callable[[], bool]
    ) -> PendingCollective:
        """Receive the header, whose size is known, then the tensors that it describes."""
        first = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        self.post([first], call, outward=False).wait()
        body = first.numpy().tobytes()
        size = int.from_bytes(body[:_LENGTH_BYTES], "big") - (_HEADER_BYTES - _LENGTH_BYTES)
        if size > 0:
            rest = torch.empty(size, dtype=torch.uint8)
            self.post([rest], call, outward=False).wait()
            body += rest.numpy().tobytes()
        length = int.from_bytes(body[:_LENGTH_BYTES], "big")
        return self.post(list(allocate(body[_LENGTH_BYTES : _LENGTH_BYTES + length])), call, outward=False)

    def advance(self) -> bool:
        """Return False, because torch continues sends by itself."""
        return False

    def give_up(self) -> None:
        """Wake, from another thread, a thread that waits for a message.

        A wait of gloo that times out closes the connections of its group, which ends every other wait on it.
        """
        if self._is_closed:
            return
        group = self._inward or dist.group.WORLD
        if (
            backend_for("cpu", group) == "gloo"
        ):  # a header is a tensor of the host, also beside a device's backend
            nothing = dist.irecv(torch.zeros(1), src=self._rank, group=group, tag=_TAG + 1)
            assert nothing is not None, "both ends are in the group"
            nothing.wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Drop the references to the groups, which end with their last references."""
        self._is_closed = True
        self._outward = self._inward = None
        self._communicators = ()


class _OutgoingMessage:
    """A message that is being copied into the ring: pieces of bytes, each at a multiple of 64."""

    __slots__ = ("_done", "_pieces", "call", "ended")

    def __init__(self, header: bytes, tensors: Sequence[Tensor], call: CollectiveCall):
        size = len(header).to_bytes(_LENGTH_BYTES, "big")
        self._pieces = deque(
            [torch.frombuffer(bytearray(size + header), dtype=torch.uint8), *map(_bytes_of, tensors)]
        )
        self._done = 0
        self.call = call
        self.ended = False

    def fill(self, slot: Tensor) -> None:
        """Write as many bytes as fit into ``slot``."""
        offset = 0
        while self._pieces and offset < slot.numel():
            piece = self._pieces[0]
            count = min(piece.numel() - self._done, slot.numel() - offset)
            ctypes.memmove(slot.data_ptr() + offset, piece.data_ptr() + self._done, count)
            self._done += count
            offset = _aligned(offset + count)
            if self._done == piece.numel():
                self._pieces.popleft()
                self._done = 0
        self.ended = not self._pieces


class SharedMemoryWire:
    """Messages of two ranks over their rings; ``index`` is this rank's index in the pair, 0 or 1."""

    def __init__(self, rings: GroupRings, index: int):
        self._rings = rings
        self._index = index
        self._peer = 1 - index
        self._queue: deque[_OutgoingMessage] = deque()
        self._offset = 0
        """Position in the slot that is being read."""
        self._broken = ""

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's own memory."""
        return RING.file_bytes

    def send(self, header: bytes, tensors: Sequence[Tensor], call: CollectiveCall) -> PendingCollective:
        """Copy the message into the ring as far as there is room."""
        outgoing = _OutgoingMessage(header, tensors, call)
        with self._guarded():
            self._queue.append(outgoing)
            self._fill(blocks=False)
        return DONE if outgoing.ended else PendingCollective(lambda: self._finish(outgoing))

    def receive(
        self, call: CollectiveCall, allocate: Allocate, meanwhile: Callable[[], bool]
    ) -> PendingCollective:
        """Copy the next message out of the ring; each piece is copied once."""
        with self._guarded():
            self._next_slot(call, meanwhile)
            # The length begins the first slot, and the first slot is longer than it.
            size = torch.empty(_LENGTH_BYTES, dtype=torch.uint8)
            self._copy_out(size, call, meanwhile, aligns=False)
            header = torch.empty(int.from_bytes(size.numpy().tobytes(), "big"), dtype=torch.uint8)
            self._copy_out(header, call, meanwhile)
            tensors = list(allocate(header.numpy().tobytes()))
            for each in tensors:
                self._copy_out(_bytes_of(each), call, meanwhile)
            self._rings.release([self._peer])
        return DONE

    def advance(self) -> bool:
        """Continue waiting sends as far as there is room, and return whether some still wait."""
        if self._queue:
            with self._guarded():
                self._fill(blocks=False)
        return bool(self._queue)

    def close(self) -> None:
        """Leave the connection and notify the other rank, which may still read what was sent."""
        if not self._broken:
            self._broken = "it was closed"
            self._rings.leave(self._broken, failed=False)
            self._queue.clear()

    def _finish(self, outgoing: _OutgoingMessage) -> None:
        with self._guarded():
            while not outgoing.ended:
                self._fill(blocks=True)

    def _fill(self, blocks: bool) -> None:
        while self._queue:
            outgoing = self._queue[0]
            slot = self._rings.claim(outgoing.call, blocks)
            if slot < 0:
                return
            outgoing.fill(self._rings.rings[self._index].slots[slot])
            self._rings.publish()
            if outgoing.ended:
                self._queue.popleft()

    def _next_slot(self, call: CollectiveCall, meanwhile: Callable[[], bool]) -> None:
        self._rings.receive([self._peer], call, meanwhile)
        self._offset = 0

    def _copy_out(
        self, piece: Tensor, call: CollectiveCall, meanwhile: Callable[[], bool], aligns: bool = True
    ) -> None:
        rings, peer, done = self._rings, self._peer, 0
        while done < piece.numel():
            slot = rings.rings[peer].slots[rings.at[peer]]
            if self._offset >= slot.numel():
                rings.release([peer])
                self._next_slot(call, meanwhile)
                slot = rings.rings[peer].slots[rings.at[peer]]
            count = min(piece.numel() - done, slot.numel() - self._offset)
            ctypes.memmove(piece.data_ptr() + done, slot.data_ptr() + self._offset, count)
            done += count
            self._offset += count
        if aligns:
            self._offset = _aligned(self._offset)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Abandon the connection if the block raises: a rank that fails inside a message is out of step for good."""
        if self._broken:
            raise CommError(f"the exchange was abandoned earlier: {self._broken}")
        try:
            yield
        except BaseException as error:
            if not self._broken:
                self._broken = str(error) or repr(error)
                self._queue.clear()
                self._rings.leave(self._broken, failed=True)
            raise


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
