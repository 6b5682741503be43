"""The lists of Actions that this rank walks, and the walker.

    a step         the Plan's list, in the order of Units that all ranks follow now
    an evaluation  forward passes alone, in the same order
    keys ahead     of either, what a thread may do before it

The Plan is made anew, and validated, when the ranks agree on another order of Units, and for a step of another number
of passes. A user's own loop tells that number as it goes: lists of more and of fewer passes begin alike, so the rest of
one takes the place of the rest of another.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache

from shardwise.compose.plan import Orders, Planned, StageOrder
from shardwise.engine.table_units import TableUnits
from shardwise.parallel.zero.order import Order
from shardwise.plan.action import Action
from shardwise.plan.dataflow import Lists
from shardwise.plan.lists import Boundary, keys_ahead
from shardwise.plan.plan import Plan
from shardwise.plan.walker import Walker

_KEPT = 8
"""Plans, and lists of keys ahead, of unlike numbers of passes."""


class ActionLists:
    """See the module's docstring. ``orders``: by stage of this rank."""

    def __init__(self, planned: Planned, orders: Mapping[int, Order], tables: TableUnits, walker: Walker):
        self.planned = planned
        """The model's description and the Plan, its lists in the order of registration."""
        self.walker = walker
        self.tables = tables
        """Collections of embedding tables in the list."""
        self.microbatches = planned.policies.microbatches
        """Of the list under way: pairs of a forward and a backward pass."""
        self._orders = orders
        self._plans: dict[int, Plan] = {self.microbatches: planned.plan}
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
        """One optimizer step."""
        return self.plan.own.actions

    def begin(self, microbatches: int) -> None:
        """The walker stands at the start of a step. Errors: PlanError where there is no list for it."""
        self._of(microbatches)
        self.microbatches = microbatches
        self.walker.begin(self.step())

    def follow(self, microbatches: int) -> None:
        """The step under way has this many pairs of passes."""
        if microbatches != self.microbatches:
            self.microbatches = microbatches
            self.walker.follow(self.step())

    def forward(self, batches: int) -> list[Action]:
        """As many forward passes of a pipeline."""
        return self.planned.forward_list(self._in_force(), batches)

    def asks(self) -> Callable[[int], list[Action]]:
        """By a number of microbatches the ASKs for them, in the order that is followed now. A thread may call it while
        this one adopts another order: ranks that took it after the same step get the same."""
        if self._asks is None:
            planned, orders = self.planned, self._in_force()
            usual = planned.policies.microbatches
            step = keys_ahead(self._of(usual).own.actions)

            @lru_cache(_KEPT)
            def asks(microbatches: int) -> list[Action]:
                if microbatches == usual:
                    return step
                return keys_ahead(planned.forward_list(orders, microbatches)) if microbatches else []

            self._asks = asks
        return self._asks

    @property
    def passes(self) -> Lists:
        """Passes of stages and messages of a step, by place on "pp"."""
        rows = enumerate(self.plan.actions.values())
        return {
            place: [each for each in row if each.unit < 0 and not each.kind.ends_step] for place, row in rows
        }

    def adopt_order(self) -> None:
        """All ranks have seen one order of Units: the next list follows it."""
        if any([*(order.adopt() for order in self._orders.values()), self.tables.adopt()]):
            self._plans.clear()
            self._asks = None

    def _in_force(self) -> Orders:
        """By their numbers on the rank."""
        found = {}
        for stage, order in self._orders.items():
            units = self.planned.plan.own.units_of(stage)
            boundaries = [Boundary(enters, units[unit].index) for enters, unit in order.agreed]
            found[stage] = StageOrder(boundaries, order.fetches)
        return found
