"""Board: short texts that the ranks of a World write for one another, in a part of the job's store of their own.

    world.post(key, text)          each rank, under its own index
    world.collect(key, timeout_s)  all of them, by rank; waits for late ranks
    board.meet(ranks, call)        no text: returns when all ``ranks`` have reached the same call

Every key begins with a word that no other World of the job has, so texts of two Worlds never mix. ``number`` counts how
often the ranks have met for one purpose, which keeps the keys of each meeting apart: ranks that make the same calls in
the same order count alike.

A separate thread reads the texts, because a call of the store may block (rank 0, which serves it, may be stopped).
Meanwhile the caller checks the watch's verdict, and once a second whether a rank of this host has ended.

Cost of a meeting: one thread, and some calls of the store; ``meet`` needs the same number of calls per rank however
many ranks meet.
"""

import contextlib
import hashlib
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from shardwise.base.errors import CommError, DeadlineError
from shardwise.base.words import named_ranks
from shardwise.comm.rendezvous.store import missing_keys
from shardwise.comm.watching.questions import AwaitedTexts
from shardwise.comm.watching.watch import Watchdog

_SLICE_S = 0.05
"""Interval in seconds at which a thread that waits for texts checks the verdict."""
_LOOK_S = 1.0
"""Interval in seconds at which the thread checks whether a rank has ended."""
_LAST_TEXT_S = 0.5
"""Seconds that the last text of a rank that has ended gets to arrive."""


class MessageBoard:
    """Short texts between the ranks of a World.

    Args:
        rank: This rank, in errors.
        store: Store of the job; None: one process writes to itself.
        word: First part of every key.
        watch: Watch of this rank; None for one process.
        members: Ranks of the job, by rank of the World.
    """

    def __init__(
        self,
        rank: int,
        store: dist.Store | None = None,
        word: str = "",
        watch: Watchdog | None = None,
        members: Sequence[int] = (),
    ):
        self.store = store
        self.word = word
        """First part of every key and name, which no other World of the job has."""
        self.watch = watch
        self.members = tuple(members)
        self._rank = rank
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._past: dict[tuple[int, ...], str] = {}
        """Key of the last meeting, by the ranks that met."""

    def part(self, rank: int, name: str, members: Sequence[int]) -> "MessageBoard":
        """Return the board of some of the ranks.

        Args:
            rank: This rank among ``members``.
            name: Name of the part.
            members: Ranks of the job.
        """
        return MessageBoard(rank, self.store, f"{self.word}/{name}", self.watch, members)

    def at_work(self, key: str, what: str) -> AbstractContextManager[None]:
        """Return a context in which the calling thread does its part of work for which other ranks wait.

        Args:
            key: Beginning of the keys at which the others wait.
            what: Name of the work.
        """
        return contextlib.nullcontext() if self.watch is None else self.watch.at_work(key, what)

    def joining(self, thread: int) -> AbstractContextManager[None]:
        """Return a context in which the calling thread waits for the thread ``thread`` of this process."""
        return contextlib.nullcontext() if self.watch is None else self.watch.joining(thread)

    def number(self, *what: Any) -> int:
        """Return 0, 1, 2 ... at each call with the same ``what``."""
        self._numbers[what] = self._numbers.get(what, -1) + 1
        return self._numbers[what]

    def post(self, key: str, index: int, text: str) -> None:
        """Write ``text`` under ``key``; usable from any thread.

        Args:
            key: Key of the exchange.
            index: Index of this rank among the ranks that meet.
            text: The text.
        """
        if self.store is None:
            self.store = dist.HashStore()
        self.store.set(self._name(key, index), text)

    def collect(
        self, key: str, size: int, timeout_s: float, what: str = "", ranks: Sequence[int] | None = None
    ) -> list[str]:
        """Return the texts of all ``size`` ranks that meet under ``key``, by index, after waiting for late ranks.

        Args:
            key: As in ``post``.
            size: Number of texts.
            timeout_s: Seconds to wait.
            what: Name of the exchange in errors; "": ``key``.
            ranks: Ranks of the job that meet, by index; None: the first members of this board.

        Raises:
            DeadlineError: if a text is missing after ``timeout_s``, or the watch finds that it will not come.
            CommError: if a rank that has not written has ended, or the store has.
        """
        if self.store is None:
            raise CommError(f"store: nothing was ever posted under {key!r}")
        names = tuple(self._name(key, index) for index in range(size))
        ranks = tuple(self.members[:size] if ranks is None else ranks)
        if self.watch is None or len(ranks) != size:
            missing = missing_keys(self.store, names, timeout_s)
            if not missing:
                return [self.store.get(name).decode() for name in names]
            raise DeadlineError(self._late(what or repr(key), missing, timeout_s))
        reading = _ReaderThread(self.store, names)
        self.watch.begin_words(self._own_name, what or repr(key), AwaitedTexts(key, ranks, names), timeout_s)
        try:
            return self._awaited(reading, self.watch, ranks, what or repr(key), timeout_s)
        finally:
            reading.is_over = True
            self.watch.end()

    def meet(self, ranks: tuple[int, ...], call: str, timeout_s: float) -> None:
        """Wait until all ``ranks`` of the job have reached ``call``.

        Args:
            ranks: Ranks of the job.
            call: Name of the call.
            timeout_s: Seconds to wait.

        Raises:
            DeadlineError: if a rank does not come in time, or the watch finds that it will not come.
            CommError: if a rank has ended, or the store has.
        """
        if self.watch is None or self.store is None:
            return
        place = hashlib.sha256(str(ranks).encode()).hexdigest()[:16]
        key = f"meeting/{place}/{self.number('meeting', ranks)}/{call}"
        names = tuple(self._name(key, index) for index in range(len(ranks)))
        arriving = _ArrivalThread(self.store, names, ranks.index(self._own_name), self._past.get(ranks, ""))
        self._past[ranks] = self._name(key, 0)
        self.watch.begin_words(self._own_name, "its beginning", AwaitedTexts(key, ranks, names), timeout_s)
        try:
            self._awaited(arriving, self.watch, ranks, "its beginning", timeout_s)
        finally:
            arriving.is_over = True
            self.watch.end()

    def _awaited(
        self, reading: "_ReaderThread", watch: Watchdog, ranks: tuple[int, ...], what: str, timeout_s: float
    ) -> list[str]:
        start = time.monotonic()
        looked_s = start
        reading.start()
        while not reading.is_done.wait(_SLICE_S):
            watch.raise_verdict()
            now = time.monotonic()
            if now - looked_s > _LOOK_S:
                looked_s = now
                reading.ended = tuple(ranks.index(rank) for rank in watch.ended(ranks))
            if now - start > timeout_s:
                raise DeadlineError(
                    self._late(what, [ranks[place] for place in reading.missing()], timeout_s)
                )
        if reading.texts:
            return reading.texts
        verdict = watch.last_word()
        if verdict:
            raise DeadlineError(verdict)
        where = f"rank {self._own_name}: {watch.place(what)}"
        gone = [ranks[place] for place in reading.lost]
        if gone:
            raise CommError(
                f"{where}: {named_ranks(gone)} ended and will not come; see the last lines of the log.{watch.advice}"
            )
        gone = watch.ended((0,))
        why = (
            "rank 0, which serves it, has ended; see the last lines of its log"
            if gone
            else "rank 0 serves it"
        )
        raise CommError(f"{where}: the store does not answer: {why}. ({reading.error})") from reading.error

    def _late(self, what: str, missing: Sequence[int], timeout_s: float) -> str:
        place = what if self.watch is None else self.watch.place(what)
        return f"rank {self._own_name}: {place}: no word from {named_ranks(missing)} within {timeout_s:.0f} s"

    @property
    def _own_name(self) -> int:
        return self.members[self._rank] if self._rank < len(self.members) else self._rank

    def forget(self, key: str, size: int) -> None:
        """Delete the texts of all ``size`` ranks; called by one rank when all have read them."""
        if self.store is not None:
            for index in range(size):
                self.store.delete_key(self._name(key, index))

    def raise_verdict(self) -> None:
        """Raise the watch's verdict, if there is one, in a thread that waits.

        Raises:
            DeadlineError: if the watch has found that the waiting is in vain.
        """
        if self.watch is not None:
            self.watch.raise_verdict()

    def _name(self, key: str, index: int) -> str:
        return f"shardwise/{self.word}/{key}/{index}"


class _ReaderThread(threading.Thread):
    """A thread that waits until all of ``names`` are in the store, and reads them."""

    def __init__(self, store: dist.Store, names: Sequence[str]):
        super().__init__(name="shardwise-words", daemon=True)
        self._store = store
        self._names = list(names)
        self._awaited = self._names
        self.texts: list[str] = []
        self.error: Exception | None = None
        self.ended: tuple[int, ...] = ()
        """Indices of ranks that have ended, which may have written before."""
        self.lost: list[int] = []
        """Indices of ranks that have ended without writing."""
        self.is_over = False
        """True if no caller waits for the texts any more."""
        self.is_done = threading.Event()

    def run(self) -> None:
        """Read the texts, or store the reason why they cannot be read."""
        pause_s = 0.0005
        try:
            self._arrive()
            while not self._store.check(self._awaited):
                if self.is_over:
                    return
                if self.ended:
                    time.sleep(_LAST_TEXT_S)
                    self.lost = [place for place in self.ended if not self._store.check([self._names[place]])]
                    if self.lost:
                        return
                    self.ended = ()
                time.sleep(pause_s)
                pause_s = min(pause_s * 2, 0.05)
            self.texts = [self._store.get(name).decode() for name in self._awaited]
        except Exception as error:  # the store has ended
            self.error = error
        finally:
            self.is_done.set()

    def _arrive(self) -> None:
        """Do nothing, because the caller has written its text."""

    def missing(self) -> list[int]:
        """Return the indices of missing texts, each checked by itself."""
        return [place for place, name in enumerate(self._names) if not self._store.check([name])]


class _ArrivalThread(_ReaderThread):
    """A thread that reports the arrival of this rank, and waits until the last rank has arrived."""

    def __init__(self, store: dist.Store, names: Sequence[str], index: int, past: str):
        super().__init__(store, names)
        self._index = index
        self._past = past.rpartition("/")[0]
        """Key of the meeting before, whose texts are no longer read."""
        self._key = self._names[0].rpartition("/")[0]
        self._awaited = [f"{self._key}/go"]

    def _arrive(self) -> None:
        self._store.set(self._names[self._index], "")
        if self._past:
            self._store.delete_key(f"{self._past}/{self._index}")
        if self._store.add(f"{self._key}/count", 1) == len(self._names):
            self._store.set(f"{self._key}/go", "go")
            for name in ("count", "go") if self._past else ():
                self._store.delete_key(f"{self._past}/{name}")
