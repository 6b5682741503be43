"""Quantities: the bytes of each Action of one rank, by Unit, as the Plan and one measured pass give them.

The table of Kinds (plan/kinds.py) names these numbers in its moves; the price (prices.py) divides them by the rates of
the lanes. Bytes of a whole step (tiers/tier_cost.py) are divided evenly among the Actions that move them.

Cost: one look at each Action and each bucket.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from shardwise.parallel.zero.cost import Calls
from shardwise.plan.action import Action, Kind
from shardwise.plan.plan import Plan, class_of
from shardwise.simulate.passes import MeasuredPass, UnitPass
from shardwise.simulate.sent import RankExchanges
from shardwise.simulate.touched import (
    MissedRows,
    TableRows,
    balanced_bytes,
    directed_bytes,
    gradient_bytes,
    orthogonalised,
    scaled_bytes,
    table_rows,
)
from shardwise.tiers.tier_cost import TierTraffic, unit_traffic


class UnitQuantities(NamedTuple):
    """Bytes of one Unit that an Action of each Kind moves."""

    weights_read: float = 0.0
    """Of LOAD_WEIGHT, from a disk."""
    weights_brought: float = 0.0
    """Of LOAD_WEIGHT, to the device."""
    whole_read: float = 0.0
    """Of UNSHARD, from a disk, if no shard is brought ahead of it."""
    whole_brought: float = 0.0
    """Of UNSHARD, to the device, if no shard is brought ahead of it."""
    gradients_down: float = 0.0
    """Of ARRIVE, to the host."""
    gradients_brought: float = 0.0
    """Of ARRIVE, back to the device, for a later microbatch to add to them."""
    gradients_left: float = 0.0
    """Of ARRIVE, to and from a disk."""
    state_read: float = 0.0
    """Of LOAD, from a disk."""
    state_written: float = 0.0
    """Of STORE, to a disk."""
    updated_on_device: float = 0.0
    """Of STEP, read and written on the device."""
    updated_on_host: float = 0.0
    """Of STEP, read and written in host memory."""
    updated_up: float = 0.0
    """Of STEP, updated weights to the device."""
    saved: float = 0.0
    """Of F and RELOAD, between the device and this rank's host."""
    accumulated: float = 0.0
    """Of B, gradients that are written once; they are read and written as often as the microbatch demands."""
    accumulated_in_i: float = 0.0
    """Of I, the same for a Unit whose gradients are complete behind I."""
    accumulated_in_w: float = 0.0
    """Of W, the same for a Unit whose gradients are complete behind W."""
    directed: float = 0.0
    """Of DIRECTION, read and written."""
    adopted: float = 0.0
    """Of SWAP_WEIGHT, the updated weights of the step before, to the device."""
    keys_found: float = 0.0
    """Of FETCH, INPUT_DIST or READ, keys of a batch of embedding tables."""
    missed: tuple[MissedRows, ...] = ()
    """Of FETCH or READ, rows of embedding tables from a disk and back, for tables with tiers."""
    rows_read: float = 0.0
    """Of FETCH, rows of embedding tables."""
    rows_merged: float = 0.0
    """Of DELIVER, gradients of rows, read and written."""
    rows_updated: float = 0.0
    """Of STEP, rows of embedding tables with their state, read and written."""


class RankQuantities(NamedTuple):
    """Bytes that the Actions of a whole rank read and write."""

    normed: float = 0.0
    """Of NORM, gradients."""
    compared: float = 0.0
    """Of TRUST_RATIO, weights and directions."""
    balanced: float = 0.0
    """Of BALANCE, biases of routers and loads of their experts."""
    scaled: float = 0.0
    """Of SCALE, weights that are gathered in fp8."""


class Quantities:
    """Bytes and operations of the Actions of one rank.

    Args:
        plan: The Plan.
        passed: Measured pass of one microbatch, by stage.
        rank: The rank.
    """

    def __init__(self, plan: Plan, passed: Mapping[int, MeasuredPass], rank: int):
        self.ranks = plan.classes[class_of(plan.mesh, rank)]
        self.strategies = self.ranks.strategies
        self._mesh = plan.mesh
        self._passed = passed
        self._gradients, normed = gradient_bytes(self.ranks, plan.mesh)
        self._directed = [
            directed_bytes(self.ranks, plan.registry, plan.mesh, unit)
            for unit in range(len(self.ranks.units))
        ]
        self.matrices = orthogonalised(plan, self.ranks)
        """Products of ALL_TO_ALL."""
        self.of_rank = RankQuantities(
            normed,
            sum(each.compared for each in self._directed),
            balanced_bytes(plan.registry, self.ranks),
            scaled_bytes(self.ranks),
        )
        """Bytes of the rank's Actions."""
        self._exchanges = RankExchanges(plan, passed, rank)
        times = Counter((action.kind, action.unit) for action in self.ranks.actions)
        moved = unit_traffic(self.ranks, plan.mesh)
        self.of = [self._of(unit, each, times) for unit, each in enumerate(moved)]
        """Bytes of each Unit's Actions."""

    def _of(self, unit: int, moved: TierTraffic, times: Counter[tuple[Kind, int]]) -> UnitQuantities:
        strategy = self.strategies[unit]
        windows, arrivals = (max(times[kind, unit], 1) for kind in (Kind.UNSHARD, Kind.ARRIVE))
        read, brought = moved.weights_read / windows, moved.weights_brought / windows
        is_ahead = strategy.brings_shard
        directed = self._directed[unit]
        rows = self._rows_of(unit)
        deliveries = max(times[Kind.FETCH, unit], 1)
        return UnitQuantities(
            weights_read=read * is_ahead,
            weights_brought=brought * is_ahead,
            whole_read=read * (not is_ahead),
            whole_brought=brought * (not is_ahead),
            gradients_down=moved.down / arrivals,
            gradients_brought=moved.gradients_brought / arrivals,
            gradients_left=(moved.gradients_written + moved.gradients_read) / arrivals,
            state_read=moved.read,
            state_written=moved.written,
            updated_on_device=max(moved.updated_on_device - directed.saved, 0),
            updated_on_host=moved.updated_on_host,
            updated_up=moved.up * (not strategy.is_delayed),
            saved=self._saved(unit),
            accumulated=self._gradients[unit],
            accumulated_in_i=self._gradients[unit] * (unit not in self.ranks.later_units),
            accumulated_in_w=self._gradients[unit] * (unit in self.ranks.later_units),
            directed=directed.direction,
            adopted=moved.up * strategy.is_delayed,
            keys_found=2 * rows.keys_bytes,
            missed=rows.missed,
            rows_read=rows.read_bytes,
            rows_merged=2 * rows.read_bytes * deliveries,
            rows_updated=2 * rows.updated_bytes * deliveries,
        )

    def _rows_of(self, unit: int) -> TableRows:
        """Return the rows of a Unit in one microbatch; zeros for a Unit without embedding tables."""
        if not self.ranks.units[unit].has_rows:
            return TableRows()
        lookups = self._passed[self.ranks.unit_stages[unit]].lookups
        return table_rows(lookups.get(self.ranks.units[unit].name, ()), self._mesh.size("dp"))

    def share(self, kind: Kind, unit: int) -> UnitPass:
        """Return the part of a Unit in a pass of one microbatch."""
        return self._passed[self.ranks.unit_stages[unit]].of(kind, self.ranks.units[unit].name)

    def _saved(self, unit: int) -> int:
        """Return the bytes that a Unit's forward saves on this rank's host."""
        if self.strategies[unit].saved_tier == "device":
            return 0
        name, passed = self.ranks.units[unit].name, self._passed[self.ranks.unit_stages[unit]]
        alike = passed.alike_bytes.get(name, 0)
        others = alike - -(-alike // self._mesh.tp)
        return max(self.share(Kind.F, unit).net_bytes - others, 0)

    def exchanges(self, action: Action) -> Calls:
        """Return the collectives and messages of one Action, with what its pass sends (sent.py)."""
        return self._exchanges.of(action)

    @property
    def before_passes(self) -> Calls:
        """Calls of a step before its first Action: keys of tables, or the rows of parts of batches."""
        return self._exchanges.before_passes
