"""The watch: who keeps the others waiting, and where it is.

A rank that has waited long asks all ranks, over the store; a thread of each answers, also where its main thread hangs:

    waits      what its main thread waits for in a collective, and how long        (it is not to blame)
    stack      where its main thread is, in Python
    unmoved    seconds since that stack changed, or the process and its children computed, read or wrote anything

From the answers follows one of these, and what becomes of it under ``comm.timeout_s: auto``:

    does not answer    its process is stopped, has no time, or is gone             the job ends
    does not move      a lock, a sleep, a lost server: no work at all              the job ends
    is at work         slow, or in a loop: from outside they look alike            named in the log; the job ends at
                                                                                   300 s or ten median steps
    all wait           for one another: ranks called different collectives         the job ends

Being asked costs nothing that counts, so it happens early: after 20 s, or five median steps where steps are long; a
number for ``comm.timeout_s`` asks before it, and ends the job then and not before. A debugger is no hang.

On a device the host goes on, and a collective in flight is what waits (flights.py): it is asked for in the same manner,
and where it fails or its time is over its communicator is ended, and every later call raises why.

Two threads, since a call of the store may block (rank 0, which serves it, may be the one that is stopped): ``_observe``
looks at this process and at the clock, ``_talk`` speaks with the store. The verdict of the first to reach one is left
in the store, so that all ranks tell the same story.

Cost: each second two questions to the store and a look at one stack, about 0.2 ms.
"""

import atexit
import contextlib
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from shardwise.comm.flights import Flights
from shardwise.comm.handshake import Who
from shardwise.comm.process import Pulse, seconds_of, stack_of, state_of
from shardwise.comm.store import SealedStore, Talker
from shardwise.plan.errors import CommError, DeadlineError

_log = logging.getLogger(__name__)

_TICK_S = 1.0
_ANSWER_S = 3.5
"""For all answers to a question."""
_STORE_S = 6.0
"""A store that has said nothing for so long does not answer."""
_RECENT_S = 10.0
"""A question so long ago has been judged."""
_LAST_WORD_S = 2.5
_AGAIN_S = 60.0
"""Between two notices of one wait."""


class Wait(NamedTuple):
    """One thread's wait in a collective or for a message."""

    what: tuple[Any, ...]
    """(rank, operation, tensor, step)"""
    since_s: float
    patience_s: float
    """After which the others are asked."""
    is_auto: bool
    """Whether what they say may end the job before its deadline."""
    standstill_s: float
    """How long a rank may stand still."""
    give_up: Callable[[], None] | None
    """Wakes a thread that waits inside torch."""

    def __str__(self) -> str:
        rank, operation, what, step = self.what
        return f"rank {rank}: {operation} of {what} in step {step}"


class _Questions:
    """Questions to all ranks, their answers and the verdict, over the store: the side of one of ``size`` ranks."""

    def __init__(self, rank: int, size: int, store: SealedStore, prefix: str):
        self._rank = rank
        self._size = size
        self._store = store
        self._prefix = prefix
        self._turn = 0
        """The next question."""
        self.contact_s = time.monotonic()
        """When the store was last heard."""
        self.asked_s = 0.0
        """When this rank last had its answers."""
        self.answered_s = -_RECENT_S

    def connect(self) -> Talker:
        """Use a connection of its own from now on, so that a call that blocks holds nobody else up.

        Returns:
            The talker of that connection, for the thread that is going to use it.
        """
        self._store = self._store.again()
        self.contact_s = time.monotonic()
        return Talker(self._store)

    @property
    def is_asked(self) -> bool:
        """Whether a question waits for this rank's answer."""
        return self._store.check([self._key("question", self._turn)])

    def answer(self, said: Mapping[str, Any]) -> None:
        """Answer the question that waits."""
        self._store.set(self._key("answer", self._turn, self._rank), json.dumps(said))
        self._turn += 1
        self.answered_s = time.monotonic()

    def ask(self, own: Mapping[str, Any], is_over: Callable[[], bool]) -> dict[int, dict[str, Any]]:
        """Ask all ranks; ``own`` is this one's answer. Answers by rank, of those that came before ``is_over``."""
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
        """What a rank has come to; empty where none has."""
        key = self._key("verdict")
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def leave_verdict(self, sentence: str) -> None:
        """For all ranks, before this one leaves, which the others notice."""
        self._store.set(self._key("verdict"), sentence)

    def _key(self, *parts: Any) -> str:
        return "/".join([self._prefix, *map(str, parts)])


class Watch:
    """Of one rank of a job. ``who``: all ranks; ``prefix`` begins the keys in ``store``."""

    def __init__(self, rank: int, who: Sequence[Who], store: SealedStore, prefix: str):
        self._rank = rank
        self._who = who
        self._questions = _Questions(rank, len(who), store, prefix)
        self._waits: dict[int, Wait] = {}
        """By thread."""
        self._pulse = Pulse(None, None)
        self.flights = Flights()
        """What the device exchanges."""
        self._failure: CommError | None = None
        self._verdict = ""
        self._story = ""
        self._wanted = False
        self._reported_s = -_AGAIN_S
        self._suspects: frozenset[int] = frozenset()
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._at_exit: Callable[[], None] = lambda: None

    # The main thread's side ------------------------------------------------------------------------------------

    def start(self) -> bool:
        """Begin to watch the calling thread; False where it had begun."""
        if self._threads or len(self._who) < 2:
            return False
        self._pulse = Pulse(threading.get_ident(), threading.get_native_id())
        talker = self._questions.connect()
        # The threads hold no reference between two ticks: a World that is dropped and not closed ends them.
        own, ended = weakref.ref(self), self._ended
        self._at_exit = partial(_stop, own)
        self._threads = [
            threading.Thread(target=run, args=arguments, name=f"shardwise-watch-{name}", daemon=True)
            for name, run, arguments in (
                ("observe", _observe, (own, ended)),
                ("talk", _talk, (own, ended, talker, self._at_exit)),
            )
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self._at_exit)  # the interpreter does not end well beneath a thread in torch
        return True

    def stop(self) -> None:
        """End the threads."""
        self._ended.set()
        for thread in self._threads:
            thread.join(2.0)
        self._threads = []
        self.flights = Flights()
        atexit.unregister(self._at_exit)

    def begin(
        self,
        what: tuple[Any, ...],
        patience_s: float,
        is_auto: bool,
        standstill_s: float,
        give_up: Callable[[], None] | None = None,
    ) -> None:
        """The calling thread begins to wait."""
        self._waits[threading.get_ident()] = Wait(
            what, time.monotonic(), patience_s, is_auto, standstill_s, give_up
        )

    def end(self) -> None:
        """It waits no longer."""
        self._waits.pop(threading.get_ident(), None)

    def last_word(self) -> str:
        """The verdict. A rank that sees another one leave, just after a question, waits a moment for the reason."""
        until_s = time.monotonic() + _LAST_WORD_S
        while not self._verdict and time.monotonic() < min(until_s, self._questions.answered_s + _RECENT_S):
            time.sleep(0.02)
        return self._verdict

    @property
    def story(self) -> str:
        """What the last question brought; empty where none was asked."""
        return self._story

    def raise_verdict(self) -> None:
        """Raise where waiting is in vain."""
        if self._verdict:
            raise DeadlineError(self._verdict)

    def raise_failure(self) -> None:
        """Raise what has ended the device's communicators."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def condemn(self, words: str) -> None:
        """This rank cannot go on, and what the others have begun with it will never end."""
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
        if age_s > longest.patience_s and not self._verdict:
            self._wanted = True
            silence_s = time.monotonic() - self._questions.contact_s
            if silence_s > _STORE_S and age_s > longest.patience_s + _ANSWER_S:
                self._judge_alone(longest, silence_s)
        if self._verdict:
            self._wake()

    def _longest(self) -> Wait | None:
        """The wait whose patience ends first."""
        waits = [*self._waits.copy().values(), *self._flying()]
        return min(waits, key=lambda wait: wait.since_s + wait.patience_s, default=None)

    def _flying(self) -> list[Wait]:
        """The device's longest flight, if there is one."""
        found = self.flights.oldest()
        if found is None:
            return []
        flight, since_s = found
        patience_s, is_auto, standstill_s = flight.patience
        return [Wait(flight.what, since_s, patience_s, is_auto, standstill_s, None)]

    def _fail(self, error: CommError) -> None:
        """The communicators end, so that a host that waits for the device goes on, to where it meets the error."""
        self._failure = error
        self.flights.end()

    def _wake(self) -> None:
        """Threads that wait inside torch do not look at the verdict, nor does a device."""
        if self._failure is None and self.flights.oldest() is not None:
            self._fail(DeadlineError(self._verdict))
        for wait in self._waits.copy().values():
            if wait.give_up is not None:
                with contextlib.suppress(Exception):
                    wait.give_up()

    def _judge_alone(self, wait: Wait, silence_s: float) -> None:
        """The store does not answer: what can be seen of the ranks of this host without it."""
        found = {rank: self._seen_from_outside(rank) for rank in self._here() if rank != self._rank}
        stopped = [rank for rank, (ends, _) in found.items() if ends]
        lines = [f"rank {rank} does not answer: {found[rank][1]}" for rank in stopped]
        if not stopped:
            lines = [
                f"the store has not answered for {silence_s:.0f} s: rank 0, which serves it, hangs or is cut off"
            ]
        self._story = "; ".join(lines)
        if wait.is_auto and (stopped or silence_s > wait.patience_s):
            self._verdict = self._sentence(wait, self._story)
        else:
            self._tell(wait)

    def _here(self) -> list[int]:
        host = self._who[self._rank].host
        return [rank for rank, each in enumerate(self._who) if each.host == host]

    def _seen_from_outside(self, rank: int) -> tuple[bool, str]:
        """Whether this rank of this host can never answer, and what the kernel says of it."""
        pid = self._who[rank].pid
        state = state_of(pid)
        if state in ("T", "t"):
            return (
                True,
                f"its process {pid} is stopped (SIGSTOP or a debugger), so its stack cannot be asked for",
            )
        if state in ("", "Z", "X"):
            return True, f"its process {pid} has ended"
        before = seconds_of(pid)
        time.sleep(0.3)
        if state == "R" or seconds_of(pid) > before:
            return False, f"its process {pid} computes in one long call that lets no Python run beside it"
        return False, f"its process {pid} sleeps (state {state})"

    # The store -------------------------------------------------------------------------------------------------

    def _talk(self) -> None:
        questions = self._questions
        while questions.is_asked:
            questions.answer(self._answer())
        self._is_judged()
        questions.contact_s = time.monotonic()
        wait = self._longest()
        is_due = time.monotonic() - questions.asked_s > (0 if self._suspects else _ANSWER_S)
        if self._wanted and wait is not None and is_due and not self._verdict:
            self._wanted = False
            answers = questions.ask(self._answer(), self._is_judged)
            if not self._is_judged():
                self._judge(wait, answers)

    def _answer(self) -> dict[str, Any]:
        thread = self._pulse.thread_id
        wait = None if thread is None else self._waits.get(thread)
        flying = [] if wait is not None else self._flying()
        wait = wait or next(iter(flying), None)
        return {
            "waits": None if wait is None else [str(wait), time.monotonic() - wait.since_s],
            "flies": bool(flying),
            "unmoved_s": time.monotonic() - self._pulse.moved_s,
            "stack": stack_of(self._pulse.calls()),
        }

    def _is_judged(self) -> bool:
        """Whether another rank has come to a verdict, which is then ours too."""
        found = "" if self._verdict else self._questions.verdict
        if found:
            self._verdict = found
            self._wake()
        return bool(self._verdict)

    def _judge(self, wait: Wait, answers: Mapping[int, dict[str, Any]]) -> None:
        lines: list[str] = []
        ends = False
        silent = frozenset(range(len(self._who))) - frozenset(answers)
        here = self._here()
        for rank in sorted(silent):
            if rank in here:
                is_over, seen = self._seen_from_outside(rank)
                is_over = is_over or (rank in self._suspects and "sleeps" in seen)
            else:
                is_over, seen = rank in self._suspects, "nothing is heard from its host"
            ends = ends or is_over
            lines.append(f"rank {rank} does not answer: {seen}")
        self._suspects = silent
        free = [rank for rank, said in answers.items() if said["waits"] is None]
        for rank in free:
            unmoved_s = float(answers[rank]["unmoved_s"])
            if unmoved_s > wait.patience_s / 2:
                state = f"has not moved for {unmoved_s:.0f} s: no line, no computing, no reading or writing"
            else:
                state = "is alive and at work"
            ends = ends or unmoved_s >= wait.standstill_s
            lines.append(f"rank {rank} {state}. Its main thread is at\n{answers[rank]['stack']}")
        if not lines:
            waits = {rank: said["waits"] for rank, said in answers.items()}
            # A device may just be busy with what its rank launched before, which no one sees from outside.
            flies = any(said["flies"] for said in answers.values())
            ends = not flies and min(seconds for _, seconds in waits.values()) > wait.patience_s
            lines = ["all ranks wait for one another:"]
            lines += [f"    {what}, for {seconds:.0f} s" for what, seconds in waits.values()]
        self._story = "\n".join(lines)
        speakers = [rank for rank, said in answers.items() if said["waits"] is not None]
        if self._rank == min(speakers, default=self._rank) and not (ends and wait.is_auto):
            self._tell(wait)
        if ends and wait.is_auto and self._longest() is not None and not self._is_judged():
            sentence = self._sentence(wait, self._story)
            self._questions.leave_verdict(sentence)
            self._verdict = sentence
            self._wake()

    def _tell(self, wait: Wait) -> None:
        """In the log, now and then."""
        if time.monotonic() - self._reported_s >= _AGAIN_S:
            self._reported_s = time.monotonic()
            _log.warning("%s", self._sentence(wait, self._story))

    def _sentence(self, wait: Wait, story: str) -> str:
        return f"{wait} has waited {time.monotonic() - wait.since_s:.0f} s: {story}"


def _run(own: "weakref.ref[Watch]", ended: threading.Event, tick: Callable[["Watch"], None]) -> None:
    """One thread of a watch, until it is stopped or dropped."""
    while not ended.wait(_TICK_S):
        watch = own()
        if watch is None:
            return
        try:
            tick(watch)
        except Exception as error:  # the store has ended, as it does when the job ends
            _log.debug("the watch ends: %s", error)
            return
        del watch


def _observe(own: "weakref.ref[Watch]", ended: threading.Event) -> None:
    """The thread that looks at this process and at the clock."""
    _run(own, ended, Watch._observe)


def _talk(
    own: "weakref.ref[Watch]", ended: threading.Event, talker: Talker, at_exit: Callable[[], None]
) -> None:
    """The thread that speaks with the store, and stops before the store does."""

    def tick(watch: Watch) -> None:
        if talker.must_leave():
            raise EOFError("the process that serves the store ends")
        watch._talk()

    _run(own, ended, tick)
    with contextlib.suppress(Exception):  # the store has ended
        talker.leave()
    if own() is None:
        atexit.unregister(at_exit)


def _stop(own: "weakref.ref[Watch]") -> None:
    watch = own()
    if watch is not None:
        watch.stop()
