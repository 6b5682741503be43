"""Tables: what a row says, where a parameter lies, and what is refused."""

import pytest
from torch import nn

from shardwise.base.errors import PlanError
from shardwise.kernels.dropout import EqualPart
from shardwise.models.gpt import Gpt
from shardwise.parallel.tensor.apply import table_of
from shardwise.parallel.tensor.layout import (
    KINDS,
    CutStyle,
    StyleTable,
    dropout_cuts,
    parse,
    places,
)
from shardwise.plan.placement import Partial, Replicate
from tests.engine.nets import Language
from tests.models.shapes import LLAMA

NET = {
    "embed": "vocabulary whole",
    "blocks.*.norm": "sequence",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "norm": "replicate",
    "head": "head whole",
}


def test_words_of_a_style() -> None:
    assert parse("a", "column 8+2+2") == CutStyle("column", (8, 2, 2))
    assert parse("a", "row 4 whole") == CutStyle("row", (4,), frozenset({"whole"}))
    assert parse("a", "region heads groups=8/2") == CutStyle(
        None, (), frozenset({"region"}), ("heads", "groups=8/2")
    )


@pytest.mark.parametrize(
    "words", ["column row", "vocabulary 3", "column 0+2", "column 2+", "heads/2", "row 2 3"]
)
def test_words_that_say_nothing(words: str) -> None:
    with pytest.raises(PlanError, match="tensor.table"):
        parse("blocks.*.up", words)


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


def without(key: str) -> StyleTable:
    return StyleTable({pattern: words for pattern, words in NET.items() if pattern != key})


@pytest.mark.parametrize(
    ("table", "ranks", "text"),
    [
        (without("blocks.*.down"), 2, "parameter 'blocks.0.down.weight' of a Linear has no row"),
        (
            StyleTable(NET | {"block.*.up": "column"}),
            2,
            "matches no module of Language; did you mean 'blocks.*.up'",
        ),
        (StyleTable(NET | {"blocks.*.up": "colum"}), 2, "'colum' is neither a style nor an attribute"),
        (
            StyleTable(NET | {"blocks.*.up": "vocabulary"}),
            2,
            "style vocabulary is for a Embedding, this is a Linear",
        ),
        (StyleTable(NET | {"head": "replicate"}), 2, "embed.weight and head.weight are one tied parameter"),
        (StyleTable(NET | {"blocks.*.up": "column 4"}), 2, "9 features do not lie in 4 equal parts"),
        (StyleTable(NET), 2, "9 features do not divide over tp=2; the nearest numbers that do are 8 and 10"),
    ],
    ids=lambda value: "" if isinstance(value, StyleTable) else str(value)[:20],
)
def test_refusals(table: StyleTable, ranks: int, text: str) -> None:
    width = 8 if "divide" in text or "equal parts" in text else 7
    with pytest.raises(PlanError) as caught:
        places(Language(2, width=width), table, ranks, sequence=True)
    assert text in str(caught.value)


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
