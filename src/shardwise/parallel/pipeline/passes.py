"""Passes: pure functions that join the halves of backward passes, and add messages and Unit Actions to a schedule.

    schedule            F(0,0)                              F(0,1)                I(0,0) W(0,0) ...
    join_halves         F(0,0)                              F(0,1)                B(0,0) ...
    add_communication   F(0,0) SEND(0,0,1)                  F(0,1) SEND(0,1,1)    RECV(0,0,1) B(0,0) ...
    add_sharding        F(0,0) UNSHARD(u) F(u) RESHARD(u) SEND(0,0,1) ...

W directly behind its I saves time only if another rank waits for I's result, which B would send later. Where no rank
does, join_halves puts B, which frees what a layer has saved as soon as the gradient of its weight is computed; I would
keep it for W. The gradients have the same bits.

A SEND follows its pass. A RECV is placed as late as possible: just before its use, or before the rank's next message in
this order:

[Note: order of messages] All messages of a step are put in one order, by the time at which their pass ends if messages
take no time, and every rank sends and receives in that order. Blocking sends then cannot deadlock: the two ranks of the
first remaining message wait only for their own passes, whose inputs were received earlier. Two ranks have one channel
in each direction; messages keep their order in the channel and need no tags. No rank waits for a message longer than
for the input of its next pass: if passes last the assumed seconds, the lists cost as much as the bare schedule.
"""

from collections.abc import Callable, Mapping, Sequence

from shardwise.plan.action import RECV, SEND, Action, Kind
from shardwise.plan.dataflow import Lists, stages_of, walk
from shardwise.plan.stage_places import StagePlaces

UnitActions = Callable[[Kind, int, bool, bool], Sequence[Action]]
"""Function (kind, stage, is_first, is_last) that returns the Actions of the stage's Units in a pass: whether the pass
is the stage's first, and last, one of its sort in the step. F is one sort, B and I (which give the gradient of the
input) are one, and B and W (which give the gradients of the weights) are one."""

_NOMINAL_S = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}


def nominal_s(action: Action) -> float:
    """Return the assumed seconds of a pass that was not measured: a backward takes two forwards."""
    return _NOMINAL_S.get(action.kind, 0.0)


def join_halves(lists: Mapping[int, Sequence[Action]], ranks: int, folded: bool = False) -> Lists:
    """Replace I and W by B where W follows its I directly and the result of I is not sent to another rank.

    Args:
        lists: The passes of each rank in order.
        ranks: Size of the "pp" axis.
        folded: True if the stages lie on the ranks in a V (``StagePlaces``).

    Returns:
        The passes of each rank in order, which take as long.
    """
    places = StagePlaces(ranks, folded)
    joined: Lists = {rank: [] for rank in lists}
    for rank, row in lists.items():
        for action in row:
            before = joined[rank][-1] if joined[rank] else None
            is_sent = action.stage > 0 and places.place(action.stage - 1) != rank
            if action.kind is Kind.W and before == action._replace(kind=Kind.I) and not is_sent:
                joined[rank][-1] = action._replace(kind=Kind.B)
            else:
                joined[rank].append(action)
    return joined


def add_communication(
    lists: Mapping[int, Sequence[Action]],
    ranks: int,
    seconds: Callable[[Action], float] = nominal_s,
    folded: bool = False,
) -> Lists:
    """Add SEND and RECV between stages on different ranks; stages on the same rank exchange no messages.

    Args:
        lists: The passes of each rank in order.
        ranks: Size of the "pp" axis.
        seconds: Seconds of a pass, which order the messages; any function gives correct lists.
        folded: True if the stages lie on the ranks in a V (``StagePlaces``).

    Returns:
        The lists with messages.

    Raises:
        PlanError: If the passes of ``lists`` cannot all run.
    """
    stages, places = stages_of(lists), StagePlaces(ranks, folded)
    spans = walk(lists, seconds)
    sent = []
    for span in spans:  # in an order in which every pass follows the passes whose results it takes
        target = _target(span.action, stages)
        if target is not None and places.place(target) != span.rank:
            sent.append((span.stop_s, span.rank, span.action, target))
    sent.sort(key=lambda entry: entry[0])  # stable: passes that take no time stay in order
    done: Lists = {rank: [] for rank in lists}
    position = dict.fromkeys(lists, 0)
    arriving: dict[int, dict[Action, None]] = {
        rank: {} for rank in lists
    }  # each RECV is delayed as long as possible

    def take(rank: int, until: Action | None) -> None:
        """Move Actions of ``rank`` up to ``until`` into its list, each after the message that it takes."""
        row, received = lists[rank], arriving[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            position[rank] += 1
            taken = _takes(action)
            while taken in received:
                first = next(iter(received))
                done[rank].append(first)
                del received[first]
            done[rank].append(action)
            if action == until:
                return

    for _, rank, action, target in sent:
        take(rank, action)
        done[rank] += [*arriving[rank], SEND(action.stage, action.microbatch, target)]
        arriving[rank].clear()
        arriving[places.place(target)][RECV(target, action.microbatch, action.stage)] = None
    for rank in lists:
        take(rank, None)
    return done


def _target(action: Action, stages: int) -> int | None:
    """Return the stage that receives the result of a pass, or None."""
    if action.unit >= 0 or action.kind not in (Kind.F, Kind.B, Kind.I):
        return None
    target = action.stage + (1 if action.kind is Kind.F else -1)
    return target if 0 <= target < stages else None


def _takes(action: Action) -> Action | None:
    """Return the message that a pass needs, or None."""
    if action.unit >= 0 or action.kind not in (Kind.F, Kind.B, Kind.I):
        return None
    return RECV(action.stage, action.microbatch, action.stage + (-1 if action.kind is Kind.F else 1))


def add_sharding(
    lists: Mapping[int, Sequence[Action]], units: UnitActions, reshard_after_forward: bool = True
) -> Lists:
    """Add the Actions of the Units inside a stage, after each pass of that stage.

    Args:
        lists: The passes of each rank in order.
        units: Function that returns the Units' Actions of a pass.
        reshard_after_forward: False gathers a stage's Units once, before its first F, and releases them in its
            last pass: less traffic, but the stage's full weights are in memory for the whole step.

    Returns:
        The lists with the Units' Actions.
    """
    return {rank: _with_units(row, units, not reshard_after_forward) for rank, row in lists.items()}


_SORTS = {Kind.F: (Kind.F,), Kind.B: (Kind.I, Kind.W), Kind.I: (Kind.I,), Kind.W: (Kind.W,)}
"""Sorts of a pass; B is both of I's and of W's."""


def last_passes(row: Sequence[Action]) -> dict[tuple[Kind, int], int]:
    """Return the position of the last pass of each sort (F, I or W) and stage in ``row``."""
    passes = [(i, action) for i, action in enumerate(row) if action.unit < 0 and action.kind.computes]
    return {(sort, action.stage): i for i, action in passes for sort in _SORTS[action.kind]}


def _with_units(row: Sequence[Action], units: UnitActions, once: bool) -> list[Action]:
    last = last_passes(row)
    first = {key: len(row) - 1 - i for key, i in last_passes(row[::-1]).items()}
    # W reads no weight.
    last_of_stage = {
        stage: max(i for (sort, at), i in last.items() if at == stage and sort is not Kind.W)
        for _, stage in last
    }
    begun: set[int] = set()
    done: list[Action] = []
    for i, action in enumerate(row):
        if action.unit >= 0 or not action.kind.computes:
            done.append(action)
            continue
        stage, sorts = action.stage, _SORTS[action.kind]
        is_first, is_last = (any(i == ends[sort, stage] for sort in sorts) for ends in (first, last))
        served = list(units(action.kind, stage, is_first, is_last))
        if once and action.kind is not Kind.W:
            if stage not in begun:
                begun.add(stage)
                gathers = dict.fromkeys(a[:2] for a in served if a.kind in (Kind.LOAD_WEIGHT, Kind.UNSHARD))
                done += [Action(kind, unit) for kind, unit in gathers]
            served = _gathered_once(served, frees=i == last_of_stage[stage])
        done.append(action)
        done += [own._replace(microbatch=action.microbatch) for own in served]
    return done


def _gathered_once(served: list[Action], frees: bool) -> list[Action]:
    """Return the Actions without gathers, and without LOAD_WEIGHT for gathers.

    If ``frees``, the last RESHARD of each Unit stays.
    """
    last_release = {action.unit: i for i, action in enumerate(served) if action.kind is Kind.RESHARD}
    return [
        action
        for i, action in enumerate(served)
        if action.kind not in (Kind.LOAD_WEIGHT, Kind.UNSHARD)
        and (action.kind is not Kind.RESHARD or (frees and i == last_release[action.unit]))
    ]
