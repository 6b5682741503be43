"""The results that a pass needs before it can run, and the order of lists that follows from them.

    F(s, i)   F(s - 1, i)                            SEND, RECV   a RECV needs its SEND
    B(s, i)   B(s + 1, i), on the last stage F(s, i)    W(s, i)   I(s, i)

B may be whole or in two parts, of which other stages need I (the gradient of the input).
"""

from collections.abc import Callable, Mapping, Sequence

from shardwise.base.errors import PlanError
from shardwise.plan.action import Action, Kind
from shardwise.plan.timeline import Span, Timeline

Lists = dict[int, list[Action]]
"""Actions by the rank's index on "pp"."""
Result = tuple[int, ...]
"""The result of an Action as a key; equal for B and I."""

_ACTIVATION, _GRADIENT, _MESSAGE = range(3)


def stages_of(lists: Mapping[int, Sequence[Action]]) -> int:
    """Return the number of pipeline stages in ``lists``."""
    return 1 + max((action.stage for row in lists.values() for action in row), default=-1)


def need(action: Action, stages: int) -> Result | None:
    """Return the result of another Action that ``action`` needs, or None.

    Args:
        action: The Action.
        stages: Stages of the pipeline.
    """
    kind, unit, microbatch, stage, other = action
    if unit >= 0:
        return None
    if kind is Kind.RECV:
        return (_MESSAGE, other, microbatch, stage)
    if kind is Kind.F:
        return (_ACTIVATION, stage - 1, microbatch) if stage else None
    if kind is Kind.B or kind is Kind.I:
        return (_ACTIVATION, stage, microbatch) if stage == stages - 1 else (_GRADIENT, stage + 1, microbatch)
    return (_GRADIENT, stage, microbatch) if kind is Kind.W else None


def result(action: Action) -> Result | None:
    """Return the result that ``action`` leaves for others, or None."""
    kind, unit, microbatch, stage, other = action
    if unit >= 0:
        return None
    if kind is Kind.F:
        return (_ACTIVATION, stage, microbatch)
    if kind is Kind.B or kind is Kind.I:
        return (_GRADIENT, stage, microbatch)
    return (_MESSAGE, stage, microbatch, other) if kind is Kind.SEND else None


def walk(lists: Mapping[int, Sequence[Action]], seconds: Callable[[Action], float]) -> list[Span]:
    """Return the time span of each Action if every rank walks its list and sends do not wait.

    Args:
        lists: Actions by the rank's index on "pp".
        seconds: Seconds that an Action occupies its rank.

    Raises:
        PlanError: if ranks wait for each other, or for an Action that is in no list.
    """
    stages = stages_of(lists)
    stop_s: dict[Result, float] = {}
    waiting: dict[Result, list[int]] = {}
    now, position = dict.fromkeys(lists, 0.0), dict.fromkeys(lists, 0)
    spans: list[Span] = []
    free = list(lists)
    while free:
        rank = free.pop()
        row = lists[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            needed = need(action, stages)
            if needed is not None and needed not in stop_s:
                waiting.setdefault(needed, []).append(rank)
                break
            ready = now[rank] if needed is None else max(now[rank], stop_s[needed])
            # The wait for a message counts as part of the RECV; a pass starts when its inputs are ready.
            start = now[rank] if action.kind is Kind.RECV else ready
            now[rank] = ready + seconds(action)
            spans.append(Span(rank, action, start, now[rank]))
            left = result(action)
            if left is not None:
                stop_s[left] = now[rank]
                free += waiting.pop(left, [])
            position[rank] += 1
    stuck = {rank: row[position[rank]] for rank, row in lists.items() if position[rank] < len(row)}
    if stuck:
        stands = "; ".join(f"rank {rank} before {action}" for rank, action in stuck.items())
        raise PlanError(
            f"schedule: ranks wait for each other, or for what nobody does: {stands}. Each Action must find what it "
            "takes: F of a stage that of the stage before, B that of the next stage, RECV its SEND, W its I"
        )
    return spans


def timeline_of(lists: Mapping[int, Sequence[Action]], seconds: Callable[[Action], float]) -> Timeline:
    """Return the result of ``walk`` as a timeline, by rank.

    Args:
        lists: Actions by the rank's index on "pp".
        seconds: Seconds that an Action occupies its rank.

    Raises:
        PlanError: if ranks wait for each other, or for an Action that is in no list.
    """
    return Timeline.of(walk(lists, seconds))
