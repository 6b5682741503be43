"""The thread of a lane: order, errors, its end."""

import threading
import time

import pytest

from shardwise.comm.world import World

_PATIENCE_S = 10.0


def test_jobs_run_in_order_and_their_errors_are_the_askers() -> None:
    world, done = World(0, 1), []
    thread = world.thread("keys")
    assert world.thread("keys") is thread is not world.thread("others")

    def refuse() -> None:
        raise ValueError("no")

    futures = [thread.submit(lambda n=n: done.append(n)) for n in range(5)]
    refused, last = thread.submit(refuse), thread.submit(lambda: "last")
    assert last.result(_PATIENCE_S) == "last" and done == list(range(5))
    assert all(future.done() for future in futures)
    with pytest.raises(ValueError, match="no"):
        refused.result(_PATIENCE_S)
    end = time.monotonic() + _PATIENCE_S
    while any(each.name == "shardwise-keys" for each in threading.enumerate()):
        assert time.monotonic() < end, "the thread ends with its work"
        time.sleep(0.02)
    assert thread.submit(lambda: "again").result(_PATIENCE_S) == "again"
