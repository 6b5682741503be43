"""Waits of a rank's threads for other ranks, and how long each may last."""

from collections.abc import Callable
from typing import Any, NamedTuple

from shardwise.comm.watching.questions import AwaitedTexts
from shardwise.comm.watching.recorder import NOWHERE, CallPlace

SOON_S = 5.0
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
    place: CallPlace = NOWHERE
    """Group and number of the collective or message in the records."""

    @property
    def soon_s(self) -> float:
        """Seconds after which the other ranks are first asked."""
        early_s = _AHEAD * self.patience_s
        return min(SOON_S, early_s) if self.call or self.words is not None else early_s

    def __str__(self) -> str:
        if self.words is not None:
            rank, what = self.what
            return f"rank {rank}: {', '.join(filter(None, (self.call, what)))}"
        rank, operation, what, step = self.what
        return f"rank {rank}: {operation} of {what} in step {step}" + (
            f", in {self.call}" if self.call else ""
        )


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
