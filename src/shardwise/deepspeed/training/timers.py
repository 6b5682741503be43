"""Clocks that DeepSpeed's scripts start and stop themselves, and the times of an engine's last step."""

import time
from collections.abc import Sequence

from shardwise.base.errors import UsageError
from shardwise.deepspeed.calls.device import get_accelerator
from shardwise.deepspeed.calls.logs import log_dist
from shardwise.plan.trace import Trace


class WallClock:
    """A named clock in milliseconds, which synchronizes the device before it reads the time."""

    def __init__(self, name: str):
        self.name = name
        self.started = False
        self._since = 0.0
        self._spans: list[float] = []

    def start(self) -> None:
        """Start the clock.

        Raises:
            UsageError: if the clock is running.
        """
        if self.started:
            raise UsageError(f"timer {self.name!r}: it runs already; stop() it first")
        get_accelerator().synchronize()
        self.started, self._since = True, time.perf_counter()

    def stop(self, reset: bool = False, record: bool = True) -> None:
        """Stop the clock and record the time since ``start``.

        Args:
            reset: No effect.
            record: False to drop the time.

        Raises:
            UsageError: if the clock is not running.
        """
        if not self.started:
            raise UsageError(f"timer {self.name!r}: it does not run; start() it first")
        get_accelerator().synchronize()
        self.started = False
        if record:
            self._spans.append((time.perf_counter() - self._since) * 1e3)

    def reset(self) -> None:
        """Stop the clock and drop the recorded times."""
        self.started = False
        self._spans = []

    def elapsed(self, reset: bool = True) -> float:
        """Return the sum of the recorded times in milliseconds, and drop them if ``reset`` is True."""
        total = sum(self._spans)
        if reset:
            self._spans = []
        return total

    def mean(self) -> float:
        """Return the mean of the recorded times in milliseconds."""
        return sum(self._spans) / max(len(self._spans), 1)


class SynchronizedWallClockTimer:
    """A set of named clocks: ``timers("fwd").start()``."""

    def __init__(self) -> None:
        self.timers: dict[str, WallClock] = {}

    def __call__(self, name: str) -> WallClock:
        """Return the clock with this name; make it if there is none."""
        return self.timers.setdefault(name, WallClock(name))

    def has_timer(self, name: str) -> bool:
        """Return whether there is a clock with this name."""
        return name in self.timers

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the milliseconds of each clock, divided by ``normalizer``.

        Args:
            names: Names of clocks; unknown names are left out.
            normalizer: The number to divide by.
            reset: True to drop the recorded times.
            memory_breakdown: No effect.
            ranks: The ranks that log; None: rank 0.
        """
        known = (name for name in names if name in self.timers)
        told = " | ".join(f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in known)
        log_dist(f"time (ms) | {told}", ranks or [0])

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the mean milliseconds of each clock by name, divided by ``normalizer``.

        Args:
            names: Names of clocks; unknown names are left out.
            normalizer: The number to divide by.
            reset: True to drop the recorded times.
        """
        found = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        for name in found if reset else ():
            self.timers[name].reset()
        return found


def milliseconds(trace: Trace) -> dict[str, float]:
    """Return the milliseconds of the last step, by part: ``fwd``, ``bwd`` and ``step``."""
    spent = trace.seconds()
    return {"fwd": spent.forward_s * 1e3, "bwd": spent.backward_s * 1e3, "step": spent.update_s * 1e3}
