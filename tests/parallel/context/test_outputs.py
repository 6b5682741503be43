"""Outputs of cut sequences: the order of a join, its gradients over ranks with losses of their own, and stand-ins."""

from typing import Any

import pytest
import torch

from shardwise.base.errors import UsageError
from shardwise.comm.policy import CommPolicy
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.parallel.context.layout import cut_sequences
from shardwise.parallel.context.outputs import (
    has_number,
    join_tokens,
    joined_outputs,
    own_tokens,
    withheld_outputs,
)
from shardwise.plan.mesh import Mesh

LENGTHS = (1, 5, 8, 13)


def joins(world: World) -> float:
    """Largest error of joined tokens, and of gradients of losses that differ from rank to rank."""
    group = world.group(
        Mesh(dp_shard=world.size, cp=world.size), "cp", CommPolicy(), world.clock(CommPolicy()), Traffic()
    )
    worst = 0.0
    for length in LENGTHS:
        layout = cut_sequences(length, world.size)
        whole = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(length))
        weights = torch.randn(world.size, 2, length, 3, generator=torch.Generator().manual_seed(7))
        own = own_tokens(whole, layout, group.index).requires_grad_()
        found = join_tokens(own, layout, group)
        (found * weights[group.index]).sum().backward()
        assert own.grad is not None
        wanted = own_tokens(weights.sum(0), layout, group.index)
        worst = max(
            worst, float((found.detach() - whole).abs().max()), float((own.grad - wanted).abs().max())
        )
    return worst


@pytest.mark.parametrize("size", [2, 3])
def test_tokens_are_joined_in_order_and_gradients_go_home(ranks: Any, size: int) -> None:
    assert max(ranks(size).run(joins)) < 1e-6


def test_padding_has_the_fill_or_the_last_token() -> None:
    layout = cut_sequences(5, 2)
    x = torch.arange(1, 6)[None]
    parts = [own_tokens(x, layout, rank, -100) for rank in range(2)]
    assert sorted(torch.cat(parts, 1).flatten().tolist()) == [-100] * 3 + [1, 2, 3, 4, 5]
    repeated = [own_tokens(x, layout, rank, None) for rank in range(2)]
    assert sorted(torch.cat(repeated, 1).flatten().tolist()) == [1, 2, 3, 4, 5, 5, 5, 5]


def test_a_number_and_tensors_of_tokens_are_told_apart() -> None:
    layout = cut_sequences(8, 2)
    logits = torch.zeros(2, 4, 3)
    output = {"loss": torch.zeros(()), "logits": logits, "pooled": torch.zeros(2, 3)}
    assert has_number(output) and not has_number((logits, None))
    held = withheld_outputs(output, layout, lambda text: text, "why")
    assert held["logits"] == "logits: why" and held["pooled"] is output["pooled"]
    with pytest.raises(UsageError, match=r"output pooled of a pass without targets has the shape \[2, 3\]"):
        joined_outputs({"pooled": output["pooled"]}, layout, None)  # type: ignore[arg-type]
