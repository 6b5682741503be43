"""How the ranks of a save or a load agree: short texts over a store, no collective.

A save runs behind training in its own thread, where a collective would tangle with the training's own. Texts under
agreed keys do not. Every phase of a save or load is one ``Coordinator.gather``: each rank does its part, posts how it
went, and reads how all the others fared, so that all of them go on or all of them raise, and no rank is left waiting
for one that failed. A rank that died or hangs does not post: ``JobRanks.collect`` raises, which names it, and a rank
that does its own part says so by ``JobRanks.at_work``.

Cost: one text per rank and phase; 5 to 7 phases a save, 3 a load.
"""

import contextlib
import json
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from shardwise.plan.errors import (
    CheckpointError,
    DamagedError,
    DamagedStateError,
    MismatchError,
    ShardwiseError,
    TierError,
)
from shardwise.plan.words import in_words

_END_S = 10.0
"""For the others to read a text that lies there."""


class JobRanks(Protocol):
    """The ranks of a job, as the checkpoint sees them. ``World`` is one; a single process has ``Solo``."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def barrier(self) -> None: ...

    def post(self, key: str, text: str) -> None:
        """Leave ``text`` for the others under ``key``."""

    def collect(self, key: str, timeout_s: float, what: str = "") -> list[str]:
        """Return what every rank posted under ``key``, by rank; raise if one does not come within ``timeout_s``.
        ``what`` names the meeting in errors."""

    def at_work(self, key: str, what: str) -> AbstractContextManager[None]:
        """Inside, the calling thread does this rank's part of what all meet for at keys below ``key``."""

    def joining(self, thread: int) -> AbstractContextManager[None]:
        """Inside, the calling thread waits for the thread of this process with that number."""

    def forget(self, key: str) -> None:
        """Drop what all ranks posted under ``key``; for one of them, when all have read it."""


class Solo:
    """The one rank of a single process."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._posted: dict[str, str] = {}

    def barrier(self) -> None:
        """Nobody to wait for."""

    def post(self, key: str, text: str) -> None:
        self._posted[key] = text

    def collect(self, key: str, timeout_s: float, what: str = "") -> list[str]:
        return [self._posted.pop(key)]

    def at_work(self, key: str, what: str) -> AbstractContextManager[None]:
        """Nobody to tell."""
        return contextlib.nullcontext()

    def joining(self, thread: int) -> AbstractContextManager[None]:
        """Nobody to tell."""
        return contextlib.nullcontext()

    def forget(self, key: str) -> None:
        """It is gone since it was read."""


class _Turns:
    """Numbers for the conversations over one ``JobRanks``: keys must never be used twice on one store.

    Ranks open their conversations in the same order, so equal numbers meet. Counted per JobRanks object and not per
    folder, since several engines of one process may share the store; by identity, since it need not be hashable.
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


_turns = _Turns()


def _story(error: Exception) -> str:
    """What the other ranks and the user read of it."""
    if isinstance(error, ShardwiseError):
        return str(error)
    return in_words(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


class Coordinator:
    """The phases of one save or one load. Open it in the caller's thread, use it in any."""

    # The order in which failures of several ranks are judged, the same on every rank: what cannot be cured by an
    # older step comes first. State on disk that fails, while it is saved or loaded, is no fault of any step.
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
        """True from the beginning of a phase until all have come, and for ever if one of them does not."""

    def at_work(self) -> AbstractContextManager[None]:
        """Inside, the calling thread runs this conversation: between its waits it works for the others."""
        return self._peers.at_work(self._key, self._purpose)

    def gather(self, phase: str, work: Callable[[], Any]) -> list[str]:
        """Do ``work``, tell the others, and return the JSON text of every rank's result.

        Raises on all ranks if any failed: the same class with the same story.
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
        """End the conversation, also if it has failed on all ranks: rank 0 goes on when all have read the outcome.
        The store may live in its process, and a script may end right after a save or a load; the others would take a
        step that is committed for one that is lost. Nobody reads a text of this conversation any more, and they are
        dropped.
        """
        if self.size == 1 or self._is_open:
            return
        with contextlib.suppress(Exception):  # who died here has lost nothing that was saved
            self._peers.post(f"{self._key}/end", "")
            if self.rank == 0:
                self._peers.collect(f"{self._key}/end", min(self._timeout_s, _END_S))
                for phase in (*self._phases, "end"):
                    self._peers.forget(f"{self._key}/{phase}")

    def _forget(self, phase: str) -> None:
        """Whoever posted ``phase`` has read the one before it. Its text, which may be long, goes at once."""
        if self._phases and self.size > 1:
            with contextlib.suppress(Exception):  # the next gather tells of a store that is gone
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
