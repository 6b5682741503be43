"""A model's parameters by its table: their places, their gradients, and what is refused."""

import pytest
import torch

from shardwise.base.errors import PlanError
from shardwise.models.gpt import Gpt, GptPolicy
from shardwise.parallel.tensor.apply import local_piece, table_of
from shardwise.parallel.tensor.layout import (
    ParameterPlacement,
    places,
)
from shardwise.plan.placement import Partial, Replicate, Shard, ShardBlock
from tests.engine.nets import Language
from tests.models.shapes import GPT2, LLAMA


def gpt(policy: GptPolicy, ranks: int, sequence: bool) -> dict[str, ParameterPlacement]:
    with torch.device("meta"):
        model = Gpt(policy)
    return places(model, table_of(model), ranks, sequence)


def test_places_of_our_model() -> None:
    found = gpt(LLAMA, 2, sequence=True)
    qkv = Shard(0, (ShardBlock(32, 4), ShardBlock(16, 2), ShardBlock(16, 2)))
    assert found["blocks.1.attention.qkv.weight"] == ParameterPlacement(qkv, qkv, (64, 24))
    assert found["blocks.0.attention.out.weight"] == ParameterPlacement(Shard(1), Shard(1), (24, 32))
    assert found["blocks.0.mlp.gate_up.weight"].placement == Shard(
        0, (ShardBlock(40, 40), ShardBlock(40, 40))
    )
    assert found["embed.weight"].placement == found["head.weight"].placement == Shard(0)
    assert found["norm.weight"] == ParameterPlacement(Replicate(), Partial(), (24,))
    whole = gpt(LLAMA, 2, sequence=False)
    assert whole["norm.weight"] == ParameterPlacement(Replicate(), Replicate(), (24,))


def test_gradients_of_what_is_whole_on_every_rank() -> None:
    """Norms, the bias of a row layer and learned positions see some tokens: addends, if the sequence is cut."""
    policy = GPT2.model_copy(update={"heads": 4})
    cut, whole = gpt(policy, 2, sequence=True), gpt(policy, 2, sequence=False)
    addends = {name for name, place in cut.items() if isinstance(place.gradient, Partial)}
    assert not any(isinstance(place.gradient, Partial) for place in whole.values())
    assert "positions.weight" in addends and "norm.bias" in addends and "blocks.0.mlp.down.bias" in addends
    assert "blocks.0.mlp.up.bias" not in addends
    assert {name for name in cut if isinstance(cut[name].placement, Replicate)} == addends


def test_one_rank_holds_everything() -> None:
    assert {place.placement for place in gpt(LLAMA, 1, sequence=True).values()} == {Replicate()}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "text"),
    [
        (
            6,
            2,
            4,
            "6 heads (or other indivisible parts) do not divide over tp=4; the nearest tp that works is 3",
        ),
        (
            6,
            3,
            2,
            "3 heads (or other indivisible parts) do not divide over tp=2; the nearest tp that works is 1",
        ),
        (4, 1, 8, "nearest tp that works is 4"),
    ],
)
def test_heads_that_do_not_divide(heads: int, kv_heads: int, ranks: int, text: str) -> None:
    policy = LLAMA.model_copy(update={"heads": heads, "kv_heads": kv_heads})
    with pytest.raises(PlanError) as caught:
        gpt(policy, ranks, sequence=True)
    assert text in str(caught.value)


def test_a_model_that_nobody_knows() -> None:
    with pytest.raises(PlanError, match="nobody knows how to cut a Language"):
        table_of(Language())


def test_pieces_put_side_by_side_are_the_whole() -> None:
    """Fused blocks, key-value heads that neighbours share, and rows that padding fills up."""
    full = torch.arange(1, 33.0).view(16, 2)
    qkv = Shard(0, (ShardBlock(8, 4), ShardBlock(4, 2), ShardBlock(4, 2)))
    locals_ = [local_piece(full, ParameterPlacement(qkv, qkv, (16, 2)), index, 4) for index in range(4)]
    rows = [[int(row[0]) // 2 for row in local] for local in locals_]
    assert rows == [
        [0, 1, 8, 9, 12, 13],
        [2, 3, 8, 9, 12, 13],
        [4, 5, 10, 11, 14, 15],
        [6, 7, 10, 11, 14, 15],
    ]
    odd = [
        local_piece(full[:5], ParameterPlacement(Shard(0), Shard(0), (5, 2)), index, 4) for index in range(4)
    ]
    assert [local.shape for local in odd] == [(2, 2)] * 4
    assert torch.equal(torch.cat(odd)[:5], full[:5]) and not torch.cat(odd)[5:].any()
