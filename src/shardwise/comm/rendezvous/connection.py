"""Connection of a rank to the job's store, through the gate (gate.py) that keeps strangers away from it.

    rank 0   binds one address: the loopback interface if all ranks are on one host, else that of the store's name
             starts the gate there and serves torch's TCPStore behind it, on loopback
    others   dial the gate until it answers, and then let torch's client speak through a relay of their own

The secret is SHARDWISE_SECRET; on one host without it rank 0 draws one and leaves it, with its port, in a file in a
folder that only this user may enter. Several hosts without it have no secret: the gate then detects accidents alone.

torchrun's agent serves a store that listens on every interface. The ranks take one text from it: the address and the
port of rank 0's gate. A stranger who changes that text leads the ranks to a gate that cannot prove the secret.
"""

import errno
import hashlib
import hmac
import json
import multiprocessing.util
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from shardwise.base.errors import CommError
from shardwise.comm.rendezvous import gate
from shardwise.comm.rendezvous.address import HostRoute, family_of, listed, own_addresses
from shardwise.comm.rendezvous.gate import DialRelay, GateRefused, Place
from shardwise.comm.rendezvous.handshake import identity
from shardwise.comm.rendezvous.process import SERVING
from shardwise.comm.rendezvous.seat import LOOPBACK, JobSeat
from shardwise.comm.rendezvous.store import missing_keys

_INNER = "127.0.0.2"
"""Loopback address of rank 0's own relay, which has the same port as torch's server on the usual one."""
_PORTS = 8
"""Ports among which rank 0 takes the first free one if nobody names a port."""
_LOWEST_PORT, _PORT_COUNT = 20_000, 12_000
_ANSWER_S, _SHORT_ANSWER_S = 5.0, 1.0
"""Seconds to wait for each answer of a gate, at the only port where it may be and at one of several."""
_KEY_BYTES = 32
_FILE_BYTES = 1 << 12
_BACKLOG = 1024
LIFE = "TORCHELASTIC_RESTART_COUNT"
"""Variable with the number of times that torchrun has started the ranks again; its agent serves one store for all."""


class StoreAccess(NamedTuple):
    """Place and secret of the store, as one rank needs them to reach it."""

    seat: JobSeat
    address: str
    """Numeric address of the store's host."""
    timeout_s: float
    secret: bytes
    folder: Path | None
    """Folder for the secret of a job on one host that has no SHARDWISE_SECRET."""
    in_thread: bool
    """True if the relay may be a thread of this process."""
    any_port: bool = False
    """True if rank 0 takes any free port, because it has another way to tell the others."""

    @property
    def path(self) -> Path | None:
        """File in which rank 0 leaves the port and the secret."""
        if self.folder is None:
            return None
        named = f"{identity('').host} {self.seat.port}"
        return self.folder / f"gate_{hashlib.sha256(named.encode()).hexdigest()[:24]}"

    def ports(self, secret: bytes) -> list[int]:
        """Return the ports at which the gate may be, the first choice first."""
        if self.seat.gives_port:
            return [self.seat.port]
        draws = (
            hmac.digest(secret, f"port {number} of {self.seat.port}".encode(), "sha256")
            for number in range(_PORTS)
        )
        return [_LOWEST_PORT + int.from_bytes(draw[:8], "big") % _PORT_COUNT for draw in draws]


def is_under_agent(env: Mapping[str, str]) -> bool:
    """Return whether torchrun's agent serves the store."""
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect(
    seat: JobSeat,
    route: HostRoute | None,
    timeout_s: float,
    env: Mapping[str, str],
    folder: Path | None = None,
    in_thread: bool = True,
) -> dist.Store:
    """Return the store of the job, which rank 0 begins to serve.

    Args:
        seat: This rank.
        route: Way to the store's host; None: all ranks are on this host.
        timeout_s: Seconds to wait for the store.
        env: Environment of this process.
        folder: Folder that only this user may enter, for ranks of one host without SHARDWISE_SECRET.
        in_thread: True if only Python code uses the store, so that a thread may carry its calls.

    Raises:
        CommError: if the store cannot be reached or served, or another secret is asked for.
    """
    # All ranks are on this host: no other host shall reach the store, whatever name of this host the environment
    # contains.
    one_host = seat.local_size == seat.world_size
    under_agent = is_under_agent(env)
    address = LOOPBACK if one_host and not under_agent else seat.address if route is None else route.store
    own = LOOPBACK if one_host else address if route is None or not under_agent else route.own
    if address == LOOPBACK and not _has_loopback():
        raise CommError(
            f"rank {seat.rank}: this host has no loopback interface ({LOOPBACK} cannot be bound), where ranks of one "
            "host meet; switch it on (ip link set lo up), or let the container have one"
        )
    secret = env.get("SHARDWISE_SECRET", "").encode()
    access = StoreAccess(
        seat, own, timeout_s, secret, folder if one_host and not secret else None, in_thread, under_agent
    )
    listens = seat.rank == 0
    try:
        if under_agent:
            meeting = dist.PrefixStore(f"gate {env.get(LIFE, '0')}", _client(address, seat.port, timeout_s))
            return _met_at_agent(access, meeting)
        return _served(access, env.get("SHARDWISE_STORE_FD")) if listens else _dialled(access)
    except (RuntimeError, dist.DistNetworkError, OSError) as error:
        advice = f"; rank 0, which serves it, has not come within {timeout_s:.0f} s or has ended"
        if listens and not under_agent:
            advice = ""
            if getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
                advice = f"; rank 0 must run on the host with this address, and this one has {listed(own_addresses())}"
        raise CommError(
            f"rank {seat.rank}: cannot reach the store at {address}:{seat.port} (from {seat.source}){advice}: {error}"
        ) from error


class _Served(NamedTuple):
    """A store that this process serves, and its gate."""

    store: dist.Store
    control: int
    """Descriptor of the socket to the process of the gate, which ends when it is closed."""
    place: Place
    """Address and port of the gate."""


_SERVED: dict[tuple[int, str, int], _Served] = {}
"""Stores that this process serves, by process, address and port.

A program may destroy torch's default group and initialize again. Without this reference the server would end with the
group, and ranks that come first would join the old one; the descriptor of the launcher's port exists once.
"""
_DIALLED: dict[tuple[int, str, int], Place] = {}
"""Places of the relays of this process, by process and the gate's address and port."""


def refused_hosts(seat: JobSeat) -> list[str]:
    """Return the addresses of hosts that could not prove the secret to the gate of this process."""
    found = []
    for (process, _, port), served in _SERVED.items():
        if process == os.getpid() and port == seat.port:
            with suppress(OSError, ValueError), socket.socket(fileno=os.dup(served.control)) as control:
                text = control.recv(1 << 16, socket.MSG_DONTWAIT | socket.MSG_PEEK)
                found += [str(json.loads(line)["refused"]) for line in text.splitlines()]
    return found


def _served(access: StoreAccess, descriptor: str | None) -> dist.Store:
    """Serve the store behind a gate, and return it."""
    named = (os.getpid(), access.address, access.seat.port)
    if named in _SERVED:
        return _SERVED[named].store
    secret = access.secret
    if access.folder is not None:
        secret = secrets.token_bytes(_KEY_BYTES)
    listener = socket.socket(fileno=int(descriptor)) if descriptor else _bound(access, secret)
    listener.listen(_BACKLOG)
    place = listener.getsockname()[:2]
    if access.path is not None:
        _leave(access.path, place[1], secret)
    inner, door = _inner_sockets()
    with listener, inner:
        key = secrets.token_bytes(_KEY_BYTES)
        is_signed = door is not None and gate.sign(inner, key)
        # The gate may be dialled before torch's server runs, and a signed socket ignores a refusal without a signature.
        inner.listen(_BACKLOG)
        control = _start(
            [listener],
            {"is_gate": True, "place": inner.getsockname(), "key": key.hex() if is_signed else ""},
            secret,
        )
        if door is not None and is_signed:
            _run_relay(door, place, secret, access.in_thread)
        elif door is not None:
            door.close()
        port = inner.getsockname()[1]
        store = dist.TCPStore(
            _INNER if is_signed else LOOPBACK,
            port,
            world_size=None,
            is_master=True,
            timeout=timedelta(seconds=access.timeout_s),
            wait_for_workers=False,
            master_listen_fd=inner.detach(),
        )
    _SERVED[named] = _Served(store, control, place)
    return store


def _dialled(access: StoreAccess) -> dist.Store:
    """Wait for the gate, and return the store behind it."""
    named = (os.getpid(), access.address, access.seat.port)
    if named not in _DIALLED:
        place, secret = _found_gate(access)
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((LOOPBACK, 0))
        _DIALLED[named] = listener.getsockname()
        _run_relay(listener, place, secret, access.in_thread)
    return _client(*_DIALLED[named], access.timeout_s)


def _met_at_agent(access: StoreAccess, meeting: dist.Store) -> dist.Store:
    """Return the store behind rank 0's gate, whose place is a text in the store of torchrun's agent."""
    named = (os.getpid(), access.address, access.seat.port)
    if access.seat.rank == 0:
        is_new = named not in _SERVED
        store = _served(access, None)
        if is_new:
            meeting.set("place", json.dumps(_SERVED[named].place))
        return store
    if missing_keys(meeting, ["place"], access.timeout_s):
        raise OSError(errno.ETIMEDOUT, "no word from rank 0 in the store of torchrun's agent")
    try:
        address, port = json.loads(bytes(meeting.get("place"))[:_FILE_BYTES])
        seat = access.seat._replace(port=int(port), gives_port=True)
        given = access._replace(seat=seat, address=str(address))
    except (ValueError, TypeError) as error:
        raise OSError(errno.EPROTO, "the text in the store of torchrun's agent is not an address") from error
    if access.path is not None:
        return _dialled(access)
    return _dialled(given)


def _client(address: str, port: int, timeout_s: float) -> dist.Store:
    return dist.TCPStore(
        address,
        port,
        world_size=None,
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


def _found_gate(access: StoreAccess) -> tuple[Place, bytes]:
    """Return the place of the gate and the secret that it accepts, after waiting for rank 0.

    Raises:
        OSError: if nothing answers in time.
        CommError: if the gate does not accept this rank's secret.
    """
    end_s = time.monotonic() + access.timeout_s
    pause_s, last, refused = 0.005, OSError("nothing answers"), ""
    while True:
        candidates = _candidates(access)
        # Among several ports a program that accepts connections and says nothing shall not take the time of the join.
        patience_s = _ANSWER_S if len(candidates) == 1 else _SHORT_ANSWER_S
        for place, secret in candidates:
            try:
                gate.dial(place, secret, patience_s).close()
                return place, secret
            except GateRefused as error:
                refused = str(error)
            except OSError as error:
                last = error
        if refused and access.folder is None:
            raise CommError(
                f"rank {access.seat.rank} on host {socket.gethostname()}: {refused}: this host has another "
                "SHARDWISE_SECRET than rank 0's, or none, or another program answers there. Give all ranks of the job "
                "the same SHARDWISE_SECRET"
            )
        if time.monotonic() > end_s:
            raise last
        if last.errno == errno.ENETUNREACH:
            raise last
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.2)


def _candidates(access: StoreAccess) -> list[tuple[Place, bytes]]:
    """Return where the gate may be, and with which secret."""
    if access.path is None:
        return [((access.address, port), access.secret) for port in access.ports(access.secret)]
    with suppress(OSError, ValueError, KeyError, TypeError):
        with access.path.open("rb") as file:
            left = json.loads(file.read(_FILE_BYTES))
        return [((access.address, int(left["port"])), bytes.fromhex(left["secret"]))]
    return []


def _leave(path: Path, port: int, secret: bytes) -> None:
    """Write the gate's port and the job's secret for the other ranks of this host and user."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(json.dumps({"port": port, "secret": secret.hex()}))
    new.replace(path)


def forget_secret(seat: JobSeat, folder: Path | None) -> None:
    """Remove the file of ``_leave``; rank 0 calls this when all ranks have read it."""
    path = StoreAccess(seat, LOOPBACK, 0.0, b"", folder, True).path
    if path is not None:
        path.unlink(missing_ok=True)


def _run_relay(listener: socket.socket, place: Place, secret: bytes, in_thread: bool) -> None:
    """Let a relay carry the calls of torch's client in this process to the gate."""
    listener.listen(_BACKLOG)
    if in_thread:
        relay = DialRelay(listener, os.getpid(), place, secret)
        threading.Thread(target=_serve, args=(relay,), name="shardwise-store", daemon=True).start()
        return
    with listener:
        _start([listener], {"is_gate": False, "place": place, "key": ""}, secret)


def _serve(relay: DialRelay) -> None:
    """Run a relay in the calling thread, which does no work of this process (process.py)."""
    SERVING.add(threading.get_native_id())
    relay.run()


def _start(listeners: Sequence[socket.socket], given: Mapping[str, Any], secret: bytes) -> int:
    """Start a process of gate.py, and return the socket to it after it has begun to listen.

    The socket is a bare descriptor, because the process shall end with this one, and not with an object.
    """
    numbers = [listener.fileno() for listener in listeners]
    ours, theirs = socket.socketpair()
    with theirs:
        # A relay must not be a child that a program's own os.wait finds, so Popen, which polls, is not used.
        words = [sys.executable, "-I", "-S", gate.__file__, str(theirs.fileno())]
        first = multiprocessing.util.spawnv_passfds(  # type: ignore[attr-defined]
            os.fsencode(sys.executable), words, [theirs.fileno(), *numbers]
        )
        with suppress(ChildProcessError):  # a program that ignores SIGCHLD
            os.waitpid(first, 0)
    told = dict(given) | {"secret": secret.hex(), "listeners": numbers, "owner": os.getpid()}
    ours.sendall(json.dumps(told).encode() + b"\n")
    ours.settimeout(_ANSWER_S * 4)
    try:
        if b"ready" not in ours.recv(1 << 12):
            raise OSError("the process of the store's gate has ended")
    except TimeoutError:
        raise OSError("the process of the store's gate does not start") from None
    ours.setblocking(True)
    return ours.detach()


def _inner_sockets() -> tuple[socket.socket, socket.socket | None]:
    """Return sockets with one port on two loopback addresses: for torch's server, and for rank 0's own relay.

    The second is None on systems that have one loopback address.
    """
    for _ in range(_PORTS):
        inner = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        inner.bind((LOOPBACK, 0))
        door = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            door.bind((_INNER, inner.getsockname()[1]))
        except OSError as error:
            door.close()
            if error.errno == errno.EADDRINUSE:
                inner.close()
                continue
            return inner, None
        return inner, door
    raise OSError(errno.EADDRINUSE, "no port is free on two loopback addresses")


def _has_loopback() -> bool:
    """Return False if no socket can be bound to the loopback interface; torch's error would name another address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as opened:
        try:
            opened.bind((LOOPBACK, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def _bound(access: StoreAccess, secret: bytes) -> socket.socket:
    """Return a socket at one address of this host, for the gate to listen on.

    Raises:
        OSError: if this host does not have the address, or no port is free.
    """
    family = family_of(access.address)
    is_told = access.any_port or (access.path is not None and not access.seat.gives_port)
    ports = [0] if is_told else access.ports(secret)
    for port in ports:
        place = socket.getaddrinfo(
            access.address, port, family, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0][4]
        opened = socket.socket(family, socket.SOCK_STREAM)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind(place)
        except OSError as error:
            opened.close()
            if error.errno != errno.EADDRINUSE or port == ports[-1]:
                raise
            continue
        return opened
    raise AssertionError("the list of ports is not empty")
