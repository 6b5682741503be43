"""StackFile: the stack of a process that lets none of its Python threads run, for another process on the same host.

A C extension or a regular expression that holds the interpreter's lock keeps the watch's thread from answering. Then
``faulthandler``, which needs no lock, writes the stacks of all threads when a signal arrives:

    own      StackFile(thread)      uses a free real-time signal and a file in memory without a name
             offer                  the numbers with which another process uses them
    peer     stack_by_signal(...)   sends the signal and reads the file through /proc

A signal is sent only to a process that catches it, because its default is to end the process. Threads of Python that
are held up cannot change their frames, so reading them without the lock is safe. The signal restarts most
calls of the system and ends a sleep in C early. On systems without real-time signals or /proc there is no file, and no
stack.

Cost: one descriptor; a few kilobytes for each request.
"""

import contextlib
import faulthandler
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from shardwise.comm.rendezvous.process import ThreadCall, threads_of

_FIRST = 5
"""Number of first real-time signals that are not used: debuggers, profilers and threading libraries often use them."""
_WRITE_S = 1.0
"""Most seconds that a process gets to write its stacks."""
_SETTLED_S = 0.1


class StackFile:
    """The file into which this process writes its stacks at a signal.

    ``thread_id`` is the thread whose stack others request.
    """

    def __init__(self, thread_id: int):
        self._thread_id = thread_id
        self._signal = _free_signal()
        self._descriptor = -1
        if not self._signal:
            return
        file = open(os.memfd_create("shardwise-stacks", os.MFD_CLOEXEC), "wb")  # noqa: SIM115
        self._descriptor = file.fileno()
        if threading.current_thread() is threading.main_thread():
            # ``unregister`` restores this handler, so that a signal that comes too late does nothing.
            signal.signal(self._signal, signal.SIG_IGN)
        faulthandler.register(self._signal, file=file, all_threads=True)
        self.close = weakref.finalize(self, _let_go, self._signal, file)
        self.close.atexit = False

    @property
    def offer(self) -> list[int]:
        """Numbers of signal, descriptor and thread; empty if the system has none."""
        return [self._signal, self._descriptor, self._thread_id] if self._signal else []


def stack_by_signal(pid: int, offer: list[int]) -> list[ThreadCall]:
    """Return the calls of the thread that another process of this host has offered; empty if it writes nothing."""
    number, descriptor, thread_id = offer
    if not _catches(pid, number):
        return []
    text = b""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
        start = file.seek(0, os.SEEK_END)
        os.kill(pid, number)
        until_s, settled_s = time.monotonic() + _WRITE_S, time.monotonic() + _WRITE_S
        while time.monotonic() < min(until_s, settled_s):
            time.sleep(_SETTLED_S / 5)
            file.seek(start)
            found = file.read()
            if len(found) > len(text):
                text, settled_s = found, time.monotonic() + _SETTLED_S
    return threads_of(text.decode(errors="replace")).get(thread_id, [])


def _free_signal() -> int:
    """Return a real-time signal without a handler, or 0."""
    if not hasattr(signal, "SIGRTMIN") or not hasattr(os, "memfd_create"):
        return 0
    for number in range(signal.SIGRTMIN + _FIRST, signal.SIGRTMAX):
        if not _catches(os.getpid(), number) and signal.getsignal(number) in (
            signal.SIG_DFL,
            signal.SIG_IGN,
        ):
            return number
    return 0


def _catches(pid: int, number: int) -> bool:
    """Return True if a process has a handler for a signal, of Python's or of any library's."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _let_go(number: int, file: Any) -> None:
    faulthandler.unregister(number)
    file.close()
