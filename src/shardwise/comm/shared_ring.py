"""Ring: the memory that one rank shares with the others of its host, and the semaphores that order its use.

Each rank owns one file in /dev/shm that never has a name there: it is made with O_TMPFILE, and its peers open it
through /proc/<pid>/fd. So a rank may be killed at any moment and leaves nothing behind, and no other user can open it.

    | control: state, two semaphores per peer, one head per slot | slot 0 | slot 1 | ... | slot K-1 |

The owner fills its slots in turn: round t goes to slot t % K. Every ordered pair (owner, reader) has two semaphores:

    written   the owner posts after filling a slot      the reader waits before reading it
    free      the reader posts after reading a slot     the owner waits before filling it again, K rounds later

The design uses POSIX semaphores because ``sem_post`` and ``sem_wait`` synchronise memory by their specification. A
payload that torch wrote before the post is visible after the wait, on ARM as on x86; no plain load or store of ours
orders anything. They are also the fastest of the ways with this guarantee (benchmarks/collectives): uncontended, a post
or a wait is one atomic instruction in user space. The death of a rank is detected through a pidfd, which reports it at
once even if forked children still hold its descriptors.
"""

import contextlib
import ctypes
import errno
import json
import mmap
import os
import select
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.base.errors import CommError, DeadlineError

_LINE_BYTES = 128
"""Distance of two semaphores: two ranks never write one cache line, nor the pair of lines that is prefetched."""
_STATE_BYTES = 1024
HEAD_BYTES = 256
_SLICE_S = 0.02
"""Interval in seconds at which a blocked rank checks whether its peers still live."""
_BUSY_SLICE_S = 0.001
"""Interval in seconds at which a blocked rank with other work continues that work."""
_SPIN_S = 50e-6
"""Seconds that a rank polls before it sleeps.

It yields the core in between, so this also works with more ranks than cores.
"""
_OPEN, _LEFT, _FAILED = 0, 1, 2
"""State of an owner, in the first byte of its file; the reason follows.

An owner that left may just have finished before its peers; an owner that failed will be missed by all of them.
"""
_CLOCK_MONOTONIC = 1
_FOLDER = "/dev/shm"


class SharedMemoryUnavailable(Exception):
    """A group that cannot use shared memory; raised on all of its ranks or on none."""


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


class Semaphores:
    """The semaphore calls of libc, by address. All but ``wait`` return at once and so keep the interpreter's lock."""

    def __init__(self) -> None:
        quick, slow = ctypes.PyDLL(None), ctypes.CDLL(None)
        try:
            self._init, self.post, self.take, self._value = (
                quick.sem_init,
                quick.sem_post,
                quick.sem_trywait,
                quick.sem_getvalue,
            )
            self._wait = slow.sem_clockwait
        except AttributeError as error:
            raise OSError(errno.ENOSYS, f"the C library lacks a semaphore call: {error}") from error
        self._init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
        self._value.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
        self._wait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec)]
        self.post.argtypes = self.take.argtypes = [ctypes.c_void_p]

    def start(self, address: int) -> None:
        """Initialize a semaphore at zero that processes share.

        Raises:
            OSError: if the system refuses.
        """
        if self._init(address, 1, 0) != 0:
            raise OSError(errno.ENOSYS, "sem_init refuses a semaphore that processes share")

    def value(self, address: int) -> int:
        """Return how often the semaphore could be taken now."""
        count = ctypes.c_int()
        self._value(address, ctypes.byref(count))
        return count.value

    def wait(self, address: int, seconds: float) -> bool:
        """Wait to take the semaphore, and return False if the time is over or a signal arrives first."""
        end = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(seconds * 1e9)
        until = _Timespec(*divmod(end, 1_000_000_000))
        return bool(self._wait(address, _CLOCK_MONOTONIC, ctypes.byref(until)) == 0)


class RingLayout(NamedTuple):
    """Positions of the parts of a ring's file."""

    ranks: int
    slots: int
    slot_bytes: int

    def written(self, reader: int) -> int:
        """Return the offset of the semaphore that counts filled slots for ``reader``."""
        return _STATE_BYTES + _LINE_BYTES * 2 * reader

    def free(self, reader: int) -> int:
        """Return the offset of the semaphore with which ``reader`` returns slots."""
        return _STATE_BYTES + _LINE_BYTES * (2 * reader + 1)

    def head(self, slot: int) -> int:
        """Return the offset of the text that names the collective that begins in ``slot``."""
        return _STATE_BYTES + _LINE_BYTES * 2 * self.ranks + HEAD_BYTES * slot

    @property
    def control_bytes(self) -> int:
        """Bytes before the first slot, in whole pages."""
        return -(-self.head(self.slots) // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.control_bytes + self.slots * self.slot_bytes


class SharedRing:
    """One rank's file, as mapped by its owner or by a peer."""

    def __init__(self, descriptor: int, layout: RingLayout):
        self.layout = layout
        self.map = mmap.mmap(descriptor, layout.file_bytes)
        data = torch.frombuffer(self.map, dtype=torch.uint8)
        self.address: int = data.data_ptr()
        self.slots: tuple[Tensor, ...] = data[layout.control_bytes :].split(layout.slot_bytes)

    def write_head(self, slot: int, head: bytes) -> None:
        """Write the name of the collective that begins in ``slot``."""
        start = self.layout.head(slot)
        self.map[start : start + HEAD_BYTES] = head.ljust(HEAD_BYTES)

    def read_head(self, slot: int) -> bytes:
        """Return the name of the collective that begins in ``slot``."""
        start = self.layout.head(slot)
        return self.map[start : start + HEAD_BYTES].rstrip()

    @property
    def state(self) -> int:
        """State of the owner: open, left or failed."""
        return self.map[0]

    @property
    def reason(self) -> str:
        """Reason why the owner has left or failed."""
        return self.map[1:_STATE_BYTES].rstrip(b"\0").decode(errors="replace")

    def leave(self, reason: str, failed: bool) -> None:
        """Record for the peers that the owner takes part no longer."""
        text = reason.encode()[: _STATE_BYTES - 1]
        self.map[1 : 1 + len(text)] = text
        self.map[0] = _FAILED if failed else _LEFT


class CollectiveCall(NamedTuple):
    """The collective that a rank is in, for errors."""

    operation: str
    what: str
    timeout_s: float


class PeerProcesses:
    """The peers' processes, which can be checked for their end.

    ``descriptors`` are their pidfds. They close with this object at the latest, because an engine may be dropped
    without being closed.
    """

    def __init__(self, descriptors: dict[int, int]):
        self._peers = {descriptor: peer for peer, descriptor in descriptors.items()}
        self._poll = select.poll()
        for descriptor in self._peers:
            self._poll.register(descriptor, select.POLLIN)
        self.let_go = weakref.finalize(self, _close_all, list(self._peers))
        self.let_go.atexit = False

    def ended(self) -> set[int]:
        """Return the peers whose process has ended."""
        return {self._peers[descriptor] for descriptor, _ in self._poll.poll(0)}


class GroupRings:
    """The rings of a group as one rank uses them: it fills its own and reads those of its peers.

    Args:
        rank: This rank's index.
        rings: All rings, by rank.
        lives: Processes of the peers.
        names: Numbers of the ranks in errors.
        alarm: Function that a waiting thread calls; it may raise.
    """

    def __init__(
        self,
        rank: int,
        rings: Sequence[SharedRing],
        lives: PeerProcesses,
        names: Sequence[int],
        alarm: Callable[[], None] | None = None,
    ):
        layout = rings[rank].layout
        self.rings = rings
        self.layout = layout
        self.peers = [peer for peer in range(len(rings)) if peer != rank]
        self.at = [-1] * len(rings)
        """Slot of each peer's ring that was waited for last."""
        self._rank = rank
        self._names = names
        self._lives = lives
        self._alarm = alarm
        self._semaphores = Semaphores()
        own = rings[rank].address
        self._tell = [own + layout.written(peer) for peer in self.peers]
        self._told = {peer: rings[peer].address + layout.written(rank) for peer in self.peers}
        self._give = {peer: rings[peer].address + layout.free(rank) for peer in self.peers}
        self._given = {peer: own + layout.free(peer) for peer in self.peers}
        self._credits = dict.fromkeys(self.peers, layout.slots)
        self._next = 0

    def claim(self, call: CollectiveCall, blocks: bool) -> int:
        """Return the next slot of the own ring after every peer has returned it.

        Args:
            call: The collective, for errors.
            blocks: Wait for the slot.

        Returns:
            The slot; -1 if ``blocks`` is False and a wait would be needed.
        """
        credits, take = self._credits, self._semaphores.take
        for peer, address in self._given.items():
            if not credits[peer]:
                if take(address) != 0:
                    if not blocks:
                        return -1
                    self._wait(self._given, peer, [peer], call)
                credits[peer] = 1
        for peer in credits:
            credits[peer] -= 1
        slot = self._next
        self._next = (slot + 1) % self.layout.slots
        return slot

    def publish(self) -> None:
        """Allow the peers to read the slot claimed last."""
        post = self._semaphores.post
        for address in self._tell:
            post(address)

    def receive(
        self, sources: Sequence[int], call: CollectiveCall, meanwhile: Callable[[], bool] | None = None
    ) -> None:
        """Wait for the next slot of each source; ``at`` then contains its number.

        Args:
            sources: Peers to wait for.
            call: The collective, for errors.
            meanwhile: Function that a waiting rank calls again and again; returns whether it has more to do.
        """
        take, told, at, slots = self._semaphores.take, self._told, self.at, self.layout.slots
        for place, peer in enumerate(sources):
            if take(told[peer]) != 0:
                self._wait(told, peer, sources[place:], call, meanwhile)
            at[peer] = (at[peer] + 1) % slots

    def release(self, sources: Sequence[int]) -> None:
        """Return the slots received last to their owners."""
        post, give = self._semaphores.post, self._give
        for peer in sources:
            post(give[peer])

    def leave(self, reason: str, failed: bool) -> None:
        """Record for the peers that this rank takes part no longer, and release all resources."""
        self.rings[self._rank].leave(reason, failed)
        self._lives.let_go()
        self.rings = []

    def _wait(
        self,
        addresses: dict[int, int],
        peer: int,
        awaited: Sequence[int],
        call: CollectiveCall,
        meanwhile: Callable[[], bool] | None = None,
    ) -> None:
        """Take ``peer``'s semaphore; if that fails, the error names all of ``awaited`` whose semaphore is empty."""
        address, take = addresses[peer], self._semaphores.take
        start = time.monotonic()
        while time.monotonic() - start < _SPIN_S:
            if take(address) == 0:
                return
            os.sched_yield()
        while True:
            is_busy = meanwhile is not None and meanwhile()
            if self._semaphores.wait(address, _BUSY_SLICE_S if is_busy else _SLICE_S):
                return
            if self._alarm is not None:
                self._alarm()
            missing = [other for other in awaited if self._semaphores.value(addresses[other]) == 0]
            gone = self._gone(missing)
            if gone:
                # Wait one slice more, because a post just before the rank ended still counts.
                if self._semaphores.wait(address, _SLICE_S):
                    return
                raise CommError(f"{self._where(call)}: {gone}")
            if missing and time.monotonic() - start > call.timeout_s:
                raise DeadlineError(
                    f"{self._where(call)}: {self._list(missing)} did not arrive within {call.timeout_s:g} s; see the "
                    "last lines of their logs. Ranks that are merely slow need a larger comm.timeout_s"
                )

    def _gone(self, missing: Sequence[int]) -> str:
        """Return a sentence on the ranks that will not come, or "".

        A death precedes what other ranks report about it.
        """
        ended = self._lives.ended()
        gone = [peer for peer in missing if peer in ended or self.rings[peer].state == _LEFT]
        if gone:
            return f"{self._list(gone)} ended or left the group; see the last lines of the log"
        for peer in self.peers:
            if self.rings[peer].state == _FAILED:
                return f"{self._list([peer])} gave up: {self.rings[peer].reason}"
        return ""

    def _where(self, call: CollectiveCall) -> str:
        return f"rank {self._names[self._rank]}: {call.operation} of {call.what}"

    def _list(self, ranks: Sequence[int]) -> str:
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(self._names[rank]) for rank in ranks)}"


def meet(
    rank: int,
    post: Callable[[str, str], None],
    collect: Callable[[str, float], list[str]],
    timeout_s: float,
    layout: RingLayout,
    names: Sequence[int],
    alarm: Callable[[], None] | None = None,
) -> GroupRings:
    """Make the own ring and open those of all peers; either every rank succeeds or all raise.

    The ranks exchange texts twice: first their offers, then whether they could open the others' rings.

    Args:
        rank: This rank's index.
        post: Function that writes a text under a key.
        collect: Function that returns the texts of all ranks under a key.
        timeout_s: Seconds to wait for the others.
        layout: Layout of every ring.
        names: Numbers of the ranks in errors.
        alarm: Function that a waiting thread calls; it may raise.

    Raises:
        SharedMemoryUnavailable: on all ranks, if one of them cannot take part.
    """
    with contextlib.ExitStack() as held:
        own: SharedRing | None = None
        try:
            descriptor = _create(layout)
            held.callback(os.close, descriptor)
            own = SharedRing(descriptor, layout)
            semaphores = Semaphores()
            for peer in range(layout.ranks):
                semaphores.start(own.address + layout.written(peer))
                semaphores.start(own.address + layout.free(peer))
            offer = _describe(descriptor, layout)
        except (OSError, AttributeError) as error:
            offer = {"reason": f"{_FOLDER}: {error}"}
        post("offer", json.dumps(offer))
        offers: list[dict[str, Any]] = [json.loads(text) for text in collect("offer", timeout_s)]
        _refuse([str(each.get("reason", "")) for each in offers], names)
        for key, meaning in (("host", "hosts"), ("layout", "ring sizes")):
            if any(each[key] != offers[0][key] for each in offers):
                raise SharedMemoryUnavailable(f"the ranks {list(names)} are on different {meaning}")

        assert own is not None, "a rank without a ring gave its reason above"
        rings, lives, reason = [own] * layout.ranks, {}, ""
        undo = held.enter_context(contextlib.ExitStack())
        try:
            for peer in range(layout.ranks):
                if peer != rank:
                    lives[peer] = os.pidfd_open(offers[peer]["pid"])
                    undo.callback(os.close, lives[peer])
                    rings[peer] = _attach(offers[peer], layout)
        except (OSError, AttributeError) as error:
            reason = f"cannot open the memory of rank {names[peer]}: {error}"
        post("attached", reason)
        _refuse(collect("attached", timeout_s), names)
        undo.pop_all()
    return GroupRings(rank, rings, PeerProcesses(lives), names, alarm)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _create(layout: RingLayout) -> int:
    """Create a file without a name and reserve its memory.

    A /dev/shm that is too small fails here, not with SIGBUS later.
    """
    descriptor = os.open(_FOLDER, os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, layout.file_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _describe(descriptor: int, layout: RingLayout) -> dict[str, Any]:
    status = os.fstat(descriptor)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {
        "host": [boot, os.stat("/proc/self/ns/pid").st_ino],
        "layout": list(layout),
        "pid": os.getpid(),
        "descriptor": descriptor,
        "file": [status.st_dev, status.st_ino],
    }


def _attach(offer: dict[str, Any], layout: RingLayout) -> SharedRing:
    descriptor = os.open(f"/proc/{offer['pid']}/fd/{offer['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if [status.st_dev, status.st_ino] != offer["file"]:
            raise OSError(errno.ESTALE, "its process ended and another took its number")
        return SharedRing(descriptor, layout)
    finally:
        os.close(descriptor)


def _refuse(reasons: Sequence[str], names: Sequence[int]) -> None:
    given = [f"rank {name}: {reason}" for name, reason in zip(names, reasons, strict=True) if reason]
    if given:
        raise SharedMemoryUnavailable("; ".join(given))
