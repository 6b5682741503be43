"""The table of Kinds: a row holds what the validator, the price and the pages must know."""

import copy
import pickle
from dataclasses import replace

import pytest
from tests.plan.described import plan

from shardwise.base.errors import PlanError
from shardwise.plan.action import NORM, Action
from shardwise.plan.kinds import AnyKind, Definition, Kind, Move, OrderRule, Times, UnitFacts, Use
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Partial, Replicate, Shard
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import Strategy
from shardwise.plan.validate import validate_plan
from shardwise.simulate.quantities import RankQuantities, UnitQuantities

R, S, P = Replicate(), Shard(), Partial()


class Own(AnyKind):
    """A table of one Kind."""

    SHRINK = Definition(
        "shrink the gradient of a Unit that trains",
        uses=(
            Use(
                "sums",
                lambda facts: Times.STEP if facts.trains else Times.NEVER,
                "of a Unit in which nothing trains",
                "though the Unit trains",
                order=(OrderRule("NORM", False, "rank", ", which needs what it shrinks"),),
            ),
        ),
        moves=(Move("exchange", "sent"),),
    )


SHRINK = [Action(Own.SHRINK, unit) for unit in range(5)]  # type: ignore[arg-type]


def with_shrinks(whole: Plan, shrinks: list[Action], behind_norm: bool = False) -> Plan:
    row = list(whole.own.actions)
    place = row.index(NORM) + behind_norm
    own = replace(whole.own, actions=(*row[:place], *shrinks, *row[place:]))
    return replace(whole, classes={"all": own})


def test_a_row_is_what_the_validator_checks() -> None:
    """Nobody else knows of the Kind."""
    whole, kinds = plan(Mesh(dp_shard=2), 2), (*Kind, Own.SHRINK)
    validate_plan(with_shrinks(whole, SHRINK), 2, kinds)  # type: ignore[arg-type]
    for shrinks, behind, says in (
        (SHRINK[1:], False, r"no SHRINK\(u0\) though the Unit trains"),
        ([*SHRINK, SHRINK[2]], False, r"SHRINK\(u2\) twice"),
        (SHRINK, True, r"SHRINK\(u0\) after NORM, which needs what it shrinks"),
    ):
        with pytest.raises(PlanError, match=says):
            validate_plan(with_shrinks(whole, shrinks, behind), 2, kinds)  # type: ignore[arg-type]


def test_kinds_are_themselves_after_a_copy() -> None:
    """Actions travel between processes, and a dictionary looks up handlers by identity."""
    for kind in Kind:
        assert pickle.loads(pickle.dumps(kind)) is copy.deepcopy(kind) is kind
        assert str(Action(kind)) == kind.name and repr(kind) == f"<Kind.{kind.name}>"


def test_moves_name_quantities_and_results() -> None:
    given = {kind.row.gives for kind in Kind} | {"updated"}
    for kind in Kind:
        known = UnitQuantities._fields if kind.row.of != "rank" else RankQuantities._fields
        assert {move.quantity for move in kind.row.moves or ()} <= {*known, "sent", "work"}, kind
        assert {*kind.row.holds, *kind.row.waits_for} <= given, kind
        assert kind.row.meaning and not kind.row.meaning.endswith("."), kind
        for use in kind.row.uses:
            assert all(order.other in Kind.__members__ for order in use.order), kind


def facts(trains: bool = True, **strategy: object) -> UnitFacts:
    made = replace(Strategy((R, R), (P, P), (R, R)), **strategy)  # type: ignore[arg-type]
    return UnitFacts(made, trains)


def times(kind: Kind, of: UnitFacts) -> list[Times]:
    return [use.times(of) for use in kind.row.uses]


def test_what_a_unit_needs_follows_from_its_placements() -> None:
    zero0, zero3 = facts(), facts(weight=(R, S), grad=(P, S), master=(R, S))
    zero1 = facts(master=(R, S))
    assert times(Kind.UNSHARD, zero0) == [Times.NEVER, Times.NEVER]
    assert times(Kind.UNSHARD, zero1) == [Times.NEVER, Times.STEP]
    assert times(Kind.UNSHARD, zero3) == [Times.WINDOW, Times.NEVER]
    assert times(Kind.REDUCE, zero0) == [Times.LAST] and times(Kind.REDUCE, zero3) == [Times.MICROBATCH]
    assert times(Kind.REDUCE, facts(False)) == times(Kind.STEP, facts(False)) == [Times.NEVER]
    disk = facts(weight=(R, S), grad=(P, S), master=(R, S), tier="disk", weight_tier="disk")
    assert times(Kind.LOAD_WEIGHT, disk) == [Times.WINDOW] and times(Kind.LOAD_WEIGHT, zero3) == [Times.NEVER]
    assert times(Kind.LOAD, disk) == times(Kind.STORE, disk) == [Times.STEP]
    at_end = facts(tier="host", waits_at_end=True)
    assert times(Kind.WAIT, at_end) == [Times.STEP]
    gathered = facts(master=(R, S), tier="host", waits_at_end=True)
    assert times(Kind.WAIT, gathered) == [Times.NEVER], "the gather of the update waits for it"


def test_a_skipped_step_updates_nothing() -> None:
    late = facts(master=(R, S), tier="disk", is_delayed=True)._replace(is_skipped=True)
    assert times(Kind.SWAP_WEIGHT, late) == [Times.STEP] and times(Kind.UNSHARD, late)[1] is Times.STEP
    for kind in (Kind.STEP, Kind.LOAD, Kind.STORE, Kind.WAIT, Kind.DIRECTION):
        assert times(kind, late) == [Times.NEVER], kind
    assert times(Kind.UNSHARD, facts(master=(R, S))._replace(is_skipped=True))[1] is Times.NEVER
