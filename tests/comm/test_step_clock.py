"""The deadlines of a step's waits."""

import threading

import pytest
import torch.distributed as dist

from shardwise.base.errors import UsageError
from shardwise.comm.rendezvous.handshake import RankIdentity
from shardwise.comm.rendezvous.store import SealedStore
from shardwise.comm.step_clock import StepClock
from shardwise.comm.watching.questions import AwaitedTexts
from shardwise.comm.watching.watch import Watchdog


def test_the_first_step_has_ten_times_the_deadline() -> None:
    clock = StepClock(30.0)
    assert clock.timeout_s == 300.0
    clock.steps_done = 1
    assert clock.timeout_s == 30.0


def test_auto_waits_some_times_the_median_of_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("shardwise.comm.step_clock.time.monotonic", lambda: now)
    clock = StepClock("auto")
    shortest = clock.timeout_s / 10  # the first step has ten times as long
    for seconds in (0.0, 1000.0, 1000.0, 9000.0):
        now += seconds
        clock.step_ended()
    assert clock.timeout_s == max(shortest, 10 * 1000.0)


def test_a_collective_of_a_rank_that_works_alone_is_an_error() -> None:
    clock = StepClock(30.0)
    clock.check_together("all_reduce", "Unit a")
    with clock.alone(), pytest.raises(UsageError, match="all_reduce of Unit a takes all ranks"):
        clock.check_together("all_reduce", "Unit a")
    clock.check_together("all_reduce", "Unit a")


def test_a_wait_for_texts_has_the_limits_of_the_engine_that_is_called() -> None:
    """An engine with ``timeout_s: 600`` on the same World kept the load of another one waiting as long."""
    watch = Watchdog(0, [RankIdentity("here", 1, "cpu")] * 2, SealedStore(dist.HashStore(), b"key"), "watch")
    patient, brief = StepClock(600.0, watch=watch), StepClock(60.0, watch=watch)
    texts = AwaitedTexts("load/1", (0, 1), ("load/1/0", "load/1/1"))

    def ends_s() -> float:
        watch.begin_words(0, "its beginning", texts, 900.0)
        found = watch._waits[threading.get_ident()].ends_s
        watch.end()
        return found

    with brief.within("engine.load()"), patient.within("engine.save()"):
        assert ends_s() == 60.0, "the outermost call counts"
    with patient.within("engine.load()"):
        assert ends_s() == 600.0
    assert ends_s() == 600.0, "a background save may be that of any engine"
