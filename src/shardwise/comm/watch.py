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
stack of a process that holds the interpreter's lock is obtained by a signal (stack_file.py).

On a device the host goes on, and a collective in flight takes the place of the wait (flights.py): the watch asks for it
in the same way. If it fails or its time is over, its communicator is ended, and every later call raises the reason.

There are two threads, because a call of the store may block (rank 0, which serves it, may be the one that is stopped):
``_observe`` checks this process and the clock, ``_talk`` uses the store. The first rank that reaches a verdict writes
it into the store, so that all ranks report the same.

Cost: each second two questions to the store and a look at one stack, about 0.2 ms.
"""

import atexit
import contextlib
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from shardwise.base.errors import CommError, DeadlineError
from shardwise.comm.flights import InFlightCollectives
from shardwise.comm.rendezvous.handshake import RankIdentity
from shardwise.comm.rendezvous.process import (
    WATCHING,
    ProcessHeartbeat,
    calls_of,
    has_ended,
    seconds_of,
    stack_of,
    state_of,
)
from shardwise.comm.rendezvous.stack_file import StackFile, stack_by_signal
from shardwise.comm.rendezvous.store import SealedStore, StoreClient

_log = logging.getLogger(__name__)

_TICK_S = 1.0
_ANSWER_S = 3.5
"""Seconds to wait for all answers to a question."""
_STORE_S = 6.0
"""Seconds after which a silent store counts as not answering."""
_RECENT_S = 10.0
"""Age in seconds at which a question has been judged."""
_LAST_WORD_S = 2.5
_AGAIN_S = 60.0
"""Seconds between two log lines about one wait."""
_SOON_S = 5.0
"""Seconds after which ranks that wait for one another, one of them in a call that all must make, wait forever."""
_AHEAD = 0.75
"""Part of the patience after which ranks are first asked, so that a rank that does not answer can be asked twice."""


class WaitLimits(NamedTuple):
    """Seconds that limit the waits of one engine."""

    patience_s: float
    """Seconds after which the other ranks are asked."""
    standstill_s: float
    """Seconds that a rank may stand still."""
    ends_s: float
    """Seconds after which the answers may end the job."""


class AwaitedTexts(NamedTuple):
    """The texts of other ranks that a thread waits for."""

    key: str
    ranks: tuple[int, ...]
    """Ranks of the job."""
    names: tuple[str, ...]
    """Keys of the ranks' texts in the store, by ``ranks``."""


class CollectiveWait(NamedTuple):
    """One thread's wait in a collective, for a message or for the texts of other ranks."""

    what: tuple[Any, ...]
    """(rank, operation, tensor, step), or (rank, words)."""
    since_s: float
    patience_s: float
    """Seconds after which the other ranks are asked."""
    is_auto: bool
    """True if the answers may end the job before its deadline."""
    standstill_s: float
    """Seconds that a rank may stand still."""
    give_up: Callable[[], None] | None
    """Function that wakes a thread that waits inside torch."""
    members: tuple[int, ...] = ()
    """Ranks of the job that take part."""
    call: str = ""
    """Engine call in which the thread waits; all ranks make it."""
    words: AwaitedTexts | None = None
    ends_s: float = 0.0
    """Seconds for which the job continues, whatever the answers are."""

    @property
    def soon_s(self) -> float:
        """Seconds after which the other ranks are first asked."""
        early_s = _AHEAD * self.patience_s
        return min(_SOON_S, early_s) if self.call or self.words is not None else early_s

    def __str__(self) -> str:
        if self.words is not None:
            rank, what = self.what
            return f"rank {rank}: {', '.join(filter(None, (self.call, what)))}"
        rank, operation, what, step = self.what
        return f"rank {rank}: {operation} of {what} in step {step}" + (
            f", in {self.call}" if self.call else ""
        )


class RankState(Enum):
    """The state of a rank that keeps another one waiting."""

    WAITS = "waits"
    WORKS = "works"
    STILL = "still"


class SharedWork(NamedTuple):
    """A part of common work that one thread does while other ranks wait for it."""

    key: str
    """Beginning of the keys of the texts that follow from the work."""
    what: str
    since_s: float


END_OF_PASS = "the end of a pass over engine.loader()"
"""Beginning of the name of the meeting at the end of a pass over the data."""


def advice(call: str) -> str:
    """Return advice on a call that not all ranks make; "" if there is none."""
    if not call:
        return ""
    if END_OF_PASS in call:
        return (
            "The data ends after unlike numbers of steps on the ranks: give engine.loader() the same dataset on every "
            "rank, and a stream that yields as many items on each"
        )
    return (
        f"{call} is collective: call it on all ranks, in the same order, and not under `if engine.is_main:` or "
        "`if rank == 0:`"
    )


class _WatchQuestions:
    """Questions to all ranks, their answers and the verdict over the store, for one of ``size`` ranks."""

    def __init__(self, rank: int, size: int, store: SealedStore, prefix: str):
        self._rank = rank
        self._size = size
        self._store = store
        self._prefix = prefix
        self._turn = 0
        """Number of the next question."""
        self.contact_s = time.monotonic()
        """Time of the last contact with the store."""
        self.asked_s = 0.0
        """Time at which this rank last got its answers."""
        self.answered_s = -_RECENT_S

    def connect(self) -> StoreClient:
        """Use a separate connection from now on, so that a call that blocks holds up no other thread.

        Returns:
            The talker of that connection, for the thread that will use it.
        """
        self._store = self._store.again()
        self.contact_s = time.monotonic()
        return StoreClient(self._store)

    def offer(self, numbers: list[int]) -> None:
        """Write the numbers with which another rank gets this rank's stack without its answer."""
        self._store.set(self._key("stack", self._rank), json.dumps(numbers))

    def offer_of(self, rank: int) -> list[int] | None:
        """Return what a rank has offered, or None if it has not yet."""
        key = self._key("stack", rank)
        return list(json.loads(self._store.get(key))) if self._store.check([key]) else None

    def missing(self, words: AwaitedTexts) -> list[int]:
        """Return the ranks whose text is missing."""
        return [
            rank for rank, name in zip(words.ranks, words.names, strict=True) if not self._store.check([name])
        ]

    @property
    def is_asked(self) -> bool:
        """True if a question waits for this rank's answer."""
        return self._store.check([self._key("question", self._turn)])

    def answer(self, said: Mapping[str, Any]) -> None:
        """Answer the waiting question."""
        self._store.set(self._key("answer", self._turn, self._rank), json.dumps(said))
        self._turn += 1
        self.answered_s = time.monotonic()

    def ask(self, own: Mapping[str, Any], is_over: Callable[[], bool]) -> dict[int, dict[str, Any]]:
        """Ask all ranks and return the answers that came before ``is_over``, by rank; ``own`` is this rank's answer."""
        keys = [self._key("answer", self._turn, rank) for rank in range(self._size)]
        self._store.set(self._key("question", self._turn), str(self._rank))
        self.answer(own)
        until_s = time.monotonic() + _ANSWER_S
        while not self._store.check(keys) and time.monotonic() < until_s and not is_over():
            time.sleep(_TICK_S / 20)
        found = {rank: key for rank, key in enumerate(keys) if self._store.check([key])}
        self.asked_s = time.monotonic()
        return {rank: json.loads(self._store.get(key)) for rank, key in found.items()}

    @property
    def verdict(self) -> str:
        """Verdict of any rank; "" if there is none."""
        key = self._key("verdict")
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def leave_verdict(self, sentence: str) -> None:
        """Write a verdict for all ranks, before this rank leaves and the others notice."""
        self._store.set(self._key("verdict"), sentence)

    def _key(self, *parts: Any) -> str:
        return "/".join([self._prefix, *map(str, parts)])


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
    """

    def __init__(self, rank: int, who: Sequence[RankIdentity], store: SealedStore, prefix: str):
        self._rank = rank
        self._who = who
        self._questions = _WatchQuestions(rank, len(who), store, prefix)
        self._waits: dict[int, CollectiveWait] = {}
        """Waits, by thread."""
        self._doings = _ThreadActivities()
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
        for thread in self._threads:
            thread.start()
        # The interpreter may crash if it ends while a thread is in torch.
        atexit.register(self._doings.at_exit)
        return True

    def stop(self) -> None:
        """End the threads of the watch."""
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
    ) -> None:
        """Record that the calling thread waits, until ``end``.

        Args:
            what: (rank, operation, tensor, step).
            patience_s: Seconds after which the other ranks are asked.
            is_auto: True if the answers may end the job before its deadline.
            standstill_s: Seconds that a rank may stand still.
            give_up: Function that wakes a thread that waits inside torch.
            members: Ranks of the job that take part.
        """
        thread = threading.get_ident()
        self._waits[thread] = CollectiveWait(
            what,
            time.monotonic(),
            patience_s,
            is_auto,
            standstill_s,
            give_up,
            members,
            self._doings.calls.get(thread, ""),
        )

    def end(self) -> None:
        """Record that the calling thread waits no longer."""
        self._waits.pop(threading.get_ident(), None)

    def last_word(self) -> str:
        """Return the verdict, or "" if there is none.

        A rank that sees another rank leave just after a question waits a moment for the reason.
        """
        until_s = time.monotonic() + _LAST_WORD_S
        while not self._verdict and time.monotonic() < min(until_s, self._questions.answered_s + _RECENT_S):
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

    def condemn(self, words: str) -> None:
        """End all communication of all ranks, because this rank cannot go on, with ``words`` as the reason."""
        with contextlib.suppress(RuntimeError):  # the store has ended
            self._questions.leave_verdict(words)
        self._verdict = words
        self._fail(DeadlineError(words))

    # This process and the clock --------------------------------------------------------------------------------

    def _observe(self) -> None:
        self._pulse.look()
        failed = None if self._failure is not None else self.flights.look()
        if failed is not None:
            self._fail(failed)
        longest = self._longest()
        if longest is None:
            self._story = ""
            self._suspects = frozenset()
            return
        age_s = time.monotonic() - longest.since_s
        if age_s > longest.soon_s and not self._verdict:
            self._wanted = True
            silence_s = time.monotonic() - self._questions.contact_s
            if silence_s > _STORE_S and age_s > longest.patience_s + _ANSWER_S:
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
                flight.what, since_s, patience_s, is_auto, standstill_s, None, flight.members, flight.call
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
        pid = self._who[rank].pid
        state = state_of(pid)
        if state in ("T", "t"):
            return (
                True,
                f"its process {pid} is stopped (SIGSTOP or a debugger), so its stack cannot be asked for",
            )
        if has_ended(pid):
            return True, f"its process {pid} has ended"
        before = seconds_of(pid)
        time.sleep(0.3)
        calls = (
            stack_by_signal(pid, self._doings.stacks.offers[rank])
            if is_late and self._doings.stacks.offers.get(rank)
            else []
        )
        where = f". Its main thread is at\n{stack_of(calls)}" if calls else ""
        if state == "R" or seconds_of(pid) > before:
            return (
                False,
                f"its process {pid} computes in one long call that lets no Python run beside it{where}",
            )
        return False, f"its process {pid} sleeps (state {state}){where}"

    # The store -------------------------------------------------------------------------------------------------

    def _talk(self) -> None:
        questions = self._questions
        while questions.is_asked:
            questions.answer(self._answer())
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
            answers = questions.ask(self._answer(), self._is_judged)
            if not self._is_judged():
                self._judge(wait, answers)

    def _is_due(self, wait: CollectiveWait) -> bool:
        """Return whether to ask the other ranks now; seldom if a wait is long."""
        now, ripe_s = time.monotonic(), wait.since_s + wait.patience_s
        silence_s = now - self._questions.asked_s
        if self._suspects or self._questions.asked_s < ripe_s < now:
            return True
        return silence_s > max(_ANSWER_S, (now - wait.since_s) / 5)

    def _answer(self) -> dict[str, Any]:
        thread = self._pulse.thread_id or 0
        thread = self._doings.joins.get(thread, thread)
        wait = self._waits.get(thread)
        flying = self._flying()
        shown = wait or next(iter(flying), None)
        now = time.monotonic()
        return {
            "waits": None if shown is None else [str(shown), now - shown.since_s],
            "members": [] if shown is None else list(shown.members),
            "call": "" if shown is None else shown.call,
            "key": "" if shown is None or shown.words is None else shown.words.key,
            "flies": bool(flying) and wait is None,
            "works": [
                [each.key, each.what, now - each.since_s, each_thread == thread, self._stack(each_thread)]
                for each_thread, each in self._doings.works.copy().items()
                if each_thread not in self._waits
            ],
            "unmoved_s": now - self._pulse.moved_s,
            "stack": stack_of(self._pulse.calls()),
        }

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

    def _judge(self, wait: CollectiveWait, answers: Mapping[int, dict[str, Any]]) -> None:
        age_s = time.monotonic() - wait.since_s
        awaited = [*range(len(self._who))] if wait.words is None else self._questions.missing(wait.words)
        silent = frozenset(awaited) - frozenset(answers)
        lines, ends = self._of_silent(silent)
        # A rank that does not answer is reported after the second question, with its stack.
        is_sure = silent <= self._suspects
        self._suspects = silent
        found = [self._of_one(rank, answers[rank], wait) for rank in awaited if rank in answers]
        lines += [line for line, _ in found if line]
        ends = ends or RankState.STILL in (state for _, state in found)
        if not wait.is_auto or age_s <= max(wait.patience_s, wait.ends_s):
            ends = False
        is_idle = not silent and {state for _, state in found} <= {RankState.WAITS}
        if is_idle and all(said["waits"] is not None for said in answers.values()):
            waits = {rank: said["waits"] for rank, said in answers.items()}
            # A device may be busy with work that its rank launched before, which cannot be seen from outside.
            flies = any(said["flies"] for said in answers.values())
            alike = {(said["key"], said["call"]) for said in answers.values()}
            ends = (
                wait.is_auto and not flies and min(seconds for _, seconds in waits.values()) > wait.patience_s
            )
            lines = ["all ranks wait for one another:"]
            lines += [f"    {what}, for {seconds:.0f} s" for what, seconds in waits.values()]
            calls = sorted({said["call"] for said in answers.values()} - {""})
            lines += [advice(" and ".join(calls))] if len(alike) > 1 and calls else []
        crossed = self._crossed(wait, answers, awaited)
        if crossed:
            lines, ends = [crossed], True
        if not lines:
            return
        self._story = "\n".join(lines)
        speakers = [
            rank
            for rank, said in answers.items()
            if (said["waits"] is not None if wait.words is None else rank not in awaited)
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

    def _of_one(self, rank: int, said: Mapping[str, Any], wait: CollectiveWait) -> tuple[str, RankState]:
        """Return a line about a rank that answers, and its state; no line if it waits as this rank does."""
        for key, what, seconds, is_main, stack in said["works"]:
            if is_main or (wait.words is not None and wait.words.key.startswith(f"{key}/")):
                at = f"That thread is at\n{stack}"
                return f"rank {rank} is at work on its own for {seconds:.0f} s: {what}. {at}", RankState.WORKS
        if said["waits"] is not None:
            what, seconds = said["waits"]
            return ("" if wait.words is None else f"{what}, waits for {seconds:.0f} s"), RankState.WAITS
        unmoved_s = float(said["unmoved_s"])
        if unmoved_s > wait.patience_s / 2:
            state = f"has not moved for {unmoved_s:.0f} s: no line, no computing, no reading or writing"
        else:
            state = "is alive and at work"
        hint = f" {advice(wait.call)}." if wait.call and wait.words is not None else ""
        return (
            f"rank {rank} {state}.{hint} Its main thread is at\n{said['stack']}",
            RankState.STILL if unmoved_s >= wait.standstill_s else RankState.WORKS,
        )

    def _crossed(
        self, wait: CollectiveWait, answers: Mapping[int, dict[str, Any]], awaited: Sequence[int]
    ) -> str:
        """Return a sentence if two ranks have waited for one another for a while in different engine calls, else ""."""
        own = answers.get(self._rank, {})
        if own.get("waits") is None or own["flies"] or own["waits"][0] != str(wait):
            return ""
        for rank in awaited:
            said = answers.get(rank, {})
            if rank == self._rank or said.get("waits") is None or rank not in wait.members:
                continue
            is_other = said["call"] != own["call"] or said["key"] != own["key"]
            calls = [call for call in (own["call"], said["call"]) if call]
            if not is_other or not calls or self._rank not in said["members"]:
                continue
            # A rank within the call may be a phase ahead of one that reads what it has written.
            if said["call"] == own["call"] or min(own["waits"][1], said["waits"][1]) < _SOON_S:
                continue
            both = " and ".join(dict.fromkeys(calls))
            return (
                f"it waits for rank {rank}, and {said['waits'][0]}, has waited for this one for "
                f"{said['waits'][1]:.0f} s: neither can go on. {advice(both)}"
            )
        return ""

    def _tell(self, wait: CollectiveWait) -> None:
        """Log the state of a wait, at most once a minute."""
        if time.monotonic() - self._reported_s >= _AGAIN_S:
            self._reported_s = time.monotonic()
            _log.warning("%s", self._sentence(wait, self._story))

    def _sentence(self, wait: CollectiveWait, story: str) -> str:
        return f"{wait} has waited {time.monotonic() - wait.since_s:.0f} s: {story}"


def _run(own: "weakref.ref[Watchdog]", ended: threading.Event, tick: Callable[["Watchdog"], None]) -> None:
    """Call ``tick`` once a second until the watch is stopped or dropped."""
    counted_s = 0.0
    while not ended.wait(_TICK_S):
        now_s = time.thread_time()
        WATCHING.add(now_s - counted_s)
        counted_s = now_s
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
