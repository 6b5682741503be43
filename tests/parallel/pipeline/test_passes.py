"""Messages and Unit Actions find their places."""

from collections.abc import Sequence

import pytest

from shardwise.base.errors import PlanError
from shardwise.parallel.pipeline.passes import (
    add_communication,
    add_sharding,
    join_halves,
    nominal_s,
)
from shardwise.parallel.pipeline.schedules import forward_only, schedule
from shardwise.plan.action import Action, B, F, Kind
from shardwise.plan.dataflow import timeline_of
from shardwise.plan.validate_schedule import validate_schedule
from tests.engine.halves import halved
from tests.parallel.pipeline.shapes import SHAPES, WHOLE, WIDE, lists_of


def words(row: Sequence[Action]) -> str:
    return " ".join(map(str, row))


def test_messages_of_two_ranks() -> None:
    lists = add_communication(schedule("1f1b", 2, 2), 2)
    assert words(lists[0]) == ("F(0,0) SEND(0,0,1) F(0,1) SEND(0,1,1) RECV(0,0,1) B(0,0) RECV(0,1,1) B(0,1)")
    assert words(lists[1]) == (
        "RECV(1,0,0) F(1,0) B(1,0) RECV(1,1,0) SEND(1,0,0) F(1,1) B(1,1) SEND(1,1,0)"
    ), "rank 1 takes F(0,1) before it sends: two SENDs that block would wait for each other"


def test_stages_of_one_rank_exchange_nothing() -> None:
    lists = schedule("interleaved_1f1b", 1, 3, 4)
    assert add_communication(lists, 1) == lists


def test_messages_add_no_time_where_they_take_none() -> None:
    """The order of the messages never makes a rank wait for what its next pass does not need."""
    for shape in SHAPES + WIDE:
        bare = lists_of(shape)
        with_messages = add_communication(bare, shape.ranks, folded=shape.folded)
        assert timeline_of(with_messages, nominal_s).makespan_s == timeline_of(bare, nominal_s).makespan_s, (
            shape
        )


def test_a_message_is_received_just_before_its_use_unless_another_message_is_next() -> None:
    for shape in SHAPES:
        for row in add_communication(lists_of(shape), shape.ranks, folded=shape.folded).values():
            for action, following in zip(row, row[1:], strict=False):
                if action.kind is Kind.RECV and following.kind.computes:
                    assert (following.stage, following.microbatch) == action[3:1:-1], shape


@pytest.mark.parametrize("forward_s, backward_s", [(1, 1), (2, 1), (1, 5), (0, 0)])
def test_lists_ordered_by_other_seconds_are_proved_too(forward_s: float, backward_s: float) -> None:
    for shape in SHAPES[::3] + WIDE:
        lists = add_communication(
            lists_of(shape),
            shape.ranks,
            lambda action: forward_s if action.kind is Kind.F else backward_s,
            shape.folded,
        )
        validate_schedule(lists, shape.ranks, shape.microbatches, folded=shape.folded)


def test_backwards_in_two_parts_send_the_gradient_after_the_first() -> None:
    lists = {
        0: [F(0, 0), Action(Kind.I, -1, 0, 0), Action(Kind.W, -1, 0, 0)],
        1: [F(1, 0), Action(Kind.I, -1, 0, 1), Action(Kind.W, -1, 0, 1)],
    }
    with_messages = add_communication(lists, 2)
    assert words(with_messages[1]) == "RECV(1,0,0) F(1,0) I(1,0) SEND(1,0,0) W(1,0)"
    validate_schedule(with_messages, 2)


def test_halves_are_joined_where_no_other_rank_waits() -> None:
    first, second = join_halves(schedule("zb_h1", 2, 3), 2).values()
    assert words(first) == "F(0,0) F(0,1) B(0,0) F(0,2) B(0,1) B(0,2)"
    assert words(second) == words(schedule("zb_h1", 2, 3)[1]), "rank 0 waits for each I of rank 1"
    turn = join_halves(schedule("zb_v", 2, 1, 2), 2, folded=True)[1]
    assert words(turn) == "F(1,0) F(2,0) B(2,0) I(1,0) W(1,0)", (
        "stage 2 hands its gradient over on its own rank"
    )


def test_joined_halves_take_as_long_as_before() -> None:
    for shape in SHAPES:
        if shape in WHOLE:
            continue
        apart = lists_of(shape)
        joined = join_halves(apart, shape.ranks, shape.folded)
        lists = add_communication(joined, shape.ranks, folded=shape.folded)
        validate_schedule(lists, shape.ranks, shape.microbatches, folded=shape.folded)
        assert timeline_of(lists, nominal_s).makespan_s == timeline_of(apart, nominal_s).makespan_s, shape


def test_an_order_that_cannot_run_is_named() -> None:
    with pytest.raises(PlanError, match=r"rank 0 before B\(0,0\); rank 1 before B\(1,0\)"):
        add_communication({0: [F(0, 0), B(0, 0)], 1: [B(1, 0), F(1, 0)]}, 2)


def units(kind: Kind, stage: int, first: bool, last: bool) -> list[Action]:
    if kind is Kind.F:
        return [Action(each, stage) for each in (Kind.UNSHARD, Kind.F, Kind.RESHARD)]
    inside = [Kind.UNSHARD, kind, Kind.RESHARD] if kind is not Kind.W else [kind]
    return [Action(each, stage) for each in inside + [Kind.REDUCE] * (last and kind is not Kind.I)]


def test_unit_actions_follow_their_pass() -> None:
    lists = add_sharding(add_communication(schedule("1f1b", 2, 2), 2), units)
    assert words(lists[1]) == (
        "RECV(1,0,0) F(1,0) UNSHARD(u1,0) F(u1,0) RESHARD(u1,0) B(1,0) UNSHARD(u1,0) B(u1,0) RESHARD(u1,0) "
        "RECV(1,1,0) SEND(1,0,0) F(1,1) UNSHARD(u1,1) F(u1,1) RESHARD(u1,1) B(1,1) UNSHARD(u1,1) B(u1,1) RESHARD(u1,1) "
        "REDUCE(u1,1) SEND(1,1,0)"
    )


def test_weights_gathered_once_per_step() -> None:
    lists = add_sharding(schedule("1f1b", 1, 2), units, reshard_after_forward=False)
    assert words(lists[0]) == (
        "UNSHARD(u0) F(0,0) F(u0,0) B(0,0) B(u0,0) F(0,1) F(u0,1) B(0,1) B(u0,1) RESHARD(u0,1) REDUCE(u0,1)"
    )
    evaluation = add_sharding(forward_only(1, 2), units, reshard_after_forward=False)
    assert words(evaluation[0]) == "UNSHARD(u0) F(0,0) F(u0,0) F(0,1) F(u0,1) RESHARD(u0,1)"


def test_a_backward_pass_in_two_parts_is_reduced_behind_the_second() -> None:
    passes = [action(0, i) for i in range(2) for action in (F, B)]
    for delay, expected in (
        (
            0,
            "I(0,0) I(u0,0) W(0,0) W(u0,0) F(0,1) F(u0,1) I(0,1) I(u0,1) RESHARD(u0,1) W(0,1) W(u0,1) REDUCE(u0,1)",
        ),
        (
            1,
            "I(0,0) I(u0,0) F(0,1) F(u0,1) I(0,1) I(u0,1) RESHARD(u0,1) W(0,0) W(u0,0) W(0,1) W(u0,1) REDUCE(u0,1)",
        ),
    ):
        made = add_sharding({0: halved(passes, delay)}, units, reshard_after_forward=False)
        assert words(made[0]) == "UNSHARD(u0) F(0,0) F(u0,0) " + expected


@pytest.mark.parametrize("reshards", [True, False])
def test_passes_in_either_order_give_one_list_that_is_proved(reshards: bool) -> None:
    for shape in WHOLE[::5] + WIDE:
        bare = lists_of(shape)
        one = add_sharding(add_communication(bare, shape.ranks), units, reshards)
        validate_schedule(one, shape.ranks, shape.microbatches)
        gathers = sum(action.kind is Kind.UNSHARD for row in one.values() for action in row)
        stages = shape.ranks * shape.virtual_stages
        assert gathers == stages * (2 * shape.microbatches if reshards else 1)
