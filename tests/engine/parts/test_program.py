"""The list is the program: what is not in it does not happen, and what is in it does.

Lists are changed behind the validator's back (tests/plan/test_validate.py shows what it refuses), alike on all ranks,
and the parity figures or an error of the engine show it.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import UsageError
from shardwise.comm.world import World
from shardwise.engine.parts.program import ActionLists
from shardwise.plan.action import SUM, Action, Kind
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


class Own(Enum):
    """As ``Kind``."""

    LOOK = "LOOK"

    computes = False
    ends_step = True

    @property
    def updates(self) -> bool:
        return False


def look_before_the_sum(world: Any) -> list[str]:
    """A new Kind is a handler, and an Action in the list."""
    seen: list[str] = []
    right = ActionLists.step

    def with_look(self: ActionLists) -> Sequence[Action]:
        row = list(right(self))
        place = next(i for i, each in enumerate(row) if each.kind.ends_step)
        return (*row[:place], Action(Own.LOOK), *row[place:])  # type: ignore[arg-type]

    with patch.object(ActionLists, "step", with_look):
        engine = shardwise.initialize(seeded(Language), {"zero": {"stage": 2}}, world=world)
        engine._parts.walker.handlers[Own.LOOK] = lambda action: seen.append(str(action))  # type: ignore[index]
        engine.train_step([data(world.rank)])
    with suppress(ValueError):
        seen.append(str(engine.trace.actions.index(Action(Own.LOOK)) > 0))  # type: ignore[arg-type]
    engine.close()
    return seen


def test_a_new_kind_needs_a_handler_alone(ranks: Any) -> None:
    assert ranks(2).run(look_before_the_sum) == [["LOOK", "True"]] * 2
    assert not SUM.kind.computes


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
