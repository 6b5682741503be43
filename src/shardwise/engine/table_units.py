"""Collections of embedding tables while the list runs: where the model asks for vectors, and what the walker does.

    ASK(t)        the keys of a batch to come, to the owners of the rows; in a thread of its own (engine/keys_ahead.py)
    FETCH(t)      the model asks for vectors; the walker is told, and remembers behind which Unit it was
    DELIVER(t)    row gradients to the owners of the rows
    STEP(t)       the rows that got gradients

Where they stand in the list the Plan says (``compose/plan.py``): FETCH at first by the module's name, from the second
step on where the last one had it. ASK is derived from it: the half of FETCH that reads no weights.
"""

from collections.abc import Mapping
from functools import partial

import torch

from shardwise.compose.plan import registered
from shardwise.engine.tables import Tables
from shardwise.parallel.embedding.ahead import Found
from shardwise.parallel.embedding.batch import Prepared
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.zero.order import Order
from shardwise.plan.action import Action, Kind
from shardwise.plan.plan import RankClass
from shardwise.plan.unit import Unit
from shardwise.plan.walker import Walker


class TableUnits:
    """See the module's docstring. ``own``: what this rank holds; ``orders``: by stage of this rank."""

    def __init__(self, tables: Tables, own: RankClass, orders: Mapping[int, Order], walker: Walker):
        names = [unit.name for unit in own.tables]
        assert names == [*tables.collections], f"tables {[*tables.collections]} here, {names} in the Plan"
        self._tables = tables
        self._own = own
        self._orders = orders
        self._walker = walker
        for stage, order in orders.items():
            order.follow_fetches(registered(own, stage).fetches)
        self._seen: dict[int, dict[int, int]] = {stage: {} for stage in own.stages}
        """By stage and Unit of tables: the Unit in front of its FETCH when the model last asked."""
        self.at_hand: Found | None = None
        """The batches of the step whose ASKs run now."""
        for unit in own.tables:
            tables.collections[unit.name].placed.on_fetch = partial(self._asked, unit)

    # Where the model asks --------------------------------------------------------------------------------------

    def adopt(self) -> bool:
        """Follow what the last step did. True where that is something new."""
        is_new = False
        for stage, seen in self._seen.items():
            before = self._orders[stage].fetches
            found = {unit: behind for unit, behind in before.items() if unit not in seen} | seen
            if [*found.items()] != [*before.items()]:
                is_new = True
                self._orders[stage].follow_fetches(found)
        return is_new

    def _asked(self, unit: Unit, prepared: Prepared, learns: bool) -> None:
        """The model asks for vectors now."""
        if torch._C._current_graph_task_id() >= 0:  # a block that is computed again
            return
        if learns:
            stage = self._own.unit_stages[unit.index]
            behind = self._own.units_of(stage)[self._orders[stage].last_opened].index
            self._seen[stage].pop(unit.index, None)  # the last one to ask stands last
            self._seen[stage][unit.index] = behind
        if self._walker.run_to(Kind.FETCH, unit.index):
            if prepared.ahead is not None:
                self._walker.trace.ahead.append(prepared.ahead)
        elif learns or self._walker.is_aside:
            self._walker.diverge(f"FETCH of {unit.title} is not next in the list")

    # Handlers --------------------------------------------------------------------------------------------------

    def ask(self, action: Action) -> None:
        """ASK: the keys of one microbatch of the step at hand. In the thread of keys."""
        assert self.at_hand is not None, "keys are asked for of a step's batches"
        self.at_hand.ask(self.collection(action), action.microbatch)

    def passed_by(self, action: Action) -> None:
        """FETCH: the model did not ask before what follows in the list."""
        self._walker.diverge(f"{action}: {self._name(action)} was not asked for vectors there")

    def deliver(self, action: Action) -> None:
        """DELIVER: see ``Tables.deliver``."""
        self._tables.deliver(self._name(action))

    def step(self, action: Action, lr_factor: float, divisor: float) -> None:
        """STEP: see ``Tables.step``."""
        self._tables.step(self._name(action), lr_factor, divisor)

    def collection(self, action: Action) -> EmbeddingCollection:
        """That an Action is of."""
        return self._tables.collections[self._name(action)]

    def _name(self, action: Action) -> str:
        return self._own.units[action.unit].name
