"""StepSource: steps, one after another, out of a loader or any iterable; a thread may read what the caller hands out.

A ``Loader`` is lent: its position is that of the step handed out last; whoever else asks it for steps takes it back.

Cost: none beside reading.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from shardwise.data.feed import Fetched
from shardwise.data.loader import Loader
from shardwise.observe.lanes_picture import Lanes


class Step(NamedTuple):
    """A step on its way to the caller."""

    batches: Any
    number: int
    fetched: Fetched | None
    """Where a ``Loader`` counts it."""


class StepSource:
    """See the module's docstring. ``taken_back``: called where somebody else asks the loader for steps."""

    def __init__(self, steps: Iterable[Any] | Loader, lanes: Lanes | None, taken_back: Callable[[], None]):
        self._loader = steps if isinstance(steps, Loader) else None
        self._steps: Iterator[Any] | None = None if isinstance(steps, Loader) else iter(steps)
        if self._loader is not None:
            self._loader.lend(taken_back)
        self._left = None if self._loader is None else self._loader.steps_left
        self._lanes = lanes
        self._has_ended = False
        self._reading = threading.Lock()
        """Held while a step is read."""

    @property
    def reads_apart(self) -> bool:
        """Whether another thread may read: what a user's data draws and holds open belongs to the caller's."""
        return self._loader is not None and self._loader.reads_apart

    def read(self, number: int) -> Step | None:
        """The next step, None behind the last. ``number``: its own, where the loader knows no better."""
        with self._reading:
            if self._has_ended:
                return None
            started = time.perf_counter()
            try:
                step = self._next_step(number)
            except Exception:
                self._has_ended = True
                raise
        if step is None:
            self._has_ended = True
        elif self._lanes is not None and not self.reads_apart:
            self._lanes.record("read", step.number, started, time.perf_counter())
        return step

    def _next_step(self, number: int) -> Step | None:
        if self._steps is not None:
            return next((Step(batches, number, None) for batches in self._steps), None)
        assert self._loader is not None, "either a loader or steps"
        if self._left is not None:
            if self._left == 0:
                return None
            self._left -= 1
        fetched = self._loader.fetch()
        # By position, as readers know the step.
        position = fetched.after.get("position")
        if position is not None:
            number = position // self._loader.share.global_batch
        return Step(fetched.batches, number, fetched)

    def count(self, step: Step) -> None:
        """It is handed out."""
        if self._loader is not None and step.fetched is not None:
            self._loader.count(step.fetched)

    def end(self) -> None:
        """Nothing is read any more."""
        self._has_ended = True

    def wait(self, seconds: float) -> bool:
        """Until no step is being read; False where one still is."""
        is_free = self._reading.acquire(timeout=max(0.0, seconds))
        if is_free:
            self._reading.release()
        return is_free

    def close(self, seconds: float) -> None:
        """Close the loader; one whose reader is in the middle of a step even then is closed by the next to ask it."""
        if self._loader is not None and self.wait(seconds):
            self._loader.close()
