"""Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP during training: stored, and handled between two steps."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from shardwise.launch.local import stop_signals


class StopFlag:
    """Flag that the first stop signal sets; the signal also calls ``tell``. A second signal has its former effect."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self.signal: signal.Signals | None = None
        self._tell = tell
        self._before: dict[signal.Signals, Any] = {}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()
        self._tell()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the ``with`` block; does nothing outside the main thread, where Python cannot."""
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._before[number] = signal.signal(number, self._remember)
        try:
            yield
        finally:
            self._restore()
