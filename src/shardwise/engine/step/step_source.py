"""StepSource: steps, one after another, from a loader or any iterable; a thread may read them ahead of the caller.

A ``Loader`` is lent to the source: its position is that of the step handed out last. Any other caller that requests
steps of the loader takes it back.

Cost: none beside reading.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from shardwise.data.feed import StepMicrobatches
from shardwise.data.loader import Loader
from shardwise.observe.lanes_picture import LaneRecorder


class ReadStep(NamedTuple):
    """A step that was read for the caller."""

    batches: Any
    number: int
    fetched: StepMicrobatches | None
    """The step as its ``Loader`` counts it; None without a ``Loader``."""


class StepSource:
    """The steps of a loader or an iterable, read one after another.

    Args:
        steps: The loader, or an iterable of steps.
        lanes: Records the seconds of reading, if given.
        taken_back: Called if another caller requests steps of the loader.
    """

    def __init__(
        self, steps: Iterable[Any] | Loader, lanes: LaneRecorder | None, taken_back: Callable[[], None]
    ):
        self._loader = steps if isinstance(steps, Loader) else None
        self._steps: Iterator[Any] | None = None if isinstance(steps, Loader) else iter(steps)
        if self._loader is not None:
            self._loader.lend(taken_back)
        self._left = None if self._loader is None else self._loader.steps_left
        self._lanes = lanes
        self._has_ended = False
        self._reading = threading.Lock()
        """Lock that is held while a step is read."""

    @property
    def reads_apart(self) -> bool:
        """True if another thread may read. The data of an iterable may only be read by the caller's thread."""
        return self._loader is not None and self._loader.reads_apart

    def read(self, number: int) -> ReadStep | None:
        """Read the next step.

        Args:
            number: The step's number, unless the loader has a position that gives it.

        Returns:
            The step; None after the last one.
        """
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

    def _next_step(self, number: int) -> ReadStep | None:
        if self._steps is not None:
            return next((ReadStep(batches, number, None) for batches in self._steps), None)
        assert self._loader is not None, "either a loader or steps"
        if self._left is not None:
            if self._left == 0:
                return None
            self._left -= 1
        fetched = self._loader.fetch()
        # Readers of the loader number steps by position; use the same number.
        position = fetched.after.get("position")
        if position is not None:
            number = position // self._loader.share.global_batch
        return ReadStep(fetched.batches, number, fetched)

    def count(self, step: ReadStep) -> None:
        """Count a step as handed out in the loader's position."""
        if self._loader is not None and step.fetched is not None:
            self._loader.count(step.fetched)

    def end(self) -> None:
        """Stop reading: every later ``read`` returns None."""
        self._has_ended = True

    def wait(self, seconds: float) -> bool:
        """Wait until no step is being read.

        Args:
            seconds: The longest time to wait.

        Returns:
            False if a step is still being read.
        """
        is_free = self._reading.acquire(timeout=max(0.0, seconds))
        if is_free:
            self._reading.release()
        return is_free

    def close(self, seconds: float) -> None:
        """Close the loader if its reader ends within ``seconds``; otherwise the loader's next caller closes it."""
        if self._loader is not None and self.wait(seconds):
            self._loader.close()
