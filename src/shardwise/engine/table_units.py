"""Collections of embedding tables as Units of a rank's list, numbered behind those of parameters.

    FETCH(t, i)  in the forward pass of microbatch i, where the model asks for vectors: behind the Unit whose forward
                 began last before
    DELIVER(t)   when all microbatches are done: row gradients to the owners of the rows
    STEP(t)      behind those of the other Units: the rows that got gradients

The place of a FETCH is at first that of the module's name, then that of the last step. Keys that go ahead
(``engine.ahead``) are the half of FETCH that reads no weights.

Cost: one look at each Action of the list, when it is made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from shardwise.engine.tables import Tables
from shardwise.parallel.zero.order import Order
from shardwise.plan.action import Action, Kind
from shardwise.plan.lists import is_inside
from shardwise.plan.plan import Plan, class_of
from shardwise.plan.unit import Unit
from shardwise.plan.walker import Walker


class TableUnits:
    """See the module's docstring. ``plan``: with the Units of parameters; ``orders``: by stage of this rank."""

    def __init__(self, tables: Tables, plan: Plan, orders: Mapping[int, Order], walker: Walker):
        self._tables = tables
        self._orders = orders
        self._walker = walker
        self._names = list(tables.collections)
        first = len(plan.units)
        self.units = tuple(Unit(first + i, name, ()) for i, name in enumerate(self._names))
        """Without buckets: rows lie in the tables' own stores."""
        self._in_stage = {stage: plan.own.units_of(stage) for stage in plan.own.stages}
        self._after: dict[int, int] = {}
        """By Unit: the Unit in front of its FETCH."""
        self._seen: dict[int, int] = {}
        """By Unit: what that was in the running step."""
        for unit in self.units:
            around = [u for u in self._in_stage[self._stage(unit)] if is_inside(unit.name, u.name)]
            self._after[unit.index] = max(around, key=lambda u: len(u.name)).index
            tables.collections[unit.name].placed.on_fetch = partial(self._asked, unit)

    def _stage(self, unit: Unit) -> int:
        return self._tables.stages[unit.name]

    # The list --------------------------------------------------------------------------------------------------

    def added_to(self, plan: Plan) -> Plan:
        """``plan`` with the tables of this rank in its list."""
        if not self.units:
            return plan
        own = plan.own
        made = replace(
            own,
            units=(*own.units, *self.units),
            unit_stages=(*own.unit_stages, *map(self._stage, self.units)),
            actions=self._added_to(own.actions),
        )
        return replace(plan, classes={**plan.classes, class_of(plan.mesh, plan.rank): made})

    def _added_to(self, actions: Sequence[Action]) -> tuple[Action, ...]:
        made: list[Action] = []
        left: list[Unit] = []
        is_delivered = False
        for action in actions:
            if action.kind.ends_step and not is_delivered:
                made += [Action(Kind.DELIVER, unit.index) for unit in self.units]
                is_delivered = True
            made.append(action)
            if action.unit < 0:  # a pass begins, or ends
                is_forward = action.kind is Kind.F
                left = [unit for unit in self.units if is_forward and self._stage(unit) == action.stage]
            elif action.kind is Kind.F:
                asked = [unit for unit in left if self._after[unit.index] == action.unit]
                made += [action._replace(kind=Kind.FETCH, unit=unit.index) for unit in asked]
                left = [unit for unit in left if unit not in asked]
        return (*made, *(Action(Kind.STEP, unit.index) for unit in self.units))

    def adopt(self) -> bool:
        """Follow what the last step did. True where that is something new."""
        found = self._after | self._seen
        is_new, self._after = found != self._after, found
        return is_new

    def _asked(self, unit: Unit, learns: bool) -> None:
        """The model asks for vectors now."""
        if torch._C._current_graph_task_id() >= 0:  # a block that is computed again
            return
        if learns:
            stage = self._stage(unit)
            self._seen[unit.index] = self._in_stage[stage][self._orders[stage].last_opened].index
        if not self._walker.run_to(Kind.FETCH, unit.index) and learns:
            self._walker.diverge(f"FETCH of {unit.title} is not next in the list")

    # Handlers --------------------------------------------------------------------------------------------------

    def passed_by(self, action: Action) -> None:
        """FETCH: the model did not ask before what follows in the list."""
        self._walker.diverge(f"{action}: {self._name(action)} was not asked for vectors there")

    def deliver(self, action: Action) -> None:
        """DELIVER: see ``Tables.deliver``."""
        self._tables.deliver(self._name(action))

    def step(self, action: Action, lr_factor: float, divisor: float) -> None:
        """STEP: see ``Tables.step``."""
        self._tables.step(self._name(action), lr_factor, divisor)

    def _name(self, action: Action) -> str:
        return self._names[action.unit - self.units[0].index]
