"""Partition: the block that begins each stage.

    uniform      the same number of blocks in each stage; if the stages do not divide the blocks, some stages in the
                 middle have one more, because the first and the last also hold the modules around the blocks
    parameters   max over stages of (parameters of its blocks [+ front] [+ back]) is least; among such cuts the sum of
                 squares is least
    measured     as "parameters", with measured seconds in the place of parameters
    type:REGEX   as "parameters", where every block counts 1 whose class name contains the expression, in any case, and
                 other blocks count 0
    names        as given

The least maximum is found by bisection over a greedy cut; the sum of squares by dynamic programming over the cuts that
do not exceed that maximum.

In a V each rank has a stage of the first half and one of the second, so "parameters", "measured" and ``type:REGEX``
balance the two together: the maximum over ranks of what their pair holds is least. Rank 0's pair contains what is in
front of the blocks and what is behind them. Ranks get their pairs from the outside in: a rank takes blocks from both
ends of what is left, as near to an equal share of the rest as the maximum allows, and its two stages as alike as that
leaves them. The search returns to a rank's next choice if the rest cannot be distributed, and notes each rest that
cannot. A maximum for which it has found nothing after some thousand rests counts as too small, so that the cut of many
blocks may exceed the least maximum if one of them is much heavier than the others.

Cost: O(L²) for L blocks; in a V O((L/p)²) for each rest that is looked at, over p ranks.
"""

import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from shardwise.base.errors import PlanError
from shardwise.base.policy import nearest
from shardwise.parallel.pipeline.block_seconds import BlockSeconds
from shardwise.parallel.pipeline.policy import OF_TYPE

_MOST_RESTS = 5000
"""Most rests that the search for a V looks at for one maximum."""


def partition(
    how: str | Sequence[str],
    blocks: Sequence[str],
    weights: Sequence[int],
    stages: int,
    front: int = 0,
    back: int = 0,
    classes: Sequence[str] = (),
    *,
    seconds: BlockSeconds | None = None,
    folded: bool = False,
) -> tuple[str, ...]:
    """Return the names of the blocks that begin each stage but the first.

    Args:
        how: "uniform", "parameters", "measured", ``type:REGEX``, or the names themselves.
        blocks: Names of all blocks, in order.
        weights: Number of parameters of each block.
        stages: Number of stages.
        front: Number of parameters of the modules before the blocks.
        back: Number of parameters of the modules behind the blocks.
        classes: Class names of the blocks.
        seconds: Measured seconds, for "measured"; None: they are not known yet, and parameters count.
        folded: True if the stages lie on their ranks in a V, two on each.

    Returns:
        ``stages - 1`` names.

    Raises:
        PlanError: If there are fewer blocks than stages, if a name is unknown or out of order, or if a stage
            would have no parameters.
    """
    if stages == 1 and isinstance(how, str):
        return ()
    if stages > len(blocks):
        raise PlanError(
            f"pipeline: {len(blocks)} blocks cannot make {stages} stages (mesh.pp x pipeline.virtual_stages); every "
            f"stage needs a block, so {len(blocks)} stages are the most; "
            f"nearest that work: {_factors(len(blocks))}"
        )
    if not isinstance(how, str):
        places = _by_name(how, blocks, stages)
    elif how == "uniform":
        places = _uniform(len(blocks), stages)
    elif how == "measured" and seconds is not None:
        places = _by_weight(*seconds.loads(blocks), stages, folded)
    elif how in ("parameters", "measured"):
        places = _by_weight(weights, front, back, stages, folded)
    elif how.startswith(OF_TYPE):
        places = _by_weight(_matching(how, classes, stages), 0, 0, stages, folded)
    else:
        raise PlanError(
            f"pipeline.partition: {how!r} is no way to cut{nearest(how, ['uniform', 'parameters', 'measured'])}"
        )
    _check_trained(places, blocks, weights, front, back)
    return tuple(blocks[place] for place in places)


def _check_trained(
    places: Sequence[int], blocks: Sequence[str], weights: Sequence[int], front: int, back: int
) -> None:
    """Raise PlanError if a stage has no parameters. The arguments are those of ``partition``."""
    bounds, stages = [0, *places, len(blocks)], len(places) + 1
    for stage, (first, stop) in enumerate(itertools.pairwise(bounds)):
        held = sum(weights[first:stop]) + (front if stage == 0 else 0) + (back if stage == stages - 1 else 0)
        if not held:
            span = blocks[first] if stop - first == 1 else f"{blocks[first]} ... {blocks[stop - 1]}"
            raise PlanError(
                f"pipeline.partition: stage {stage} ({span}) has no parameters, so it has nothing to train; put it "
                "together with a neighbour, by fewer stages or by names that begin the stages"
            )


def _matching(how: str, classes: Sequence[str], stages: int) -> list[int]:
    """Return 1 for each block whose class name matches ``type:REGEX``, and 0 for each other block."""
    pattern = re.compile(how.removeprefix(OF_TYPE), re.IGNORECASE)
    found = [int(pattern.search(name) is not None) for name in classes]
    if sum(found) < stages:
        raise PlanError(
            f"pipeline.partition: {how!r} is found in the classes of {sum(found)} blocks, but there are {stages} "
            f"stages, each of which needs one; the classes are {', '.join(dict.fromkeys(classes))}"
        )
    return found


def _uniform(blocks: int, stages: int) -> list[int]:
    share, more = divmod(blocks, stages)
    first = (stages - more) // 2
    sizes = [share + (first <= stage < first + more) for stage in range(stages)]
    return list(itertools.accumulate(sizes))[:-1]


def _by_name(names: Sequence[str], blocks: Sequence[str], stages: int) -> list[int]:
    if len(names) != stages - 1:
        raise PlanError(
            f"pipeline.partition names {len(names)} blocks that begin a stage, but {stages} stages need {stages - 1}: "
            f"one for each stage but the first; with these names there are {len(names) + 1} stages"
        )
    for name in names:
        if name not in blocks:
            raise PlanError(f"pipeline.partition: no block is called {name!r}{nearest(name, blocks)}")
    places = [list(blocks).index(name) for name in names]
    if places != sorted(set(places)):
        right = ", ".join(blocks[place] for place in sorted(set(places)))
        raise PlanError(
            f"pipeline.partition: names begin stages in the order of the blocks, each once: {right}"
        )
    if places and places[0] == 0:
        raise PlanError(
            f"pipeline.partition: {names[0]!r} is the first block, so stage 0 would have none; stage 1 can begin at "
            f"{blocks[1]!r} at the earliest"
        )
    return places


def _by_weight(weights: Sequence[int], front: int, back: int, stages: int, folded: bool) -> list[int]:
    """Return the indices where stages begin, in a V for the pairs of the ranks."""
    loads = list(weights)
    loads[0] += front
    loads[-1] += back
    return _folded(loads, stages // 2) if folded else _in_row(loads, stages)


def _in_row(loads: Sequence[int], stages: int) -> list[int]:
    """Return the indices where stages begin: least maximum, then least sum of squares."""
    total = [0, *itertools.accumulate(loads)]
    low, high = max(max(loads), -(-total[-1] // stages)), total[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _stages_needed(loads, middle) <= stages else (middle + 1, high)
    # best[i]: least sum of squares of the first i blocks in the stages so far; begins[.][i]: start of the last stage
    infinite = float("inf")
    best: list[float] = [0.0] + [infinite] * len(loads)
    begins: list[list[int]] = []
    for _ in range(stages):
        reached: list[float] = [infinite] * len(best)
        begin = [0] * len(best)
        for stop in range(1, len(best)):
            for start in range(stop - 1, -1, -1):
                load = total[stop] - total[start]
                if load > low:
                    break
                if best[start] + load**2 < reached[stop]:
                    reached[stop], begin[stop] = best[start] + load**2, start
        best = reached
        begins.append(begin)
    places, stop = [], len(loads)
    for begin in reversed(begins):
        stop = begin[stop]
        places.append(stop)
    return places[::-1][1:]


def _folded(loads: Sequence[int], ranks: int) -> list[int]:
    """Return the indices where stages in a V begin: least maximum over ranks of what their two stages hold."""
    total = [0, *itertools.accumulate(loads)]
    low = most = max(max(loads) + min(loads), -(-total[-1] // ranks))  # a rank has two blocks at least
    step = max(1, low // 64)
    while (found := _Pairs(total, ranks, most).cut()) is None:
        low, most, step = most + 1, most + step, 2 * step
    while low < most:
        middle = (low + most) // 2
        fewer = _Pairs(total, ranks, middle).cut()
        if fewer is None:
            low = middle + 1
        else:
            found, most = fewer, middle
    return found


class _Pairs:
    """The search for pairs of stages none of which holds more than ``most``, from the outside in.

    Args:
        total: What the first blocks hold together, by their number.
        ranks: Number of pairs.
        most: Most that a pair may hold.
    """

    def __init__(self, total: Sequence[int], ranks: int, most: int):
        self._total = total
        self._ranks = ranks
        self._most = most
        self._left = _MOST_RESTS
        """Rests that may still be looked at."""
        self._failed: set[tuple[int, int, int]] = set()
        """Rests that cannot be distributed: rank, first block, and the number of the block behind the last."""

    def cut(self) -> list[int] | None:
        """Return the indices where stages begin, or None if a pair would hold more."""
        return self._rest(0, 0, len(self._total) - 1)

    def _rest(self, rank: int, start: int, stop: int) -> list[int] | None:
        """Return the indices where the stages of ``rank`` and of later ranks begin, without the first of them."""
        if self._left == 0 or (rank, start, stop) in self._failed:
            return None
        self._left -= 1
        total = self._total
        held = total[stop] - total[start]
        if rank == self._ranks - 1:
            if held > self._most:
                return None
            halves = range(start + 1, stop)
            return [min(halves, key=lambda place: abs(2 * total[place] - total[start] - total[stop]))]
        for first, second in self._choices(held, self._ranks - rank, start, stop):
            inside = self._rest(rank + 1, first, second)
            if inside is not None:
                return [first, *inside, second]
        self._failed.add((rank, start, stop))
        return None

    def _choices(self, held: int, ranks: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ends of the first and the starts of the second stage of a rank, the best choice first.

        Args:
            held: What the blocks hold that are left.
            ranks: Ranks that are left.
            start: First block that is left.
            stop: Number of the block behind the last that is left.
        """
        total, found = self._total, []
        least = held - (ranks - 1) * self._most
        needed = 2 * (ranks - 1)
        for first in range(start + 1, stop - needed):
            own = total[first] - total[start]
            if own > self._most:
                break
            low, high = first + needed, stop - 1
            begin = bisect_left(total, total[stop] + own - self._most, low, high + 1)
            end = bisect_right(total, total[stop] + own - least, low, high + 1)
            for second in range(begin, min(end, high + 1)):
                other = total[stop] - total[second]
                found.append((abs(ranks * (own + other) - held), abs(own - other), first, second))
        return [(first, second) for _, _, first, second in sorted(found)]


def _stages_needed(loads: Sequence[int], most: int) -> int:
    stages, load = 1, 0
    for each in loads:
        if load + each > most:
            stages, load = stages + 1, 0
        load += each
    return stages


def _factors(blocks: int) -> str:
    """Return the ways to have exactly ``blocks`` stages, as text for an error."""
    ways = [
        f"pp {ranks}" + (f" with virtual_stages {blocks // ranks}" if ranks < blocks else "")
        for ranks in range(blocks, 1, -1)
        if blocks % ranks == 0
    ]
    return ", ".join(ways[:3]) or "pp 1"
