"""Questions of a watch to all ranks over the job's store, their answers, and the verdict that all ranks then share."""

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from shardwise.base.strict_json import read_object, validated
from shardwise.comm.rendezvous.store import SealedStore, StoreClient
from shardwise.comm.watching.answers import RankAnswer

ANSWER_S = 3.5
"""Seconds to wait for all answers to a question."""
RECENT_S = 10.0
"""Age in seconds at which a question has been judged."""
_PAUSE_S = 0.05


class AwaitedTexts(NamedTuple):
    """The texts of other ranks that a thread waits for."""

    key: str
    ranks: tuple[int, ...]
    """Ranks of the job."""
    names: tuple[str, ...]
    """Keys of the ranks' texts in the store, by ``ranks``."""


class WatchQuestions:
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
        self.answered_s = -RECENT_S

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

    def answer(self, said: RankAnswer) -> None:
        """Answer the waiting question."""
        self._store.set(self._key("answer", self._turn, self._rank), said.model_dump_json())
        self._turn += 1
        self.answered_s = time.monotonic()

    def ask(self, own: RankAnswer, is_over: Callable[[], bool]) -> dict[int, RankAnswer]:
        """Ask all ranks and return the answers that came before ``is_over``, by rank; ``own`` is this rank's answer."""
        keys = [self._key("answer", self._turn, rank) for rank in range(self._size)]
        self._store.set(self._key("question", self._turn), str(self._rank))
        self.answer(own)
        until_s = time.monotonic() + ANSWER_S
        while not self._store.check(keys) and time.monotonic() < until_s and not is_over():
            time.sleep(_PAUSE_S)
        found = {rank: key for rank, key in enumerate(keys) if self._store.check([key])}
        self.asked_s = time.monotonic()
        return {rank: self._answer_in(key) for rank, key in found.items()}

    def _answer_in(self, key: str) -> RankAnswer:
        return validated(RankAnswer, read_object(self._store.get(key), key), key)

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
