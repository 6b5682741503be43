"""What can be seen of a process without asking it: its threads' stacks from inside, the kernel's word from outside.

A watched thread *moves* while its stack changes, or while its process and what descends from it compute, read or write
anything; a debugger that holds it counts as moving.
"""

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
"""Processor time that counts as work; the watch itself takes less in a minute."""
_WORK_BYTES = 256 << 10


class Pulse:
    """When this process last did anything."""

    def __init__(self, thread_id: int | None, native_id: int | None):
        self.thread_id = thread_id
        self._native_id = native_id
        self._place: list[ThreadCall] = []
        self._seconds = 0.0
        self._bytes = 0
        self.moved_s = time.monotonic()

    def calls(self) -> "list[ThreadCall]":
        """Where the watched thread is."""
        return [] if self.thread_id is None else calls_of(self.thread_id)

    def look(self) -> None:
        """Once a tick."""
        place = self.calls()
        is_debugged = any(call.file.endswith(("bdb.py", "pdb.py")) for call in place)
        now = (place, time.process_time() + seconds_of_children(os.getpid()), bytes_of(os.getpid()))
        worked = now[1] - self._seconds > _WORK_S or now[2] - self._bytes > _WORK_BYTES
        if (
            now[0] != self._place
            or worked
            or is_debugged
            or state_of(os.getpid(), self._native_id) in ("R", "D")
        ):
            self._place, self._seconds, self._bytes = now
            self.moved_s = time.monotonic()


class ThreadCall(NamedTuple):
    """One call of a thread."""

    file: str
    line: int
    function: str


def calls_of(thread_id: int) -> list[ThreadCall]:
    """Return the calls of a thread of this process, the last one first, a hundred at most.

    ``faulthandler`` writes them down without letting another thread run. To walk ``sys._current_frames()`` in Python is
    to hold frames whose callers return meanwhile: ``frame.f_back`` may then read freed memory (CPython 3.11).
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return threads_of(file.read().decode(errors="replace")).get(thread_id, [])


def threads_of(text: str) -> dict[int, list[ThreadCall]]:
    """Return the calls of each thread in what ``faulthandler`` wrote, by the thread's number."""
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
    """The last calls of a thread, as a traceback shows them."""
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
    """/proc/PID/stat from the state on; empty where there is none."""
    path = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    try:
        return Path(path).read_text().rpartition(")")[2].split()
    except OSError:
        return []


def state_of(pid: int, thread: int | None = None) -> str:
    """One letter, as ps shows it; empty where there is no such process, or no /proc."""
    found = _fields(pid, thread)
    return found[0] if found else ""


def has_ended(pid: int) -> bool:
    """Return True if there is no such process any more, or its parent alone has yet to take note of its end."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return state_of(pid) in ("Z", "X")


def seconds_of(pid: int) -> float:
    """Processor time of a process and its threads."""
    found = _fields(pid)
    return (int(found[11]) + int(found[12])) / os.sysconf("SC_CLK_TCK") if found else 0.0


def seconds_of_children(pid: int) -> float:
    """Processor time of all that descends from a process: workers of a loader, of a compiler, a copying program."""
    total = 0.0
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        total += sum(seconds_of(int(child)) + seconds_of_children(int(child)) for child in children)
    return total


def bytes_of(pid: int) -> int:
    """What a process has read and written."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
