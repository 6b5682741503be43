"""Pieces of all ranks cover each tensor once, and those of the model are those of a save."""

from collections import Counter
from contextlib import closing
from math import prod
from typing import Any

import pytest

from shardwise.comm.world import World
from shardwise.engine.state.pieces import CheckpointState, items_to_save, model_items
from tests.engine.tables_net import build, train

Covered = dict[tuple[str, str], list[tuple[int, int]]]


def ranges(items: list[Any]) -> Covered:
    return {(each.kind, each.name): [(p.start, p.stop) for p in each.pieces] for each in items}


def written(world: World, stage: int) -> tuple[Covered, Covered, dict[str, int]]:
    """Ranges of elements that this rank writes: of the model, and of the whole state; elements of each weight."""
    engine = build(world, zero={"stage": stage})
    train(engine, 1)
    parts = engine._parts
    with closing(CheckpointState(parts, changes=False)) as opened:
        model = model_items(parts, opened)
        labels = {slot.name: o.state.labels for b, o in parts.trained for slot in b.layout.slots}
        state = items_to_save(parts, labels, frozenset(), opened)
        sizes = {each.name: prod(each.shape) for each in model}
        found = ranges(model), ranges(state), sizes
    engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_each_element_is_written_once(ranks: Any, stage: int) -> None:
    found = ranks(2).run(written, stage)
    for (kind, name), size in [(key, found[0][2][key[1]]) for key in found[0][0]]:
        places = Counter(
            place
            for model, _, _ in found
            for first, last in model[kind, name]
            for place in range(first, last)
        )
        assert places == Counter(range(size)), (kind, name)
    for model, state, _ in found:
        assert model.items() <= state.items() and {"exp_avg", "exp_avg_sq"} <= {kind for kind, _ in state}
