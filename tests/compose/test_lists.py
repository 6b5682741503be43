"""All lists of a rank: a step, a skipped step, an evaluation, one pass."""

from typing import Any

import pytest
from tests.plan.described import plan

from shardwise.base.errors import PlanError
from shardwise.compose.lists import UnitLists, forward_actions_of, pass_actions, registered
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.plan.action import NORM, Kind
from shardwise.plan.mesh import Mesh
from shardwise.plan.plan import Plan
from shardwise.plan.validate import validate_forward

ZERO3 = ZeroPolicy(stage=3, prefetch_bytes=1)


def text(actions: Any) -> str:
    return " ".join(map(str, actions))


def evaluation(whole: Plan, batches: int) -> Any:
    return forward_actions_of(whole, PipelinePolicy(), ZERO3, {}, batches)


@pytest.mark.parametrize("mesh", [Mesh(dp_shard=2), Mesh(pp=2, dp_shard=2)], ids=str)
def test_an_evaluation_is_forward_passes_and_is_proved(mesh: Mesh) -> None:
    whole = plan(mesh, 3)
    made = evaluation(whole, 2)
    kinds = {each.kind for each in made}
    assert kinds <= {Kind.F, Kind.UNSHARD, Kind.RESHARD, Kind.SEND, Kind.RECV}
    assert sum(each.kind is Kind.F and each.unit < 0 for each in made) == 2
    for left_out in range(len(made)):
        if made[left_out].kind in (Kind.SEND, Kind.RECV):
            continue  # those of all ranks together are proved with the schedule
        with pytest.raises(PlanError):
            validate_forward(whole, made[:left_out] + made[left_out + 1 :], 2)


def test_one_pass_is_that_of_an_evaluation() -> None:
    whole = plan(Mesh(dp_shard=2), 3, prefetch_bytes=1)
    lists = UnitLists(whole.own, ZERO3)
    made = pass_actions(whole, lists, 0, registered(whole.own, 0))
    assert text(each._replace(microbatch=0) for each in made) == text(evaluation(whole, 1)[1:])


def test_a_backward_pass_of_another_engine_reduces_nothing() -> None:
    whole = plan(Mesh(dp_shard=2), 3)
    lists, order = UnitLists(whole.own, ZERO3), registered(whole.own, 0).boundaries
    own, foreign = lists.backward(order, is_last=True, is_first=True), lists.foreign(order)
    assert [each for each in own if each.kind not in (Kind.REDUCE, Kind.ARRIVE)] == foreign
    assert lists.foreign(order) is foreign, "made once for an order"


@pytest.mark.parametrize("delayed", [False, True])
def test_a_skipped_step_ends_with_what_belongs_to_the_step_before(delayed: bool) -> None:
    whole = plan(Mesh(dp_shard=2), 1, on_disk=1.0, delayed=delayed).own
    behind = whole.actions[whole.actions.index(NORM) + 1 :]
    updates = [each for each in behind if each.kind is Kind.SWAP_WEIGHT]
    assert bool(updates) == delayed
    wanted = [each for swap in updates for each in (swap, swap._replace(kind=Kind.UNSHARD))]
    assert list(whole.skipped) == wanted
