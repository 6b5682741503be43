"""Bytes of single Actions are those of a whole step, shared out evenly."""

from typing import Any

import pytest

from shardwise.parallel.zero.cost import unit_bytes
from shardwise.plan.action import Action, Kind
from shardwise.plan.mesh import Mesh
from shardwise.simulate.quantities import Quantities
from shardwise.tiers.tier_cost import unit_traffic
from tests.plan.described import plan

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"stage": 3},
    "disk": {"stage": 1, "on_disk": 1.0},
    "weights on a disk": {"stage": 3, "on_disk": 0.5, "weights_too": True},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_actions_of_a_step_move_what_the_step_moves(name: str) -> None:
    given = dict(LAYOUTS[name])
    whole = plan(Mesh(dp_shard=2), given.pop("stage"), **given)
    found = Quantities(whole, {0: _Never()}, 0)  # type: ignore[dict-item]
    times = [(each.kind, each.unit) for each in whole.own.actions]
    for unit, (moved, of) in enumerate(zip(unit_traffic(whole.own, whole.mesh), found.of, strict=True)):
        loads, gathers = times.count((Kind.LOAD_WEIGHT, unit)), times.count((Kind.UNSHARD, unit))
        assert of.weights_read * loads + of.whole_read * gathers == pytest.approx(moved.weights_read)
        assert of.weights_brought * loads + of.whole_brought * gathers == pytest.approx(moved.weights_brought)
        assert of.gradients_down * times.count((Kind.ARRIVE, unit)) == pytest.approx(moved.down)
        assert (of.state_read, of.state_written) == (moved.read, moved.written)
        sent = unit_bytes(whole.units[unit], whole.own.strategies[unit], whole.mesh)
        by_action = [
            sum(call.bytes for call in found.exchanges(Action(kind, unit, 0)))
            for kind in (Kind.UNSHARD, Kind.REDUCE)
        ]
        assert by_action == [sent.gather, sent.reduce]


class _Never:
    """A pass that nobody reads: no Unit saves elsewhere."""
