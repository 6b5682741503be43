"""Choice and room by themselves, and tokens of a sequence on two ranks."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.comm.world import World
from shardwise.parallel.expert.policy import RouterPolicy
from shardwise.parallel.expert.router import choice
from shardwise.passes.replay import BatchPosition, DrawReplay
from tests.parallel.expert import naive
from tests.parallel.expert.small import batch, close, gradients, made
from tests.parallel.tensor.whole import tensor_group


def policies() -> Iterator[tuple[RouterPolicy, int]]:
    """Thirty, with the number of experts."""
    draw = random.Random(5)
    while True:
        groups, size = draw.choice([1, 2, 3]), draw.randint(1, 4)
        top_groups = draw.choice([None, *range(1, groups + 1)])
        reach = (top_groups or groups) * size
        score = draw.choice(["softmax", "sigmoid"])
        yield (
            RouterPolicy(
                top_k=draw.randint(1, min(reach, 4)), groups=groups, top_groups=top_groups, score=score
            ),
            groups * size,
        )


def test_choices_are_those_of_the_loops_ties_too() -> None:
    draw = torch.Generator().manual_seed(0)
    for (policy, experts), _ in zip(policies(), range(30), strict=False):
        scores = torch.randint(0, 3, (20, experts), generator=draw).double() / 4  # mostly ties
        bias = torch.randint(0, 2, (experts,), generator=draw).float() / 8
        found = choice(scores, bias, policy).tolist()
        assert found == [naive.chosen(row, policy) for row in (scores + bias).tolist()], policy


def test_a_router_that_starts_at_zero_takes_the_lower_experts() -> None:
    layer, x = made(top_k=2), batch()
    nn.init.zeros_(layer.router.weight)
    tokens = layer.surroundings.take(x)
    assert layer.router(tokens, layer.surroundings).index.tolist() == [[0, 1]] * 12


CASES: list[dict[str, Any]] = [
    {"balance": "loss", "balance_weight": 0.7},
    {"capacity": 0.75, "balance": "loss", "z_weight": 0.3, "noise": "jitter"},
    {"capacity": 0.5, "drop": "position", "noise": "gumbel", "top_k": 1},
    {"z_weight": 0.3, "balance": "loss", "balance_over": "batch"},
]
MASK = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 1, 1, 0, 0, 0]]).bool()


def shared_sequences(world: World, layout: str) -> list[str]:
    """What differs from one process in any case."""
    group = tensor_group(world)
    differ = []

    def summed(x: Tensor) -> Tensor:
        group.all_reduce(x.reshape(-1), "a test").wait()
        return x

    for case in CASES:
        for mask, (b, t) in ((None, (2, 6)), (MASK, (2, 6)), (None, (3, 1) if layout != "cut" else (3, 2))):
            layer, x, weight = made(shared=1, **case), batch(b, t).requires_grad_(), batch(b, t, seed=2)
            place = layer.surroundings
            place.replay, place.name = DrawReplay(), "mlp"
            if layer.router.loads is not None:
                layer.router.loads.copy_(torch.tensor([0.5, 0.25, 0.0, 0.25]))
            with place.replay.at(BatchPosition(step=2, first_sample=1)):
                whole = layer(x, mask)
            expected = gradients((whole * weight).sum(), layer, x)
            place.group, place.layout = group, lambda: layout
            piece = slice(None)
            if layout == "cut":
                piece = slice(world.rank * t // 2, (world.rank + 1) * t // 2)
            own = x[:, piece]
            with place.replay.at(BatchPosition(step=2, first_sample=1)):
                y = layer(own, None if mask is None else mask[:, piece])
            parts = (y * weight[:, piece]).sum()
            found = gradients(parts / 2 if layout == "addends" else parts, layer, x)
            where = f"{case} of {b} x {t}"
            differ += [] if close(y, whole[:, piece]) else [f"result, {where}"]
            for name, each in found.items():
                is_alike = layout == "alike" and name == "x"
                if not close(each if is_alike else summed(each.contiguous()), expected[name]):
                    differ.append(f"{name}, {where}")
    return differ


@pytest.mark.parametrize("layout", ["cut", "alike", "addends"])
def test_ranks_that_share_sequences_do_what_one_does(ranks: Any, layout: str) -> None:
    """Room and balance are those of whole sequences, noise that of the place; three tokens are two and one."""
    assert ranks(2).run(shared_sequences, layout) == [[], []]
