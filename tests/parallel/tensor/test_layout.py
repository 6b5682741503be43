"""Tables: what a row says, where a parameter lies, and what is refused."""

import pytest
import torch
from torch import nn

from shardwise.base.errors import PlanError
from shardwise.kernels.dropout import EqualPart
from shardwise.models.gpt import Gpt, GptPolicy
from shardwise.parallel.tensor.apply import local_piece, table_of
from shardwise.parallel.tensor.layout import (
    KINDS,
    ParameterPlacement,
    Style,
    Table,
    dropout_cuts,
    parse,
    places,
)
from shardwise.plan.placement import Block, Partial, Replicate, Shard
from tests.engine.nets import Language
from tests.models.shapes import GPT2, LLAMA

NET = {
    "embed": "vocabulary whole",
    "blocks.*.norm": "sequence",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "norm": "replicate",
    "head": "head whole",
}


def gpt(policy: GptPolicy, ranks: int, sequence: bool) -> dict[str, ParameterPlacement]:
    with torch.device("meta"):
        model = Gpt(policy)
    return places(model, table_of(model), ranks, sequence)


def test_words_of_a_style() -> None:
    assert parse("a", "column 8+2+2") == Style("column", (8, 2, 2))
    assert parse("a", "row 4 whole") == Style("row", (4,), frozenset({"whole"}))
    assert parse("a", "region heads groups=8/2") == Style(
        None, (), frozenset({"region"}), ("heads", "groups=8/2")
    )


@pytest.mark.parametrize(
    "words", ["column row", "vocabulary 3", "column 0+2", "column 2+", "heads/2", "row 2 3"]
)
def test_words_that_say_nothing(words: str) -> None:
    with pytest.raises(PlanError, match="tensor.table"):
        parse("blocks.*.up", words)


def test_places_of_our_model() -> None:
    found = gpt(LLAMA, 2, sequence=True)
    qkv = Shard(0, (Block(32, 4), Block(16, 2), Block(16, 2)))
    assert found["blocks.1.attention.qkv.weight"] == ParameterPlacement(qkv, qkv, (64, 24))
    assert found["blocks.0.attention.out.weight"] == ParameterPlacement(Shard(1), Shard(1), (24, 32))
    assert found["blocks.0.mlp.gate_up.weight"].placement == Shard(0, (Block(40, 40), Block(40, 40)))
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


def test_a_table_of_the_users_own() -> None:
    model = Language(2, width=7)
    never_cut = table_of(model, NET)
    assert not never_cut.sequence
    assert places(model, never_cut, 2, sequence=True)["blocks.1.norm.weight"].gradient == Replicate()
    found = places(model, table_of(model, NET | {"blocks.0": "enter"}), 2, sequence=True)
    assert found["blocks.1.norm.weight"].gradient == Partial()
    assert found["norm.weight"].gradient == Replicate()
    assert found["head.weight"] == found["embed.weight"]


def test_the_later_row_wins() -> None:
    model = Gpt(LLAMA)
    table = table_of(model, {"blocks.0.mlp_norm": "replicate"})
    found = places(model, table, 2, sequence=True)
    assert found["blocks.0.mlp_norm.weight"].gradient == Replicate()
    assert found["blocks.1.mlp_norm.weight"].gradient == Partial()


def without(key: str) -> Table:
    return Table({pattern: words for pattern, words in NET.items() if pattern != key})


@pytest.mark.parametrize(
    ("table", "ranks", "text"),
    [
        (without("blocks.*.down"), 2, "parameter 'blocks.0.down.weight' of a Linear has no row"),
        (
            Table(NET | {"block.*.up": "column"}),
            2,
            "matches no module of Language; did you mean 'blocks.*.up'",
        ),
        (Table(NET | {"blocks.*.up": "colum"}), 2, "'colum' is neither a style nor an attribute"),
        (
            Table(NET | {"blocks.*.up": "vocabulary"}),
            2,
            "style vocabulary is for a Embedding, this is a Linear",
        ),
        (Table(NET | {"head": "replicate"}), 2, "embed.weight and head.weight are one tied parameter"),
        (Table(NET | {"blocks.*.up": "column 4"}), 2, "9 features do not lie in 4 equal parts"),
        (Table(NET), 2, "9 features do not divide over tp=2; the nearest numbers that do are 8 and 10"),
    ],
    ids=lambda value: "" if isinstance(value, Table) else str(value)[:20],
)
def test_refusals(table: Table, ranks: int, text: str) -> None:
    width = 8 if "divide" in text or "equal parts" in text else 7
    with pytest.raises(PlanError) as caught:
        places(Language(2, width=width), table, ranks, sequence=True)
    assert text in str(caught.value)


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
    qkv = Shard(0, (Block(8, 4), Block(4, 2), Block(4, 2)))
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


def test_every_style_is_told_in_the_docstring() -> None:
    import shardwise.parallel.tensor.layout as layout

    assert all(f"\n    {kind} " in (layout.__doc__ or "") for kind in KINDS)


def test_a_dropout_has_a_row() -> None:
    model = Gpt(LLAMA.model_copy(update={"dropout": 0.1}))
    found = dropout_cuts(model, table_of(model), 1, 2, sequence=True)
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    assert found == dict.fromkeys(names, EqualPart(1, 2, 1))
    assert not dropout_cuts(model, table_of(model), 1, 2, sequence=False)
    model.blocks[0].mlp.inner = nn.Dropout(0.2)
    with pytest.raises(PlanError, match=r"dropout 'blocks.0.mlp.inner' \(p=0.2\) has no row"):
        dropout_cuts(model, table_of(model), 1, 2, sequence=True)
    table = table_of(model, {"blocks.0.mlp.inner": "partial"})
    assert dropout_cuts(model, table, 1, 2, sequence=False) == {"blocks.0.mlp.inner": EqualPart(-1, 2, 1)}
