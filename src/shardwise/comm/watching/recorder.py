"""The recorder: a ring of records of what this rank does, in a mapped file that survives the process, however it ends.

    flight/rank_00003.ring
      header      4 KiB    who wrote the file; the time of the last sign of life; numbers for a stack by signal
      snapshot    2 parts  what the watch's thread saw a second ago, as JSON (watch.py): stack, waits, the last story
      strings     128 KiB  names of tensors, groups and places in code, each once
      records     8192     64 bytes each; the oldest is overwritten

A record is one event of one thread:

    ACTION  the walker comes to an Action           its Kind, Unit, stage, microbatch
    START   a collective or message is started      operation, group, number in the group, dtype, elements, call site
    WAIT    the thread begins to wait for ranks     operation, group, number
    WAITED  the wait is over
    STEP    a step is over

Ranks that make the same calls count alike, so a START with one group and one number is the same collective on all
members of the group. Two ranks whose records of one number differ have called different collectives (mismatch.py).

The kernel writes the pages of a mapped file to the disk after the process is gone, so nothing is lost by SIGKILL; only
a crash of the host may lose the last seconds. Blocks are reserved when the file is made: later the disk may be full,
and a store into a page without a block would end the process (SIGBUS). If the file cannot be made, the ring is in
memory, and training goes on.

The file contains no pickle. Every number is checked when it is read (rings.py), because the folder of a run may be
shared.

Cost: about 1 µs for a record, 2 µs for a START, which looks for the call site on the stack
(``benchmarks/recorder/README.md``); 0.7 MiB of disk per rank.
"""

import contextlib
import itertools
import logging
import mmap
import os
import socket
import struct
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from shardwise.base.regular_files import read_small_text
from shardwise.base.words import in_words
from shardwise.plan.action import Action, Kind

_log = logging.getLogger(__name__)

MAGIC = b"SWRING01"
HEADER = struct.Struct("<8sIIIIIIQqqQ64s160s")
"""Magic, rank, ranks, records, bytes of strings, bytes of a snapshot, zero, process, its start in clock ticks, time of
opening, wall clock minus monotonic clock, host name, host (``RankIdentity.host``); then the CRC-32 of all of these."""
BEAT = struct.Struct("<qIiiq")
"""Time of the last sign of life, 1 if the rank has left the job, and signal, descriptor and thread for its stack."""
PART = struct.Struct("<QII")
"""Turn of a snapshot, its bytes, their CRC-32."""
RECORD = struct.Struct("<QqIBBBBiihhIIQHHHH4x")
"""Number + 1, time, step, event, kind of Action, operation, dtype, unit, microbatch, stage, other, number in the group,
number + 1 again (low half), elements, group, tensor, call site, thread."""
STRING = struct.Struct("<H")
BEAT_AT, STRINGS_AT = 512, 4096
SNAPSHOT_BYTES, STRING_BYTES, SLOTS = 16 << 10, 128 << 10, 8192
RECORD_BYTES = 64
QUESTION = "question"
"""Name of the file with which a running job is asked (inquiry.py)."""
_QUESTION_BYTES = 64
_MOST_STRING = 400
_MOST_FRAMES = 60

OPERATIONS = (
    "",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "barrier",
    "send",
    "all_to_all",
    "receive",
    "texts",
)
DTYPES = tuple(sorted({str(each) for each in vars(torch).values() if isinstance(each, torch.dtype)}))
"""Names of dtypes; a record has an index + 1, and 0 for none."""
KINDS = tuple(Kind)
_OPERATION_NUMBERS = {name: number for number, name in enumerate(OPERATIONS)}
_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
_DTYPE_NUMBERS = {
    each: DTYPES.index(str(each)) + 1 for each in vars(torch).values() if isinstance(each, torch.dtype)
}


class Event(IntEnum):
    """The kind of a record."""

    ACTION = 1
    START = 2
    WAIT = 3
    WAITED = 4
    STEP = 5


class RingOwner(NamedTuple):
    """The process that writes a ring."""

    rank: int
    ranks: int
    host: str
    """Text that only processes of one host have in common (``RankIdentity.host``)."""


class RecordedGroup:
    """A group of ranks in the records, with the number of its next collective.

    Args:
        name: Index of the group's name among the strings.
    """

    __slots__ = ("count", "name")

    def __init__(self, name: int):
        self.name = name
        self.count = 0


class _Caller(NamedTuple):
    """The user's frame that was found above a place that calls this module."""

    depth: int
    """Frames between the two; 0 without a user's frame."""
    code: CodeType
    instruction: int
    site: int
    """Index of the string."""


class CallPlace(NamedTuple):
    """A collective or message: its group in the records, and its number in the group."""

    group: int
    number: int


NOWHERE = CallPlace(0, 0)


def ranges_text(ranks: Sequence[int]) -> str:
    """Return ranks as a short text: ``0-3``, ``0-12/4`` for 0, 4, 8 and 12, ``0,5,7``."""
    if len(ranks) < 3:
        return ",".join(map(str, ranks))
    stride = ranks[1] - ranks[0]
    if stride > 0 and all(b - a == stride for a, b in itertools.pairwise(ranks)):
        return f"{ranks[0]}-{ranks[-1]}" + (f"/{stride}" if stride > 1 else "")
    return ",".join(map(str, ranks))


class Recorder:
    """Writes the records of one rank.

    Args:
        path: File of the ring; None: in memory.
        owner: This process.
    """

    def __init__(self, path: Path | None, owner: RingOwner):
        mapped = _mapped(path)
        self.path = None if mapped is None else path
        self._map = mapped or mmap.mmap(-1, _size())
        self._next = itertools.count().__next__
        self._strings: dict[str, int] = {"": 0}
        self._listed = [""]
        self._used = STRING.size
        self._groups: weakref.WeakKeyDictionary[Any, RecordedGroup] = weakref.WeakKeyDictionary()
        self._names: dict[str, int] = {}
        """Groups made so far, by name."""
        self._threads: dict[int, int] = {}
        self._callers: dict[tuple[int, int], _Caller] = {}
        self._codes: dict[int, tuple[CodeType, int]] = {}
        self._turn = 0
        self._lock = threading.Lock()
        self.step = 0
        """Number of the running step."""
        self.users = 0
        """Watches that use this recorder."""
        self._head(owner)

    def _head(self, owner: RingOwner) -> None:
        now = time.monotonic_ns()
        packed = HEADER.pack(
            MAGIC,
            owner.rank,
            owner.ranks,
            SLOTS,
            STRING_BYTES,
            SNAPSHOT_BYTES,
            0,
            os.getpid(),
            start_ticks(os.getpid()),
            now,
            (time.time_ns() - now) & (1 << 63) - 1,
            socket.gethostname().encode()[:64],
            owner.host.encode()[:160],
        )
        self._map[: len(packed) + 4] = packed + zlib.crc32(packed).to_bytes(4, "little")
        BEAT.pack_into(self._map, BEAT_AT, now, 0, 0, 0, 0)

    # Records -----------------------------------------------------------------------------------------------------

    def action(self, action: Action) -> None:
        """Record that the walker has come to an Action; one of a Kind that a program has added is left out."""
        kind, unit, microbatch, stage, other = action
        number = _KIND_NUMBERS.get(kind)
        if number is not None:
            self._write(Event.ACTION, number, 0, 0, unit, microbatch, stage, other)

    def start(
        self, group: RecordedGroup, operation: str, dtype: torch.dtype | None, elements: int, what: str
    ) -> CallPlace:
        """Record that a collective or a message begins.

        Args:
            group: Its group.
            operation: Name of the operation.
            dtype: Dtype of the elements.
            elements: Elements of the full tensor.
            what: Name of the tensor.

        Returns:
            The group and the number of the collective in the group, for the records of its waits.
        """
        number = group.count = group.count + 1
        self._write(
            Event.START,
            0,
            _OPERATION_NUMBERS[operation],
            0 if dtype is None else _DTYPE_NUMBERS[dtype],
            -1,
            -1,
            -1,
            -1,
            number,
            elements,
            group.name,
            self._string(what),
            self._site(),
        )
        return CallPlace(group.name, number)

    def wait(self, operation: str, what: str, place: CallPlace = NOWHERE) -> None:
        """Record that the calling thread begins to wait for other ranks."""
        number = _OPERATION_NUMBERS[operation]
        self._write(
            Event.WAIT, 0, number, 0, -1, -1, -1, -1, place.number, 0, place.group, self._string(what)
        )

    def waited(self) -> None:
        """Record that the calling thread waits no longer."""
        self._write(Event.WAITED)

    def step_ended(self) -> None:
        """Record that a step is over."""
        self._write(Event.STEP)
        self.step += 1

    def _write(
        self,
        event: Event,
        kind: int = 0,
        operation: int = 0,
        dtype: int = 0,
        unit: int = -1,
        microbatch: int = -1,
        stage: int = -1,
        other: int = -1,
        number: int = 0,
        elements: int = 0,
        group: int = 0,
        what: int = 0,
        site: int = 0,
    ) -> None:
        count = self._next()
        identifier = threading.get_ident()
        thread = self._threads.get(identifier)
        if thread is None:
            thread = self._threads[identifier] = len(self._threads) & 0xFFFF
        RECORD.pack_into(
            self._map,
            _RECORDS_AT + count % SLOTS * RECORD_BYTES,
            count + 1,
            time.monotonic_ns(),
            self.step,
            event,
            kind,
            operation,
            dtype,
            unit,
            microbatch,
            stage,
            other,
            number & 0xFFFFFFFF,
            (count + 1) & 0xFFFFFFFF,
            elements,
            group,
            what,
            site,
            thread,
        )

    # Names -------------------------------------------------------------------------------------------------------

    def group_of(self, transport: Any, name: str) -> RecordedGroup:
        """Return the group whose collectives a transport carries, in one order.

        Args:
            transport: The transport.
            name: Name of the group, the same on all of its members.
        """
        found = self._groups.get(transport)
        if found is None:
            found = self._groups[transport] = self.group(name)
        return found

    def group(self, name: str) -> RecordedGroup:
        """Return a new group; a second group of one name has a number, equal on ranks that make groups in one order."""
        count = self._names[name] = self._names.get(name, 0) + 1
        return RecordedGroup(self._string(name if count == 1 else f"{name} ({count})"))

    def name_of(self, place: CallPlace) -> str:
        """Return the name of the group of a collective; "" for none."""
        return self._listed[place.group]

    def _string(self, text: str) -> int:
        """Return the index of a string, which is written when it comes first; 0 if there is no room."""
        found = self._strings.get(text)
        return self._added(text) if found is None else found

    def _added(self, text: str) -> int:
        with self._lock:
            if text in self._strings:
                return self._strings[text]
            data = text.encode(errors="replace")[:_MOST_STRING]
            end = self._used + STRING.size + len(data)
            index = len(self._strings)
            if end + STRING.size > STRING_BYTES or index > 0xFFFF:
                return 0
            at = STRINGS_AT + 2 * SNAPSHOT_BYTES + self._used
            self._map[at + STRING.size : at + STRING.size + len(data)] = data
            STRING.pack_into(self._map, at, len(data) + 1)
            self._used, self._strings[text] = end, index
            self._listed.append(text)
            return index

    def _site(self) -> int:
        """Return the string for the place in the user's code that has led to this call.

        Without such a place, as in ``shardwise train``, the string is for the place in this package that called. A walk
        up a deep stack takes 5 µs, so the depth of the user's frame is kept for each place that calls this module.
        """
        near, depth, codes = sys._getframe(2), 2, self._codes
        while near.f_back is not None:
            owned = codes.get(id(near.f_code))
            if (self._owner(near.f_code) if owned is None else owned[1]) != _COMM:
                break
            near, depth = near.f_back, depth + 1
        key = id(near.f_code), near.f_lasti
        known = self._callers.get(key)
        if known is not None:
            if not known.depth:
                return known.site
            frame = _frame_at(known.depth + 1)
            if frame is not None and frame.f_code is known.code and frame.f_lasti == known.instruction:
                return known.site
        found = self._callers[key] = self._caller(near, depth)
        return found.site

    def _caller(self, near: FrameType, depth: int) -> "_Caller":
        """Return the frame of the user's code on the stack of ``near``, which has ``depth`` frames above it."""
        frame: FrameType | None = near
        for above in range(depth, depth + _MOST_FRAMES):
            if frame is None:
                break
            if self._owner(frame.f_code) == _USER:
                return _Caller(above, frame.f_code, frame.f_lasti, self._site_of(frame))
            frame = frame.f_back
        return _Caller(0, near.f_code, near.f_lasti, self._site_of(near))

    def _site_of(self, frame: FrameType) -> int:
        code = frame.f_code
        return self._string(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")

    def _owner(self, code: CodeType) -> int:
        """Return whose code ``code`` is; the result is kept by its identity, because its hash covers its constants."""
        found = self._codes.get(id(code))
        if found is None:
            found = self._codes[id(code)] = code, _owner_of(code.co_filename)
        return found[1]

    # The watch's thread -------------------------------------------------------------------------------------------

    def offer(self, numbers: Sequence[int]) -> None:
        """Write the numbers with which another process gets this rank's stack (stack_file.py)."""
        if numbers:
            BEAT.pack_into(self._map, BEAT_AT, time.monotonic_ns(), 0, *numbers)

    def beat(self) -> None:
        """Write the time as a sign of life."""
        struct.pack_into("<q", self._map, BEAT_AT, time.monotonic_ns())

    def snapshot(self, data: bytes) -> None:
        """Write what the watch sees; nothing if it is too long."""
        if len(data) > SNAPSHOT_BYTES - PART.size:
            return
        self._turn += 1
        at = STRINGS_AT + self._turn % 2 * SNAPSHOT_BYTES
        PART.pack_into(self._map, at, 0, 0, 0)
        self._map[at + PART.size : at + PART.size + len(data)] = data
        PART.pack_into(self._map, at, self._turn, len(data), zlib.crc32(data))

    def question(self) -> str:
        """Return the question that lies beside the ring; "" if there is none."""
        if self.path is None:
            return ""
        try:
            return read_small_text(self.path.with_name(QUESTION), _QUESTION_BYTES, follows_links=False)
        except OSError:
            return ""

    def data(self) -> bytes:
        """Return the whole ring as it is now."""
        return self._map[:]

    def leave(self) -> None:
        """Record that the rank leaves the job."""
        struct.pack_into("<qI", self._map, BEAT_AT, time.monotonic_ns(), 1)


_RECORDS_AT = STRINGS_AT + 2 * SNAPSHOT_BYTES + STRING_BYTES
_COMM, _PACKAGE, _INSTALLED, _USER = range(4)
_ROOT = str(Path(__file__).parents[2]) + os.sep
_COMM_ROOT = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = (os.path.dirname(os.__file__) + os.sep, "<frozen", str(Path(torch.__file__).parents[1]) + os.sep)


def _frame_at(depth: int) -> FrameType | None:
    """Return the frame ``depth`` frames above this function; None if the stack is not so deep."""
    try:
        return sys._getframe(depth)
    except ValueError:
        return None


def _owner_of(file: str) -> int:
    """Return whose code a file is: of the exchange, of this package, of an installed library, or of the user."""
    if file.startswith(_ROOT):
        return _COMM if file.startswith(_COMM_ROOT) else _PACKAGE
    return _INSTALLED if file.startswith(_LIBRARIES) or f"{os.sep}site-packages{os.sep}" in file else _USER


def _size() -> int:
    return _RECORDS_AT + SLOTS * RECORD_BYTES


def _mapped(path: Path | None) -> mmap.mmap | None:
    """Make and map the file of a ring with all of its blocks; None if that is not possible."""
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _log.warning("the records of this rank are kept in memory alone: %s", in_words(error))
        return None
    try:
        os.posix_fallocate(descriptor, 0, _size())
        return mmap.mmap(descriptor, _size())
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        _log.warning("the records of this rank are kept in memory alone: %s", in_words(error))
        return None
    finally:
        os.close(descriptor)


def start_ticks(pid: int) -> int:
    """Return the time at which a process started, in clock ticks since the host's start; 0 if it is not known."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def ring_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank's ring in the folder of the rings."""
    return folder / f"rank_{rank:05d}.ring"


def shared_recorder(path: Path | None, owner: RingOwner) -> Recorder:
    """Return the recorder of this process for ``path``, which several Worlds share, until ``give_back``."""
    key = os.getpid(), path
    found = None if path is None else _OPEN.get(key)
    if found is None:
        found = Recorder(path, owner)
        if path is not None:
            _OPEN[key] = found
    found.users += 1
    return found


def give_back(recorder: Recorder, removes: bool) -> None:
    """End the use of a recorder; the last user marks its ring as left in order.

    Args:
        recorder: The recorder.
        removes: Remove the file, and its folder if that is empty then.
    """
    recorder.users -= 1
    if recorder.users:
        return
    recorder.leave()
    for key in [key for key, each in _OPEN.items() if each is recorder]:
        del _OPEN[key]
    if removes and recorder.path is not None:
        with contextlib.suppress(OSError):
            recorder.path.unlink()
            recorder.path.parent.rmdir()


_OPEN: dict[tuple[int, Path | None], Recorder] = {}
"""Recorders of this process, by process and file: two Worlds of one job write into one ring."""
