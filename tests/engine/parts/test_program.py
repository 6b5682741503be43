"""The list is the program: what is not in it does not happen, and what is in it does.

Lists are changed behind the validator's back (tests/plan/test_validate.py shows what it refuses), alike on all ranks,
and the parity figures or an error of the engine show it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import PlanError, UsageError
from shardwise.comm.world import World
from shardwise.engine.parts.program import ActionLists
from shardwise.plan.action import NORM, Action, Kind
from shardwise.plan.kinds import AnyKind, Definition, OrderRule, Times, Use
from shardwise.plan.trace import Trace, recorded
from shardwise.plan.validate import validate_plan
from shardwise.plan.walker import Walker
from tests.engine.nets import Language, seeded
from tests.engine.test_model_parallel import Layout, config_of, model_of, pieces
from tests.engine.test_model_parallel import measure as measure_layout
from tests.engine.test_parity import Case, data
from tests.engine.test_parity import measure as measure_case

Change = Callable[[list[Action]], Sequence[Action]]


def without(kind: Kind, unit: int | None = None) -> Change:
    return lambda row: [each for each in row if each.kind is not kind or unit not in (None, each.unit)]


def only_first(kind: Kind) -> Change:
    """Of each Unit's the first alone."""

    def change(row: list[Action]) -> list[Action]:
        seen: set[int] = set()
        return [
            each for each in row if each.kind is not kind or not (each.unit in seen or seen.add(each.unit))
        ]

    return change


def twice(kind: Kind) -> Change:
    return lambda row: [each for each in row for _ in range(2 if each.kind is kind else 1)]


def after_the_step(kind: Kind) -> Change:
    def change(row: list[Action]) -> list[Action]:
        return [each for each in row if each.kind is not kind] + [each for each in row if each.kind is kind]

    return change


CHANGES: dict[str, tuple[Case | Layout, Change]] = {
    "nothing is reduced": (Case(0, 1, 1, "sgd", "fp64"), without(Kind.REDUCE)),
    "one Unit is not reduced": (Case(1, 1, 1, "sgd", "fp64"), without(Kind.REDUCE, 1)),
    "one microbatch is reduced": (Case(2, 1, 2, "sgd", "fp64"), only_first(Kind.REDUCE)),
    "nothing is updated": (Case(0, 1, 1, "sgd", "fp64"), without(Kind.STEP)),
    "one Unit is not updated": (Case(3, 1, 1, "sgd", "fp64"), without(Kind.STEP, 2)),
    "updated twice": (Case(3, 1, 1, "sgd", "fp64"), twice(Kind.STEP)),
    "updates are not gathered": (Case(1, 1, 1, "sgd", "fp64"), without(Kind.UNSHARD)),
    "no norm": (Case(1, 1, 1, "sgd", "fp64"), without(Kind.NORM)),
    "the norm after the step": (Case(1, 1, 1, "sgd", "fp64"), after_the_step(Kind.NORM)),
    "no pass": (Case(0, 1, 1, "sgd", "fp64"), lambda row: [each for each in row if each.kind.ends_step]),
    "no backward pass": (Case(0, 1, 1, "sgd", "fp64"), without(Kind.B)),
    "nothing at all": (Case(0, 1, 1, "sgd", "fp64"), lambda row: []),
    "no sum over tp": (Layout(tp=2), without(Kind.SUM)),
    "the sum twice": (Layout(tp=2), twice(Kind.SUM)),
    "the sum behind the norm": (Layout(tp=2), after_the_step(Kind.SUM)),
    "no sum of tied weights": (Layout(pp=2, family="gpt2"), without(Kind.SUM)),
}


def measure_changed(world: Any, name: str) -> str:
    """What shows the change: an error, or a figure above the limit of parity; "" where nothing does."""
    given, change = CHANGES[name]
    right = ActionLists.step

    def changed(self: ActionLists) -> Sequence[Action]:
        return tuple(change(list(right(self))))

    with patch.object(ActionLists, "step", changed):
        try:
            if isinstance(given, Case):
                figures = measure_case(world, given)
            else:
                figures = measure_layout(world, given, check="off")
        except Exception as error:  # alike on all ranks: they have the same list
            return f"{type(error).__name__}: {error}"
    worst = max(figures.gradients, figures.norm, figures.weights, figures.loss)
    return str(figures) if worst > 1e-6 else ""


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_list_shows(ranks: Any, name: str) -> None:
    pool = ranks(2)
    shown = pool.run(measure_changed, name)
    assert all(shown), shown


# A Kind of one's own -------------------------------------------------------------------------------------------------


class Own(AnyKind):
    """A table of one Kind, in the form of ``Kind``."""

    LOOK = Definition(
        "look at the gradients before they are summed",
        of="rank",
        uses=(
            Use(
                "sums",
                lambda facts: Times.STEP,
                missing="though every step looks",
                order=(OrderRule("NORM", False, "rank", ", which has summed them"),),
            ),
        ),
    )


class Looker:
    """Does LOOK."""

    def __init__(self, walker: Walker) -> None:
        self._walker = walker
        self.seen: list[str] = []

    @property
    def trace(self) -> Trace:
        return self._walker.trace

    @recorded
    def look(self, action: Action) -> None:
        self.seen.append(str(action))


def with_look(row: Sequence[Action]) -> list[Action]:
    place = next(i for i, each in enumerate(row) if each.kind.ends_step)
    return [*row[:place], Action(Own.LOOK), *row[place:]]  # type: ignore[arg-type]


def look_before_the_sum(world: Any) -> tuple[list[str], bool, tuple[str, ...]]:
    right = ActionLists.step
    with patch.object(ActionLists, "step", lambda self: tuple(with_look(right(self)))):
        engine = shardwise.initialize(seeded(Language), {"zero": {"stage": 2}}, world=world)
        looker = Looker(engine._parts.walker)
        engine._parts.walker.handlers[Own.LOOK] = looker.look  # type: ignore[index]
        result = engine.train_step([data(world.rank)])
    planned = with_look(engine.plan.own.actions)
    found = looker.seen, engine.trace.actions == planned, result.divergences
    engine.close()
    return found


def test_a_new_kind_is_a_row_and_a_function(ranks: Any) -> None:
    """The list that has it is proved by the row, walked with the function, and repeated by the trace."""
    assert ranks(2).run(look_before_the_sum) == [(["LOOK"], True, ())] * 2
    plan, kinds = (
        shardwise.foresee(lambda: seeded(Language), {"zero": {"stage": 2}}, 2).plan,
        (*Kind, Own.LOOK),
    )
    row, look = with_look(plan.own.actions), Action(Own.LOOK)  # type: ignore[arg-type]

    def validated(actions: Sequence[Action]) -> None:
        own = replace(plan.own, actions=tuple(actions))
        validate_plan(replace(plan, classes={"all": own}), 1, kinds)  # type: ignore[arg-type]

    validated(row)
    late = [each for each in row if each != look]
    late.insert(late.index(NORM) + 1, look)
    for broken, says in (
        (plan.own.actions, "no LOOK though every step looks"),
        ([each for each in row for _ in range(1 + (each == look))], "LOOK twice"),
        (late, "LOOK after NORM"),
        ([look, *plan.own.actions], "after LOOK"),
    ):
        with pytest.raises(PlanError, match=says):
            validated(broken)


def test_a_kind_without_a_handler_is_named() -> None:
    engine = shardwise.initialize(seeded(Language), {}, world=World(0, 1))
    del engine._parts.walker.handlers[Kind.REDUCE]
    with pytest.raises(PlanError, match="the list has REDUCE, but no handler does it"):
        engine.train_step([data(0)])
    engine.close()


# Interrupted ---------------------------------------------------------------------------------------------------------


def interrupted_step(world: Any) -> tuple[str, int]:
    engine = shardwise.initialize(model_of(Layout(pp=2)), config_of(Layout(pp=2)), world=world)
    batches, weights = pieces(Layout(pp=2), 0, 0)
    engine._parts.walker._cursor = 1  # as Ctrl-C leaves it
    with pytest.raises(UsageError) as caught:
        engine.train_step(batches, weights)
    result = engine.train_step(batches, weights)
    engine.close()
    return str(caught.value), len(result.divergences)


def test_a_step_does_not_go_on_from_the_middle_of_another(ranks: Any) -> None:
    for said, divergences in ranks(2).run(interrupted_step):
        assert "interrupted in its middle" in said
        assert divergences == 0


# What every step does ------------------------------------------------------------------------------------------------


class Skipping(nn.Module):
    """Three blocks, of which a call leaves out some."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor, skipped: Sequence[int]) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = x if place in skipped else block(x)
        return x.square().mean()


def divergences_of(engine: shardwise.Engine, skipped: Sequence[int], passes: int) -> tuple[str, ...]:
    x = torch.ones(2, 3)
    for _ in range(passes):
        loss = engine(x, skipped)
    engine.backward(loss)
    return engine.step().divergences


def test_what_every_step_does_is_told_once() -> None:
    engine = shardwise.initialize(Skipping(), {"zero": {"units": ["blocks.*"]}}, world=World(0, 1))
    assert divergences_of(engine, [2], 1) == ("F(u3,0) did not run: blocks.2 was skipped",)
    assert divergences_of(engine, [2], 1) == () and len(engine.trace.divergences) == 1
    further, anew = divergences_of(engine, [2], 3)
    assert "further forward pass" in further and "planned anew" in anew, (
        "each once, though the first came twice"
    )
    assert divergences_of(engine, [2], 3) == ()
    assert divergences_of(engine, [1], 3) == ("F(u2,0) did not run: blocks.1 was skipped",)
    assert divergences_of(engine, [], 1) == ()
    assert len(divergences_of(engine, [1], 2)) == 3, "told again where it had stopped"
