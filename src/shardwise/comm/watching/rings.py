"""Reading of rings of records (recorder.py): every byte may be hostile, so every number is checked before it is used.

    ring = read_ring(path)      DamagedError, never another error, for bytes that no recorder writes
    ring.records                the last events of the rank, oldest first
    ring.answer                 what the watch's thread of the rank last saw

A rank may write while its ring is read, and may be killed in the middle of a record or a snapshot: a record whose two
numbers differ is left out, and a snapshot with a wrong checksum gives way to the one before.

Cost: one read of 0.7 MiB and one look at each of 8192 records, some 30 ms.
"""

import contextlib
import struct
import time
import zlib
from pathlib import Path
from typing import NamedTuple

from shardwise.base.errors import DamagedError, DataError
from shardwise.base.regular_files import open_regular, read_small_file
from shardwise.base.strict_json import read_object, validated
from shardwise.base.words import in_words, printable
from shardwise.comm.watching.answers import RankAnswer, StartedCall
from shardwise.comm.watching.recorder import (
    BEAT,
    BEAT_AT,
    DTYPES,
    HEADER,
    KINDS,
    MAGIC,
    OPERATIONS,
    PART,
    RECORD,
    RECORD_BYTES,
    SLOTS,
    SNAPSHOT_BYTES,
    STRING,
    STRING_BYTES,
    STRINGS_AT,
    Event,
)
from shardwise.plan.action import Action

_STRINGS_FROM = STRINGS_AT + 2 * SNAPSHOT_BYTES
_RECORDS_FROM = _STRINGS_FROM + STRING_BYTES
_FILE_BYTES = _RECORDS_FROM + SLOTS * RECORD_BYTES
_MOST_RANKS = 1 << 24
_MOST_NS = 1 << 62
_OLD_S = 24 * 3600.0


class RingRecord(NamedTuple):
    """One event of a thread."""

    number: int
    time_ns: int
    step: int
    event: Event
    action: Action | None
    call: StartedCall | None
    """The collective or message of a START, a WAIT or a WAITED."""
    thread: int


class RankRing(NamedTuple):
    """The ring of one rank."""

    path: Path
    rank: int
    ranks: int
    pid: int
    started_ticks: int
    """Start of the process, in clock ticks since the host's start."""
    opened_ns: int
    wall_ns: int
    """Wall clock minus monotonic clock of the host."""
    host_name: str
    host: str
    beat_ns: int
    """Time of the last sign of life of the watch's thread."""
    has_left: bool
    """True if the rank left the job in order."""
    offer: tuple[int, int, int]
    """Signal, descriptor and thread with which the rank's stack can be requested (stack_file.py); zeros without it."""
    answer: RankAnswer | None
    records: list[RingRecord]


def read_ring(path: Path) -> RankRing:
    """Read the ring of a rank.

    Raises:
        DamagedError: if the file contains anything that no recorder writes.
        DataError: if the file cannot be read.
    """
    try:
        data = read_small_file(path, _FILE_BYTES, follows_links=False)
    except OSError as error:
        raise DataError(f"doctor: the records cannot be read: {in_words(error)}") from None
    return parse_ring(data, path)


def read_answer(path: Path) -> RankAnswer | None:
    """Return the newest answer in the ring of a rank; None if there is none.

    Raises:
        DamagedError: if the answer is none that a recorder writes.
        DataError: if the file cannot be read.
    """
    try:
        with open_regular(path, follows_links=False) as file:
            return _snapshot_of(file.read(_STRINGS_FROM).ljust(_STRINGS_FROM, b"\0"), path)
    except OSError as error:
        raise DataError(f"doctor: the records cannot be read: {in_words(error)}") from None


def silent_seconds(path: Path) -> float:
    """Return the seconds since the last sign of life of a rank of this host; 0 if its ring cannot be read."""
    try:
        with open_regular(path, follows_links=False) as file:
            file.seek(BEAT_AT)
            beat_ns, left, *_ = BEAT.unpack(file.read(BEAT.size))
    except (OSError, struct.error):
        return 0.0
    return 0.0 if left else (time.monotonic_ns() - int(beat_ns)) * 1e-9


def remove_old(parent: Path) -> None:
    """Remove the folders of rings in ``parent`` whose ranks have given no sign of life for a day.

    They are left by jobs that were killed.
    """
    with contextlib.suppress(OSError):
        for folder in parent.iterdir():
            rings = list(folder.glob("rank_*.ring"))
            if rings and not any(0 < silent_seconds(path) < _OLD_S for path in rings):
                for path in rings:
                    path.unlink()
                folder.rmdir()


def parse_ring(data: bytes, path: Path, last: int = SLOTS) -> RankRing:
    """Return the ring in ``data``.

    Args:
        data: Bytes of the whole file.
        path: File of the ring, for errors.
        last: Most records to read, the newest ones.

    Raises:
        DamagedError: if the bytes contain anything that no recorder writes.
    """
    if len(data) != _FILE_BYTES or not data.startswith(MAGIC):
        raise DamagedError(
            f"{path}: not a ring of records of this version of Shardwise: expected {_FILE_BYTES} bytes that begin with "
            f"{MAGIC.decode()}, found {len(data)} that begin with {printable(repr(data[:8]))}"
        )
    head = data[: HEADER.size]
    if zlib.crc32(head) != int.from_bytes(data[HEADER.size : HEADER.size + 4], "little"):
        raise DamagedError(f"{path}: the header does not have its checksum")
    _, rank, ranks, slots, strings, part, _, pid, ticks, opened, wall, name, host = HEADER.unpack(head)
    beat, left, signal, descriptor, thread = BEAT.unpack_from(data, BEAT_AT)
    if (
        (slots, strings, part) != (SLOTS, STRING_BYTES, SNAPSHOT_BYTES)
        or not rank < ranks <= _MOST_RANKS
        or not 0 < pid < 1 << 31
        or not all(0 <= each < _MOST_NS for each in (opened, wall, beat))
        or left > 1
        or min(signal, descriptor, thread) < 0
    ):
        raise DamagedError(
            f"{path}: a number of the header is out of range (rank {rank} of {ranks}, process {pid})"
        )
    names = _strings_of(data, path)
    return RankRing(
        path,
        rank,
        ranks,
        pid,
        ticks,
        opened,
        wall,
        printable(name.rstrip(b"\0").decode(errors="replace")),
        host.rstrip(b"\0").decode(errors="replace"),
        beat,
        bool(left),
        (signal, descriptor, thread),
        _snapshot_of(data, path),
        _records_of(data, path, names, last),
    )


def _strings_of(data: bytes, path: Path) -> list[str]:
    found, at = [""], _STRINGS_FROM + STRING.size
    while at + STRING.size <= _RECORDS_FROM:
        (size,) = STRING.unpack_from(data, at)
        if size == 0:
            return found
        at += STRING.size
        if at + size - 1 > _RECORDS_FROM:
            raise DamagedError(f"{path}: string {len(found)} ends behind the strings")
        found.append(printable(data[at : at + size - 1].decode(errors="replace")))
        at += size - 1
    return found


def _snapshot_of(data: bytes, path: Path) -> RankAnswer | None:
    """Return the newest whole snapshot; None before the first."""
    found: list[tuple[int, bytes]] = []
    for part in range(2):
        at = STRINGS_AT + part * SNAPSHOT_BYTES
        turn, size, check = PART.unpack_from(data, at)
        body = data[at + PART.size : at + PART.size + min(size, SNAPSHOT_BYTES - PART.size)]
        if turn and len(body) == size and zlib.crc32(body) == check:
            found.append((turn, body))
    if not found:
        return None
    where = f"{path}, snapshot"
    return validated(RankAnswer, read_object(max(found)[1], where, limit_bytes=SNAPSHOT_BYTES), where)


def _records_of(data: bytes, path: Path, names: list[str], last: int) -> list[RingRecord]:
    rows = []
    for slot, row in enumerate(RECORD.iter_unpack(data[_RECORDS_FROM:])):
        number = row[0]
        if number == 0 or number & 0xFFFFFFFF != row[12]:
            continue  # never written, or cut by a kill
        if (number - 1) % SLOTS != slot:
            raise DamagedError(f"{path}: record {number} lies in the place of another one")
        rows.append(row)
    rows.sort()
    return [_record_of(row, path, names) for row in rows[-last:]]


def _record_of(row: tuple[int, ...], path: Path, names: list[str]) -> RingRecord:
    number, time_ns, step, event, kind, operation, dtype, unit, microbatch, stage, other, turn = row[:12]
    elements, group, what, site, thread = row[13:18]
    if (
        event not in Event.__members__.values()
        or kind >= len(KINDS)
        or operation >= len(OPERATIONS)
        or dtype > len(DTYPES)
        or max(group, what, site) >= len(names)
        or min(unit, microbatch, stage, other) < -1
        or not 0 <= time_ns < _MOST_NS
    ):
        raise DamagedError(f"{path}: record {number} contains a number that no recorder writes: {row[2:18]}")
    action = Action(KINDS[kind], unit, microbatch, stage, other) if event == Event.ACTION else None
    call = None
    if event in (Event.START, Event.WAIT):
        call = StartedCall(
            group=names[group],
            number=turn,
            operation=OPERATIONS[operation],
            what=names[what],
            dtype=DTYPES[dtype - 1].removeprefix("torch.") if dtype else "",
            elements=elements,
            site=names[site],
        )
    return RingRecord(number, time_ns, step, Event(event), action, call, thread)
