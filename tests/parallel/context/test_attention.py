"""Attention over ranks that each have some tokens equals attention in one process, with the gradients of all inputs."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.comm.policy import CommPolicy
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.parallel.context.attention import AttentionSite, context_attention
from shardwise.parallel.context.keys import plan_exchange
from shardwise.parallel.context.layout import cut_in_groups, cut_sequences
from shardwise.parallel.context.ring import plan_ring
from shardwise.plan.mesh import Mesh


def drawn(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    length = draw.choice([1, 3, 17, 96, 300])
    starts = tuple(
        tuple(sorted({0, *(draw.randrange(length) for _ in range(draw.choice([0, 0, 3])))})) for _ in range(2)
    )
    return {
        "length": length,
        "starts": starts,
        "window": draw.choice([None, None, 1, 5, 64]),
        "heads": draw.choice([(4, 2), (3, 3), (2, 1), (6, 2), (6, 3), (1, 1)]),
        "sink": draw.choice([True, False]),
    }


def inputs(case: dict[str, Any], seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    heads, kv = case["heads"]
    shapes = [(2, each, case["length"], 4) for each in (heads, kv, kv)]
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [*tensors, torch.randn(heads, dtype=torch.float64), torch.randn(shapes[0], dtype=torch.float64)]


def plainly(case: dict[str, Any], seed: int) -> list[Tensor]:
    q, k, v, sink, grad = inputs(case, seed)
    leaves = [each.requires_grad_() for each in (q, k, v, sink)]
    length, group = case["length"], q.shape[1] // k.shape[1]
    document = torch.stack(
        [torch.bucketize(torch.arange(length), torch.tensor(each), right=True) for each in case["starts"]]
    )
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (document[:, :, None] == document[:, None]) & (distance >= 0)
    seen &= distance < (case["window"] or length)
    scores = (q @ k.repeat_interleave(group, 1).mT / 2).masked_fill(~seen[:, None], float("-inf"))
    if case["sink"]:
        scores = torch.cat([scores, sink.view(1, -1, 1, 1).expand(2, -1, length, 1)], -1)
    out = scores.softmax(-1)[..., :length] @ v.repeat_interleave(group, 1)
    used = leaves if case["sink"] else leaves[:3]
    return [out, *torch.autograd.grad(out, used, grad)]


def over_ranks(world: World, seeds: list[int], method: str = "planned", heads: int = 1) -> list[list[Tensor]]:
    """What this rank has of the output and of the gradients, put in its places of the whole."""
    clock, traffic = world.clock(CommPolicy()), Traffic()
    mesh = Mesh(dp_shard=world.size, cp=world.size, cp_heads=heads)
    within, group = (
        world.group(mesh, axis, CommPolicy(), clock, traffic) for axis in ("cp_heads", "cp_tokens")
    )
    plan: Any = plan_ring if method == "ring" else plan_exchange
    found = []
    for seed in seeds:
        case = drawn(seed)
        whole, layout = cut_in_groups(case["length"], group.size, heads, starts=case["starts"])
        keys = plan(whole, group.index, case["starts"], case["window"])
        q, k, v, sink, grad = inputs(case, seed)
        places = layout.places(world.rank)
        here = places < case["length"]

        def mine(whole: Tensor, places: Tensor = places, here: Tensor = here) -> Tensor:
            part = whole.new_zeros(*whole.shape[:2], len(places), whole.shape[3])
            part[:, :, here] = whole[:, :, places[here]]
            return part

        leaves = [mine(each).requires_grad_() for each in (q, k, v)]
        sinks = [sink.requires_grad_()] if case["sink"] else []
        site = AttentionSite(group, keys, "a test", within)
        out = context_attention(*leaves, *(sinks or [None]), site)
        gradients = torch.autograd.grad(out, [*leaves, *sinks], mine(grad))
        whole = []
        for part, like in zip([out, *gradients[:3]], (q, q, k, v), strict=True):
            full = torch.zeros_like(like)
            full[:, :, places[here]] = part.detach()[:, :, here]
            whole.append(full)
        found.append([*whole, *gradients[3:]])
    return found


@pytest.mark.parametrize(
    ("size", "method", "heads"),
    [
        *((size, "planned", 1) for size in (1, 2, 3, 4)),
        *((size, "ring", 1) for size in (2, 3, 4)),
        *((size, "planned", size) for size in (2, 3, 4)),
        (4, "planned", 2),
        (4, "ring", 2),
    ],
)
def test_equals_attention_in_one_process(ranks: Any, size: int, method: str, heads: int) -> None:
    """Rows that are seen, a ring, heads for tokens, and two of them at once; also more ranks than heads."""
    seeds = list(range(20))
    parts = ranks(size).run(over_ranks, seeds, method, heads)
    for seed in seeds:
        for found, wanted in zip(
            zip(*(part[seed] for part in parts), strict=True), plainly(drawn(seed), seed), strict=True
        ):
            torch.testing.assert_close(sum(found), wanted, rtol=1e-11, atol=1e-11)


def test_rows_that_nobody_sees_stay_at_home() -> None:
    one, many = ((0,),), (tuple(range(0, 4096, 128)),)
    for starts, window, most in ((one, None, 0.76), (many, None, 0.1), (one, 128, 0.1)):
        layout = cut_sequences(4096, 4, starts=starts, window=window)
        counts = plan_exchange(layout, 0, starts, window).counts
        assert sum(map(sum, counts)) / 4 <= most * 3 / 4 * 4096
