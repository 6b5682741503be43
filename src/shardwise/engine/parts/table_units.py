"""Collections of embedding tables while the list runs: the model's requests for vectors, and the walker's Actions.

    INPUT_DIST(t)  send the keys of a later batch to the owners of the rows; in a thread (engine/step/keys_ahead.py)
    READ(t)       read rows of a later batch from a disk into memory, for tables with tiers; in the same thread
    FETCH(t)      the model requests vectors; the walker runs the Action, and the Unit in front of it is recorded
    DELIVER(t)    send row gradients to the owners of the rows
    STEP(t)       update the rows that got gradients

The Plan sets the positions in the list (``compose/plan.py``): at first FETCH is placed by the module's name, from the
second step on at its position in the last step. INPUT_DIST is derived from FETCH: it is the half that reads no weights.
"""

from collections.abc import Mapping
from functools import partial

import torch

from shardwise.compose.lists import registered
from shardwise.engine.parts.tables import ModelTables
from shardwise.parallel.embedding.ahead import BatchFeatures
from shardwise.parallel.embedding.batch import PreparedKeys
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.zero.order import UnitOrder
from shardwise.plan.action import Action, Kind
from shardwise.plan.plan import RankClass
from shardwise.plan.trace import Trace, recorded
from shardwise.plan.unit import Unit
from shardwise.plan.walker import Walker


class TableUnits:
    """The handlers of INPUT_DIST, READ, FETCH, DELIVER and STEP for embedding tables.

    Args:
        tables: The collections of the model.
        own: The part of the Plan for this rank.
        orders: The observed order of Units, by stage of this rank.
        walker: The walker of this rank's list.
    """

    def __init__(self, tables: ModelTables, own: RankClass, orders: Mapping[int, UnitOrder], walker: Walker):
        names = [unit.name for unit in own.tables]
        assert names == [*tables.collections], f"tables {[*tables.collections]} here, {names} in the Plan"
        self._tables = tables
        self._own = own
        self._orders = orders
        self._walker = walker
        for stage, order in orders.items():
            order.follow_fetches(registered(own, stage).fetches)
        self._seen: dict[int, dict[int, int]] = {stage: {} for stage in own.stages}
        """By stage and Unit of tables: the Unit in front of the model's last request for vectors."""
        self.at_hand: BatchFeatures | None = None
        """The batches of the step whose INPUT_DISTs and READs run now."""
        for unit in own.tables:
            tables.collections[unit.name].placed.on_fetch = partial(self._asked, unit)

    @property
    def trace(self) -> Trace:
        """The trace of the list that is running."""
        return self._walker.trace

    # Where the model asks --------------------------------------------------------------------------------------

    def adopt(self) -> bool:
        """Follow the order of requests in the last step.

        Returns:
            True if the order has changed.
        """
        is_new = False
        for stage, seen in self._seen.items():
            before = self._orders[stage].fetches
            found = {unit: behind for unit, behind in before.items() if unit not in seen} | seen
            if [*found.items()] != [*before.items()]:
                is_new = True
                self._orders[stage].follow_fetches(found)
        return is_new

    def _asked(self, unit: Unit, prepared: PreparedKeys, learns: bool) -> None:
        """Run FETCH, because the model requests vectors of a collection.

        Args:
            unit: The Unit of the collection.
            prepared: The batch's keys.
            learns: True in a pass with gradients, whose order of requests is recorded.
        """
        if torch._C._current_graph_task_id() >= 0:  # a recomputed block: its FETCH has run
            return
        if learns:
            stage = self._own.unit_stages[unit.index]
            behind = self._own.units_of(stage)[self._orders[stage].last_opened].index
            # Insert it again at the end, because the dict is in order of requests.
            self._seen[stage].pop(unit.index, None)
            self._seen[stage][unit.index] = behind
        if self._walker.run_to(Kind.FETCH, unit.index):
            self._walker.trace.ahead += prepared.ahead
        elif learns or self._walker.is_aside:
            self._walker.diverge(f"FETCH of {unit.title} is not next in the list")

    # Handlers --------------------------------------------------------------------------------------------------

    def input_dist(self, action: Action) -> None:
        """Run INPUT_DIST: send the keys of one microbatch to the owners of their rows. Called in the thread of keys."""
        assert self.at_hand is not None, "keys are asked for of a step's batches"
        self.at_hand.ask(self.collection(action), action.microbatch)

    def read(self, action: Action, steps: int) -> None:
        """Run READ: read rows of one microbatch from a disk into memory. Called in the thread of keys.

        Args:
            action: The Action.
            steps: Number of steps after the running one in which the rows are needed.
        """
        assert self.at_hand is not None, "rows are read of a step's batches"
        collection = self.collection(action)
        collection.placed.read_ahead(self.at_hand.asked(collection, action.microbatch), steps)

    @property
    def tiered(self) -> frozenset[int]:
        """Numbers of the collections of which only some rows are in memory."""
        return frozenset(
            unit.index
            for unit in self._own.tables
            if any(table.tiers is not None for table in self._tables.collections[unit.name].tables)
        )

    def passed_by(self, action: Action) -> None:
        """Record that the walker passes a FETCH for which the model has not requested vectors."""
        self._walker.diverge(f"{action}: {self._name(action)} was not asked for vectors there")

    @recorded
    def deliver(self, action: Action) -> None:
        """Run DELIVER: send row gradients to the owners of the rows. See ``ModelTables.deliver``."""
        self._tables.deliver(self._name(action))

    def step(self, action: Action, lr_factor: float, divisor: float) -> None:
        """Run STEP: update the rows that got gradients. See ``ModelTables.step``."""
        self._tables.step(self._name(action), lr_factor, divisor)

    def collection(self, action: Action) -> EmbeddingCollection:
        """Return the collection that an Action concerns."""
        return self._tables.collections[self._name(action)]

    def _name(self, action: Action) -> str:
        return self._own.units[action.unit].name
