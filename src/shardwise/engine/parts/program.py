"""The lists of Actions that this rank walks, and the walker.

    a step         the Plan's list, in the order of Units that all ranks follow now
    an evaluation  only forward passes, in the same order
    keys ahead     the INPUT_DISTs and READs of either list, which a thread may run ahead of the rest

The Plan is made anew, and validated, when the ranks agree on another order of Units, and for a step with another number
of passes. In a user's own loop that number becomes known as the step runs. Lists of more and of fewer passes begin
alike, so the rest of one list can replace the rest of another.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from shardwise.compose.lists import Orders, PassSeconds, StageOrder, pass_actions
from shardwise.compose.plan import PlannedModel
from shardwise.engine.parts.table_units import TableUnits
from shardwise.parallel.zero.order import UnitOrder
from shardwise.plan.action import Action, Kind
from shardwise.plan.dataflow import Lists
from shardwise.plan.lists import UnitBoundary, keys_ahead
from shardwise.plan.plan import Plan
from shardwise.plan.walker import Walker

_KEPT = 8
"""Most Plans, and lists of keys ahead, that are cached for different numbers of passes."""


class StageLists:
    """The lists of single passes of one stage, in the orders that its hooks have seen.

    Args:
        planned: The model's description and its Plan.
        stage: The stage.
        order: The observed order of the stage's Units.
    """

    def __init__(self, planned: PlannedModel, stage: int, order: UnitOrder):
        self._planned = planned
        self._stage = stage
        self.order = order
        self._numbers = [unit.index for unit in planned.plan.own.units_of(stage)]
        self._proved: tuple[StageOrder, list[Action]] | None = None

    def in_force(self) -> StageOrder:
        """Return the order that is followed now, with Units by their numbers on the rank."""
        return StageOrder(self._on_rank(self.order.agreed), self.order.fetches)

    def _on_rank(self, order: Sequence[UnitBoundary]) -> tuple[UnitBoundary, ...]:
        return tuple(UnitBoundary(enters, self._numbers[unit]) for enters, unit in order)

    def forward(self) -> list[Action]:
        """Return the list of a forward pass without a backward pass, in the agreed order."""
        order = self.in_force()
        if self._proved is None or self._proved[0] != order:
            made = pass_actions(self._planned.plan, self._planned.lists, self._stage, order)
            self._proved = order, made
        return self._proved[1]

    def backward(self, order: Sequence[UnitBoundary], last: bool, first: bool, kind: Kind) -> list[Action]:
        """Return the list of the backward pass of ``order``, the last or the first one of the step or neither.

        ``kind`` is B, or I for a pass that leaves gradients of weights to W.
        """
        return self._planned.lists.backward(self._on_rank(order), last, first, kind)

    def foreign(self, order: Sequence[UnitBoundary]) -> list[Action]:
        """Return the list of a backward pass that adds to no gradient."""
        return self._planned.lists.foreign(self._on_rank(order))


class ActionLists:
    """The lists of Actions of one rank, in the order of Units that all ranks follow now.

    Args:
        planned: The model's description and its Plan.
        orders: The observed order of Units, by stage of this rank.
        tables: Collections of embedding tables in the list.
        walker: The walker of this rank's list.
    """

    def __init__(
        self, planned: PlannedModel, orders: Mapping[int, UnitOrder], tables: TableUnits, walker: Walker
    ):
        self.planned = planned
        """The model's description and the Plan, its lists in the order of registration."""
        self.walker = walker
        self.tables = tables
        """Collections of embedding tables in the list."""
        self.microbatches = planned.policies.microbatches
        """Pairs of a forward and a backward pass in the list that is walked now."""
        self._orders = orders
        self._plans: dict[int, Plan] = {self.microbatches: planned.plan}
        self._forwards: dict[int, list[Action]] = {}
        self._asks: Callable[[int], list[Action]] | None = None

    @property
    def plan(self) -> Plan:
        """The Plan as it is walked now; lists of other ranks' Units are in the order of registration."""
        return self._of(self.microbatches)

    def _of(self, microbatches: int) -> Plan:
        if microbatches not in self._plans:
            if len(self._plans) >= _KEPT:
                self._plans.clear()
            self._plans[microbatches] = self.planned.in_order(self._in_force(), microbatches)
        return self._plans[microbatches]

    def step(self) -> tuple[Action, ...]:
        """Return the Actions of one optimizer step."""
        return self.plan.own.actions

    def begin(self, microbatches: int) -> None:
        """Set the walker to the start of a step.

        Raises:
            PlanError: if no list can be made for this number of microbatches.
        """
        self._of(microbatches)
        self.microbatches = microbatches
        self.walker.begin(self.step())

    def follow(self, microbatches: int) -> None:
        """Continue the running step with the list of this many pairs of passes."""
        if microbatches != self.microbatches:
            self.microbatches = microbatches
            self.walker.follow(self.step())

    def forward(self, batches: int) -> list[Action]:
        """Return the list of ``batches`` forward passes of a pipeline."""
        if batches not in self._forwards:
            if len(self._forwards) >= _KEPT:
                self._forwards.clear()
            self._forwards[batches] = self.planned.forward_list(self._in_force(), batches)
        return self._forwards[batches]

    def asks(self) -> Callable[[int], list[Action]]:
        """Return a function from a number of microbatches to what goes ahead of them, in the order followed now.

        These are INPUT_DISTs, and READs of tables with tiers.

        A thread may call the function while another thread adopts another order. Ranks that took the function after the
        same step get the same Actions.
        """
        if self._asks is None:
            planned, orders, tiered = self.planned, self._in_force(), self.tables.tiered
            usual = planned.policies.microbatches
            step = keys_ahead(self._of(usual).own.actions, tiered)

            @lru_cache(_KEPT)
            def asks(microbatches: int) -> list[Action]:
                if microbatches == usual:
                    return step
                if not microbatches:
                    return []
                return keys_ahead(planned.forward_list(orders, microbatches), tiered)

            self._asks = asks
        return self._asks

    @property
    def passes(self) -> Lists:
        """Passes of stages and messages of a step, by index on "pp"."""
        rows = enumerate(self.plan.actions.values())
        return {
            place: [each for each in row if each.unit < 0 and not each.kind.ends_step] for place, row in rows
        }

    def adopt_order(self) -> None:
        """Follow the new order of Units in the next list, after all ranks have seen one order."""
        changed = [order.adopt() for order in self._orders.values()]
        if self.planned.plan.own.tables:
            changed.append(self.tables.adopt())
        if any(changed):
            self._plans.clear()
            self._forwards.clear()
            self._asks = None

    def adopt_seconds(self, measured: PassSeconds) -> None:
        """Follow the schedule by measured seconds of passes in the next list."""
        self.planned = self.planned.with_seconds(measured)
        self._plans.clear()

    def _in_force(self) -> Orders:
        """Return the orders that are followed now, with Units by their numbers on the rank."""
        planned = self.planned
        return {stage: StageLists(planned, stage, order).in_force() for stage, order in self._orders.items()}
