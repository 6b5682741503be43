"""Tables in the list of Actions: where they stand, that they are walked, and that a list without them trains no row."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.ragged import Ragged
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import TablePolicy
from shardwise.plan.action import Kind
from tests.engine.conformance import Conformance, evaluation_departures


class Late(nn.Module):
    """The collection that is registered first is used behind a block."""

    def __init__(self) -> None:
        super().__init__()
        self.late = EmbeddingCollection([TablePolicy(name="b", rows=9, width=4, init_bound=0.3)])
        self.early = EmbeddingCollection([TablePolicy(name="a", rows=9, width=4, init_bound=0.3)])
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, sparse: Mapping[str, Ragged]) -> Tensor:
        x = self.blocks[0](self.early(sparse)["a"])
        return self.blocks[1](x + self.late(sparse)["b"]).square().mean()


BATCH = {"sparse": {name: Ragged.of_lists([[1, 2], [3]]) for name in "ab"}}


class Turned(Late):
    """The collection that is registered first is asked last, and both in front of the blocks."""

    def forward(self, sparse: Mapping[str, Ragged]) -> Tensor:
        x = self.early(sparse)["a"] + self.late(sparse)["b"]
        return self.blocks[1](self.blocks[0](x)).square().mean()


def engine_of(model: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    return shardwise.initialize(model or Late(), {"zero": {"units": ["blocks.*"]}, "max_grad_norm": 1.0})


def test_the_list_has_fetch_deliver_and_step_of_each_collection() -> None:
    engine = engine_of()
    late, early = (unit.index for unit in engine.plan.own.tables)
    text = [str(action) for action in engine.plan.actions["all"]]
    end = text[text.index(f"DELIVER(u{late})") :]
    assert end[:3] == [f"DELIVER(u{late})", f"DELIVER(u{early})", "NORM"]
    assert end[-2:] == [f"STEP(u{late})", f"STEP(u{early})"]
    assert text.index(f"FETCH(u{late},0)") < text.index("F(u1,0)"), (
        "by registration, until a step has shown the order"
    )
    assert any("FETCH" in each for each in engine.train_step([BATCH]).divergences)
    conformance = Conformance(engine)
    engine.train_step([BATCH])
    assert not conformance.departures
    text = [str(action) for action in engine.trace.actions]
    places = [
        text.index(each)
        for each in ("F(u0,0)", f"FETCH(u{early},0)", "F(u1,0)", f"FETCH(u{late},0)", "F(u2,0)")
    ]
    assert places == sorted(places)
    engine.close()


def test_collections_that_are_asked_in_turn_are_fetched_so() -> None:
    engine = engine_of(Turned())
    engine.train_step([BATCH])
    conformance = Conformance(engine)
    engine.train_step([BATCH])
    late, early = (unit.index for unit in engine.plan.own.tables)
    assert f"F(u0,0) FETCH(u{early},0) FETCH(u{late},0)" in " ".join(map(str, engine.trace.actions))
    assert not conformance.departures
    engine.close()


@pytest.mark.parametrize("kind", [Kind.DELIVER, Kind.STEP])
def test_a_list_without_them_moves_no_row(kind: Kind) -> None:
    engine = engine_of()
    before = engine.tables["early"].rows_here("a").weights
    tables = {unit.index for unit in engine.plan.own.tables}
    engine._parts.walker.begin(
        [
            action
            for action in engine.plan.actions["all"]
            if action.kind is not kind or action.unit not in tables
        ]
    )
    if kind is Kind.DELIVER:
        with pytest.raises(AssertionError, match="delivered before the step"):
            engine.train_step([BATCH])
    else:
        engine.train_step([BATCH])
    assert torch.equal(engine.tables["early"].rows_here("a").weights, before)


def test_an_evaluation_and_a_collection_left_out() -> None:
    model = Late()
    engine = engine_of(model)
    for _ in range(2):
        engine.train_step([BATCH])
    plan = engine.plan.actions
    assert not evaluation_departures(engine, [BATCH])
    fetched = [action.unit for action in engine._parts.walker.last_aside.actions if action.kind is Kind.FETCH]
    late, early = (unit.index for unit in engine.plan.own.tables)
    assert fetched == [early, late]
    engine.predict([BATCH])
    assert not engine.train_step([BATCH]).divergences and engine.plan.actions == plan
    model.late.forward = lambda sparse: {"b": torch.zeros(2, 4)}  # type: ignore[method-assign]
    (told,) = engine.train_step([BATCH]).divergences
    assert told.endswith("late was not asked for vectors there")
    (told, *_) = evaluation_departures(engine, [BATCH])
    assert told.startswith("Action") and f"FETCH(u{late})" in told
    engine.close()
