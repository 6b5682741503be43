"""Steps prepared before they are computed: the middle stage of three.

    read       threads of the loader        steps t+2, t+3 ...                                     step_source.py
    keys       one thread                   step t+1: to the device, distinct keys, sent where     keys_ahead.py
                                            they are needed: the INPUT_DISTs of its list
    compute    the caller's thread          step t: the Plan's list

    for batches in engine.prefetch(loader):
        engine.train_step(batches)

Only keys go ahead. Everything that depends on weights or changes a table (vectors, new keys' rows, evictions) waits for
the step before, so that every result has the bits of a run that prepares nothing ahead, at any depth and any speed of
the three.

[Note: the order of keys] Ranks must send keys in one order. So the caller's thread submits the jobs, at points that
follow only from its own steps: when it hands out step t, it submits all jobs up to t + depth, each with the list of the
order that is in force then. One thread runs the jobs in that order, including those of an evaluation between two steps.
No job is withdrawn, because another rank may be in the middle of the same job; a rank that has ended reports that it
has no step. Keys travel over their own transport. A forward pass without prepared keys uses the transport of the
vectors, and so cannot mix with the jobs. Keys are host tensors on every device, so gloo carries them beside NCCL, which
only sees the order of the caller's thread.

Memory: ``depth`` steps with their keys.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from enum import Enum
from itertools import count
from typing import Any

import torch

from shardwise.base.errors import DataError, UsageError
from shardwise.base.pytree import tensors_in
from shardwise.data.loader import Loader
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.step.keys_ahead import Asks, KeysAhead
from shardwise.engine.step.step_source import ReadStep, StepSource
from shardwise.memory.streams import keep_for
from shardwise.observe.lanes_picture import LaneRecorder
from shardwise.plan.waits import StepWaits

_PATIENCE_S = 10.0
"""Seconds to wait for running jobs at the end; they only take longer if another rank does not answer."""


class _PrefetchState(Enum):
    """The states of a prefetcher, which ends once; after ``TAKEN_BACK`` a request of a step is an error."""

    OPEN = "open"
    CLOSED = "closed"
    TAKEN_BACK = "taken back"


class Prefetcher(Iterator[Any]):
    """An iterator over steps, each with its keys exchanged. ``engine.prefetch`` makes it.

    ``close`` (or the end of a ``with`` block) ends the iterator early, and so does another caller that requests steps
    of the same ``Loader``. The loader's position is always that of the step handed out last; steps that were read ahead
    are read again.

    Args:
        parts: The running parts of the engine.
        on_step: Callbacks after each step of the engine.
        steps: The loader, or an iterable of steps.
        depth: Number of steps to prepare ahead; 0 for none.
        lanes: Records the seconds of each stage, if given.

    Raises:
        UsageError: if ``depth`` is negative.
    """

    def __init__(
        self,
        parts: EngineParts,
        on_step: list[Callable[..., None]],
        steps: Iterable[Any] | Loader,
        depth: int,
        lanes: LaneRecorder | None = None,
    ):
        if depth < 0:
            raise UsageError(
                f"prefetch: depth is {depth}; give the number of steps to prepare ahead, 0 for none"
            )
        self.depth = depth
        self._parts = parts
        self._on_step = on_step
        self._thread = parts.world.thread("keys")
        self._lanes = lanes
        self._source = StepSource(steps, lanes, self._taken_back)
        self._keys = KeysAhead(parts, lanes, depth)
        self._numbers = count(parts.progress.step_count + 1)
        self._waiting: deque[Future[ReadStep | None]] = deque()
        self._state = _PrefetchState.OPEN
        self._clock = parts.walker.trace.clock
        self._computing: tuple[int, Any, Any] | None = None
        """(step, request time, hand-out time) of the step that is computed now; the times are marks of ``_clock``."""
        self._computed_last: tuple[int, list[Any], StepWaits | None] | None = None
        """The step before with its marks and its waits, recorded one step later because a device may finish after the
        host does.
        """
        if lanes is not None:
            lanes.depth = depth
            parts.measure_waits()
            on_step.insert(0, self._computed)

    # The caller's side -----------------------------------------------------------------------------------------

    def __next__(self) -> Any:
        if self._state is _PrefetchState.TAKEN_BACK:
            raise UsageError(
                "prefetch: somebody else has asked the loader for steps, or moved its position, since the last step "
                "here; go on with the newer engine.prefetch(loader), or make another"
            )
        if self._state is _PrefetchState.CLOSED:
            raise StopIteration
        self._computed()
        asked = self._clock.mark()
        try:
            while len(self._waiting) <= self.depth:
                self._waiting.append(self._ask())
            step = self._waiting.popleft().result()
        except Exception:
            self.close()
            raise
        except BaseException:  # Ctrl-C: other ranks may have stopped elsewhere, so a job may never end
            self._end(_PrefetchState.CLOSED, 0.0)
            raise
        if step is None:
            self.close()
            raise StopIteration
        self._source.count(step)
        if self._lanes is not None:
            self._computing = (step.number, asked, self._clock.mark())
        if self._keys.stream is not None:
            here = torch.accelerator.current_stream(self._parts.device)
            keep_for(here, tensors_in(step.batches))
        return step.batches

    def close(self) -> None:
        """End the iterator after the submitted jobs are done. See [Note: the order of keys]."""
        self._end(_PrefetchState.CLOSED, _PATIENCE_S)

    def _end(self, state: _PrefetchState, patience_s: float) -> None:
        if self._state is not _PrefetchState.OPEN:
            return
        self._state = state
        self._source.end()
        end = time.monotonic() + patience_s
        for future in self._waiting:
            with contextlib.suppress(Exception):
                future.result(max(0.0, end - time.monotonic()))
        self._waiting.clear()
        if self._lanes is not None:
            self._computed()
            self._record_last()
            self._on_step.remove(self._computed)
        self._source.close(end - time.monotonic())

    def _taken_back(self) -> None:
        """End the iterator because another caller requests steps of the loader; nothing is read afterwards."""
        self._end(_PrefetchState.TAKEN_BACK, _PATIENCE_S)
        if not self._source.wait(_PATIENCE_S):
            raise DataError(
                f"prefetch: a step is still being read {_PATIENCE_S:.0f} s after its end was asked for, so the loader "
                "cannot go on; look at what holds up the reader"
            )

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        is_hasty = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit)
        self._end(_PrefetchState.CLOSED, 0.0 if is_hasty else _PATIENCE_S)

    def _computed(self, *step: object) -> None:
        """Record the end of the step handed out last.

        Called after an optimizer step, or when the next step is requested.
        """
        if self._computing is not None and self._lanes is not None:
            number, asked, started = self._computing
            self._computing = None
            self._record_last()
            marks = [asked, started, self._clock.mark()]
            self._computed_last = number, marks, self._parts.walker.last.waits if step else None
            if not self._clock.runs_behind:
                self._record_last()

    def _record_last(self) -> None:
        if self._computed_last is not None and self._lanes is not None:
            number, marks, waits = self._computed_last
            self._computed_last = None
            asked_s, start_s, stop_s = self._clock.seconds(marks)
            self._lanes.record("compute", number, start_s, stop_s, asked_s)
            for wait in () if waits is None else waits.spans():
                self._lanes.record("waits", number, wait.start_s, wait.stop_s)

    # Jobs ------------------------------------------------------------------------------------------------------

    def _ask(self) -> "Future[ReadStep | None]":
        """Submit the job for the next step."""
        number, source = next(self._numbers), self._source
        if self.depth and source.reads_apart:
            asks = self._parts.program.asks()
            return self._thread.submit(lambda: self._prepared(lambda: source.read(number), asks))
        read: Future[ReadStep | None] = Future()
        try:
            read.set_result(source.read(number))
        except Exception as error:
            read.set_exception(error)
        if self.depth == 0:
            return read
        asks = self._parts.program.asks()
        return self._thread.submit(lambda: self._prepared(read.result, asks))

    def _beside(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which waits of this thread do not count as waits of the computation."""
        meter = self._parts.clock.meter
        return contextlib.nullcontext() if meter is None else meter.beside()

    def _prepared(self, read: Callable[[], ReadStep | None], asks: Asks) -> ReadStep | None:
        """Read a step and exchange its keys, in the thread of keys.

        After the last step, and after an error, nothing is read any more.
        """
        step = None
        try:
            with self._beside():
                step = self._keys.prepared(read, asks)
        finally:
            if step is None:
                self._source.end()
        return step
