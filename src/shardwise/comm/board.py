"""Board: short texts that the ranks of a World write for one another, in a part of the job's store of their own.

    world.post(key, text)          each rank, under its own index
    world.collect(key, timeout_s)  all of them, by rank; waits for the late

A word that no other World of the job has begins every key, so what two Worlds write never mixes. ``number`` counts how
often the ranks have met for one thing, which keeps the keys of each meeting apart: ranks that do the same in the same
order count alike.
"""

from typing import Any

import torch.distributed as dist

from shardwise.comm.store import missing_keys
from shardwise.comm.watch import Watch
from shardwise.plan.errors import CommError, DeadlineError
from shardwise.plan.words import named_ranks


class Board:
    """See the module's docstring. ``rank``: this one's, in errors. Without a ``store`` one process writes to itself.

    ``watch`` knows who keeps the others waiting; None for one process.
    """

    def __init__(
        self, rank: int, store: dist.Store | None = None, word: str = "", watch: Watch | None = None
    ):
        self.store = store
        self.word = word
        """First part of every key and name: no other World of the job has it."""
        self.watch = watch
        self._rank = rank
        self._numbers: dict[tuple[Any, ...], int] = {}

    def part(self, rank: int, name: str) -> "Board":
        """That of some of the ranks, in which this one counts as ``rank``."""
        return Board(rank, self.store, f"{self.word}/{name}", self.watch)

    def number(self, *what: Any) -> int:
        """0, 1, 2 ... each time that ``what`` is asked for."""
        self._numbers[what] = self._numbers.get(what, -1) + 1
        return self._numbers[what]

    def post(self, key: str, index: int, text: str) -> None:
        """Write ``text`` under ``key`` as number ``index`` of those who meet there; usable from any thread."""
        if self.store is None:
            self.store = dist.HashStore()
        self.store.set(self._name(key, index), text)

    def collect(self, key: str, size: int, timeout_s: float) -> list[str]:
        """The texts of all ``size`` that meet under ``key``, by index; waits for the late. Errors: DeadlineError."""
        if self.store is None:
            raise CommError(f"store: nothing was ever posted under {key!r}")
        names = [self._name(key, index) for index in range(size)]
        if self.watch is not None:  # so that nobody takes a rank that waits here for one that hangs
            self.watch.begin((self._rank, "word", key, ""), timeout_s, False, timeout_s)
        try:
            missing = missing_keys(self.store, names, timeout_s)
        finally:
            if self.watch is not None:
                self.watch.end()
        if missing:
            raise DeadlineError(
                f"rank {self._rank}: {key!r}: no word from {named_ranks(missing)} within {timeout_s:.0f} s"
            )
        return [self.store.get(name).decode() for name in names]

    def forget(self, key: str, size: int) -> None:
        """Drop the texts of all ``size``; for one of them, when all have read them."""
        if self.store is not None:
            for index in range(size):
                self.store.delete_key(self._name(key, index))

    def raise_verdict(self) -> None:
        """Called by whoever waits; raises where the watch has found that the waiting is in vain."""
        if self.watch is not None:
            self.watch.raise_verdict()

    def _name(self, key: str, index: int) -> str:
        return f"shardwise/{self.word}/{key}/{index}"
