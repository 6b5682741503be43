"""Clocks: those that scripts of DeepSpeed's start and stop themselves, and what a step of the engine took."""

import time
from collections.abc import Sequence

from shardwise.deepspeed.device import get_accelerator
from shardwise.deepspeed.logs import log_dist
from shardwise.plan.errors import UsageError
from shardwise.plan.trace import Trace


class WallClock:
    """One named clock, in milliseconds; it waits for the device first."""

    def __init__(self, name: str):
        self.name = name
        self.started = False
        self._since = 0.0
        self._spans: list[float] = []

    def start(self) -> None:
        """Errors: UsageError where it runs."""
        if self.started:
            raise UsageError(f"timer {self.name!r}: it runs already; stop() it first")
        get_accelerator().synchronize()
        self.started, self._since = True, time.perf_counter()

    def stop(self, reset: bool = False, record: bool = True) -> None:
        """Errors: UsageError where it does not run."""
        if not self.started:
            raise UsageError(f"timer {self.name!r}: it does not run; start() it first")
        get_accelerator().synchronize()
        self.started = False
        if record:
            self._spans.append((time.perf_counter() - self._since) * 1e3)

    def reset(self) -> None:
        """Forget what was measured."""
        self.started = False
        self._spans = []

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds since the last reset."""
        total = sum(self._spans)
        if reset:
            self._spans = []
        return total

    def mean(self) -> float:
        """Milliseconds of one span."""
        return sum(self._spans) / max(len(self._spans), 1)


class SynchronizedWallClockTimer:
    """Clocks by name: ``timers("fwd").start()``."""

    def __init__(self) -> None:
        self.timers: dict[str, WallClock] = {}

    def __call__(self, name: str) -> WallClock:
        return self.timers.setdefault(name, WallClock(name))

    def has_timer(self, name: str) -> bool:
        """Whether one of that name was asked for."""
        return name in self.timers

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log milliseconds, over ``normalizer``."""
        known = (name for name in names if name in self.timers)
        told = " | ".join(f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in known)
        log_dist(f"time (ms) | {told}", ranks or [0])

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Milliseconds of one span by name, over ``normalizer``."""
        found = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        for name in found if reset else ():
            self.timers[name].reset()
        return found


def milliseconds(trace: Trace) -> dict[str, float]:
    """Of the step that is over, by what they went to."""
    spent = trace.seconds()
    return {"fwd": spent.forward_s * 1e3, "bwd": spent.backward_s * 1e3, "step": spent.update_s * 1e3}
