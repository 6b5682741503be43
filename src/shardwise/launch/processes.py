"""Ending processes, down to the last descendant.

Each rank leads a session and a process group of its own, so one signal reaches the rank and the workers that it forked.
A descendant that made a group of its own is found by the job's word in the environment that it inherited. A kill
through a file descriptor of the process (pidfd) cannot hit another process that got the same number since.
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
"""Seconds between SIGKILL and giving up on a process."""


def send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to one rank only; the rank handles its workers while it can still act."""
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
    """Send SIGKILL to a rank and to the process group that it leads."""
    # After a rank is reaped, its number may belong to others; ``sweep`` then finds the rest of its group.
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def wait(processes: Iterable[subprocess.Popen[bytes]], until_s: float) -> bool:
    """Wait for all processes to end and return whether they did.

    Args:
        processes: Processes to wait for.
        until_s: Latest time, by the monotonic clock.
    """
    waiting = list(processes)
    while True:
        waiting = [p for p in waiting if p.poll() is None]
        if not waiting or time.monotonic() >= until_s:
            return not waiting
        time.sleep(POLL_S)


def _is_of_job(pid: int, mark: bytes) -> bool:
    """Return whether ``mark`` is in the environment with which the process was started."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:  # the process ended meanwhile, or belongs to another user
        return False


def of_job(word: str) -> list[int]:
    """Return the processes whose environment contains the job's word; none on a system without /proc."""
    mark = f"{JOB}={word}".encode()
    entries = os.listdir("/proc") if os.path.isdir("/proc/self") else []
    return [int(entry) for entry in entries if entry.isdigit() and _is_of_job(int(entry), mark)]


def sweep(word: str) -> None:
    """Send SIGKILL to every remaining process of the job until none is left, or for ``_GONE_S`` seconds."""
    mark = f"{JOB}={word}".encode()
    until_s = time.monotonic() + _GONE_S
    while True:  # a process that forks meanwhile is caught in the next round
        pids = of_job(word)
        for pid in pids:
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(pid)
                try:
                    if _is_of_job(
                        pid, mark
                    ):  # checked again: another process may have got the number before the open
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                finally:
                    os.close(handle)
        # A killed process is there until it runs once more, which takes long on a host with many busy processes.
        if not pids or time.monotonic() > until_s:
            return
        time.sleep(POLL_S)


def stop(processes: Sequence[subprocess.Popen[bytes]], word: str, grace_s: float) -> bool:
    """Send SIGTERM to every rank, then SIGKILL to what is left, and return whether all processes ended.

    Args:
        processes: The ranks.
        word: The job's word, by which descendants are found.
        grace_s: Seconds between SIGTERM and SIGKILL.
    """
    for process in processes:
        if process.poll() is None:
            send(process, signal.SIGTERM)
    wait(processes, time.monotonic() + grace_s)
    for process in processes:
        kill_group(process)
    sweep(word)
    # A process that the kernel holds inside a device or a file system ends later, if ever: do not wait for it.
    return wait(processes, time.monotonic() + _GONE_S)
