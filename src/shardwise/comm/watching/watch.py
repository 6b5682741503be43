"""The watch: finds which rank keeps the others waiting, and where it is.

A rank that has waited long asks all ranks, over the store. A thread of each rank answers, even if its main thread
hangs:

    waits      what its main thread waits for in a collective, and how long        (it is not to blame)
    stack      where its main thread is, in Python
    unmoved    seconds since that stack changed, or the process and its children computed, read or wrote anything

One of these findings follows from the answers, with this consequence under ``comm.timeout_s: auto``:

    does not answer    its process is stopped, has no time, or is gone             the job ends
    does not move      a lock, a sleep, a lost server: no work at all              the job ends
    is at work         slow, or in a loop: from outside they look alike            named in the log; the job ends at
                                                                                   300 s or ten median steps
    all wait           for one another: ranks called different collectives         the job ends
    two wait           for one another, at least one of them in a call of the      the job ends, within seconds
                       engine's that all ranks must make (``within``)

A wait for texts of other ranks in the store (a save, a load) is watched in the same way. The ranks whose text is
missing are asked, and a rank that works alone on its part reports so (``at_work``), so that a slow disk is no hang.

A question costs almost nothing, so it is asked early: after 20 s, or five median steps if steps are long. With a number
for ``comm.timeout_s`` the question is asked earlier, and the job ends only at that time. A debugger is no hang. The
stack of a process that holds the interpreter's lock is obtained by a signal (outside.py).

On a device the host goes on, and a collective in flight takes the place of the wait (flights.py): the watch asks for it
in the same way. If it fails or its time is over, its communicator is ended, and every later call raises the reason.

There are two threads, because a call of the store may block (rank 0, which serves it, may be the one that is stopped):
``_observe`` checks this process and the clock, ``_talk`` uses the store. The first rank that reaches a verdict writes
it into the store, so that all ranks report the same.

What the watch sees goes into the ring of the rank each second (recorder.py), with what it has found of other ranks, so
that ``shardwise doctor`` has it from another terminal, and from the files of a job that was killed.

Cost: each second two questions to the store, a look at one stack and one snapshot, about 0.3 ms.
"""

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.base.errors import CommError, DeadlineError
from shardwise.comm.flights import InFlightCollectives
from shardwise.comm.rendezvous.handshake import RankIdentity
from shardwise.comm.rendezvous.process import (
    WATCHING,
    ProcessHeartbeat,
    bytes_of,
    calls_of,
    has_ended,
    stack_of,
)
from shardwise.comm.rendezvous.stack_file import StackFile
from shardwise.comm.rendezvous.store import SealedStore, StoreClient
from shardwise.comm.watching.answers import AwaitedCall, OwnWork, RankAnswer, SlowRank, StartedCall
from shardwise.comm.watching.outside import seen_from_outside
from shardwise.comm.watching.questions import ANSWER_S, RECENT_S, AwaitedTexts, WatchQuestions
from shardwise.comm.watching.recorder import (
    NOWHERE,
    CallPlace,
    Event,
    Recorder,
    RingOwner,
    give_back,
    ring_path,
    shared_recorder,
)
from shardwise.comm.watching.rings import parse_ring, silent_seconds
from shardwise.comm.watching.verdict import RankState, crossed_line, line_of, lines_of_all_waiting
from shardwise.comm.watching.waits import CollectiveWait, WaitLimits, advice

_log = logging.getLogger(__name__)

_TICK_S = 1.0
_STORE_S = 6.0
"""Seconds after which a silent store counts as not answering."""
_MOST_STARTS = 256
"""Collectives of a rank that its answer to another rank names."""
_LAST_WORD_S = 2.5
SILENT_S = 5.0
"""Seconds without a sign of life after which a rank that others wait for is looked at from outside."""
_AGAIN_S = 60.0
"""Seconds between two log lines about one wait."""


class SharedWork(NamedTuple):
    """A part of common work that one thread does while other ranks wait for it."""

    key: str
    """Beginning of the keys of the texts that follow from the work."""
    what: str
    since_s: float


class FlightFolder(NamedTuple):
    """The folder of the ranks' rings."""

    path: Path | None
    """None: rings are in memory."""
    is_temporary: bool
    """True if nobody wants the rings of a job that ended in order."""


_NO_FOLDER = FlightFolder(None, False)


class _ThreadActivities:
    """Work, waits and calls of one rank's threads, by thread, and the patience of its engines."""

    def __init__(self) -> None:
        self.works: dict[int, SharedWork] = {}
        self.joins: dict[int, int] = {}
        """Thread of this process that each thread waits for."""
        self.calls: dict[int, str] = {}
        """Collective call of the engine that each thread is in."""
        self.clocks: dict[int, Any] = {}
        """Clock of the engine whose call each thread is in."""
        self.patiences: weakref.WeakKeyDictionary[Any, WaitLimits] = weakref.WeakKeyDictionary()
        """Limits of an engine's waits, by the engine's clock."""
        self.stacks = _RemoteStacks()
        self.flight = _NO_FOLDER
        self.recorder: Recorder | None = None
        self.slow: SlowRank | None = None
        """Rank that was last seen to be slow in its own work."""
        self.at_exit: Callable[[], None] = lambda: None
        """Function that is called at the end of the process and ends the threads."""


class _RemoteStacks:
    """Access to the stacks of ranks that do not answer."""

    def __init__(self) -> None:
        self.own: StackFile | None = None
        self.offers: dict[int, list[int]] = {}
        """Offered numbers, by rank of this host."""


class Watchdog:
    """The watch of one rank of a job.

    Args:
        rank: This rank.
        who: Identity of all ranks.
        store: Store of the job.
        prefix: Beginning of the keys in ``store``.
        flight: Folder of the rings of records.
    """

    def __init__(
        self,
        rank: int,
        who: Sequence[RankIdentity],
        store: SealedStore,
        prefix: str,
        flight: FlightFolder = _NO_FOLDER,
    ):
        self._rank = rank
        self._who = who
        self._questions = WatchQuestions(rank, len(who), store, prefix)
        self._waits: dict[int, CollectiveWait] = {}
        """Waits, by thread."""
        self._doings = _ThreadActivities()
        self._doings.flight = flight
        self._pulse = ProcessHeartbeat(None, None)
        self.flights = InFlightCollectives()
        """Collectives in flight on the device."""
        self._failure: CommError | None = None
        self._verdict = ""
        self._story = ""
        self._wanted = False
        self._reported_s = -_AGAIN_S
        self._suspects: frozenset[int] = frozenset()
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    # The main thread's side ------------------------------------------------------------------------------------

    def start(self) -> bool:
        """Start to watch the calling thread, and return False if the watch was running."""
        if self._threads or len(self._who) < 2:
            return False
        self._pulse = ProcessHeartbeat(threading.get_ident(), threading.get_native_id())
        self._doings.stacks.own = StackFile(threading.get_ident())
        self._questions.offer(self._doings.stacks.own.offer)
        self._open_ring(self._doings.stacks.own.offer)
        talker = self._questions.connect()
        # The threads hold no reference between two ticks: a World that is dropped and not closed ends them.
        own, ended = weakref.ref(self), self._ended
        self._doings.at_exit = partial(_stop, own)
        self._threads = [
            threading.Thread(target=run, args=arguments, name=f"shardwise-watch-{name}", daemon=True)
            for name, run, arguments in (
                ("observe", _observe, (own, ended)),
                ("talk", _talk, (own, ended, talker, self._doings.at_exit)),
            )
        ]
        self._pulse.look()
        self._snapshot()
        for thread in self._threads:
            thread.start()
        # The interpreter may crash if it ends while a thread is in torch.
        atexit.register(self._doings.at_exit)
        return True

    def record_in(self, folder: Path) -> None:
        """Let the ring of this rank lie in ``folder``; called before the watch starts."""
        self._doings.flight = FlightFolder(folder, False)

    @property
    def recorder(self) -> Recorder | None:
        """Recorder of this rank; None before the watch starts."""
        return self._doings.recorder

    def _open_ring(self, offer: Sequence[int]) -> None:
        folder = self._doings.flight.path
        owner = RingOwner(self._rank, len(self._who), self._who[self._rank].host)
        recorder = shared_recorder(None if folder is None else ring_path(folder, self._rank), owner)
        recorder.offer(offer)
        self._doings.recorder = recorder

    def stop(self) -> None:
        """End the threads of the watch, and the records."""
        if self._threads and self._doings.recorder is not None:
            self._snapshot()
            give_back(self._doings.recorder, self._doings.flight.is_temporary and not self._verdict)
        self._ended.set()
        for thread in self._threads:
            thread.join(2.0)
        self._threads = []
        self._doings.stacks.own = None
        self.flights = InFlightCollectives()
        atexit.unregister(self._doings.at_exit)

    def set_patience(self, clock: Any, patience: WaitLimits) -> None:
        """Set the limits of one engine's waits, which are dropped together with ``clock``."""
        self._doings.patiences[clock] = patience

    @contextlib.contextmanager
    def within(self, call: str, clock: Any = None) -> Iterator[None]:
        """Name the call that the calling thread is in inside the ``with`` block, which all ranks must make.

        The outermost call counts.

        Args:
            call: Name of the call.
            clock: Clock of the engine that is called, whose limits hold for waits for texts; None: those of any engine.
        """
        thread = threading.get_ident()
        if thread in self._doings.calls:
            yield
            return
        self._doings.calls[thread] = call
        self._doings.clocks[thread] = clock
        try:
            yield
        finally:
            del self._doings.calls[thread], self._doings.clocks[thread]

    @property
    def call(self) -> str:
        """Name of the collective call that the calling thread is in."""
        return self._doings.calls.get(threading.get_ident(), "")

    @property
    def advice(self) -> str:
        """Sentence of ``advice`` on the call that the calling thread is in; "" outside such a call."""
        return f" {advice(self.call)}" if self.call else ""

    def place(self, what: str) -> str:
        """Return ``what`` with the call that the calling thread is in."""
        return ", ".join(filter(None, (self.call, what)))

    @contextlib.contextmanager
    def at_work(self, key: str, what: str) -> Iterator[None]:
        """Mark the calling thread as doing its part of work for which other ranks wait, inside the ``with`` block.

        Args:
            key: Beginning of the keys at which the others wait.
            what: Name of the work.
        """
        thread = threading.get_ident()
        before = self._doings.works.get(thread)
        self._doings.works[thread] = SharedWork(key, what, time.monotonic())
        try:
            yield
        finally:
            if before is None:
                del self._doings.works[thread]
            else:
                self._doings.works[thread] = before

    @contextlib.contextmanager
    def joining(self, thread: int) -> Iterator[None]:
        """Mark the calling thread as waiting for another thread of this process inside the ``with`` block.

        The calling thread then counts as waiting for whatever that thread waits for.
        """
        self._doings.joins[threading.get_ident()] = thread
        try:
            yield
        finally:
            del self._doings.joins[threading.get_ident()]

    def begin_words(self, rank: int, what: str, words: AwaitedTexts, timeout_s: float) -> None:
        """Record that the calling thread waits for texts of other ranks, until ``end``.

        In an engine's call the limits of that engine hold. Elsewhere, as in a background save, the longest limits of
        all engines of the World hold, because the thread may wait for any of them.

        Args:
            rank: This rank.
            what: Name of the exchange.
            words: The texts.
            timeout_s: Seconds that the wait may take.
        """
        if self._doings.recorder is not None:
            self._doings.recorder.wait("texts", what)
        clock = self._doings.clocks.get(threading.get_ident())
        own = None if clock is None else self._doings.patiences.get(clock)
        patiences = list(self._doings.patiences.values()) if own is None else [own]
        longest = [max(each) for each in zip(*patiences, strict=True)] or [timeout_s] * 3
        patience_s, standstill_s, ends_s = longest
        self._waits[threading.get_ident()] = CollectiveWait(
            (rank, what),
            time.monotonic(),
            min(patience_s, timeout_s),
            bool(patiences),
            standstill_s,
            None,
            words.ranks,
            self.call,
            words,
            ends_s,
        )

    def ended(self, ranks: Sequence[int]) -> list[int]:
        """Return the ``ranks`` of this host whose process has ended."""
        here = self._here()
        return [rank for rank in ranks if rank in here and has_ended(self._who[rank].pid)]

    def begin(
        self,
        what: tuple[Any, ...],
        patience_s: float,
        is_auto: bool,
        standstill_s: float,
        give_up: Callable[[], None] | None = None,
        members: tuple[int, ...] = (),
        place: CallPlace = NOWHERE,
    ) -> None:
        """Record that the calling thread waits, until ``end``.

        Args:
            what: (rank, operation, tensor, step).
            patience_s: Seconds after which the other ranks are asked.
            is_auto: True if the answers may end the job before its deadline.
            standstill_s: Seconds that a rank may stand still.
            give_up: Function that wakes a thread that waits inside torch.
            members: Ranks of the job that take part.
            place: Group and number of what is waited for, in the records.
        """
        thread = threading.get_ident()
        if self._doings.recorder is not None:
            self._doings.recorder.wait(what[1], what[2], place)
        self._waits[thread] = CollectiveWait(
            what,
            time.monotonic(),
            patience_s,
            is_auto,
            standstill_s,
            give_up,
            members,
            self._doings.calls.get(thread, ""),
            place=place,
        )

    def end(self) -> None:
        """Record that the calling thread waits no longer."""
        self._waits.pop(threading.get_ident(), None)
        if self._doings.recorder is not None:
            self._doings.recorder.waited()

    def last_word(self) -> str:
        """Return the verdict, or "" if there is none.

        A rank that sees another rank leave just after a question waits a moment for the reason.
        """
        until_s = time.monotonic() + _LAST_WORD_S
        while not self._verdict and time.monotonic() < min(until_s, self._questions.answered_s + RECENT_S):
            time.sleep(0.02)
        return self._verdict

    @property
    def story(self) -> str:
        """Result of the last question; "" if none was asked."""
        return self._story

    def raise_verdict(self) -> None:
        """Raise the verdict, if there is one.

        Raises:
            DeadlineError: if waiting is in vain.
        """
        if self._verdict:
            raise DeadlineError(self._verdict)

    def raise_failure(self) -> None:
        """Raise the error that has ended the device's communicators, if there is one."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def tell_slow(self, rank: int, phase: str, words: str) -> None:
        """Keep the rank that has become slow in its own work, for ``shardwise doctor``."""
        self._doings.slow = SlowRank(rank=rank, phase=phase, words=words, time_ns=time.monotonic_ns())

    def condemn(self, words: str) -> None:
        """End all communication of all ranks, because this rank cannot go on, with ``words`` as the reason."""
        with contextlib.suppress(RuntimeError):  # the store has ended
            self._questions.leave_verdict(words)
        self._verdict = words
        self._fail(DeadlineError(words))

    # This process and the clock --------------------------------------------------------------------------------

    def _observe(self) -> None:
        self._pulse.look()
        self._snapshot()
        failed = None if self._failure is not None else self.flights.look()
        if failed is not None:
            self._fail(failed)
        longest = self._longest()
        if longest is None:
            self._story = ""
            self._suspects = frozenset()
            return
        age_s = time.monotonic() - longest.since_s
        if age_s > SILENT_S and not self._verdict:
            self._look_at_silent()
        if age_s > longest.soon_s and not self._verdict:
            self._wanted = True
            silence_s = time.monotonic() - self._questions.contact_s
            if silence_s > _STORE_S and age_s > longest.patience_s + ANSWER_S:
                self._judge_alone(longest, silence_s)
        if self._verdict:
            self._wake()

    def _longest(self) -> CollectiveWait | None:
        """Return the wait whose patience ends first."""
        waits = [*self._waits.copy().values(), *self._flying()]
        return min(waits, key=lambda wait: wait.since_s + wait.soon_s, default=None)

    def _flying(self) -> list[CollectiveWait]:
        """Return the device's longest flight as a wait, if there is one."""
        found = self.flights.oldest()
        if found is None:
            return []
        flight, since_s = found
        patience_s, is_auto, standstill_s = flight.patience
        return [
            CollectiveWait(
                flight.what,
                since_s,
                patience_s,
                is_auto,
                standstill_s,
                None,
                flight.members,
                flight.call,
                place=flight.place,
            )
        ]

    def _fail(self, error: CommError) -> None:
        """End the communicators, so that a host that waits for the device goes on and raises ``error``."""
        self._failure = error
        self.flights.end(str(error))

    def _wake(self) -> None:
        """Wake threads that wait inside torch and on the device, which do not check the verdict."""
        if self._failure is None and self.flights.oldest() is not None:
            self._fail(DeadlineError(self._verdict))
        for wait in self._waits.copy().values():
            if wait.give_up is not None:
                with contextlib.suppress(Exception):
                    wait.give_up()

    def _look_at_silent(self) -> None:
        """Look from outside at ranks of this host that give no sign of life, and keep what is seen in the story.

        The rank that looks is the first of the host's other ranks. A rank is looked at once in a wait.
        """
        folder, here = self._doings.flight.path, self._here()
        if folder is None or self._story:
            return
        for rank in here:
            if rank == self._rank or self._rank != next(each for each in here if each != rank):
                continue
            if silent_seconds(ring_path(folder, rank)) > SILENT_S:
                self._story = f"rank {rank} does not answer: {self._seen_from_outside(rank)[1]}"
                self._snapshot()  # the job may be killed before the next second

    def _judge_alone(self, wait: CollectiveWait, silence_s: float) -> None:
        """Judge, while the store does not answer, by what can be seen of the ranks of this host from outside."""
        found = {rank: self._seen_from_outside(rank) for rank in self._here() if rank != self._rank}
        stopped = [rank for rank, (ends, _) in found.items() if ends]
        lines = [f"rank {rank} does not answer: {found[rank][1]}" for rank in stopped]
        if not stopped:
            lines = [
                f"the store has not answered for {silence_s:.0f} s: rank 0, which serves it, hangs or is cut off"
            ]
        self._story = "; ".join(lines)
        ripe = time.monotonic() - wait.since_s > max(wait.patience_s, wait.ends_s)
        if wait.is_auto and ripe and (stopped or silence_s > wait.patience_s):
            self._verdict = self._sentence(wait, self._story)
        else:
            self._tell(wait)

    def _here(self) -> list[int]:
        host = self._who[self._rank].host
        return [rank for rank, each in enumerate(self._who) if each.host == host]

    def _seen_from_outside(self, rank: int, is_late: bool = True) -> tuple[bool, str]:
        """Return whether a rank of this host can never answer, and a description of its process.

        If ``is_late`` is set, the rank may be sent a signal for its stack, which ends a sleep in C early.
        """
        offer = self._doings.stacks.offers.get(rank, ()) if is_late else ()
        view = seen_from_outside(self._who[rank].pid, offer)
        where = f". Its main thread is at\n{stack_of(view.calls)}" if view.calls else ""
        return view.can_never_answer, view.sentence + where

    # The store -------------------------------------------------------------------------------------------------

    def _talk(self) -> None:
        questions = self._questions
        while questions.is_asked:
            questions.answer(self._told())
        self._is_judged()
        for rank in self._here():
            offer = (
                None if rank in self._doings.stacks.offers or rank == self._rank else questions.offer_of(rank)
            )
            if offer is not None:
                self._doings.stacks.offers[rank] = offer
        questions.contact_s = time.monotonic()
        wait = self._longest()
        if self._wanted and wait is not None and self._is_due(wait) and not self._verdict:
            self._wanted = False
            answers = questions.ask(self._told(), self._is_judged)
            if not self._is_judged():
                self._judge(wait, answers)

    def _is_due(self, wait: CollectiveWait) -> bool:
        """Return whether to ask the other ranks now; seldom if a wait is long."""
        now, ripe_s = time.monotonic(), wait.since_s + wait.patience_s
        silence_s = now - self._questions.asked_s
        if self._suspects or self._questions.asked_s < ripe_s < now:
            return True
        return silence_s > max(ANSWER_S, (now - wait.since_s) / 5)

    def _answer(self, question: str = "", is_snapshot: bool = False) -> RankAnswer:
        """Return what this rank does.

        Args:
            question: Question that is answered, if it came by a file.
            is_snapshot: Take the stack that was seen a moment ago.
        """
        thread = self._pulse.thread_id or 0
        thread = self._doings.joins.get(thread, thread)
        wait = self._waits.get(thread)
        flying = self._flying()
        shown = wait or next(iter(flying), None)
        now = time.monotonic()
        works = [
            OwnWork(
                key=each.key,
                what=each.what,
                seconds=now - each.since_s,
                is_main=each_thread == thread,
                stack=self._stack(each_thread),
            )
            for each_thread, each in self._doings.works.copy().items()
            if each_thread not in self._waits
        ]
        return RankAnswer(
            time_ns=time.monotonic_ns(),
            question=question,
            waits="" if shown is None else str(shown),
            waited_s=0.0 if shown is None else now - shown.since_s,
            awaited=_awaited(shown, self._doings.recorder),
            call="" if shown is None else shown.call,
            key="" if shown is None or shown.words is None else shown.words.key,
            is_flying=bool(flying) and wait is None,
            works=works,
            unmoved_s=now - self._pulse.moved_s,
            stack=stack_of(self._pulse.place if is_snapshot else self._pulse.calls()),
            story=self._story,
            verdict=self._verdict,
            slow=self._doings.slow,
        )

    def _snapshot(self) -> None:
        """Write what this rank does into its ring."""
        recorder = self._doings.recorder
        if recorder is None or recorder.path is None:
            return
        recorder.beat()
        answer = self._answer(recorder.question(), is_snapshot=True)
        recorder.snapshot(answer.model_dump_json(exclude_defaults=True).encode())

    def _told(self) -> RankAnswer:
        """Return the answer to another rank: what this rank does, and the calls that it has made."""
        return self._answer().model_copy(update={"starts": self._starts()})

    def _starts(self) -> list[StartedCall]:
        """Return the last collectives and messages of this rank."""
        recorder = self._doings.recorder
        if recorder is None:
            return []
        ring = parse_ring(recorder.data(), recorder.path or Path("memory"))
        calls = [each.call for each in ring.records if each.event is Event.START and each.call is not None]
        return calls[-_MOST_STARTS:]

    @staticmethod
    def _stack(thread: int) -> str:
        return stack_of(calls_of(thread))

    def _is_judged(self) -> bool:
        """Return whether another rank has reached a verdict, which this rank then adopts."""
        found = "" if self._verdict else self._questions.verdict
        if found:
            self._verdict = found
            self._wake()
        return bool(self._verdict)

    def _judge(self, wait: CollectiveWait, answers: Mapping[int, RankAnswer]) -> None:
        age_s = time.monotonic() - wait.since_s
        awaited = [*range(len(self._who))] if wait.words is None else self._questions.missing(wait.words)
        silent = frozenset(awaited) - frozenset(answers)
        lines, ends = self._of_silent(silent)
        # A rank that does not answer is reported after the second question, with its stack.
        is_sure = silent <= self._suspects
        self._suspects = silent
        found = [line_of(rank, answers[rank], wait) for rank in awaited if rank in answers]
        lines += [line for line, _ in found if line]
        ends = ends or RankState.STILL in (state for _, state in found)
        if not wait.is_auto or age_s <= max(wait.patience_s, wait.ends_s):
            ends = False
        is_idle = not silent and {state for _, state in found} <= {RankState.WAITS}
        if is_idle and all(said.waits for said in answers.values()):
            # A device may be busy with work that its rank launched before, which cannot be seen from outside.
            flies = any(said.is_flying for said in answers.values())
            ends = (
                wait.is_auto
                and not flies
                and min(said.waited_s for said in answers.values()) > wait.patience_s
            )
            lines = lines_of_all_waiting(answers)
        crossed = crossed_line(self._rank, wait, answers, awaited)
        if crossed:
            lines, ends = [crossed], True
        if not lines:
            return
        self._story = "\n".join(lines)
        speakers = [
            rank
            for rank, said in answers.items()
            if (said.waits if wait.words is None else rank not in awaited)
        ]
        is_speaker = self._rank == min(speakers, default=self._rank)
        if is_speaker and is_sure and not ends and age_s > wait.patience_s:
            self._tell(wait)
        if ends and self._longest() is not None and not self._is_judged():
            sentence = self._sentence(wait, self._story)
            self._questions.leave_verdict(sentence)
            self._verdict = sentence
            self._wake()

    def _of_silent(self, silent: Collection[int]) -> tuple[list[str], bool]:
        """Return a line for each rank that does not answer, and whether one of them never will."""
        lines, ends = [], False
        here = self._here()
        for rank in sorted(silent):
            if rank in here:
                is_over, seen = self._seen_from_outside(rank, rank in self._suspects)
                is_over = is_over or (rank in self._suspects and " sleeps (" in seen)
            else:
                is_over, seen = rank in self._suspects, "nothing is heard from its host"
            ends = ends or is_over
            lines.append(f"rank {rank} does not answer: {seen}")
        return lines, ends

    def _tell(self, wait: CollectiveWait) -> None:
        """Log the state of a wait, at most once a minute."""
        if time.monotonic() - self._reported_s >= _AGAIN_S:
            self._reported_s = time.monotonic()
            recorder = self._doings.recorder
            where = "" if recorder is None or recorder.path is None else recorder.path.parent
            more = f"\nshardwise doctor {where} says more" if where else ""
            _log.warning("%s%s", self._sentence(wait, self._story), more)

    def _sentence(self, wait: CollectiveWait, story: str) -> str:
        return f"{wait} has waited {time.monotonic() - wait.since_s:.0f} s: {story}"


def _awaited(wait: CollectiveWait | None, recorder: Recorder | None) -> AwaitedCall:
    """Return what is waited for, by its group and number in the records."""
    if wait is None:
        return AwaitedCall()
    group = "" if recorder is None else recorder.name_of(wait.place)
    return AwaitedCall(group=group, number=wait.place.number, members=list(wait.members))


def _run(own: "weakref.ref[Watchdog]", ended: threading.Event, tick: Callable[["Watchdog"], None]) -> None:
    """Call ``tick`` once a second until the watch is stopped or dropped."""
    counted_s, counted_bytes = 0.0, 0
    while not ended.wait(_TICK_S):
        now_s, now_bytes = time.thread_time(), bytes_of(os.getpid(), threading.get_native_id())
        WATCHING.add(now_s - counted_s, now_bytes - counted_bytes)
        counted_s, counted_bytes = now_s, now_bytes
        watch = own()
        if watch is None:
            return
        try:
            tick(watch)
        except Exception as error:  # the store has ended, as it does when the job ends
            _log.debug("the watch ends: %s", error)
            return
        del watch


def _observe(own: "weakref.ref[Watchdog]", ended: threading.Event) -> None:
    """Run the thread that checks this process and the clock."""
    _run(own, ended, Watchdog._observe)


def _talk(
    own: "weakref.ref[Watchdog]", ended: threading.Event, talker: StoreClient, at_exit: Callable[[], None]
) -> None:
    """Run the thread that uses the store, and stop before the store does."""

    def tick(watch: Watchdog) -> None:
        if talker.must_leave():
            raise EOFError("the process that serves the store ends")
        watch._talk()

    _run(own, ended, tick)
    with contextlib.suppress(Exception):  # the store has ended
        talker.leave()
    if own() is None:
        atexit.unregister(at_exit)


def _stop(own: "weakref.ref[Watchdog]") -> None:
    watch = own()
    if watch is not None:
        watch.stop()
