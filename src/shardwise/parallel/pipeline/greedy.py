"""zb_greedy: a schedule in a V that is made from the seconds of each stage's passes.

Each rank runs, as soon as it is free, the first pass of an order of preference whose input has arrived, and W if there
is none. Four variants are made,

    preference    I before F;  or F and I in turns
    W             whenever no F or I can begin;  or only if none can begin within half of W's seconds

and zb_v and dualpipe_v, and the shortest of all that keep the limit of live activations is taken. The passes of one
Kind run in ascending order of the microbatches on every stage, so gradients have the bits of every other schedule.

[Note: room for the second half] F of a rank's first stage begins only if room for one F of its second stage is left.
The oldest microbatch can therefore always go on: what stands in its way are W, which need no message.

Paper: Qi et al. 2024, arXiv:2405.15362 (greedy schedules under a limit of memory).
Cost:  a few comparisons for each pass and variant; 4 variants of 8 ranks and 16 microbatches take 30 ms.
Shapes: p ranks along "pp", 2p stages, m microbatches.
"""

import heapq
from collections.abc import Callable, Iterator

from shardwise.parallel.pipeline.zero_bubble import dualpipe_v, zb_v
from shardwise.plan.action import Action, Kind
from shardwise.plan.dataflow import Lists, timeline_of
from shardwise.plan.stage_places import StagePlaces


def zb_greedy(
    ranks: int, microbatches: int, seconds: Callable[[Action], float], live: float | None = None
) -> Lists:
    """Return the shortest of several schedules in a V, by the rank's index on "pp".

    Args:
        ranks: Size of the "pp" axis.
        microbatches: Microbatches of the step.
        seconds: Seconds of a pass; all ranks must pass the same numbers.
        live: Most microbatches whose activations a rank keeps at a time, each on both of its stages; at least 1.
            None: ``ranks + 1/2``, as dualpipe_v.

    Returns:
        The passes of every rank in order.
    """
    most = 2 * ranks + 1 if live is None else max(2, int(2 * live))
    found: list[Lists] = [
        {rank: make(rank, ranks, microbatches) for rank in range(ranks)} for make in (zb_v, dualpipe_v)
    ]
    found += [
        _GreedyWalk(ranks, microbatches, seconds, most, takes_turns, waits).lists
        for takes_turns in (False, True)
        for waits in (False, True)
    ]
    timelines = [timeline_of(lists, seconds) for lists in found]
    fits = [number for number, each in enumerate(timelines) if max(map(each.peak_live, range(ranks))) <= most]
    return found[min(fits, key=lambda number: timelines[number].makespan_s)]


class _GreedyWalk:
    """One variant: the ranks' passes in the order in which they begin.

    Args:
        ranks: Size of the "pp" axis.
        microbatches: Microbatches of the step.
        seconds: Seconds of a pass.
        most: Most activations of a stage that live on a rank.
        takes_turns: True if a rank prefers F behind I, False if it always prefers I.
        waits: True if W begins only if no F or I could begin within half of its seconds.
    """

    def __init__(
        self,
        ranks: int,
        microbatches: int,
        seconds: Callable[[Action], float],
        most: int,
        takes_turns: bool,
        waits: bool,
    ):
        self._last = 2 * ranks - 1
        self._microbatches = microbatches
        self._seconds = seconds
        self._most = most
        self._takes_turns = takes_turns
        self._least_wait = 0.5 if waits else 0.0
        self._places = StagePlaces(ranks, folded=True)
        self._ended: dict[Action, float] = {}
        self._number: dict[tuple[Kind, int], int] = {}
        self._live = [0] * ranks
        self.lists: Lists = {rank: [] for rank in range(ranks)}
        self._walk()

    def _walk(self) -> None:
        """Begin passes in the order of time; a rank is looked at when it is free and when a message reaches it."""
        times = [(0.0, rank) for rank in self.lists]
        free = dict.fromkeys(self.lists, 0.0)
        while times:
            now, rank = heapq.heappop(times)
            if free[rank] > now:
                continue
            action, again_s = self._choose(rank, now)
            if action is not None:
                self._begin(rank, action)
                again_s = free[rank] = self._ended[action] = now + self._seconds(action)
                target = action.stage + {Kind.F: 1, Kind.I: -1}.get(action.kind, self._last + 1)
                if 0 <= target <= self._last:
                    heapq.heappush(times, (again_s, self._places.place(target)))
            if again_s is not None:
                heapq.heappush(times, (again_s, rank))

    def _begin(self, rank: int, action: Action) -> None:
        self._number[action.kind, action.stage] = action.microbatch + 1
        self._live[rank] += {Kind.F: 1, Kind.W: -1}.get(action.kind, 0)
        self.lists[rank].append(action)

    def _choose(self, rank: int, now: float) -> tuple[Action | None, float | None]:
        """Return the pass that ``rank`` begins now, or None and the time at which one can begin, if known."""
        later: float | None = None
        for action in self._preferred(rank):
            ready = self._ready_s(action)
            if ready is not None and ready <= now:
                return action, None
            if ready is not None and (later is None or ready < later):
                later = ready
        deferred = [self._next(Kind.W, stage) for stage in (rank, self._last - rank)]
        ready_s = {action: self._ready_s(action) for action in deferred}
        waiting = [(at, action) for action, at in ready_s.items() if at is not None and at <= now]
        if waiting:
            action = min(waiting)[1]
            if later is None or later - now >= self._least_wait * self._seconds(action):
                return action, None
        return None, later

    def _preferred(self, rank: int) -> Iterator[Action]:
        """Yield the next F and I of both stages of ``rank``, the preferred first, without F that find no room."""
        first, second = rank, self._last - rank
        row = self.lists[rank]
        behind = next((each.kind for each in reversed(row) if each.kind is not Kind.W), Kind.I)
        inputs = [self._next(Kind.I, stage) for stage in (first, second)]
        # [Note: room for the second half]
        room = self._most - self._live[rank]
        forward = [self._next(Kind.F, second)] * (room >= 1) + [self._next(Kind.F, first)] * (room >= 2)
        prefers_forward = self._takes_turns and behind is Kind.I
        yield from (*forward, *inputs) if prefers_forward else (*inputs, *forward)

    def _next(self, kind: Kind, stage: int) -> Action:
        return Action(kind, -1, self._number.get((kind, stage), 0), stage)

    def _ready_s(self, action: Action) -> float | None:
        """Return the time at which the inputs of a pass are there, or None if that is unknown."""
        kind, _, microbatch, stage, _ = action
        if microbatch >= self._microbatches:
            return None
        if kind is Kind.W:
            return self._ended.get(action._replace(kind=Kind.I))
        if kind is Kind.F:
            return self._ended.get(action._replace(stage=stage - 1)) if stage else 0.0
        own = self._ended.get(action._replace(kind=Kind.F))
        other = own if stage == self._last else self._ended.get(action._replace(stage=stage + 1))
        return None if own is None or other is None else max(own, other)
