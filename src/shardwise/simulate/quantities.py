"""Quantities: the bytes of each Action of one rank, by Unit, as the Plan and one measured pass give them.

The table of Kinds (plan/kinds.py) names these numbers in its moves; the price (price.py) divides them by the rates of
the lanes. Bytes of a whole step (tiers/tier_cost.py) are divided evenly among the Actions that move them.

Cost: one look at each Action and each bucket.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardwise.plan.action import Action, Kind
from shardwise.plan.plan import Plan, class_of
from shardwise.simulate.exchanges import ExchangeCall
from shardwise.simulate.passes import MeasuredPass, UnitPass
from shardwise.simulate.sent import RankExchanges
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
    gathered: float = 0.0
    """Of UNSHARD, sent to other ranks."""
    reduced: float = 0.0
    """Of REDUCE, sent to other ranks."""
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
    saved_elsewhere: float = 0.0
    """Of RELOAD, from parts on the hosts of other ranks on "tp"."""


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
        self._tp = plan.mesh.tp
        self._passed = passed
        self._sent = RankExchanges(plan, passed, rank)
        self.over_replicas = sum(_bytes_of(sent.replicas) for sent in self._sent.of_units)
        """Bytes of the sums over replicas of shards, before NORM."""
        self.gradients = [0] * len(self.ranks.units)
        """Bytes of gradients, by Unit."""
        for (unit, bucket), rows in self.ranks.buffers.items():
            laid_out = self.ranks.units[unit].buckets[bucket]
            self.gradients[unit] += sum(row.nbytes(laid_out, plan.mesh) for row in rows if row.kind == "grad")
        times = Counter((action.kind, action.unit) for action in self.ranks.actions)
        moved = unit_traffic(self.ranks, plan.mesh)
        self.of = [self._of(unit, each, times) for unit, each in enumerate(moved)]
        """Bytes of each Unit's Actions."""

    def _of(self, unit: int, moved: TierTraffic, times: Counter[tuple[Kind, int]]) -> UnitQuantities:
        strategy, sent = self.strategies[unit], self._sent.of_units[unit]
        windows, arrivals = (max(times[kind, unit], 1) for kind in (Kind.UNSHARD, Kind.ARRIVE))
        read, brought = moved.weights_read / windows, moved.weights_brought / windows
        is_ahead = strategy.brings_shard
        saved, elsewhere = self._saved(unit)
        return UnitQuantities(
            weights_read=read * is_ahead,
            weights_brought=brought * is_ahead,
            whole_read=read * (not is_ahead),
            whole_brought=brought * (not is_ahead),
            gathered=_bytes_of(sent.gather),
            reduced=_bytes_of((*sent.reduce, *sent.arrive)),
            gradients_down=moved.down / arrivals,
            gradients_brought=moved.gradients_brought / arrivals,
            gradients_left=(moved.gradients_written + moved.gradients_read) / arrivals,
            state_read=moved.read,
            state_written=moved.written,
            updated_on_device=moved.updated_on_device,
            updated_on_host=moved.updated_on_host,
            updated_up=moved.up,
            saved=saved,
            saved_elsewhere=elsewhere,
        )

    def exchanges(self, action: Action) -> tuple[ExchangeCall, ...]:
        """Return the collectives and messages of one Action, with what its pass sends (sent.py)."""
        return self._sent.of(action)

    def share(self, kind: Kind, unit: int) -> UnitPass:
        """Return the part of a Unit in a pass of one microbatch."""
        return self._passed[self.ranks.unit_stages[unit]].of(kind, self.ranks.units[unit].name)

    def _saved(self, unit: int) -> tuple[int, int]:
        """Return the bytes that a Unit's forward saves elsewhere: on this rank's host, and on those of others."""
        if self.strategies[unit].saved_tier == "device":
            return 0, 0
        name, passed = self.ranks.units[unit].name, self._passed[self.ranks.unit_stages[unit]]
        alike = passed.alike_bytes.get(name, 0)
        others = alike - -(-alike // self._tp)
        return max(self.share(Kind.F, unit).net_bytes - others, 0), others

    def message(self, action: Action) -> int:
        """Return the bytes of a SEND or RECV."""
        first, last = sorted((action.stage, action.other))
        received = self._passed[last].received_bytes
        return self._passed[first].answered_bytes if action.carries_gradient else received


def _bytes_of(calls: Iterable[ExchangeCall]) -> int:
    return sum(call.bytes for call in calls)
