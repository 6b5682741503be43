"""Signals to processes, and ends down to the last descendant."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from shardwise.launch.environment import JOB
from shardwise.launch.processes import ask, ignores, kill_group, of_job, send, stop, wait

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")

WORD = f"word-of-{os.getpid()}"
READY = "import signal, sys, time; {}; print('ready', flush=True); time.sleep(60)"


class Started:
    """Processes that a test starts, all of which are killed at its end."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[bytes]] = []

    def __call__(self, setup: str = "pass", word: str = WORD) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", READY.format(setup)],
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, JOB: word},
        )
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        self.all.append(process)
        return process


@pytest.fixture
def started() -> Iterator[Started]:
    made = Started()
    yield made
    for process in made.all:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def ended(process: subprocess.Popen[bytes]) -> int:
    return process.wait(30)


def test_a_request_by_sigusr1_is_one_by_sigterm_where_nothing_handles_it(started: Started) -> None:
    plain = started()
    handling = started("signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))")
    ask(plain, signal.SIGUSR1)
    ask(handling, signal.SIGUSR1)
    assert ended(plain) == -signal.SIGTERM and ended(handling) == 7
    send(plain, signal.SIGTERM)


def test_what_a_process_ignores(started: Started) -> None:
    # A process that runs in the background of a shell ignores SIGINT, and so do those that it starts.
    heard = "signal.signal(signal.SIGINT, signal.SIG_DFL)"
    deaf, plain = started(f"{heard}; signal.signal(signal.SIGTERM, signal.SIG_IGN)"), started()
    assert ignores(deaf.pid, signal.SIGTERM) and ignores(deaf.pid, signal.SIGUSR1)
    assert not ignores(deaf.pid, signal.SIGINT) and not ignores(plain.pid, signal.SIGTERM)


def test_a_wait_ends_with_the_processes_or_at_its_time(started: Started) -> None:
    one = started()
    assert not wait([one], time.monotonic())
    kill_group(one)
    assert wait([one], time.monotonic() + 30) and one.returncode == -signal.SIGKILL
    kill_group(one)


def test_a_job_is_found_by_its_word_and_swept_with_groups_of_its_own(started: Started) -> None:
    deaf, other = started("signal.signal(signal.SIGTERM, signal.SIG_IGN)"), started(word="of another job")
    child = (
        "import subprocess, sys; "
        "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'], start_new_session=True)"
    )
    parent = started(child)
    until_s = time.monotonic() + 30
    while len(of_job(WORD)) < 3 and time.monotonic() < until_s:
        time.sleep(0.01)  # the child of the parent starts when Python has
    assert len(of_job(WORD)) == 3 and {deaf.pid, parent.pid} < {*of_job(WORD)}
    assert stop([deaf, parent], WORD, grace_s=0.1)
    assert of_job(WORD) == [] and other.poll() is None
    assert (deaf.returncode, parent.returncode) == (-signal.SIGKILL, -signal.SIGTERM)
