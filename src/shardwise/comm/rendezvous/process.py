"""Observation of a process without its cooperation: its threads' stacks from inside, the kernel's data from outside.

A watched thread *moves* while its stack changes, or while its process and its descendants compute, read or write
anything. Threads that serve other processes do not count: rank 0 has the job's store, which the others ask who hangs. A
debugger that holds it counts as moving. A thread that runs, or waits for a disk, at two looks in a row
moves, too. One look says nothing: the signal that requests the stack of a sleeping thread (stack_file.py) lets it run
for a moment, and on a busy machine it waits for a processor longer than it runs.
"""

import contextlib
import faulthandler
import linecache
import os
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_FRAMES = 12
_STACK_BYTES = 4000
_WORK_S = 0.2
"""Processor time in seconds that counts as work. The time of the watch's own threads is not counted."""
_WORK_BYTES = 256 << 10


class WatchingTime:
    """Processor seconds and bytes of the threads that watch this process, which are no work of it.

    Otherwise a process that hangs would seem to work if several engines watch it, or if a look takes long.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.bytes = 0

    def add(self, seconds: float, nbytes: int) -> None:
        """Add the processor seconds that a watching thread has taken, and the bytes that it has read and written."""
        self.seconds += seconds
        self.bytes += nbytes


WATCHING = WatchingTime()
"""Time and bytes of all watches of this process."""

_SERVERS = ("pt_tcpstore", "gloo_tcp_loop")
"""Beginnings of the names of torch's threads that serve other processes."""


class ServingThreads:
    """Threads that serve other processes while this one may hang: they carry the questions of the other ranks.

    Their processor time and bytes are no work of this process. torch's threads are found by their names.
    """

    def __init__(self) -> None:
        self._serves: dict[int, bool] = {}
        """True for a thread that serves, by its number."""
        self._used: dict[int, tuple[float, int]] = {}
        """Processor seconds and bytes of each thread that serves; what a thread used stays when it has ended."""

    def add(self, native_id: int) -> None:
        """Count a thread of this process as one that serves."""
        self._serves[native_id] = True

    def used(self) -> tuple[float, int]:
        """Return the processor seconds and the bytes of all threads that serve."""
        pid = os.getpid()
        for task in Path(f"/proc/{pid}/task").glob("*"):
            number = int(task.name)
            if number not in self._serves:
                with contextlib.suppress(OSError):
                    self._serves[number] = (task / "comm").read_text().startswith(_SERVERS)
            if self._serves.get(number):
                before_s, before = self._used.get(number, (0.0, 0))
                self._used[number] = (
                    max(seconds_of(pid, number), before_s),
                    max(bytes_of(pid, number), before),
                )
        return sum(each for each, _ in self._used.values()), sum(each for _, each in self._used.values())


SERVING = ServingThreads()
"""Threads of this process that serve others."""


class ProcessHeartbeat:
    """Time at which this process last made progress."""

    def __init__(self, thread_id: int | None, native_id: int | None):
        self.thread_id = thread_id
        self._native_id = native_id
        self._place: list[ThreadCall] = []
        self._seconds = 0.0
        self._bytes = 0
        self._runs = False
        """True if the watched thread ran, or waited for a disk, at the last look."""
        self.moved_s = time.monotonic()

    def calls(self) -> "list[ThreadCall]":
        """Return the calls of the watched thread."""
        return [] if self.thread_id is None else calls_of(self.thread_id)

    @property
    def place(self) -> "list[ThreadCall]":
        """Calls of the watched thread at the last look; another look would count as reading and writing."""
        return self._place

    def look(self) -> None:
        """Update the time of the last progress; called once a tick."""
        place = self.calls()
        is_debugged = any(call.file.endswith(("bdb.py", "pdb.py")) for call in place)
        served_s, served = SERVING.used()
        computed = time.process_time() - WATCHING.seconds - served_s + seconds_of_children(os.getpid())
        now = (place, computed, bytes_of(os.getpid()) - WATCHING.bytes - served)
        worked = now[1] - self._seconds > _WORK_S or now[2] - self._bytes > _WORK_BYTES
        ran, self._runs = self._runs, state_of(os.getpid(), self._native_id) in ("R", "D")
        if now[0] != self._place or worked or is_debugged or (ran and self._runs):
            self._place, self._seconds, self._bytes = now
            self.moved_s = time.monotonic()


class ThreadCall(NamedTuple):
    """One call on a thread's stack."""

    file: str
    line: int
    function: str


def calls_of(thread_id: int) -> list[ThreadCall]:
    """Return the calls of a thread of this process, the last one first, a hundred at most.

    ``faulthandler`` writes the calls without letting another thread run. Walking ``sys._current_frames()`` in Python
    would hold frames whose callers return meanwhile: ``frame.f_back`` may then read freed memory (CPython 3.11).
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return threads_of(file.read().decode(errors="replace")).get(thread_id, [])


def threads_of(text: str) -> dict[int, list[ThreadCall]]:
    """Return the calls of each thread in a text that ``faulthandler`` wrote, by the thread's number."""
    found = {}
    for part in re.split(r"^(?=(?:Current t|T)hread )", text, flags=re.MULTILINE):
        head, _, rest = part.partition("\n")
        named = re.match(r"(?:Current t|T)hread 0x([0-9a-f]+)", head)
        if named:
            found[int(named[1], 16)] = [
                ThreadCall(file, int(line), name) for file, line, name in _CALL.findall(rest)
            ]
    return found


def stack_of(calls: Sequence[ThreadCall]) -> str:
    """Return the last calls of a thread as text, in the form of a traceback."""
    shown = [call for call in calls if not call.file.startswith("<frozen")][:_FRAMES]
    lines = []
    for call in reversed(shown):
        source = linecache.getline(call.file, call.line).strip()
        lines += [
            f'  File "{call.file}", line {call.line}, in {call.function}',
            *[f"    {source}"] * bool(source),
        ]
    return "\n".join(lines)[-_STACK_BYTES:]


def _fields(pid: int, thread: int | None = None) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if there is no such file."""
    path = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    try:
        return Path(path).read_text().rpartition(")")[2].split()
    except OSError:
        return []


def state_of(pid: int, thread: int | None = None) -> str:
    """Return the state of a process as one letter, as ps shows it; "" without such a process, or without /proc."""
    found = _fields(pid, thread)
    return found[0] if found else ""


def has_ended(pid: int) -> bool:
    """Return True if the process is gone, or only its parent has yet to collect its exit status."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return state_of(pid) in ("Z", "X")


def seconds_of(pid: int, thread: int | None = None) -> float:
    """Return the processor seconds of a process and its threads, or of one of its threads."""
    found = _fields(pid, thread)
    return (int(found[11]) + int(found[12])) / os.sysconf("SC_CLK_TCK") if found else 0.0


def seconds_of_children(pid: int) -> float:
    """Return the processor seconds of all descendants of a process, such as workers of a loader or a compiler."""
    total = 0.0
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        total += sum(seconds_of(int(child)) + seconds_of_children(int(child)) for child in children)
    return total


def bytes_of(pid: int, thread: int | None = None) -> int:
    """Return the bytes that a process, or one of its threads, has read and written."""
    path = f"/proc/{pid}/io" if thread is None else f"/proc/{pid}/task/{thread}/io"
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
