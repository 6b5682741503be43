import os
import signal
import threading
from collections.abc import Iterator

import pytest

from shardwise.cli.stop import StopFlag


@pytest.fixture(autouse=True)
def _as_in_a_terminal() -> Iterator[None]:
    """Whoever starts the tests behind a shell may have had signals ignored, and children inherit that."""
    given = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in given.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_remembered_and_told(number: signal.Signals) -> None:
    told: list[str] = []
    flag = StopFlag(lambda: told.append("stop"))
    with flag.listening():
        os.kill(os.getpid(), number)
        assert flag.signal == number
        assert told == ["stop"]


def test_the_second_ctrl_c_interrupts() -> None:
    flag = StopFlag(lambda: None)
    with pytest.raises(KeyboardInterrupt), flag.listening():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_afterwards_signals_do_what_they_did_before() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with StopFlag(lambda: None).listening():
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] != before
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    failures: list[BaseException] = []

    def listen() -> None:
        try:
            with StopFlag(lambda: None).listening():
                pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert failures == []


def test_under_nohup_a_closing_terminal_is_no_request() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        flag = StopFlag(lambda: None)
        with flag.listening():
            os.kill(os.getpid(), signal.SIGHUP)
        assert flag.signal is None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
