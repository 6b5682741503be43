"""The clock of an engine's steps: how long a wait for other ranks may take, and what it is called in errors.

    auto      the median of the last steps, times a factor, but not less than the limits of comm/policy.py
    given     comm.timeout_s
    first     ten times as long in the first step of a process, in which kernels are compiled

The clock also tells the watch (watching/watch.py) of each wait, the recorder (watching/recorder.py) of each step, and
the meter (wait_meter.py) of the waits of the computation.

Cost: one median of at most 32 numbers a step.
"""

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardwise.base.errors import CommError, UsageError
from shardwise.comm.flights import InFlightCollective, PendingCollective
from shardwise.comm.policy import FIRST_STEP_S, LONGEST_WAIT_S, PATIENCE_S
from shardwise.comm.wait_meter import WaitMeter
from shardwise.comm.watching.recorder import NOWHERE, CallPlace, Recorder
from shardwise.comm.watching.waits import WaitLimits, advice
from shardwise.comm.watching.watch import Watchdog

_STEPS = 32
"""Number of steps in the median."""
_LIMIT_STEPS, _PATIENCE_STEPS = 10, 5


class StepClock:
    """The step that the ranks are in, shared by all groups of an engine and read by errors and deadlines.

    Args:
        timeout_s: Value of ``comm.timeout_s``.
        delay_s: Longest random pause before a collective, for debugging.
        watch: Watch that records every wait; None: no watch.
        meet: Function as ``MessageBoard.meet``.
    """

    def __init__(
        self,
        timeout_s: float | str,
        delay_s: float = 0.0,
        watch: Watchdog | None = None,
        meet: Callable[[tuple[int, ...], str, float], None] | None = None,
    ):
        self._step = 0
        self.steps_done = 0
        self.watch = watch
        self.recorder: Recorder | None = None if watch is None else watch.recorder
        """Recorder of this rank; None if nothing is recorded."""
        self.meter: WaitMeter | None = None
        """Meter of the waits of the computation; None if nobody measures them."""
        self._timeout_s = timeout_s
        self._delay_s = delay_s
        self._random = random.Random()
        self._ended_s = 0.0
        self._step_s: deque[float] = deque(maxlen=_STEPS)
        self._median_s = 0.0
        self._patience_s = self._patience()
        self._is_alone = False
        self._meet = meet
        self.met: set[tuple[int, ...]] | None = None
        """Ranks that have met in the main thread's current call; None outside a call that begins with a meeting."""
        self._tell_patience()

    @property
    def step(self) -> int:
        """Number of the step that the ranks are in."""
        return self._step

    @step.setter
    def step(self, number: int) -> None:
        self._step = number
        if self.recorder is not None:
            self.recorder.step = number

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Treat this rank as working alone inside the ``with`` block: a collective there is an error.

        A collective would wait forever for ranks that do not call it.
        """
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def check_together(self, operation: str, what: str) -> None:
        """Check that this rank is not working alone.

        Args:
            operation: Name of the operation, for the error.
            what: Name of the tensor, for the error.

        Raises:
            UsageError: inside ``alone``.
        """
        if self._is_alone:
            raise UsageError(f"{operation} of {what} takes all ranks, but this one works alone here")

    def step_ended(self) -> None:
        """Record the end of a step."""
        if self.recorder is not None:
            self.recorder.step_ended()
        now = time.monotonic()
        if self.steps_done:
            self._step_s.append(now - self._ended_s)
            self._median_s = statistics.median(self._step_s)
        self._ended_s = now
        self.steps_done += 1
        self._patience_s = self._patience()
        self._tell_patience()

    @property
    def timeout_s(self) -> float:
        """Seconds after which a wait ends the job: long in the first step of this process, short later."""
        given = self._timeout_s
        base = max(LONGEST_WAIT_S, _LIMIT_STEPS * self._median_s) if isinstance(given, str) else given
        return base * (10 if self.steps_done == 0 else 1)

    @contextmanager
    def within(self, call: str, meets: bool = False) -> Iterator[None]:
        """Name the collective call ``call`` in errors and to the watch inside the ``with`` block.

        Args:
            call: Name of the call, which all ranks must make.
            meets: Let the ranks of each group first check that all have reached the call. Otherwise a collective of a
                call that one rank makes alone could be mistaken for a collective of training.
        """
        if self.watch is None:
            yield
            return
        is_outermost = not self.call
        if is_outermost and meets:
            self.met = set()
        try:
            with self.watch.within(call, self):
                yield
        finally:
            if is_outermost:
                self.met = None

    def meet(self, ranks: tuple[int, ...]) -> None:
        """Wait until all ``ranks`` of the job have reached the current call; once for each call.

        Does nothing outside a call that begins with a meeting.
        """
        if self.met is not None and self._meet is not None and ranks not in self.met and self.call:
            self.met.add(ranks)
            self._meet(ranks, self.call, self.timeout_s)

    @property
    def call(self) -> str:
        """Name of the collective call that the calling thread is in; "" outside such a call."""
        return "" if self.watch is None else self.watch.call

    @property
    def advice(self) -> str:
        """Sentence of ``advice`` on the call that the calling thread is in; "" outside such a call."""
        call = self.call
        return f" {advice(call)}" if call else ""

    def begin_wait(
        self,
        what: tuple[Any, ...],
        give_up: Callable[[], None] | None = None,
        members: tuple[int, ...] = (),
        place: CallPlace = NOWHERE,
    ) -> None:
        """Record that the calling thread waits for other ranks, until ``end_wait``.

        Args:
            what: (rank, operation, tensor) of the wait.
            give_up: Function that wakes a thread that waits inside torch.
            members: Ranks of the job that take part.
            place: Group and number of what is waited for, in the records.
        """
        if self.watch is not None:
            is_auto = isinstance(self._timeout_s, str)
            patience_s, standstill_s = self._patience_s
            self.watch.begin((*what, self.step), patience_s, is_auto, standstill_s, give_up, members, place)

    def end_wait(self) -> None:
        """Record that the calling thread waits no longer."""
        if self.watch is not None:
            self.watch.end()

    def mark_wait(self) -> Any:
        """Return a mark of ``meter`` in front of a wait; None if nobody measures the wait."""
        if (
            self.meter is None or self.met is not None
        ):  # a call that begins with a meeting is no part of a step
            return None
        return self.meter.begin()

    def _patience(self) -> tuple[float, float]:
        """Return the seconds after which the other ranks are asked, and the seconds that a rank may stand still."""
        patience_s = max(PATIENCE_S, _PATIENCE_STEPS * self._median_s)
        if not isinstance(self._timeout_s, str):
            patience_s = min(patience_s, self.timeout_s / 2)
        return patience_s, patience_s if self.steps_done else max(patience_s, FIRST_STEP_S)

    def _tell_patience(self) -> None:
        """Pass the patience of this engine to the watch, for waits for texts, which no clock measures."""
        if self.watch is not None:
            patience_s, standstill_s = self._patience_s
            given = self._timeout_s
            ends_s = patience_s if isinstance(given, str) else max(patience_s, given)
            self.watch.set_patience(self, WaitLimits(patience_s, standstill_s, ends_s))

    def follow(
        self,
        pending: PendingCollective,
        what: tuple[Any, ...],
        explain: Callable[[Exception], CommError],
        members: tuple[int, ...] = (),
        place: CallPlace = NOWHERE,
    ) -> InFlightCollective | None:
        """Give a collective on a device, which runs while the host goes on, the deadline of a wait.

        Args:
            pending: The collective.
            what: (rank, operation, tensor) of the wait.
            explain: Function that turns an error into ours.
            members: Ranks of the job that take part.
            place: Group and number of the collective in the records.

        Returns:
            The flight; None without a watch.
        """
        if self.watch is None or pending.communicator is None:
            return None
        patience_s, standstill_s = self._patience_s
        flight = InFlightCollective(
            (*what, self.step),
            self.timeout_s,
            (patience_s, isinstance(self._timeout_s, str), standstill_s),
            explain,
            pending.works,
            pending.communicator,
            members,
            self.call,
            place,
        )
        self.watch.flights.add(flight)
        return flight

    def check_intact(self) -> None:
        """Raise the error of a collective that failed or was late on the device; later numbers there are undefined."""
        if self.watch is not None:
            self.watch.raise_failure()

    def tell_slow(self, rank: int, phase: str, words: str) -> None:
        """Keep the rank that has become slow for ``shardwise doctor``.

        Args:
            rank: The rank.
            phase: ``reading``, ``computing`` or ``waiting``.
            words: Sentence on the rank.
        """
        if self.watch is not None:
            self.watch.tell_slow(rank, phase, words)

    def condemn(self, words: str) -> None:
        """End all communication of all ranks, with ``words`` as the reason."""
        if self.watch is not None:
            self.watch.condemn(words)

    def verdict(self) -> str:
        """Return the reason why waiting was in vain; "" if there is none."""
        return "" if self.watch is None else self.watch.last_word()

    @property
    def story(self) -> str:
        """Sentence on the ranks that kept others waiting when last asked; "" if none were asked."""
        return f" When last asked: {self.watch.story}" if self.watch is not None and self.watch.story else ""

    def maybe_delay(self) -> None:
        """Sleep for the random pause of debug mode, if it is set."""
        if self._delay_s:
            time.sleep(self._random.uniform(0, self._delay_s))
