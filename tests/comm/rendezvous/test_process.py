"""What can be seen of a thread from another one."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.comm.rendezvous import process
from shardwise.comm.rendezvous.process import (
    SERVING,
    WATCHING,
    ProcessHeartbeat,
    ServingThreads,
    ThreadCall,
    bytes_of,
    calls_of,
    stack_of,
)


def _asleep(begun: Callable[[int], None], until: threading.Event) -> None:
    begun(threading.get_ident())
    until.wait()  # here it stays


def test_the_calls_of_a_thread_are_seen() -> None:
    found: list[int] = []
    until = threading.Event()
    thread = threading.Thread(target=_asleep, args=(found.append, until))
    thread.start()
    while not found:
        time.sleep(0.001)
    calls: list[ThreadCall] = []
    while not any(call.function == "wait" for call in calls):
        calls = calls_of(found[0])
    until.set()
    thread.join()
    stack = stack_of(calls)
    assert "until.wait()  # here it stays" in stack and "in _asleep" in stack
    assert stack.index("_asleep") < stack.index("in wait"), "the last call comes last"
    assert not calls_of(-1)


def test_a_thread_moves_while_its_calls_change() -> None:
    pulse = ProcessHeartbeat(threading.get_ident(), threading.get_native_id())
    pulse.look()
    before = pulse.moved_s
    time.sleep(0.01)
    pulse.look()  # from another line
    assert pulse.moved_s > before


_WALK = """
import threading, time
from shardwise.comm.rendezvous.process import calls_of

def deep(depth):
    return depth and max(each for each in (deep(depth - 1), deep(depth // 3)))

def work():
    while not over:
        deep(12)

over = False
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
end = time.monotonic() + 1.5
while time.monotonic() < end:
    for thread in threads:
        calls_of(thread.ident)
over = True
"""


def test_looking_at_threads_that_run_harms_nobody() -> None:
    """Frames of running threads, walked in Python, ended processes now and then."""
    assert subprocess.run([sys.executable, "-c", _WALK], timeout=60, check=False).returncode == 0


@contextlib.contextmanager
def hung_thread() -> Iterator[ProcessHeartbeat]:
    """Yield the heartbeat of a thread that hangs."""
    stuck, begun = threading.Event(), threading.Event()
    natives: list[int] = []

    def hang() -> None:
        natives.append(threading.get_native_id())
        begun.set()
        stuck.wait()

    thread = threading.Thread(target=hang)
    thread.start()
    begun.wait()
    time.sleep(0.2)
    yield ProcessHeartbeat(thread.ident, natives[0])
    stuck.set()
    thread.join()


def read_zeros(count: int) -> None:
    with Path("/dev/zero").open("rb") as zeros:
        zeros.read(count)


def test_bytes_that_the_watch_reads_are_no_work() -> None:
    """The watch writes and reads stacks each second: after some seconds a hung process had seemed to work."""
    with hung_thread() as beat:
        beat.look()
        for counts, moves in ((True, False), (False, True)):
            before_s, before = beat.moved_s, bytes_of(os.getpid(), threading.get_native_id())
            read_zeros(1 << 20)
            if counts:
                WATCHING.add(0.0, bytes_of(os.getpid(), threading.get_native_id()) - before)
            beat.look()
            assert (beat.moved_s > before_s) == moves


@pytest.mark.parametrize("serves", [True, False])
def test_work_for_other_processes_is_no_work_of_this_one(serves: bool) -> None:
    """Rank 0 has the job's store: questions of the ranks that wait for it made rank 0 seem to move."""
    go, done, over = threading.Event(), threading.Event(), threading.Event()
    natives: list[int] = []

    def carry() -> None:
        natives.append(threading.get_native_id())
        go.wait()
        read_zeros(1 << 20)
        end_s = time.thread_time() + 0.3
        while time.thread_time() < end_s:
            pass
        done.set()
        over.wait()

    thread = threading.Thread(target=carry)
    thread.start()
    while not natives:
        time.sleep(0.001)
    if serves:
        SERVING.add(natives[0])
    with hung_thread() as beat:
        beat.look()
        before_s = beat.moved_s
        go.set()
        done.wait()
        beat.look()
        assert (beat.moved_s > before_s) == (not serves)
        over.set()
        thread.join()
        time.sleep(0.05)
        beat.look()
        assert (beat.moved_s > before_s) == (not serves), "what the thread used stays when it has ended"


def test_the_threads_of_torchs_store_serve() -> None:
    """They are found by name."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    serving = ServingThreads()
    serving.used()
    names = [(Path("/proc/self/task") / str(each) / "comm").read_text() for each in serving._used]
    assert any(name.startswith("pt_tcpstore") for name in names)
    del store


def test_a_thread_that_a_signal_has_woken_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for the stack of a lock's waiter made a hang look like slow work, beside many other processes."""
    states = iter("SRSRR")
    with hung_thread() as beat:
        monkeypatch.setattr(process, "state_of", lambda *given: next(states))
        beat.look()
        before_s = beat.moved_s
        for moves in (False, False, False, True):
            beat.look()
            assert (beat.moved_s > before_s) == moves
