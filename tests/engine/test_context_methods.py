"""Each method of context parallelism: equal to one process, and what is sent equals the Plan and what is foreseen."""

import random
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.base.errors import ConfigError, PlanError
from shardwise.comm.world import World
from shardwise.engine.fit.foresee import read
from shardwise.parallel.context import ring, ulysses
from shardwise.plan.plan import AttentionExchange
from tests.engine.test_context import batch, begin, make, numbers

METHODS = ("planned", "ring", "ulysses")
WAYS: tuple[tuple[int, Any], ...] = (
    *((cp, method) for cp in (2, 3, 4) for method in METHODS),
    (4, {"method": "planned", "ulysses": 2}),
    (4, {"method": "ring", "ulysses": 2}),
)
BESIDE: dict[str, tuple[dict[str, Any], list[int], dict[str, Any]]] = {
    "odd, dropout, recompute": ({"recompute": "full"}, [13, 7, 5], {"dropout": 0.3}),
    "shorter than the chunks": ({"zero": {"stage": 3}}, [1, 2, 3], {"kv_heads": 1}),
    "uneven heads": ({"zero": {"stage": 2}}, [11], {"heads": 6, "width": 24, "kv_heads": 2}),
    "compiled": ({"compile": {"scope": "blocks", "backend": "aot_eager"}}, [12], {}),
    "muon, tied": ({"optimizer": {"type": "muon", "lr": 0.02}}, [9], {"tied_head": True}),
    "tiles, learned positions": ({"tiles": {"logits": 5, "mlp": 5}}, [10], {"family": "gpt2"}),
    "state on the host": (
        {"zero": {"stage": 3}, "offload": {"optimizer": "host", "step": "at_end"}},
        [12],
        {},
    ),
}
TABLE = [(cp, way, beside) for cp, way in WAYS for beside in BESIDE]
DRAWN = random.Random(28).sample(TABLE, 6)


def quietly(world: World, *given: Any) -> Any:
    """The numbers of ``numbers``; dynamo looks at every input of a compiled block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute|.*should not be instantiated")
        return numbers(world, *given)


def compare(ranks: Any, cp: int, way: Any, beside: str) -> None:
    config, lengths, model = BESIDE[beside]
    wanted, state = quietly(World(0, 1), config, lengths, None, model)  # type: ignore[arg-type]
    given = {**config, "mesh": {"cp": cp}, "context": way}
    for got, weights in ranks(cp).run(quietly, given, lengths, None, model):
        assert got == pytest.approx(wanted, rel=1e-10)
        for key, value in state.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("row", DRAWN, ids=str)
def test_equals_one_process(ranks: Any, row: Any) -> None:
    compare(ranks, *row)


@pytest.mark.soak
@pytest.mark.parametrize("row", [row for row in TABLE if row not in DRAWN], ids=str)
def test_every_row_equals_one_process(ranks: Any, row: Any) -> None:
    compare(ranks, *row)


# What is sent ------------------------------------------------------------------------------------------------------

SHAPES: tuple[dict[str, Any], ...] = (
    {"heads": 4, "kv_heads": 2},
    {"heads": 6, "width": 24, "kv_heads": 3},
    {"heads": 4, "kv_heads": 1, "sliding_window": 5},
)
ROWS = 2


def config_of(cp: int, way: Any) -> dict[str, Any]:
    return {
        "mesh": {"cp": cp},
        "context": way,
        "check_first_step": "off",
        "optimizer": {"type": "sgd", "lr": 0.1},
    }


def sent(world: World, ways: list[Any]) -> list[tuple[int, int]]:
    """Elements along cp that this rank sent in a step, and that its Plan has, by method and shape."""
    found = []
    for way in ways:
        for shape in SHAPES:
            engine = begin(world, config_of(world.size, way), **shape)
            engine.train_step([batch(32)])
            counted = sum(
                count.elements
                for (_, purpose, axis), count in engine.traffic.counts.items()
                if purpose == "activations" and axis.startswith("cp")
            )
            planned = sum(
                ROWS * (each.forward + each.backward)
                for each in engine.plan.exchanges
                if isinstance(each, AttentionExchange)
            )
            engine.close()
            found.append((counted, planned))
    return found


def foreseen(cp: int, way: Any, shape: dict[str, Any]) -> int:
    """Elements that rank 0 sends along cp, from its pass on shapes."""
    example = {name: tensor.to("meta") for name, tensor in batch(32).items()}
    job = read(lambda: make(**shape), config_of(cp, way), cp, torch.device("cpu"), example)
    shares = job.passed[0].shares.values()
    calls = (call for share in shares for call in share.exchanges if call.axis.startswith("cp"))
    return sum(call.elements * call.calls for call in calls)


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_plan_has_what_is_sent(ranks: Any, cp: int) -> None:
    ways = [way for size, way in WAYS if size == cp]
    cases = [(way, shape) for way in ways for shape in SHAPES]
    by_rank = ranks(cp).run(sent, ways)
    for figures in by_rank:
        assert all(counted == planned > 0 for counted, planned in figures)
    assert [counted for counted, _ in by_rank[0]] == [foreseen(cp, *case) for case in cases]


# What is refused, and planted mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "said"),
    [
        ({"method": "planned", "ulysses": 2}, "2 ranks that exchange heads do not divide mesh.cp: 3"),
        ({"method": "ulysses", "ulysses": 1}, "over all 3 ranks along cp"),
        ("rings", "'auto', 'ring', 'ulysses' or 'planned'"),
    ],
)
def test_what_does_not_fit_is_refused(context: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shardwise.initialize(make(), {"mesh": {"cp": 3}, "context": context}, world=World(0, 1))


def gradients_end_one_place_before_home() -> Any:
    right = ring._pass_on

    def wrong(block: Tensor, group: Any, what: str) -> Any:
        arrive = right(block, group, what)
        return (lambda: block) if what.startswith("gradients") else arrive

    return patch.object(ring, "_pass_on", wrong)


def blocks_are_those_of_the_next_rank() -> Any:
    right = ring.seen_groups

    def wrong(queries: Any, keys: Any, *more: Any) -> Any:
        return right(keys, queries, *more)

    return patch.object(ring, "seen_groups", wrong)


def shared_key_heads_are_written_over() -> Any:
    right = ulysses._ToHeads.backward

    def wrong(ctx: Any, *gradients: Tensor) -> Any:
        found = list(right(ctx, *gradients))
        found[1] = found[1] / 2
        return tuple(found)

    return patch.object(ulysses._ToHeads, "backward", staticmethod(wrong))


MISTAKES = {
    "ring": (gradients_end_one_place_before_home, blocks_are_those_of_the_next_rank),
    "ulysses": (shared_key_heads_are_written_over,),
}


def planted(world: World) -> list[str]:
    said = []
    for method, mistakes in MISTAKES.items():
        for mistake in mistakes:
            ring.plan_ring.cache_clear()
            with mistake():
                engine = begin(
                    world, {"mesh": {"cp": 2}, "context": method, "check_first_step": "auto"}, kv_heads=1
                )
                try:
                    engine.train_step([batch(13)])
                except PlanError as error:
                    said.append(f"{mistake.__name__}: {error}")
                    engine.discard()
                engine.close()
    ring.plan_ring.cache_clear()
    return said


def test_the_check_of_the_first_step_sees_planted_mistakes(ranks: Any) -> None:
    for said in ranks(2).run(planted):
        assert len(said) == 3 and all("uncut" in each for each in said), said
