"""The stack of a process that lets none of its Python threads run, by a signal."""

import ctypes
import os
import signal
import threading
from pathlib import Path

import pytest

from shardwise.comm.rendezvous.stack_file import StackFile, _catches, stack_by_signal

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="a file in memory is Linux's")


def hold_the_lock(until: int) -> None:
    ctypes.PyDLL(None).read(until, ctypes.create_string_buffer(1), ctypes.c_size_t(1))


def test_the_stack_of_a_process_that_holds_its_lock() -> None:
    (until, end), (offers, offered) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            file = StackFile(threading.get_ident())
            os.write(offered, bytes(str(file.offer), "ascii"))
            hold_the_lock(until)
        finally:
            os._exit(0)
    offer = [int(number) for number in os.read(offers, 100).decode().strip("[]").split(",")]
    for _ in range(2):  # a neighbour may ask again
        calls = []
        while not any(call.function == "hold_the_lock" for call in calls):
            calls = stack_by_signal(pid, offer)
    os.write(end, b".")
    os.waitpid(pid, 0)
    assert stack_by_signal(pid, offer) == [], "it has ended"


def test_a_signal_with_a_handler_is_left_alone() -> None:
    first, second = StackFile(1), StackFile(2)
    assert first.offer[0] != second.offer[0]
    taken = first.offer[0]
    del first
    assert not _catches(os.getpid(), taken)
    before = signal.signal(taken, lambda number, frame: None)
    third = StackFile(3)
    assert third.offer[0] not in (taken, second.offer[0])
    signal.signal(taken, before)


def test_a_process_that_catches_nothing_gets_no_signal() -> None:
    """The signal's default is to end the process."""
    file = StackFile(threading.get_ident())
    offer = file.offer
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    del file
    assert stack_by_signal(os.getpid(), offer) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors - 1
