"""The rank whose collectives or messages differ from those of the others, from the records of the ranks' last calls.

    rank 0    1 all_reduce of x    2 all_reduce of y        3 ...      the calls of one number differ
    rank 1    1 all_reduce of x    2 broadcast of y         3 ...

    rank 0    1 all_reduce of x    send    receive          2 not yet  rank 0 has skipped call 2 of the group: in its
    rank 1    1 all_reduce of x    2 all_reduce of y                   loop before, 2 came in front of send and receive

[Note: the rank that differs]
If calls of one group and number differ, the calls of most ranks are taken for right. Of two ranks, that rank differs
whose call never followed the call before it, or was never made: a loop makes the same calls in every step, so the right
rank has made them before. If ranks wait for one another in calls of several groups, no number has two calls yet; the
rank that differs is the one that has made other calls where it made the awaited one in an earlier step.

Cost: one look at each record that two ranks have in common.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from shardwise.base.words import named_ranks
from shardwise.comm.watching.answers import AwaitedCall, StartedCall


class CallMismatch(NamedTuple):
    """The first collective or message of a group that two ranks have called differently."""

    group: str
    number: int
    calls: dict[int, StartedCall]
    """The calls of this number, by rank."""
    odd: int | None
    """Rank that differs from the others. See [Note: the rank that differs]."""

    def __str__(self) -> str:
        by_call: dict[str, list[int]] = {}
        for rank, call in self.calls.items():
            by_call.setdefault(str(call), []).append(rank)
        said = "; ".join(f"{named_ranks(ranks)}: {call}" for call, ranks in by_call.items())
        return f"call {self.number} of {self.group} differs: {said}"


def first_mismatch(starts: Mapping[int, Sequence[StartedCall]]) -> CallMismatch | None:
    """Return the first call on which ranks of one group differ; None if none differs.

    Args:
        starts: The last calls of each rank, oldest first.
    """
    tables: dict[str, dict[int, dict[int, StartedCall]]] = {}
    for rank, calls in starts.items():
        for call in calls:
            tables.setdefault(call.group, {}).setdefault(call.number, {})[rank] = call
    found = []
    for group, table in tables.items():
        for number in sorted(table):
            calls_of_number = table[number]
            if len({call.likeness for call in calls_of_number.values()}) > 1:
                odd = _odd_rank(calls_of_number, starts)
                found.append(CallMismatch(group, number, calls_of_number, odd))
                break
    return max(found, key=lambda each: _calls_behind(each, starts), default=None)


def _calls_behind(found: CallMismatch, starts: Mapping[int, Sequence[StartedCall]]) -> int:
    """Return how many calls the ranks made behind a call that differs: the first difference has the most."""
    return max(len(starts[rank]) - list(starts[rank]).index(call) for rank, call in found.calls.items())


def _odd_rank(calls: Mapping[int, StartedCall], starts: Mapping[int, Sequence[StartedCall]]) -> int | None:
    by_likeness: dict[tuple[object, ...], list[int]] = {}
    for rank, call in calls.items():
        by_likeness.setdefault(call.likeness, []).append(rank)
    sizes = sorted(len(ranks) for ranks in by_likeness.values())
    if len(calls) > 2 and sizes[-1] > sizes[-2]:
        return min(rank for ranks in by_likeness.values() if len(ranks) < sizes[-1] for rank in ranks)
    for was_made in (_pair_was_made, _was_made):
        odd = [rank for rank, call in calls.items() if not was_made(call, starts[rank])]
        if len(odd) == 1:
            return odd[0]
    return None


def _pair_was_made(call: StartedCall, calls: Sequence[StartedCall]) -> bool:
    """Return whether the call followed the call before it earlier too."""
    own, place = _earlier(call, calls)
    if place == 0:
        return True
    pair = own[place - 1].likeness, call.likeness
    return any((a.likeness, b.likeness) == pair for a, b in pairwise(own[:place]))


def _was_made(call: StartedCall, calls: Sequence[StartedCall]) -> bool:
    """Return whether an equal call was made before."""
    own, place = _earlier(call, calls)
    return any(each.likeness == call.likeness for each in own[:place])


def _earlier(call: StartedCall, calls: Sequence[StartedCall]) -> tuple[list[StartedCall], int]:
    """Return the calls of the group of ``call``, and its place among them."""
    own = [each for each in calls if each.group == call.group]
    return own, next(place for place, each in enumerate(own) if each.number == call.number)


class SkippedCall(NamedTuple):
    """A call that a rank has not made where it made it in an earlier step, and for which others wait."""

    rank: int
    """The rank that has not made the call."""
    call: StartedCall
    """The call, as a rank that waits has made it."""
    waiting: list[int]
    """Ranks that have made the call."""
    instead: StartedCall
    """The first call that the rank has made in its place."""

    def __str__(self) -> str:
        verb = "waits" if len(self.waiting) == 1 else "wait"
        return (
            f"call {self.call.number} of {self.call.group} was not made by rank {self.rank}, for which "
            f"{named_ranks(self.waiting)} {verb}: {self.call}; in an earlier step rank {self.rank} made it in front of "
            f"{self.instead}"
        )


def skipped_call(
    awaited: Mapping[int, AwaitedCall], starts: Mapping[int, Sequence[StartedCall]]
) -> SkippedCall | None:
    """Return a call that one of several ranks that wait for one another has skipped; None if no rank has, or several.

    Args:
        awaited: The call that each rank waits for.
        starts: The last calls of each rank, oldest first.
    """
    found: dict[int, SkippedCall] = {}
    for rank, wait in awaited.items():
        theirs = next((call for call in starts[rank] if _is_awaited(call, wait)), None)
        for member in () if theirs is None else wait.members:
            has_come = member not in awaited or any(
                call.number >= wait.number and call.group == wait.group for call in starts[member]
            )
            instead = None if has_come or theirs is None else _made_instead(theirs, starts[member])
            if instead is not None and theirs is not None:
                known = found.get(member)
                others = [rank] if known is None else [*known.waiting, rank]
                found[member] = SkippedCall(member, theirs, others, instead)
    return next(iter(found.values())) if len(found) == 1 else None


def _is_awaited(call: StartedCall, wait: AwaitedCall) -> bool:
    return (call.group, call.number) == (wait.group, wait.number)


def _made_instead(missing: StartedCall, calls: Sequence[StartedCall]) -> StartedCall | None:
    """Return the first call behind the last one of the group that was never made there in front of ``missing``.

    None if there is none, or if the records have no earlier step to compare with.
    """
    own = [place for place, call in enumerate(calls) if call.group == missing.group]
    if not own:
        return None
    before, behind = calls[own[-1]].likeness, calls[own[-1] + 1 :]
    usual = [
        Counter((call.group, call.likeness) for call in calls[first + 1 : last])
        for first, last in pairwise(own)
        if (calls[first].likeness, calls[last].likeness) == (before, missing.likeness)
    ]
    for place, call in enumerate(behind):
        made = Counter((each.group, each.likeness) for each in behind[: place + 1])
        if usual and all(made - each for each in usual):
            return call
    return None
