"""The validator says no: lists that were broken on purpose, each in its own way."""

from collections.abc import Callable

import pytest

from shardwise.base.errors import PlanError
from shardwise.parallel.pipeline.passes import add_communication
from shardwise.parallel.pipeline.schedules import forward_only, schedule
from shardwise.plan.action import RECV, SEND, Action, B, F, Kind
from shardwise.plan.dataflow import Lists
from shardwise.plan.validate_schedule import validate_schedule

MICROBATCHES = 4


def good() -> Lists:
    """Two ranks, two stages each."""
    return add_communication(schedule("interleaved_1f1b", 2, MICROBATCHES, 2), 2)


def check(lists: Lists) -> None:
    validate_schedule(lists, 2, MICROBATCHES)


def test_the_unbroken_list_passes() -> None:
    check(good())


def test_every_action_is_needed() -> None:
    for rank, row in good().items():
        for i in range(len(row)):
            lists = good()
            del lists[rank][i]
            with pytest.raises(PlanError):
                check(lists)


def test_every_action_happens_once() -> None:
    for rank, row in good().items():
        for i, action in enumerate(row):
            lists = good()
            lists[rank].insert(i, action)
            with pytest.raises(PlanError):
                check(lists)


def swap(rank: int, first: Action, second: Action) -> Callable[[Lists], None]:
    def broken(lists: Lists) -> None:
        row = lists[rank]
        i, j = row.index(first), row.index(second)
        row[i], row[j] = row[j], row[i]

    return broken


def replace(rank: int, action: Action, other: Action) -> Callable[[Lists], None]:
    def broken(lists: Lists) -> None:
        lists[rank][lists[rank].index(action)] = other

    return broken


def move_to_front(rank: int, action: Action) -> Callable[[Lists], None]:
    def broken(lists: Lists) -> None:
        lists[rank].remove(action)
        lists[rank].insert(0, action)

    return broken


INPUT, WEIGHT = Action(Kind.I, -1, 0, 0), Action(Kind.W, -1, 0, 0)


@pytest.mark.parametrize(
    "broken, says",
    [
        (swap(1, RECV(1, 0, 0), RECV(1, 1, 0)), r"F\(1,0\) without RECV\(1,0,0\) before it"),
        (swap(0, F(0, 0), F(0, 1)), r"SEND\(0,0,1\) without F\(0,0\) before it"),
        (move_to_front(1, B(3, 0)), r"rank 1 has B\(3,0\) without F\(3,0\) before it"),
        (replace(1, B(3, 0), F(3, 0)), r"rank 1 runs F\(3,0\) 2 times"),
        (replace(0, F(0, 3), F(0, 4)), "microbatches are 0 to 3"),
        (replace(0, F(0, 3), F(1, 3)), r"rank 0 has F\(1,3\), but stage 1 lives on rank 1"),
        (replace(0, SEND(0, 0, 1), SEND(0, 0, 2)), "a message of the rank to itself"),
        (lambda lists: lists.pop(1), r"lists for ranks \[0\]; expected one for each of 0 to 1"),
    ],
)
def test_planted_faults(broken: Callable[[Lists], None], says: str) -> None:
    lists = good()
    broken(lists)
    with pytest.raises(PlanError, match=says):
        check(lists)


def test_channels_keep_their_order() -> None:
    lists = {
        0: [F(0, 0), F(0, 1), SEND(0, 0, 1), SEND(0, 1, 1)],
        1: [RECV(1, 1, 0), RECV(1, 0, 0), F(1, 1), F(1, 0)],
    }
    with pytest.raises(
        PlanError, match=r"message 0 from rank 0 to rank 1 is SEND\(0,0,1\) at its sender and RECV\(1,1,0\)"
    ):
        validate_schedule(lists, 2, 2, forward_only=True)


def test_sends_that_block_each_other_are_a_deadlock() -> None:
    """1F1B as it is written at first: both send, then both receive. Buffers would hide it until a message is large."""
    lists = add_communication(schedule("1f1b", 2, 2), 2)
    row = lists[1]
    i = row.index(RECV(1, 1, 0))
    row[i], row[i + 1] = row[i + 1], row[i]
    with pytest.raises(
        PlanError, match=r"deadlock .* rank 0 before SEND\(0,1,1\); rank 1 before SEND\(1,0,0\)"
    ):
        validate_schedule(lists, 2)


def test_a_ring_of_three() -> None:
    """Every rank hands on all it has before it takes what has come round."""
    lists: Lists = {rank: [] for rank in range(3)}
    for stage in range(6):
        for i in range(3):
            lists[stage % 3] += [RECV(stage, i, stage - 1)] * (stage > 0) + [F(stage, i)]
            lists[stage % 3] += [SEND(stage, i, stage + 1)] * (stage < 5)
    stands = r"rank 0 before SEND\(0,2,1\); rank 1 before SEND\(1,1,2\); rank 2 before SEND\(2,0,3\)"
    with pytest.raises(PlanError, match=f"deadlock .* {stands}"):
        validate_schedule(lists, 3, 3, forward_only=True)


def test_parts_of_a_backward() -> None:
    whole = add_communication({0: [F(0, 0), INPUT, WEIGHT]}, 1)
    validate_schedule(whole, 1)
    with pytest.raises(PlanError, match=r"W\(0,0\) without I\(0,0\) before it"):
        validate_schedule({0: [F(0, 0), WEIGHT, INPUT]}, 1)
    with pytest.raises(PlanError, match="has F, I; expected B F or F I W"):
        validate_schedule({0: [F(0, 0), INPUT]}, 1)


def test_evaluation_has_no_backward() -> None:
    lists = forward_only(1, 2)
    with pytest.raises(PlanError, match="has F; expected"):
        validate_schedule(lists, 1)
    with pytest.raises(PlanError, match="has B, F; expected F"):
        validate_schedule(schedule("1f1b", 1, 2), 1, forward_only=True)


def test_stages_that_do_not_fill_the_ranks() -> None:
    with pytest.raises(PlanError, match="3 stages on 2 ranks; expected as many on each: 4"):
        validate_schedule({0: [F(0, 0), F(2, 0)], 1: [F(1, 0)]}, 2, forward_only=True)


def test_a_v_is_refused_where_stages_lie_round_robin_and_the_other_way() -> None:
    folded = add_communication(schedule("zb_v", 2, MICROBATCHES), 2, folded=True)
    validate_schedule(folded, 2, MICROBATCHES, folded=True)
    with pytest.raises(PlanError, match=r"stage 3 lives on rank 1"):
        validate_schedule(folded, 2, MICROBATCHES)
    dealt = add_communication(schedule("interleaved_1f1b", 2, MICROBATCHES, 2), 2)
    with pytest.raises(PlanError, match=r"stage 2 lives on rank 1"):
        validate_schedule(dealt, 2, MICROBATCHES, folded=True)


def test_a_handover_inside_a_rank_needs_the_pass_before() -> None:
    lists = add_communication(schedule("zb_v", 2, MICROBATCHES), 2, folded=True)
    row = list(lists[1])
    before, after = row.index(F(1, 0)), row.index(F(2, 0))
    row[before], row[after] = row[after], row[before]
    with pytest.raises(PlanError, match=r"F\(2,0\) without F\(1,0\) before it"):
        validate_schedule({0: lists[0], 1: row}, 2, MICROBATCHES, folded=True)
    with pytest.raises(PlanError, match=r"message of the rank to itself"):
        validate_schedule({0: lists[0], 1: [*lists[1], SEND(1, 0, 2)]}, 2, MICROBATCHES, folded=True)
