"""What the kernel says of processes that sleep, compute, are stopped and have ended."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.comm.watching.outside import ProcessState, seen_from_outside


@contextmanager
def process(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(words)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def state_within(pid: int, wanted: ProcessState) -> bool:
    """True once the process is seen in a state; it takes a moment to begin."""
    return any(seen_from_outside(pid).state is wanted or bool(time.sleep(0.1)) for _ in range(30))


def test_a_process_that_sleeps_is_stopped_and_ends() -> None:
    with process("sleep", "60") as started:
        assert state_within(started.pid, ProcessState.SLEEPS)
        started.send_signal(signal.SIGSTOP)
        assert state_within(started.pid, ProcessState.STOPPED)
        assert seen_from_outside(started.pid).can_never_answer
        started.kill()
        assert state_within(started.pid, ProcessState.ENDED)


def test_a_process_that_computes() -> None:
    with process(sys.executable, "-S", "-c", "while True: pass") as started:
        assert state_within(started.pid, ProcessState.COMPUTES)
        view = seen_from_outside(started.pid)
        assert not view.can_never_answer and not view.calls and str(started.pid) in view.sentence
