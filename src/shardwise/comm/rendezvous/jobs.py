"""A thread for collectives beside those of the main thread.

All collectives over one transport must run in one order on all ranks. So each lane of a World (``World.group_among``)
has one thread, which runs jobs in the order in which they were submitted (``World.thread``).
"""

import atexit
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_LINGER_S = 0.5
"""Seconds that a thread without work waits for more."""
_EXIT_PATIENCE_S = 2.0
"""Seconds that the end of the process waits for the running job."""


class JobThread:
    """Runs jobs one after another, in the order of their submission; starts with the first job, ends when idle.

    The thread is a daemon: a job that waits for a lost rank does not keep the process alive. But the end of the process
    waits a moment for the running job, because the interpreter may crash if it ends while a thread is in a collective.
    """

    def __init__(self, name: str):
        self._name = name
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._lingers = True

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Run ``job`` after the jobs before it, and return a future of its result."""
        future: Future[Any] = Future()
        with self._changed:
            self._jobs.append((future, job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
                atexit.register(self._finish)
            self._changed.notify()
        return future

    def _finish(self) -> None:
        """Wait a moment for the running job at the end of the process."""
        with self._changed:
            self._lingers = False
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(_EXIT_PATIENCE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or not self._lingers, _LINGER_S)
                if not self._jobs:
                    self._thread = None
                    atexit.unregister(self._finish)
                    return
                future, job = self._jobs.popleft()
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del future, job  # otherwise the last step's tensors would stay alive while this thread waits
