"""Where pipeline and ZeRO meet: a schedule's lists, and what the Units of a stage do inside each of its passes.

    schedule(...)          F and B of the stages               parallel/pipeline/schedules.py
    + add_communication    SEND and RECV                       parallel/pipeline/passes.py
    + add_sharding         UNSHARD, RESHARD, REDUCE of Units   the Actions come from plan/lists.py
    + STEP                 once, when all microbatches are done

Cost: one look at each Action, once per number of microbatches.
"""

from collections.abc import Mapping

from shardwise.parallel.pipeline.passes import add_communication, add_sharding
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.parallel.pipeline.schedules import forward_only, schedule
from shardwise.parallel.zero.executor import Executor
from shardwise.plan import lists as lists_of_units
from shardwise.plan.action import Action
from shardwise.plan.lists import Strategy
from shardwise.plan.plan import Plan
from shardwise.plan.validate import validate

Lists = dict[int, list[Action]]
"""Actions by the rank's index on "pp"."""


def step_lists(ranks: int, microbatches: int, policy: PipelinePolicy) -> Lists:
    """What the stages do in one optimizer step. Errors: PlanError."""
    lists = add_communication(schedule(policy.schedule, ranks, microbatches, policy.virtual_stages), ranks)
    validate(lists, ranks)
    return lists


def forward_lists(ranks: int, microbatches: int, policy: PipelinePolicy) -> Lists:
    """What the stages do for microbatches without a backward pass."""
    return add_communication(forward_only(ranks, microbatches, policy.virtual_stages), ranks)


def with_units(
    lists: Lists,
    here: int,
    stages: Mapping[int, tuple[Plan, Executor]],
    strategy: Strategy,
    holds: bool,
) -> Lists:
    """``lists`` with the Actions of the Units of the ``stages`` on rank ``here``, numbered as in their merged Plan."""
    first, offset = {}, 0
    for index, (plan, _) in sorted(stages.items()):
        first[index], offset = offset, offset + len(plan.units)
    trained = {
        index: [any(bucket.key.trained for bucket in unit.buckets) for unit in plan.units]
        for index, (plan, _) in stages.items()
    }

    def numbered(stage: int, actions: list[Action]) -> list[Action]:
        return [action._replace(unit=action.unit + first[stage]) for action in actions]

    def forward(stage: int, last: bool) -> list[Action]:
        executor = stages[stage][1]
        return numbered(
            stage, lists_of_units.forward_actions(executor.brackets, strategy, executor.prefetch_units)
        )

    def backward(stage: int, last: bool) -> list[Action]:
        executor = stages[stage][1]
        return numbered(
            stage,
            lists_of_units.backward_actions(
                executor.brackets, strategy, trained[stage], last, executor.prefetch_units
            ),
        )

    own = add_sharding({here: lists[here]}, forward, backward, "step" if holds else "microbatch")[here]
    updates = [
        action
        for index in sorted(stages)
        for action in numbered(index, lists_of_units.update_actions(trained[index], strategy))
    ]
    return lists | {here: own + updates}
