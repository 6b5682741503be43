"""Gate before the job's store: no byte of a program without the job's secret reaches torch's store.

    rank's process             │ network      │ rank 0's host
    TCPStore ── DialRelay ─────┼──────────────┼── Gate ── TCPStore of rank 0
             127.0.0.1, own    │ one address  │  a process; 127.0.0.1, signed segments
             process alone     │              │

The gate accepts connections at one address of rank 0's host, and asks for a proof before anything else:

    rank   greeting, nonce of 32 bytes
    gate   nonce of 32 bytes
    rank   HMAC-SHA256(secret, "rank", both nonces)
    gate   1, HMAC-SHA256(secret, "gate", both nonces); or 0, and the end

Both sides draw a nonce for each connection, so a recorded one proves nothing. The gate reads no more bytes than these,
waits 5 s for them, and keeps at most 512 visitors that have not proved anything; more push out the oldest. After the
proof it copies bytes both ways, with a bounded buffer for each direction.

Two doors are on loopback interfaces. torch's server listens behind the gate with a key for TCP's signatures (RFC 2385),
so the kernel drops every segment of a program that does not have the key; where the kernel has no such keys, programs
of rank 0's own host can reach it. A DialRelay lets its own process in alone, which Linux's table of sockets tells.

The gate is a process of its own: a rank 0 whose interpreter stands still must not silence the store, by which the other
ranks find out which rank keeps them waiting. This file is that program, so it imports nothing but the standard library.
A DialRelay is a thread, or beside an accelerator a process, because torch's threads then use the store while the
interpreter may be waiting for them.

Cost: a copy and two wake-ups for each call of the store, one process of some 10 MB on rank 0's host.
"""

import contextlib
import hashlib
import hmac
import json
import os
import queue
import secrets
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

GREETING = b"SHARDW01"
_NONCE_BYTES = _PROOF_BYTES = 32
_BUFFER_BYTES = 1 << 18
_VISITORS = 512
_PROOF_S = 5.0
_TICK_S = 0.5
_NAMED = 64
"""Most refused hosts that are reported."""
_TCP_MD5SIG_EXT, _PREFIX = 32, 1
_MAPPED = bytes(8).hex() + struct.pack("=I", int.from_bytes(b"\0\0\xff\xff", "big")).hex().upper()
"""Beginning of an IPv4 address among those of IPv6, as Linux's table spells it."""
Place = tuple[str, int]


def proof(secret: bytes, role: bytes, own: bytes, other: bytes) -> bytes:
    """Return the proof of ``role`` (rank or gate) over its own nonce and the other side's."""
    return hmac.new(secret, b"shardwise " + role + own + other, hashlib.sha256).digest()


def sign(opened: socket.socket, key: bytes) -> bool:
    """Let the kernel accept only segments that ``key`` signs on an IPv4 socket; False if it has no such keys."""
    if not sys.platform.startswith("linux"):
        return False
    everyone = struct.pack("=HH4s", socket.AF_INET, 0, bytes(4)).ljust(128, b"\0")
    option = everyone + struct.pack("=BBHi", _PREFIX, 0, len(key), 0) + key.ljust(80, b"\0")
    try:
        opened.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, option)
    except OSError:
        return False
    return True


class GateRefused(Exception):
    """The gate does not accept this rank's proof, or this rank does not accept the gate's."""


def dial(place: Place, secret: bytes, timeout_s: float) -> socket.socket:
    """Return a connection to the store behind the gate at ``place``.

    Args:
        place: Numeric address and port of the gate.
        secret: Secret of the job.
        timeout_s: Seconds to wait for each answer.

    Raises:
        OSError: if nothing answers.
        GateRefused: if the secrets differ.
    """
    opened = socket.create_connection(place, timeout_s)
    try:
        _set_options(opened)
        own = secrets.token_bytes(_NONCE_BYTES)
        opened.sendall(GREETING + own)
        other = _received(opened, _NONCE_BYTES)
        opened.sendall(proof(secret, b"rank", own, other))
        answer = _received(opened, 1 + _PROOF_BYTES)
        if answer[:1] != b"\x01" or not hmac.compare_digest(answer[1:], proof(secret, b"gate", other, own)):
            raise GateRefused(f"the gate at {place[0]}:{place[1]} does not know this rank's secret")
    except BaseException:
        opened.close()
        raise
    opened.settimeout(None)
    return opened


def _received(opened: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = opened.recv(count - len(found))
        if not more:
            raise ConnectionResetError("the connection ended before the proof")
        found += more
    return found


def _set_options(opened: socket.socket) -> None:
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class _RelayEnd:
    """One of the two connections of a pair: what is still to be sent on it, and whether its other side has ended."""

    __slots__ = ("events", "is_over", "is_shut", "other", "pending", "socket")

    def __init__(self, opened: socket.socket) -> None:
        self.socket = opened
        self.other: _RelayEnd = self
        self.pending = bytearray()
        self.is_over = False
        self.is_shut = False
        self.events = 0


class Relay:
    """A loop that copies bytes between pairs of connections; ``run`` is its only thread."""

    def __init__(self, listeners: Sequence[socket.socket]) -> None:
        self.selector = selectors.DefaultSelector()
        self.control: socket.socket | None = None
        """Socket to the process with which a relay in a process of its own ends."""
        self._owner_pid = 0
        self._ends = False
        self._new: queue.Queue[tuple[socket.socket, socket.socket]] = queue.Queue()
        self._wakes, self._waker = socket.socketpair()
        for each in (self._wakes, self._waker, *listeners):
            each.setblocking(False)
        self.selector.register(self._wakes, selectors.EVENT_READ, self._take_new)
        for listener in listeners:
            self.selector.register(listener, selectors.EVENT_READ, self._accept)

    def pair(self, first: socket.socket, second: socket.socket) -> None:
        """Copy between two connections from now on; usable from any thread."""
        self._new.put((first, second))
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"1")

    def end_with(self, control: socket.socket, owner: int) -> None:
        """Let ``run`` end with the process ``owner``, which holds the other side of ``control``."""
        self.control, self._owner_pid = control, owner
        control.setblocking(False)
        self.selector.register(control, selectors.EVENT_READ, self._hear)

    def _hear(self, control: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                self._ends = not control.recv(4096)
            except ConnectionError:
                self._ends = True

    def _is_over(self) -> bool:
        # A fork of the owner may hold the socket open.
        return self._ends or (self.control is not None and not is_alive(self._owner_pid))

    def run(self) -> None:
        """Copy until the owner ends; a thread, as long as its process."""
        while not self._is_over():
            for key, events in self.selector.select(_TICK_S):
                data = key.data
                if isinstance(data, _RelayEnd):
                    self._copy(data, events)
                else:
                    data(key.fileobj)
            self.tick()

    def tick(self) -> None:
        """Do what is due after each round."""

    def visit(self, opened: socket.socket, place: Any) -> None:
        """Receive a new connection."""
        raise NotImplementedError

    def _accept(self, listener: socket.socket) -> None:
        try:
            opened, place = listener.accept()
        except OSError:  # the visitor has gone, or this process has no descriptor left
            time.sleep(0.001)
            return
        try:
            _set_options(opened)
            self.visit(opened, place)
        except OSError:
            opened.close()

    def _take_new(self, wakes: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            wakes.recv(4096)
        while not self._new.empty():
            first, second = (_RelayEnd(opened) for opened in self._new.get())
            first.other, second.other = second, first
            for end in (first, second):
                end.socket.setblocking(False)
                self._watch(end)

    def _watch(self, end: _RelayEnd) -> None:
        wanted = selectors.EVENT_WRITE if end.pending else 0
        if not end.is_over and len(end.other.pending) < _BUFFER_BYTES:
            wanted |= selectors.EVENT_READ
        if wanted == end.events:
            return
        if not end.events:
            self.selector.register(end.socket, wanted, end)
        elif wanted:
            self.selector.modify(end.socket, wanted, end)
        else:
            self.selector.unregister(end.socket)
        end.events = wanted

    def _copy(self, end: _RelayEnd, events: int) -> None:
        if end.socket.fileno() < 0:  # its partner failed in the same round
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._send(end)
            if events & selectors.EVENT_READ:
                data = end.socket.recv(_BUFFER_BYTES)
                end.is_over = not data
                end.other.pending += data
                self._send(end.other)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._close(end)
            return
        if end.is_shut and end.other.is_shut:
            self._close(end)
            return
        self._watch(end)
        self._watch(end.other)

    def _send(self, end: _RelayEnd) -> None:
        """Send what is pending, and then that no more comes if the other side has ended."""
        if end.pending:
            with contextlib.suppress(BlockingIOError, InterruptedError):
                del end.pending[: end.socket.send(end.pending)]
        if not end.pending and end.other.is_over and not end.is_shut:
            end.is_shut = True
            end.socket.shutdown(socket.SHUT_WR)

    def _close(self, end: _RelayEnd) -> None:
        for each in (end, end.other):
            if each.events:
                self.selector.unregister(each.socket)
                each.events = 0
            each.socket.close()


class _GateVisitor:
    """A connection that has not proved anything yet."""

    __slots__ = ("address", "came_s", "nonce", "other", "received", "socket")

    def __init__(self, opened: socket.socket, address: str) -> None:
        self.socket = opened
        self.address = address
        self.came_s = time.monotonic()
        self.received = b""
        self.nonce = b""
        self.other = b""


class Gate(Relay):
    """Accepts ranks that prove the job's secret, and copies between them and the store.

    Args:
        listeners: Sockets that listen.
        store: Address and port of the store.
        secret: Secret of the job.
        key: Key of the store's signatures; empty: the store has none.
    """

    def __init__(self, listeners: Sequence[socket.socket], store: Place, secret: bytes, key: bytes) -> None:
        super().__init__(listeners)
        self._store, self._secret, self._key = store, secret, key
        self._visitors: dict[socket.socket, _GateVisitor] = {}
        self._refused: set[str] = set()

    def tick(self) -> None:
        """Send visitors away that have not proved anything in time."""
        late_s = time.monotonic() - _PROOF_S
        for visitor in [each for each in self._visitors.values() if each.came_s < late_s]:
            self._send_away(visitor)

    def visit(self, opened: socket.socket, place: Any) -> None:
        """Begin to wait for the proof of a new connection."""
        if len(self._visitors) >= _VISITORS:
            self._send_away(next(iter(self._visitors.values())))
        opened.setblocking(False)
        self._visitors[opened] = _GateVisitor(opened, str(place[0]))
        self.selector.register(opened, selectors.EVENT_READ, self._prove)

    def _send_away(self, visitor: _GateVisitor) -> None:
        del self._visitors[visitor.socket]
        self.selector.unregister(visitor.socket)
        visitor.socket.close()

    def _prove(self, opened: socket.socket) -> None:
        visitor = self._visitors[opened]
        wanted = _PROOF_BYTES if visitor.nonce else len(GREETING) + _NONCE_BYTES
        try:
            data = opened.recv(wanted - len(visitor.received))
            visitor.received += data
            if not data or not GREETING.startswith(
                visitor.received[: len(GREETING)] if not visitor.nonce else b""
            ):
                self._send_away(visitor)
            elif len(visitor.received) == wanted and not visitor.nonce:
                visitor.other, visitor.received = visitor.received[len(GREETING) :], b""
                visitor.nonce = secrets.token_bytes(_NONCE_BYTES)
                opened.send(visitor.nonce)
            elif len(visitor.received) == wanted:
                self._judge(visitor)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            if opened in self._visitors:
                self._send_away(visitor)

    def _judge(self, visitor: _GateVisitor) -> None:
        right = proof(self._secret, b"rank", visitor.other, visitor.nonce)
        if not hmac.compare_digest(visitor.received, right):
            self._report(visitor.address)
            visitor.socket.send(bytes(1 + _PROOF_BYTES))
            self._send_away(visitor)
            return
        behind = self._opened_store()
        visitor.socket.send(b"\x01" + proof(self._secret, b"gate", visitor.nonce, visitor.other))
        del self._visitors[visitor.socket]
        self.selector.unregister(visitor.socket)
        self.pair(visitor.socket, behind)

    def _opened_store(self) -> socket.socket:
        opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            if self._key:
                sign(opened, self._key)
            opened.settimeout(_PROOF_S)
            opened.connect(self._store)
            _set_options(opened)
        except OSError:
            opened.close()
            raise
        return opened

    def _report(self, address: str) -> None:
        """Tell rank 0, once, that a host's proof is wrong."""
        if self.control is None or address in self._refused or len(self._refused) >= _NAMED:
            return
        self._refused.add(address)
        with contextlib.suppress(OSError):
            self.control.send(json.dumps({"refused": address}).encode() + b"\n")


class DialRelay(Relay):
    """Listens on a loopback interface for torch's store in the process ``owner``, and dials the gate for each call.

    Args:
        listener: Socket that listens.
        owner: Process whose connections are accepted.
        place: Address and port of the gate.
        secret: Secret of the job.
    """

    def __init__(self, listener: socket.socket, owner: int, place: Place, secret: bytes) -> None:
        super().__init__([listener])
        self._own = listener.getsockname()
        self._owner, self._place, self._secret = owner, place, secret

    def visit(self, opened: socket.socket, place: Any) -> None:
        """Dial the gate, in a thread of its own because other connections go on."""
        if belongs_to(self._owner, place, self._own):
            threading.Thread(target=self._dial, args=(opened,), name="shardwise-dial", daemon=True).start()
        else:
            opened.close()

    def _dial(self, opened: socket.socket) -> None:
        try:
            self.pair(opened, dial(self._place, self._secret, _PROOF_S))
        except (OSError, GateRefused):
            opened.close()


def is_alive(process: int) -> bool:
    """Return whether a process of this user exists and has not ended."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        with open(f"/proc/{process}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return True


def belongs_to(process: int, near: Place, far: Place) -> bool:
    """Return whether the IPv4 connection from ``near`` to ``far`` on this host is one of ``process``'s.

    Systems that are not Linux have no table of sockets to look in, and the answer is True.
    """
    if not sys.platform.startswith("linux"):
        return True
    wanted = [_as_in_table(near), _as_in_table(far)]
    # torch's sockets are of IPv6, with IPv4 addresses in its form.
    mapped = [_MAPPED + each for each in wanted]
    try:
        numbers = []
        for kind, places in (("tcp6", mapped), ("tcp", wanted)):
            with contextlib.suppress(FileNotFoundError), open(f"/proc/{process}/net/{kind}") as table:
                numbers += [fields[9] for fields in map(str.split, table) if fields[1:3] == places]
        if not numbers or numbers[0] == "0":
            return False
        name = f"socket:[{numbers[0]}]"
        for descriptor in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process}/fd/{descriptor}") == name:
                    return True
    except OSError:
        return False
    return False


def _as_in_table(place: Place) -> str:
    number = int.from_bytes(socket.inet_aton(place[0]), sys.byteorder)
    return f"{number:08X}:{place[1]:04X}"


def main(descriptor: int) -> None:
    """Run a gate or a dialling relay as the other side of the socket ``descriptor`` describes it.

    The process leaves its parent, because the watch of a rank counts what the rank's descendants compute as progress.
    """
    # A scheduler's request to stop is for the ranks, which still need the store to save.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # a reader of the rank's output shall not wait for this process
        os.dup2(nowhere, stream)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two for each connection of a rank
    control = socket.socket(fileno=descriptor)
    text = b""
    while not text.endswith(b"\n"):
        more = control.recv(1 << 16)
        if not more:
            return
        text += more
    given = json.loads(text)
    listeners = [socket.socket(fileno=number) for number in given["listeners"]]
    place, secret, owner = tuple(given["place"]), bytes.fromhex(given["secret"]), given["owner"]
    relay: Relay
    if given["is_gate"]:
        relay = Gate(listeners, place, secret, bytes.fromhex(given["key"]))
    else:
        relay = DialRelay(listeners[0], owner, place, secret)
    relay.end_with(control, owner)
    control.send(b'{"ready": true}\n')
    relay.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
