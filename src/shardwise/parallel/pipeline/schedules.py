"""Pipeline schedules as data: the order in which each rank runs its passes, and nothing else.

A pipeline has ``stages = ranks * virtual_stages`` stages; stage s lies on rank ``s % ranks`` along "pp", or in a V
(plan/stage_places.py). zero_bubble.py and greedy.py have the schedules that split a backward pass in two. A schedule is
a pure function from (stage or rank, their number, microbatches) to a list of Actions. ``passes.py`` adds messages and
Unit Actions, ``validate.py`` proves the result. Four stages and microbatches (interleaved: two microbatches), B twice
as long as F:

    gpipe               rank 0   F0 F1 F2 F3 .. .. .. .. .. .. .. .. .. B0 == B1 == B2 == B3 ==
                        rank 1   .. F0 F1 F2 F3 .. .. .. .. .. .. B0 == B1 == B2 == B3 == .. ..
                        rank 2   .. .. F0 F1 F2 F3 .. .. .. B0 == B1 == B2 == B3 == .. .. .. ..
                        rank 3   .. .. .. F0 F1 F2 F3 B0 == B1 == B2 == B3 == .. .. .. .. .. ..

    1f1b                rank 0   F0 F1 F2 F3 .. .. .. .. .. .. B0 == .. B1 == .. B2 == .. B3 ==
                        rank 1   .. F0 F1 F2 .. .. .. .. B0 == F3 B1 == .. B2 == .. B3 == .. ..
                        rank 2   .. .. F0 F1 .. .. B0 == F2 B1 == F3 B2 == .. B3 == .. .. .. ..
                        rank 3   .. .. .. F0 B0 == F1 B1 == F2 B2 == F3 B3 == .. .. .. .. .. ..

    interleaved_1f1b    rank 0   0F0 0F1 2F0 2F1 ... ... 2B0 === ... 2B1 === 0B0 === 0B1 ===
    (2 ranks)           rank 1   ... 1F0 1F1 3F0 3B0 === 3F1 3B1 === 1B0 === 1B1 === ... ...

Every stage runs its microbatches in ascending order, forward and backward, under every schedule. So gradients are
summed in the same order, and have the same bits, under every schedule.

Papers: Huang et al. 2018, arXiv:1811.06965 (GPipe); Narayanan et al. 2020, arXiv:2006.09503 (1F1B) and 2021,
        arXiv:2104.04473 (interleaved).
Cost:   with p ranks, v stages per rank and m >= p microbatches, a rank is idle for (p - 1) times the seconds of one
        stage's forward and backward pass; docs/techniques/pipeline.md has all closed forms.
"""

from collections.abc import Callable

from shardwise.base.errors import PlanError
from shardwise.parallel.pipeline.greedy import zb_greedy
from shardwise.parallel.pipeline.policy import FOLDED, ScheduleName
from shardwise.parallel.pipeline.zero_bubble import dualpipe_v, zb_h1, zb_v
from shardwise.plan.action import Action, B, F


def gpipe(stage: int, stages: int, microbatches: int) -> list[Action]:
    """Return all forwards, then all backwards of a stage: the simplest schedule, with all activations live at once.

    Args:
        stage: Number of the stage.
        stages: Number of stages.
        microbatches: Microbatches of the step.

    Returns:
        The stage's passes in order.
    """
    return [F(stage, i) for i in range(microbatches)] + [B(stage, i) for i in range(microbatches)]


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Action]:
    """Return the 1F1B schedule of a stage: every backward pass runs as soon as it can.

    At most ``stages - stage`` activations are live.

    Args:
        stage: Number of the stage.
        stages: Number of stages.
        microbatches: Microbatches of the step.

    Returns:
        The stage's passes in order.
    """
    warmup = min(stages - stage - 1, microbatches)
    forward = [F(stage, i) for i in range(microbatches)]
    backward = [B(stage, i) for i in range(microbatches)]
    return _one_by_one(forward, backward, warmup)


def interleaved_one_f_one_b(rank: int, ranks: int, virtual_stages: int, microbatches: int) -> list[Action]:
    """Return the 1F1B schedule over several stages per rank, which fills and drains the pipeline in shorter stages.

    Microbatches are processed in groups: all of a group pass a stage, then the rank's next stage takes them.
    With at least ``ranks`` microbatches in a group, no rank waits for its own output. So every group has
    ``ranks`` microbatches, or a few more if ``ranks`` does not divide their number.

    Args:
        rank: Index of the rank on "pp".
        ranks: Size of the "pp" axis.
        virtual_stages: Stages per rank.
        microbatches: Microbatches of the step.

    Returns:
        The rank's passes in order.
    """
    groups = microbatch_groups(ranks, microbatches)
    own = range(rank, ranks * virtual_stages, ranks)
    forward = [F(stage, i) for group in groups for stage in own for i in group]
    backward = [B(stage, i) for group in groups for stage in reversed(own) for i in group]
    warmup = (virtual_stages - 1) * max(map(len, groups)) + 2 * (ranks - rank - 1)
    return _one_by_one(forward, backward, min(warmup, len(forward)))


def microbatch_groups(ranks: int, microbatches: int) -> list[range]:
    """Return consecutive microbatches in groups of nearly equal size.

    Args:
        ranks: Size of the "pp" axis; no group is smaller, unless there is only one group.
        microbatches: Microbatches of the step.

    Returns:
        The groups in order.
    """
    count = max(1, microbatches // ranks)
    bounds = [microbatches * i // count for i in range(count + 1)]
    return [range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]


def _one_by_one(forward: list[Action], backward: list[Action], warmup: int) -> list[Action]:
    steady = [action for pair in zip(forward[warmup:], backward, strict=False) for action in pair]
    return forward[:warmup] + steady + backward[len(forward) - warmup :]


_BY_STAGE: dict[ScheduleName, Callable[[int, int, int], list[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb_v": zb_v,
    "dualpipe_v": dualpipe_v,
}


def schedule(
    name: ScheduleName,
    ranks: int,
    microbatches: int,
    virtual_stages: int = 1,
    seconds: Callable[[Action], float] = lambda action: 1.0,
    live: float | None = None,
    wgrad_delay: int | None = None,
) -> dict[int, list[Action]]:
    """Return the passes of one step by the rank's index on "pp".

    Args:
        name: The schedule.
        ranks: Size of the "pp" axis.
        microbatches: Microbatches of the step.
        virtual_stages: Stages per rank; a schedule in a V has 2, whatever is given.
        seconds: Seconds of a pass, from which zb_greedy is made; equal by default.
        live: Limit of live activations of zb_greedy, in microbatches on both stages of a rank.
        wgrad_delay: Most microbatches by which zb_h1 runs W behind I.

    Returns:
        The passes of every rank in order.

    Raises:
        PlanError: If there is nothing to run, or if ``virtual_stages`` is more than 1 and the schedule has one
            stage per rank.
    """
    _check(ranks, microbatches, virtual_stages)
    if name == "interleaved_1f1b":
        return {r: interleaved_one_f_one_b(r, ranks, virtual_stages, microbatches) for r in range(ranks)}
    if virtual_stages > 1 and name not in FOLDED:
        raise PlanError(
            f"pipeline: schedule {name!r} has one stage per rank, given virtual_stages={virtual_stages}; "
            "use 'interleaved_1f1b'"
        )
    if name == "zb_greedy":
        return zb_greedy(ranks, microbatches, seconds, live)
    if name == "zb_h1":
        return {rank: zb_h1(rank, ranks, microbatches, wgrad_delay) for rank in range(ranks)}
    return {rank: _BY_STAGE[name](rank, ranks, microbatches) for rank in range(ranks)}


def forward_only(
    ranks: int, microbatches: int, virtual_stages: int = 1, folded: bool = False
) -> dict[int, list[Action]]:
    """Return only F, for evaluation, by the rank's index on "pp".

    Args:
        ranks: Size of the "pp" axis.
        microbatches: Microbatches of the evaluation.
        virtual_stages: Stages per rank.
        folded: True if the stages, two per rank, lie on the ranks in a V.

    Returns:
        The passes of every rank in order.
    """
    _check(ranks, microbatches, virtual_stages)
    if folded:
        each = range(microbatches)
        return {
            r: _one_by_one(
                [F(r, i) for i in each],
                [F(2 * ranks - 1 - r, i) for i in each],
                min(2 * (ranks - 1 - r), microbatches),
            )
            for r in range(ranks)
        }
    groups = microbatch_groups(ranks, microbatches)
    return {
        rank: [
            F(stage, i)
            for group in groups
            for stage in range(rank, ranks * virtual_stages, ranks)
            for i in group
        ]
        for rank in range(ranks)
    }


def _check(ranks: int, microbatches: int, virtual_stages: int) -> None:
    for what, given in (("ranks", ranks), ("microbatches", microbatches), ("virtual_stages", virtual_stages)):
        if given < 1:
            raise PlanError(f"pipeline: {what}={given}; a schedule needs at least 1")
