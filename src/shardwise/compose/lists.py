"""Lists: every list of Actions that a rank walks is made here, from the Units of its class and the orders of their use.

    a step          F and B of the stages            parallel/pipeline/schedules.py, also if there is one stage;
                                                     B in two halves, I and W, where that saves time
                    + SEND and RECV                  parallel/pipeline/passes.py
                    + the Actions of the Units inside each pass, FETCH of tables in forward passes      plan/lists.py
                    + DELIVER, SUM, NORM, and the updates at the end                                    plan/lists.py
    a skipped step  the same up to NORM, then only what belongs to the update of the step before (SWAP_WEIGHT)
    an evaluation   F of the stages with messages and Units, without a backward pass
    one pass        the Actions of the Units in one pass, which the hooks of a user's own loop walk: an evaluation, a
                    backward pass whose forward pass took another way, a backward pass of another engine's loss

The order of Units inside a pass is that of registration until the ranks have seen the model's own
(parallel/zero/order.py). Lists of steps are proved by ``validate_plan``, lists of evaluations by ``validate_forward``.

Cost: one look at each Action; lists of a pass are cached by their order.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from shardwise.parallel.pipeline.passes import (
    add_communication,
    add_sharding,
    join_halves,
    nominal_s,
)
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.parallel.pipeline.schedules import forward_only, schedule
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.plan.action import ALL_TO_ALL, BALANCE, NORM, SCALE, SUM, TRUST_RATIO, Action, F, Kind
from shardwise.plan.dataflow import Lists
from shardwise.plan.lists import (
    PrefetchLimits,
    UnitBoundary,
    backward_actions,
    forward_actions,
    is_inside,
    registration_boundaries,
    update_actions,
    weight_actions,
    with_fetches,
)
from shardwise.plan.plan import Plan, RankClass
from shardwise.plan.slices import TensorSlices
from shardwise.plan.validate import validate_forward

_KEPT = 16
"""Most lists of passes that are cached for different orders of Units."""


class StageOrder(NamedTuple):
    """Order in which the Units of a stage run, by their numbers on the rank."""

    boundaries: Sequence[UnitBoundary]
    fetches: Mapping[int, int]
    """Unit behind whose F a collection of embedding tables is fetched, by number of the collection, in the order of
    FETCHes.
    """


Orders = Mapping[int, StageOrder]
"""Orders of Units, by stage."""


class UnitLists:
    """The maker of the lists of Units' Actions in the passes of one class of ranks.

    Args:
        ranks: The class of ranks.
        zero: Keys under ``zero:``.
    """

    def __init__(self, ranks: RankClass, zero: ZeroPolicy):
        limit = 0 if zero.prefetch_bytes == "auto" else int(zero.prefetch_bytes)
        self._ranks = ranks
        self._prefetch = PrefetchLimits(limit, [unit.weight_bytes for unit in ranks.units])
        self._cached = lru_cache(_KEPT)(self._make)

    def forward(self, order: StageOrder, is_first: bool) -> list[Action]:
        """Return the Units' Actions of a forward pass of a step.

        Args:
            order: Order of the Units.
            is_first: True for the stage's first forward pass of a step, beside which updates may still run.
        """
        what = "first forward" if is_first else "forward"
        return self._cached(tuple(order.boundaries), tuple(order.fetches.items()), what)

    def forward_alone(self, order: StageOrder) -> list[Action]:
        """Return the Units' Actions of a forward pass without a backward pass, which saves nothing.

        Args:
            order: Order of the Units.
        """
        return self._cached(tuple(order.boundaries), tuple(order.fetches.items()), "lone forward")

    def backward(
        self, boundaries: Sequence[UnitBoundary], is_last: bool, is_first: bool, kind: Kind = Kind.B
    ) -> list[Action]:
        """Return the Units' Actions of a backward pass, or of one half of it.

        Args:
            boundaries: Order of the forward pass.
            is_last: True for the stage's last pass of this sort in a step.
            is_first: True for the stage's first pass of this sort in a step.
            kind: B, I or W.
        """
        what = ("first " if is_first else "") + ("last " if is_last else "") + kind.name
        return self._cached(tuple(boundaries), (), what)

    def foreign(self, boundaries: Sequence[UnitBoundary]) -> list[Action]:
        """Return the Units' Actions of a backward pass that adds to no gradient: another engine's loss.

        Args:
            boundaries: Order of the forward pass.
        """
        return self._cached(tuple(boundaries), (), "foreign")

    def _make(
        self, boundaries: tuple[UnitBoundary, ...], fetches: tuple[tuple[int, int], ...], what: str
    ) -> list[Action]:
        strategies, trained, prefetch = self._ranks.strategies, self._ranks.trained, self._prefetch
        if what.endswith("forward"):
            first, saves = what.startswith("first"), not what.startswith("lone")
            if first:
                prefetch = prefetch.behind_updates(boundaries, strategies, trained)
            made = forward_actions(boundaries, strategies, prefetch, saves, first)
            return with_fetches(made, dict(fetches))
        if what == "foreign":
            trained = (False,) * len(trained)
        under_way, later, is_last = self._ranks.under_way, self._ranks.later_units, "last" in what
        if what.endswith(Kind.W.name):
            return weight_actions(boundaries, strategies, trained, is_last, later, under_way)
        return backward_actions(
            boundaries,
            strategies,
            trained,
            is_last,
            prefetch,
            under_way,
            "first" in what,
            later if what.endswith(Kind.I.name) else None,
        )


PassSeconds = Mapping[tuple[Kind, int], float]
"""Seconds of a stage's passes, by Kind and stage."""


def schedule_lists(
    ranks: int, microbatches: int, policy: PipelinePolicy, measured: PassSeconds = MappingProxyType({})
) -> Lists:
    """Return passes, SEND and RECV of one optimizer step, by index on "pp"; without a pipeline F and B in turn.

    Args:
        ranks: Ranks on "pp".
        microbatches: Microbatches of one optimizer step.
        policy: Keys under ``pipeline:``.
        measured: Measured seconds of all passes; empty: a forward pass and each part of a backward pass take as long.
    """
    if ranks == 1:
        return schedule("1f1b", 1, microbatches)

    def seconds(action: Action) -> float:
        if not measured:
            return nominal_s(action)
        kinds = (Kind.I, Kind.W) if action.kind is Kind.B else (action.kind,)
        return sum(measured.get((kind, action.stage), 0.0) for kind in kinds)

    virtual_stages, limits = policy.virtual_stages, (policy.live, policy.wgrad_delay)
    passes = schedule(policy.schedule, ranks, microbatches, virtual_stages, seconds, *limits)
    if measured or policy.schedule != "zb_greedy":  # the seconds of both halves are still to be measured
        passes = join_halves(passes, ranks, policy.folded)
    return add_communication(passes, ranks, seconds, policy.folded)


def halved_stages(rows: Lists) -> frozenset[int]:
    """Return the stages that compute gradients of inputs and of weights apart (I and W) in any backward pass."""
    return frozenset(action.stage for row in rows.values() for action in row if action.kind is Kind.W)


def turning_stages(row: Sequence[Action]) -> frozenset[int]:
    """Return the stages of which every forward pass is followed at once by its own backward pass.

    Args:
        row: F, B, SEND and RECV of one class of ranks (``schedule_lists``).
    """
    passes = [action for action in row if action.kind.computes]
    stages = {action.stage for action in passes}
    others = {
        action.stage
        for action, behind in zip(passes, [*passes[1:], None], strict=True)
        if action.kind is Kind.F
        and behind not in (action._replace(kind=Kind.B), action._replace(kind=Kind.I))
    }
    return frozenset(stages - others)


def forward_lists(ranks: int, microbatches: int, policy: PipelinePolicy) -> Lists:
    """Return F, SEND and RECV of microbatches without a backward pass, by index on "pp".

    Args:
        ranks: Ranks on "pp".
        microbatches: Number of microbatches.
        policy: Keys under ``pipeline:``.
    """
    passes = forward_only(ranks, microbatches, policy.stages_per_rank, policy.folded)
    return add_communication(passes, ranks, folded=policy.folded)


def step_actions(
    ranks: RankClass, row: Sequence[Action], plan: Plan, zero: ZeroPolicy, loads_ahead: int, orders: Orders
) -> tuple[Action, ...]:
    """Return the list of one optimizer step.

    Args:
        ranks: The class of ranks.
        row: F, B, SEND and RECV of the class (``schedule_lists``).
        plan: The Plan, without lists.
        zero: Keys under ``zero:``.
        loads_ahead: Number of Units whose state is read from a disk at once.
        orders: Orders of the stages that differ from that of registration.
    """
    lists, strategies, trained = UnitLists(ranks, zero), ranks.strategies, ranks.trained
    known = {stage: orders.get(stage) or registered(ranks, stage) for stage in ranks.stages}

    def units(kind: Kind, stage: int, is_first: bool, is_last: bool) -> list[Action]:
        if kind is Kind.F:
            return lists.forward(known[stage], is_first)
        return lists.backward(known[stage].boundaries, is_last, is_first, kind)

    actions = add_sharding(
        {0: row},
        units,
        zero.reshard_after_forward or not any(each.has_windows for each in strategies),
    )[0]
    actions += [Action(Kind.DELIVER, unit.index) for unit in ranks.tables]
    if TensorSlices(plan.registry, plan.mesh, 0).shares_gradients(ranks.stages):
        actions.append(SUM)
    rows = (Action(Kind.STEP, unit.index) for unit in ranks.tables)
    needs = {unit.index: plan.registry.needs_of(unit) for unit in ranks.units}
    directed = [unit for unit, found in needs.items() if found - {"elements"}]
    # Norms are summed over all ranks of the job, matrices are distributed among the ranks of a stage.
    between = [TRUST_RATIO] * bool(plan.registry.needs("norm"))
    between += [ALL_TO_ALL] * any("matrix" in found for found in needs.values())
    updates = update_actions(trained, strategies, directed, between, loads_ahead)
    moves_routers = bool(plan.registry.needs("loads", ranks.stages))
    return (*actions, NORM, *updates, *rows, *[BALANCE] * moves_routers, *[SCALE] * ranks.updates_fp8)


def forward_actions_of(
    plan: Plan, pipeline: PipelinePolicy, zero: ZeroPolicy, orders: Orders, batches: int
) -> list[Action]:
    """Return the list of forward passes without a backward pass of the Plan's rank, proved.

    Args:
        plan: The Plan.
        pipeline: Keys under ``pipeline:``.
        zero: Keys under ``zero:``.
        orders: Orders of the stages that differ from that of registration.
        batches: Number of forward passes.

    Raises:
        PlanError: if the list is not valid.
    """
    place, ranks = plan.mesh.index("pp", plan.rank), plan.own
    row = forward_lists(plan.mesh.pp, batches, pipeline)[place]
    lists = UnitLists(ranks, zero)
    known = {stage: orders.get(stage) or registered(ranks, stage) for stage in ranks.stages}
    made = add_sharding({0: row}, lambda kind, stage, *_: lists.forward_alone(known[stage]))[0]
    validate_forward(plan, made, batches)
    return made


def pass_actions(plan: Plan, lists: UnitLists, stage: int, order: StageOrder) -> list[Action]:
    """Return the Units' Actions of one forward pass of a stage without a backward pass, proved.

    Args:
        plan: The Plan.
        lists: The maker of lists of the Plan's rank.
        stage: The stage.
        order: Order of its Units.

    Raises:
        PlanError: if the list is not valid.
    """
    made = lists.forward_alone(order)
    inside = [each._replace(microbatch=0) for each in made]
    validate_forward(plan, [F(stage, 0), *inside], 1, stage)
    return made


def registered(ranks: RankClass, stage: int) -> StageOrder:
    """Return the order of registration, by the Units' numbers on the rank.

    Args:
        ranks: Class of ranks with the Units.
        stage: The stage.
    """
    units = ranks.units_of(stage)
    boundaries = [
        UnitBoundary(enters, units[place].index)
        for enters, place in registration_boundaries([unit.name for unit in units])
    ]
    fetches = {}
    for table in ranks.tables_of(stage):
        around = [unit for unit in units if is_inside(table.name, unit.name)]
        fetches[table.index] = max(around, key=lambda unit: len(unit.name)).index
    return StageOrder(boundaries, fetches)
