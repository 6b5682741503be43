"""Agreement among the ranks of a save or a load: short texts over a store, no collective.

A save runs in its own thread while training continues, and a collective there would mix with training's own. Texts
under agreed keys do not. Every phase of a save or load is one ``CheckpointCoordinator.gather``: each rank does its
part, posts the result, and reads the results of all others. So either all ranks continue or all raise, and no rank
waits for a rank that failed. A rank that died or hangs does not post: ``JobRanks.collect`` raises an error that names
it. A rank that is still working reports so by ``JobRanks.at_work``.

Cost: one text per rank and phase; 5 to 7 phases a save, 3 a load.
"""

import contextlib
import json
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from shardwise.base.errors import (
    CheckpointError,
    DamagedError,
    DamagedStateError,
    MismatchError,
    ShardwiseError,
    TierError,
)
from shardwise.base.words import in_words

_END_S = 10.0
"""Seconds that rank 0 waits until the others have read the last text."""


class JobRanks(Protocol):
    """The ranks of a job, as checkpoints use them: ``World``, or ``SingleRank`` for a single process."""

    @property
    def rank(self) -> int:
        """Number of this rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...

    def post(self, key: str, text: str) -> None:
        """Store ``text`` for the other ranks under ``key``."""

    def collect(self, key: str, timeout_s: float, what: str = "") -> list[str]:
        """Return the texts that all ranks posted under ``key``, by rank.

        Args:
            key: Key of the texts.
            timeout_s: Seconds to wait for a rank; an error is raised after them.
            what: Name of the phase in errors.
        """

    def at_work(self, key: str, what: str) -> AbstractContextManager[None]:
        """Return a context in which the calling thread works on this rank's part of ``what``, below ``key``."""

    def joining(self, thread: int) -> AbstractContextManager[None]:
        """Return a context in which the calling thread waits for the thread ``thread`` of this process."""

    def forget(self, key: str) -> None:
        """Delete what all ranks posted under ``key``; called by one rank after all have read it."""


class SingleRank:
    """The only rank of a single process."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._posted: dict[str, str] = {}

    def barrier(self) -> None:
        """Do nothing, because there is no other rank."""

    def post(self, key: str, text: str) -> None:
        """Store ``text`` under ``key``."""
        self._posted[key] = text

    def collect(self, key: str, timeout_s: float, what: str = "") -> list[str]:
        """Return and delete the text under ``key``."""
        return [self._posted.pop(key)]

    def at_work(self, key: str, what: str) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def joining(self, thread: int) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def forget(self, key: str) -> None:
        """Do nothing, because ``collect`` has deleted the text."""


class _ExchangeNumbers:
    """Numbers of the exchanges over one ``JobRanks``: a key must never be used twice on one store.

    Ranks open their exchanges in the same order, so that equal numbers belong together. Exchanges are counted per
    JobRanks object and not per folder, because several engines of one process may share the store; by identity, because
    the object need not be hashable.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._lock = threading.Lock()

    def next(self, peers: JobRanks) -> int:
        with self._lock:
            turn = self._counts.get(id(peers))
            if turn is None:
                turn = 0
                weakref.finalize(peers, self._counts.pop, id(peers), None).atexit = False
            self._counts[id(peers)] = turn + 1
            return turn


_turns = _ExchangeNumbers()


def _story(error: Exception) -> str:
    """Return the text of ``error`` for the other ranks and the user."""
    if isinstance(error, ShardwiseError):
        return str(error)
    return in_words(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


class CheckpointCoordinator:
    """The phases of one save or one load. Create it in the caller's thread and use it in any.

    Args:
        peers: Ranks of the job.
        purpose: Name of the save or load in errors.
        timeout_s: Seconds that a rank waits for the others within a phase.
    """

    # Order in which failures of several ranks are judged, the same on every rank. Failures that an older step cannot
    # cure come first: state on disk that fails while it is saved or loaded is no fault of any step.
    _KINDS: tuple[type[ShardwiseError], ...] = (
        TierError,
        DamagedStateError,
        CheckpointError,
        MismatchError,
        DamagedError,
    )

    def __init__(self, peers: JobRanks, purpose: str, timeout_s: float) -> None:
        self.rank, self.size = peers.rank, peers.size
        self._peers = peers
        self._purpose = purpose
        self._timeout_s = timeout_s
        self._key = f"checkpoint/{_turns.next(peers)}"
        self._phases: list[str] = []
        self._is_open = False
        """True from the beginning of a phase until all ranks have come, and forever if one does not."""

    def at_work(self) -> AbstractContextManager[None]:
        """Return a context in which the calling thread runs this exchange and counts as working between its waits."""
        return self._peers.at_work(self._key, self._purpose)

    def gather(self, phase: str, work: Callable[[], Any]) -> list[str]:
        """Run ``work``, post its result, and return the JSON text of every rank's result.

        Args:
            phase: Name of the phase.
            work: Function whose result JSON can hold.

        Raises:
            CheckpointError: if any rank failed or did not come. All ranks raise the same class with the same text,
                which may be a subclass or a TierError.
        """
        failure: Exception | None = None
        self._is_open = True
        try:
            with self._peers.at_work(self._key, f"{self._purpose}, phase {phase!r}"):
                text = "+" + json.dumps(work(), separators=(",", ":"))
        except Exception as error:
            failure = error
            kind = next((k for k in type(error).__mro__ if k in self._KINDS), CheckpointError)
            story = _story(error)
            text = "-" + json.dumps({"kind": self._KINDS.index(kind), "story": story[:4000]})
        try:
            self._peers.post(f"{self._key}/{phase}", text)
            answers = self._peers.collect(
                f"{self._key}/{phase}", self._timeout_s, f"{self._purpose}, phase {phase!r}"
            )
        except Exception as late:
            if failure is not None:
                raise CheckpointError(f"{self._purpose}, {phase}: {failure}") from failure
            raise CheckpointError(
                f"{self._purpose}: rank {self.rank} waited in phase {phase!r} for the other ranks, which died, hang or "
                f"are slow: {late}. Checkpoints committed before are untouched"
            ) from late
        self._is_open = False
        self._forget(phase)
        self._raise_failures(answers, failure)
        return [answer[1:] for answer in answers]

    def end(self) -> None:
        """End the exchange, also if it has failed on all ranks, and delete its texts.

        Rank 0 returns when all ranks have read the outcome, or after a few seconds. The store may run in its process,
        and a script may end right after a save or a load; the other ranks would then report a committed step as lost.
        """
        if self.size == 1 or self._is_open:
            return
        with contextlib.suppress(Exception):  # a failure here loses nothing that was saved
            self._peers.post(f"{self._key}/end", "")
            if self.rank == 0:
                self._peers.collect(f"{self._key}/end", min(self._timeout_s, _END_S))
                for phase in (*self._phases, "end"):
                    self._peers.forget(f"{self._key}/{phase}")

    def _forget(self, phase: str) -> None:
        """Empty this rank's text of the phase before ``phase``, which may be long, because all ranks have read it."""
        if self._phases and self.size > 1:
            with contextlib.suppress(Exception):  # the next gather reports a store that is gone
                self._peers.post(f"{self._key}/{self._phases[-1]}", "")
        self._phases.append(phase)

    def _raise_failures(self, answers: list[str], own: Exception | None) -> None:
        failed = [
            (report["kind"], rank, report["story"])
            for rank, report in ((r, json.loads(a[1:])) for r, a in enumerate(answers) if a[:1] == "-")
        ]
        if not failed:
            return
        kind, rank, story = min(failed)
        prefix = f"rank {rank}: " if self.size > 1 else ""
        raise self._KINDS[kind](prefix + story) from own
