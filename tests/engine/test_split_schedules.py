"""Schedules that split backward passes: the bits of 1f1b, and zb_greedy, whose order follows measured seconds."""

import random
from typing import Any

import pytest
import torch

import shardwise
from shardwise.compose.lists import PassSeconds
from shardwise.models import Gpt, GptPolicy
from shardwise.parallel.pipeline.policy import SPLIT
from shardwise.plan.action import Kind
from tests.engine.conformance import Conformance

STEPS, MICROBATCHES, CONTEXT, VOCABULARY = 4, 5, 8, 17
MODEL = GptPolicy(family="gpt2", layers=4, width=16, heads=2, context=CONTEXT, vocab=VOCABULARY, hidden=24)


def build(world: Any, schedule: str, stage: int) -> Any:
    torch.manual_seed(3)
    config = {
        "mesh": {"pp": 2, "dp": world.size // 2},
        "zero": {"stage": stage},
        "pipeline": {"schedule": schedule, "partition": "uniform"},
        "batch": {"accumulation": MICROBATCHES},
        "optimizer": {"type": "adamw", "lr": 1e-2},
        "comm": {"timeout_s": 20.0},
    }
    return shardwise.initialize(Gpt(MODEL), config, world=world)


def curve(engine: Any, steps: int = STEPS) -> list[tuple[float, float]]:
    """Loss and norm of each step."""
    found = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(engine.step_count * 10 + engine.dp_index)
        tokens = torch.randint(0, VOCABULARY, (2 * MICROBATCHES, CONTEXT), generator=generator)
        result = engine.train_step([(part, part) for part in tokens.chunk(MICROBATCHES)])
        found.append((result.loss, result.grad_norm))
    return found


def train(
    world: Any, schedule: str, stage: int
) -> tuple[list[tuple[float, float]], dict[str, list[float]], int]:
    engine = build(world, schedule, stage)
    conformance = Conformance(engine)
    found = curve(engine)
    state = {name: tensor.flatten().tolist() for name, tensor in engine.state_dict().items()}
    engine.close()
    return found, state, len(conformance.departures)


def train_all(world: Any, names: list[str], stage: int) -> list[Any]:
    return [train(world, name, stage) for name in names]


@pytest.mark.parametrize(
    ("size", "stage", "names"),
    [
        (2, 0, ["zb_h1", "zb_v", "zb_greedy"]),
        pytest.param(4, 3, list(SPLIT), marks=pytest.mark.soak),
        pytest.param(4, 2, list(SPLIT), marks=pytest.mark.soak),
    ],
)
def test_losses_and_weights_have_the_bits_of_1f1b(
    ranks: Any, size: int, stage: int, names: list[str]
) -> None:
    """Norms are sums over other ranks in a V, so they may differ in the last bit; nothing is clipped by them."""
    by_rank = ranks(size).run(train_all, ["1f1b", *names], stage)
    first, *others = zip(*by_rank, strict=True)
    for name, found in zip(names, others, strict=True):
        for (wanted, weights, _), (got, own, departures) in zip(first, found, strict=True):
            assert not departures, name
            assert own == weights, name
            assert [loss for loss, _ in got] == [loss for loss, _ in wanted], name


def drawn(seed: int) -> PassSeconds:
    draw = random.Random(seed)
    return {(kind, stage): draw.uniform(0.1, 2.0) for kind in (Kind.F, Kind.I, Kind.W) for stage in range(4)}


def follow(world: Any) -> tuple[list[Any], list[Any], list[list[str]], int]:
    """Train beside a schedule that is made anew by drawn seconds before every step."""
    plain = build(world, "1f1b", 0)
    wanted = curve(plain)
    plain.close()
    engine = build(world, "zb_greedy", 0)
    conformance = Conformance(engine)
    found, rows = [], []
    for seed in range(STEPS):
        program = engine._parts.program
        program.adopt_seconds(drawn(seed))
        program.begin(program.microbatches)
        conformance._planned = engine.plan.own.actions
        rows.append([str(action) for action in engine._parts.program.passes[world.rank]])
        found += curve(engine, 1)
    engine.close()
    return wanted, found, rows, len(conformance.departures)


def test_an_order_by_other_seconds_changes_no_bit_of_the_losses(ranks: Any) -> None:
    for wanted, found, rows, departures in ranks(2).run(follow):
        assert [loss for loss, _ in found] == [loss for loss, _ in wanted]
        assert len({tuple(row) for row in rows}) > 1, "other seconds give another order"
        assert not departures


def measured(world: Any) -> tuple[dict[Any, float], dict[Any, float]]:
    engine = build(world, "zb_greedy", 0)
    curve(engine, 1)
    before = dict(engine._parts.program.planned.policies.pass_seconds)
    curve(engine, 1)
    after = dict(engine._parts.program.planned.policies.pass_seconds)
    engine.close()
    return before, after


def test_the_third_step_follows_measured_seconds_that_all_ranks_share(ranks: Any) -> None:
    (before, first), (_, second) = ranks(2).run(measured)
    assert not before and first == second
    assert {stage for _, stage in first} == set(range(4))
    assert all(first[Kind.F, stage] > 0 and first[Kind.I, stage] > 0 for stage in range(4))
