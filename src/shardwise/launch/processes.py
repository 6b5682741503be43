"""Ending processes, down to the last descendant.

Each rank leads a session and a process group of its own, so one signal reaches it and the workers that it forked. A
descendant that made a group of its own is found by the job's word in its environment, which it inherited; a kill
through a file descriptor of the process (pidfd) cannot hit another one that got the same number since.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence

from shardwise.launch.environment import JOB

POLL_S = 0.02
_GONE_S = 5.0
"""Between SIGKILL and giving up on a process."""


def send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal one rank alone; its workers are the rank's own business while it can still act."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def ask(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Ask one rank to stop: by the signal, or by SIGTERM if a SIGUSR1 would only end a rank without a handler."""
    if number == signal.SIGUSR1 and not _has(process.pid, "SigCgt", number):
        number = signal.SIGTERM
    send(process, number)


def ignores(pid: int, number: signal.Signals) -> bool:
    """Return True if the process ignores the signal, and SIGTERM, which a request by SIGUSR1 may have become."""
    return _has(pid, "SigIgn", signal.SIGTERM if number == signal.SIGUSR1 else number)


def _has(pid: int, field: str, number: signal.Signals) -> bool:
    """Return True if the signal is in a mask of /proc/PID/status; False on a system without /proc."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            masks = dict(line.split(":", 1) for line in file if ":" in line)
        return bool(int(masks[field], 16) >> (number - 1) & 1)
    except (OSError, KeyError, ValueError):  # the process ended meanwhile
        return False


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a rank and to the process group that it leads."""
    # After a rank is reaped its number may belong to others; what is left of its group is then found by ``sweep``.
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def wait(processes: Iterable[subprocess.Popen[bytes]], until_s: float) -> bool:
    """Wait for all to end, at most until ``until_s`` of the monotonic clock; whether they did."""
    waiting = list(processes)
    while True:
        waiting = [p for p in waiting if p.poll() is None]
        if not waiting or time.monotonic() >= until_s:
            return not waiting
        time.sleep(POLL_S)


def _is_of_job(pid: int, mark: bytes) -> bool:
    """``mark`` stands in the environment that the process was started with."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:  # it ended meanwhile, or belongs to somebody else
        return False


def of_job(word: str) -> list[int]:
    """Processes whose environment carries the job's word; none on a system without /proc."""
    mark = f"{JOB}={word}".encode()
    entries = os.listdir("/proc") if os.path.isdir("/proc/self") else []
    return [int(entry) for entry in entries if entry.isdigit() and _is_of_job(int(entry), mark)]


def sweep(word: str) -> None:
    """SIGKILL to every process of the job that is left, until none is."""
    mark = f"{JOB}={word}".encode()
    for _ in range(10):  # one that forks while we kill is caught in the next round
        pids = of_job(word)
        for pid in pids:
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(pid)
                try:
                    if _is_of_job(
                        pid, mark
                    ):  # asked again: the number may have changed hands before the open
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                finally:
                    os.close(handle)
        if not pids:
            return
        time.sleep(POLL_S)


def stop(processes: Sequence[subprocess.Popen[bytes]], word: str, grace_s: float) -> bool:
    """SIGTERM to every rank, SIGKILL to what is left after ``grace_s`` and to whatever it started; whether all went."""
    for process in processes:
        if process.poll() is None:
            send(process, signal.SIGTERM)
    wait(processes, time.monotonic() + grace_s)
    for process in processes:
        kill_group(process)
    sweep(word)
    # One that the kernel holds inside a device or a file system ends later, if ever: the launcher does not wait for it.
    return wait(processes, time.monotonic() + _GONE_S)
