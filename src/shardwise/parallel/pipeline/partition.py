"""Partition: the block that begins each stage.

    uniform      the same number of blocks in each stage; if the stages do not divide the blocks, some stages in the
                 middle have one more, because the first and the last also hold the modules around the blocks
    parameters   max over stages of (parameters of its blocks [+ front] [+ back]) is least; among such cuts the sum of
                 squares is least
    type:REGEX   as "parameters", where every block counts 1 whose class name contains the expression, in any case, and
                 other blocks count 0
    names        as given

The least maximum is found by bisection over a greedy cut; the sum of squares by dynamic programming over the cuts that
do not exceed that maximum.

Cost: O(L²) for L blocks.
"""

import itertools
import re
from collections.abc import Sequence

from shardwise.base.errors import PlanError
from shardwise.base.policy import nearest
from shardwise.parallel.pipeline.policy import OF_TYPE


def partition(
    how: str | Sequence[str],
    blocks: Sequence[str],
    weights: Sequence[int],
    stages: int,
    front: int = 0,
    back: int = 0,
    classes: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the names of the blocks that begin each stage but the first.

    Args:
        how: "uniform", "parameters", ``type:REGEX``, or the names themselves.
        blocks: Names of all blocks, in order.
        weights: Number of parameters of each block.
        stages: Number of stages.
        front: Number of parameters of the modules before the blocks.
        back: Number of parameters of the modules behind the blocks.
        classes: Class names of the blocks.

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
    elif how == "parameters":
        places = _by_weight(weights, stages, front, back)
    elif how.startswith(OF_TYPE):
        places = _by_weight(_matching(how, classes, stages), stages, 0, 0)
    else:
        raise PlanError(
            f"pipeline.partition: {how!r} is no way to cut{nearest(how, ['uniform', 'parameters'])}"
        )
    bounds = [0, *places, len(blocks)]
    for stage, (first, stop) in enumerate(itertools.pairwise(bounds)):
        held = sum(weights[first:stop]) + (front if stage == 0 else 0) + (back if stage == stages - 1 else 0)
        if not held:
            span = blocks[first] if stop - first == 1 else f"{blocks[first]} ... {blocks[stop - 1]}"
            raise PlanError(
                f"pipeline.partition: stage {stage} ({span}) has no parameters, so it has nothing to train; put it "
                "together with a neighbour, by fewer stages or by names that begin the stages"
            )
    return tuple(blocks[place] for place in places)


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


def _by_weight(weights: Sequence[int], stages: int, front: int, back: int) -> list[int]:
    """Return the indices where stages begin: least maximum, then least sum of squares."""
    loads = list(weights)
    loads[0] += front
    loads[-1] += back
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
