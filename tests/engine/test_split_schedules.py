"""Schedules that split backward passes: the bits of 1f1b, and zb_greedy, whose order follows measured seconds."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.compose.lists import PassSeconds
from shardwise.models import Gpt, GptPolicy
from shardwise.models.gpt import GptExperts
from shardwise.parallel.expert.policy import RouterPolicy
from shardwise.parallel.pipeline.policy import SPLIT
from shardwise.plan.action import Kind
from tests.engine.conformance import Conformance

STEPS, MICROBATCHES, CONTEXT, VOCABULARY = 4, 5, 8, 17
MODEL = GptPolicy(family="gpt2", layers=4, width=16, heads=2, context=CONTEXT, vocab=VOCABULARY, hidden=24)


class Adapted(nn.Module):
    """A module with a small trained path beside it."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    model = Gpt(LLAMA).requires_grad_(False)
    for block in model.blocks:
        block.mlp = Adapted(block.mlp)
        block.mlp.down.requires_grad_(True)
        block.mlp.up.requires_grad_(True)
    return model


def frozen() -> nn.Module:
    model = Gpt(MODEL)
    for block in list(model.blocks)[:2]:
        block.requires_grad_(False)
    return model


LLAMA = GptPolicy(layers=4, width=16, heads=2, kv_heads=1, context=CONTEXT, vocab=VOCABULARY, hidden=24)
EXPERTS = LLAMA.model_copy(
    update={"experts": GptExperts(count=4, hidden=8, router=RouterPolicy(top_k=2, balance="loss"))}
)


class Variant(NamedTuple):
    """One technique beside the schedules."""

    size: int = 2
    model: Callable[[], nn.Module] = partial(Gpt, MODEL)
    config: dict[str, Any] = {}
    mesh: dict[str, int] = {}


VARIANTS = {
    "a tied head": Variant(),
    "frozen blocks": Variant(model=frozen),
    "adapters": Variant(model=adapted),
    "dropout": Variant(model=partial(Gpt, LLAMA.model_copy(update={"dropout": 0.2}))),
    "recompute": Variant(config={"recompute": "full"}),
    "recompute, stage 3": Variant(4, config={"recompute": "full", "zero": {"stage": 3}}),
    "selective, stage 2": Variant(4, config={"recompute": "selective", "zero": {"stage": 2}}),
    "stage 1": Variant(4, partial(Gpt, LLAMA), {"zero": {"stage": 1}}),
    "fp16": Variant(
        config={"precision": {"compute": "fp16", "loss_scale": {"init_scale": 1024.0, "hysteresis": 1}}}
    ),
    "bf16, stage 3": Variant(4, config={"precision": "bf16", "zero": {"stage": 3}}),
    "delayed updates": Variant(
        4, config={"offload": {"optimizer": "host", "step": "delayed"}, "zero": {"stage": 1}}
    ),
    "experts": Variant(4, partial(Gpt, EXPERTS), mesh={"ep": 2}),
    "experts, stage 3": Variant(4, partial(Gpt, EXPERTS), {"zero": {"stage": 3}}, {"ep": 2}),
    "slices": Variant(4, partial(Gpt, LLAMA), mesh={"tp": 2, "dp": 1}),
    "whole sequences": Variant(
        4, partial(Gpt, LLAMA), {"tensor": {"sequence_parallel": False}}, {"tp": 2, "dp": 1}
    ),
    "cut sequences": Variant(4, partial(Gpt, LLAMA), mesh={"cp": 2, "dp": 1}),
    "cut sequences, stage 3": Variant(4, partial(Gpt, LLAMA), {"zero": {"stage": 3}}, {"cp": 2, "dp": 1}),
    "kept weights": Variant(4, config={"zero": {"stage": 3, "reshard_after_forward": False}}),
}


def build(world: Any, schedule: str, stage: int, variant: Variant = VARIANTS["a tied head"]) -> Any:
    torch.manual_seed(3)
    config = {
        "mesh": {"pp": 2, "dp": world.size // 2, **variant.mesh},
        "zero": {"stage": stage},
        "pipeline": {"schedule": schedule, "partition": "uniform"},
        "batch": {"accumulation": MICROBATCHES},
        "optimizer": {"type": "adamw", "lr": 1e-2},
        "comm": {"timeout_s": 20.0},
        **variant.config,
    }
    return shardwise.initialize(variant.model(), config, world=world)


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
    world: Any, schedule: str, stage: int, variant: str = "a tied head"
) -> tuple[list[tuple[float, float]], dict[str, list[float]], int]:
    engine = build(world, schedule, stage, VARIANTS[variant])
    conformance = Conformance(engine)
    found = curve(engine)
    state = {name: tensor.flatten().tolist() for name, tensor in engine.state_dict().items()}
    engine.close()
    return found, state, len(conformance.departures)


def train_all(world: Any, names: list[str], stage: int, variant: str = "a tied head") -> list[Any]:
    return [train(world, name, stage, variant) for name in names]


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
    check_bits(ranks(size).run(train_all, ["1f1b", *names], stage), names)


def check_bits(by_rank: list[Any], names: list[str]) -> None:
    first, *others = zip(*by_rank, strict=True)
    for name, found in zip(names, others, strict=True):
        for (wanted, weights, _), (got, own, departures) in zip(first, found, strict=True):
            assert not departures, name
            assert own == weights, name
            assert [loss for loss, _ in got] == [loss for loss, _ in wanted], name


@pytest.mark.parametrize(
    ("variant", "names"),
    [
        ("adapters", ["zb_v"]),
        ("frozen blocks", ["zb_h1"]),
        *(pytest.param(variant, list(SPLIT), marks=pytest.mark.soak) for variant in VARIANTS),
    ],
)
def test_the_same_bits_beside_another_technique(ranks: Any, variant: str, names: list[str]) -> None:
    size = VARIANTS[variant].size
    check_bits(ranks(size).run(train_all, ["1f1b", *names], 0, variant), names)


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
