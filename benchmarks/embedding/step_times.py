"""Times of many steps: progress while they run, the tail of their times, and what the longest of them did.

    times = StepTimes(engine, 5000)
    for batch in batches:
        with times.step() as part:
            engine.train_step(batch)
            with part("save"):
                engine.save(folder)
    times.report("all steps")

A line is printed every few seconds. The report has the median, the 99th and the 99.9th percentile and the longest
step, each over the median, and one line for each of the longest steps:

    parts        seconds of what the caller has named, and of the Actions of the engine's trace by kind
    processor    seconds that the caller's thread was computing. The rest of the step it waited: for a lock, for the
                 interpreter's lock, for a disk, or for a core
    forced off   times that the system took the core away from the thread
    page faults  pages that came into memory for the thread, and those of them that came from a disk
    saving       a save was being written behind the step

``machine`` measures a loop as long as the median step that only computes. Its tail is the machine's own, which no
program removes.
"""

from __future__ import annotations

import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

_EVERY_S = 5.0
_SHOWN = 8
"""Number of the longest steps that are described."""

_ROUNDS = 1000
"""Most rounds of the loop that only computes."""

Part = Callable[[str], AbstractContextManager[None]]


class _Usage(NamedTuple):
    """What the caller's thread has used."""

    cpu_s: float
    forced_off: int
    faults: int
    faults_of_disk: int

    @classmethod
    def now(cls) -> _Usage:
        found = resource.getrusage(resource.RUSAGE_THREAD)
        return cls(time.thread_time(), found.ru_nivcsw, found.ru_minflt, found.ru_majflt)

    def since(self, before: _Usage) -> _Usage:
        return _Usage(*(now - then for now, then in zip(self, before, strict=True)))


class _Step(NamedTuple):
    """One step that was timed."""

    number: int
    seconds: float
    usage: _Usage
    parts: dict[str, float]
    is_saving: bool


class StepTimes:
    """Times of the steps of one engine.

    Args:
        engine: the engine.
        total: number of steps that will be timed.
    """

    def __init__(self, engine: Any, total: int) -> None:
        self._engine, self._total = engine, total
        self.steps: list[_Step] = []
        self._begun = self._told = time.perf_counter()

    @contextmanager
    def step(self) -> Iterator[Part]:
        """Time one step; the function that is yielded times a part of it by name."""
        parts: Counter[str] = Counter()

        @contextmanager
        def part(name: str) -> Iterator[None]:
            begun = time.perf_counter()
            yield
            parts[name] += time.perf_counter() - begun

        was_saving, before, begun = _is_saving(), _Usage.now(), time.perf_counter()
        yield part
        seconds = time.perf_counter() - begun
        usage = _Usage.now().since(before)
        for row in self._engine.trace.rows():
            parts[row.action.kind.name] += row.stop_s - row.start_s
        number = len(self.steps)
        self.steps.append(_Step(number, seconds, usage, dict(parts), was_saving or _is_saving()))
        self._tell()

    def _tell(self) -> None:
        now = time.perf_counter()
        if now - self._told > _EVERY_S:
            self._told = now
            recent = [each.seconds for each in self.steps[-200:]]
            print(
                f"  step {len(self.steps)} of {self._total}, {now - self._begun:.0f} s: median of the last "
                f"{len(recent)} {1e3 * float(torch.tensor(recent).median()):.2f} ms, longest so far "
                f"{1e3 * max(each.seconds for each in self.steps):.1f} ms{', saving' * _is_saving()}",
                flush=True,
            )

    @property
    def median_s(self) -> float:
        """Median of the steps, in seconds."""
        return float(torch.tensor([each.seconds for each in self.steps], dtype=torch.float64).median())

    def report(self, name: str) -> None:
        """Print the tail of all steps, of those beside a save, and what the longest did."""
        print(tail(name, [each.seconds for each in self.steps]))
        saving = [each.seconds for each in self.steps if each.is_saving]
        if saving:
            print(tail("  beside a save", saving, self.median_s))
        for each in sorted(self.steps, key=lambda each: -each.seconds)[:_SHOWN]:
            print(f"  step {each.number}: {_described(each)}")

    def machine(self) -> None:
        """Print the tail of a loop as long as the median step that only computes."""
        print(
            tail(
                "the machine, a loop that only computes", loop_s(self.median_s, min(len(self.steps), _ROUNDS))
            )
        )


def _is_saving() -> bool:
    """Return whether a save is being written behind the steps."""
    return any(thread.name == "shardwise-save" for thread in threading.enumerate())


def _described(step: _Step) -> str:
    usage = step.usage
    parts = sorted(step.parts.items(), key=lambda each: -each[1])[:5]
    return (
        f"{1e3 * step.seconds:.1f} ms, processor {1e3 * usage.cpu_s:.1f}, forced off {usage.forced_off}, page faults "
        f"{usage.faults} ({usage.faults_of_disk} from a disk){', saving' * step.is_saving}; "
        + ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in parts)
    )


def tail(name: str, seconds: list[float], median_s: float | None = None) -> str:
    """Return a line with the percentiles of times over their median, or over another that is given."""
    times = torch.tensor(seconds, dtype=torch.float64)
    over = float(times.median()) if median_s is None else median_s
    p99, p999 = (float(times.quantile(share)) / over for share in (0.99, 0.999))
    return (
        f"{name}: {len(seconds)} steps, median {1e3 * float(times.median()):.2f} ms; over the median: p99 {p99:.2f}, "
        f"p99.9 {p999:.2f}, longest {float(times.max()) / over:.2f}; "
        f"{int((times > 3 * over).sum())} above 3"
    )


def loop_s(median_s: float, count: int) -> list[float]:
    """Return the seconds of ``count`` rounds of a computation that takes about ``median_s``."""
    numbers = torch.rand(1 << 14)
    begun = time.perf_counter()
    for _ in range(1000):
        numbers.mul_(0.999).add_(0.001)
    rounds = max(int(median_s / (time.perf_counter() - begun) * 1000), 1)
    found = []
    for _ in range(count):
        begun = time.perf_counter()
        for _ in range(rounds):
            numbers.mul_(0.999).add_(0.001)
        found.append(time.perf_counter() - begun)
    return found
