"""Guard: the keys of the comparison of state that has to be equal on several ranks, and the search for what differs.

The comparison itself runs with the numbers of NORM (engine/parts/guard.py). It tells that something differs. Every rank
then writes down the digest of each of its tensors, and this module finds the first tensor whose holders disagree, and
the ranks in the minority.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from pydantic import PositiveInt

from shardwise.base.policy import Policy
from shardwise.base.words import named_ranks

_ORDER = ("weight", "master")
"""Kinds of state in the order in which they are named; moments and the rest follow."""
_SHOWN = 8
"""Most ranks that a message names."""


class GuardPolicy(Policy):
    """Keys under ``guard:``: ranks compare the state that has to be equal on them, while the run goes on.

    A rank whose memory, device or network has changed a number trains on, and nothing shows it. With this block the
    ranks compare hashes of 64 bits of the weights, masters and moments that several of them hold.
    """

    every: PositiveInt = 50
    """Steps from one comparison to the next. The first step of a process is compared too."""
    at_rest: bool = True
    """Compare also what no other rank holds with itself: after the update of a compared step, and before the next
    update. What has changed between is the memory's fault."""
    on_alarm: Literal["stop", "restore"] = "stop"
    """The reaction to a difference: ``stop`` raises DivergedError on all ranks in the same step; ``restore`` also loads
    the newest step that was saved no later than the last good comparison, and ``shardwise train`` goes on from it."""


class TensorCopies(NamedTuple):
    """One tensor of one kind of state, or a part of it, that some ranks hold alike, with its digest on one rank."""

    kind: str
    name: str
    start: int
    """First element in the flattened piece of the tensor that a rank holds."""
    stop: int
    holders: tuple[int, ...]
    digest: int

    @property
    def key(self) -> tuple[str, str, int, int, tuple[int, ...]]:
        """The fields in which the entries of all holders agree."""
        return self[:5]


class Difference(NamedTuple):
    """A tensor whose holders do not have the same bytes."""

    kind: str
    name: str
    start: int
    stop: int
    holders: tuple[int, ...]
    minority: tuple[int, ...]
    """Ranks whose bytes fewer ranks have than others; empty if no ranks are in the majority."""

    def __str__(self) -> str:
        """Return the difference as part of a sentence."""
        where = f"{self.kind} of {self.name}, elements [{self.start}, {self.stop}) of the flattened piece"
        if self.minority:
            return f"{where}: {_ranks(self.minority)} differ{'s' * (len(self.minority) == 1)} from the other holders"
        return (
            f"{where}: its holders, {_ranks(self.holders)}, do not agree, and none of them is in the majority"
        )


def differences(tables: Sequence[Sequence[TensorCopies]]) -> list[Difference]:
    """Return the tensors whose holders disagree, weights first.

    Args:
        tables: The entries of each rank, by rank.
    """
    held: dict[tuple[str, str, int, int, tuple[int, ...]], dict[int, int]] = {}
    for rank, entries in enumerate(tables):
        for entry in entries:
            held.setdefault(entry.key, {})[rank] = entry.digest
    found = []
    for key, digests in held.items():
        if len({*digests.values()}) == 1:
            continue
        (common, count), *rest = Counter(digests.values()).most_common()
        is_clear = all(other < count for _, other in rest)
        minority = [rank for rank, each in sorted(digests.items()) if each != common] if is_clear else []
        found.append(Difference(*key, tuple(minority)))
    return sorted(found, key=_rank_of)


def _rank_of(found: Difference) -> tuple[int, str, str, int]:
    place = _ORDER.index(found.kind) if found.kind in _ORDER else len(_ORDER)
    return place, found.kind, found.name, found.start


def _ranks(ranks: Sequence[int]) -> str:
    """Return rank numbers as text, the first eight of many."""
    others = f" and {len(ranks) - _SHOWN} others" if len(ranks) > _SHOWN else ""
    return named_ranks(ranks[:_SHOWN]) + others


def say_alarm(
    step: int, last_good: int | None, found: Sequence[Difference], at_rest: Mapping[int, Sequence[str]]
) -> str:
    """Return the message of a DivergedError.

    Args:
        step: Number of the running step.
        last_good: Last step after whose update all copies were equal, or None.
        found: Tensors whose holders disagree.
        at_rest: Names of the state that changed between two steps, by rank.
    """
    said = []
    if found:
        more = f" ({len(found) - 1} more differ)" if len(found) > 1 else ""
        said.append(f"ranks that hold the same state do not hold the same bytes: {found[0]}{more}")
    said += [
        f"state of rank {rank} changed after one update and before the next: {', '.join(names[:3])}"
        + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for rank, names in at_rest.items()
    ]
    if not said:
        said.append("numbers of the run, such as its step counts or its loss scale, differ between the ranks")
    good = (
        "the start weights differed already"
        if last_good is None
        else f"all copies were equal after step {last_good}"
    )
    return (
        f"step {step}: {'; '.join(said)}; {good}. This step updated nothing. Load a step that was saved no later, and "
        "look at the memory and the links of the ranks that are named"
    )
