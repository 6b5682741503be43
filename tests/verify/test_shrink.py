"""What is shrunk keeps the relations that mistakes depend on, and the list of changes is complete."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from shardwise.config.auto import resolve
from shardwise.config.run import RunConfig, load
from shardwise.models import Gpt, GptPolicy
from shardwise.plan.mesh import Mesh
from shardwise.verify.layout import layout_of, parse_layout, with_layout
from shardwise.verify.shrink import (
    few_experts,
    few_heads,
    few_layers,
    indivisible,
    shrink_batch,
    shrink_config,
    shrink_layout,
    shrink_model,
    shrink_transformers,
    uneven_axes,
)

LARGE = {
    "model": {
        "name": "gpt",
        "layers": 30,
        "width": 2048,
        "heads": 32,
        "kv_heads": 4,
        "context": 4096,
        "vocab": 50304,
    },
    "mesh": {"pp": 4, "dp": {"replicate": 4, "shard": 8}, "tp": 8},
    "batch": {"global_size": 1024, "micro_size": 2},
    "tiles": {"logits": 512},
    "max_grad_norm": 1.0,
}


# Layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("pp=8,dp=16x32,tp=4,zero=3", "pp=2,dp=2x2,tp=2,zero=3"),
        ("dp=3,tp=9", "dp=2,tp=3"),
        ("dp=64,ep=8,zero=1", "dp=2,ep=2,zero=1"),
        ("dp=64,ep=8,etp=4", "dp=4,ep=2,etp=2"),
        ("pp=8,virtual=5", "pp=2,virtual=2"),
        ("dp=1", "dp=1"),
    ],
)
def test_each_axis_becomes_its_smallest_divisor(given: str, found: str) -> None:
    layout, shrunk = shrink_layout(parse_layout(given))
    assert str(layout) == found
    assert shrunk == ({} if given == found else {"layout": (given, found)})


def test_a_layout_that_was_asked_for_stays_up_to_eight_ranks() -> None:
    small, large = parse_layout("pp=4,dp=2"), parse_layout("pp=4,dp=4")
    assert shrink_layout(small, is_asked_for=True) == (small, {})
    assert str(shrink_layout(small)[0]) == "pp=2,dp=2"
    assert str(shrink_layout(large, is_asked_for=True)[0]) == "pp=2,dp=2"


def test_an_uneven_axis_becomes_four_where_eight_ranks_are_enough() -> None:
    config = load(LARGE)
    layout = layout_of(config)
    assert uneven_axes(config, layout) == {"pp", "tp"}
    assert str(shrink_layout(parse_layout("pp=8,dp=8"), uneven={"pp"})[0]) == "pp=4,dp=2"
    assert str(shrink_layout(parse_layout("pp=3"), uneven={"pp"})[0]) == "pp=3"
    assert shrink_layout(layout, uneven={"pp", "tp"})[0].ranks == 16  # twos alone
    assert uneven_axes(load({"model": {"layers": 8}}), parse_layout("pp=4,tp=2")) == set()


# Sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", range(1, 65))
def test_heads_keep_their_ratio_and_divide(heads: int) -> None:
    for kv_heads in (n for n in range(1, heads + 1) if not heads % n):
        for tp in (n for n in range(1, heads + 1) if not heads % n):
            few_tp = next((n for n in range(2, tp + 1) if not tp % n), 1)
            if kv_heads % tp and tp % kv_heads:
                continue  # no such cut
            few, few_kv = few_heads(heads, kv_heads, few_tp, tp)
            assert not few % few_kv and not few % few_tp and few_kv <= kv_heads
            assert (few_kv < few_tp) == (kv_heads < tp), (kv_heads, tp)
            assert few // few_kv == heads // kv_heads or few // few_kv == heads // kv_heads * few_tp
            assert not few_kv % few_tp or not few_tp % few_kv


def test_numbers_of_layers_sizes_and_experts() -> None:
    two, four = parse_layout("pp=2"), parse_layout("pp=4")
    assert few_layers(32, 1, two, four) == 4
    assert few_layers(30, 1, two, four) == 5, "unequal stages stay unequal"
    assert few_layers(3, 1, two, two) == 3
    assert few_layers(32, 3, parse_layout("tp=2"), two) == 3
    assert indivisible(9, [2, 3]) == 11 and indivisible(35, [1]) == 35
    assert few_experts(64, 8, 8, 4) == 16 and few_experts(8, 2, 1, 2) == 4 and few_experts(3, 1, 1, 3) == 3


# Our configurations ------------------------------------------------------------------------------------------------


def small(given: dict[str, Any], text: str | None = None) -> tuple[RunConfig, dict[str, Any]]:
    config = load(given)
    before = layout_of(config)
    layout = parse_layout(text) if text else shrink_layout(before)[0]
    return shrink_config(with_layout(config, layout), layout, before)


def test_every_change_is_listed_with_both_values() -> None:
    config, shrunk = small(LARGE)
    own, mesh = config.model, Mesh(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    assert isinstance(own, GptPolicy) and config.mesh.mesh(16) == mesh
    assert (own.layers, own.heads, own.kv_heads, own.width) == (5, 8, 1, 32)
    assert own.context % 2 and own.vocab is not None and own.vocab % 2
    assert shrunk["model.layers"] == (30, 5) and shrunk["model.vocab"] == (50304, 35)
    assert shrunk["max_grad_norm"] == (1.0, 0.05) and shrunk["model.dropout"] == (0.0, 0.1)
    before, after = load(LARGE).model_dump(), config.model_dump()
    undone = {key: change.old for key, change in shrunk.items()}
    for key, value in undone.items():
        *outer, last = key.split(".")
        target = after
        for part in outer:
            target = target[part]
        target[last] = value
    assert {**after, "mesh": None} == {**before, "mesh": None}, "nothing else changed"


@pytest.mark.parametrize(
    "model",
    [
        {"family": "gpt2", "layers": 12, "width": 768, "heads": 12},
        {"family": "llama", "layers": 7, "width": 512, "heads": 8, "head_size": 32, "hidden": 999},
        {"layers": 12, "experts": {"count": 16, "first": 3, "every": 4, "shared": 2, "router": {"top_k": 4}}},
        {"layers": 2, "width": 8, "heads": 2, "context": 4, "vocab": 5, "dropout": 0.3},
    ],
)
def test_a_language_model_stays_one_that_can_be_built_and_cut(model: dict[str, Any]) -> None:
    given = {"model": {"vocab": 1000, **model}, "mesh": {"tp": 2, "pp": 1}}
    config, _ = small(given, "tp=2,dp=2")
    before, own = load(given).model, config.model
    assert isinstance(own, GptPolicy) and isinstance(before, GptPolicy)
    built = Gpt(own.resolved())
    assert sum(p.numel() for p in built.parameters()) < 60_000
    assert (own.family, own.tied_head) == (before.family, before.tied_head) and own.dropout
    kinds = {before.has_experts(i) for i in range(before.layers)}
    assert {own.has_experts(i) for i in range(own.layers)} == kinds
    assert resolve(config, 4, "cpu").config.max_grad_norm == 0.05


@pytest.mark.parametrize(
    "model",
    [
        {"name": "bert"},
        {"name": "resnet"},
        {"name": "resnet", "depth": 34, "stem": "cifar"},
        {"name": "alexnet"},
        {"name": "dlrm", "bottom": [512, 256], "top": [1024, 1]},
        {"name": "dcn", "cross_layers": 6, "rank": 512},
    ],
)
def test_other_models_of_ours_shrink(model: dict[str, Any]) -> None:
    config, shrunk = small({"model": model}, "dp=2")
    assert any(key.startswith("model.") for key in shrunk)
    assert getattr(config.model, "name", "") == model["name"]
    if model["name"] == "resnet":
        assert config.model.stem == model.get("stem", "imagenet")  # type: ignore[union-attr]


def test_a_model_of_unknown_code_stays_whole() -> None:
    given = {"model": {"target": "package.module:build", "layers": 96}, "pipeline": {"partition": ["a", "b"]}}
    config, shrunk = small({**given, "mesh": {"pp": 3}}, "pp=2,dp=2")
    assert not any(key.startswith("model") for key in shrunk)
    assert shrunk["pipeline.partition"].new == "parameters" and config.batch.accumulation == 3


# Models of transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {"num_key_value_heads": 8}),
        ("GPT2", {}),
        ("Mixtral", {}),
        ("Qwen3Moe", {"mlp_only_layers": [0, 5]}),
        ("Gemma3Text", {}),
        ("DeepseekV3", {}),
        ("Qwen3", {}),
        ("Bert", {}),
    ],
)
def test_a_configuration_of_transformers_stays_one_that_runs(kind: str, options: dict[str, Any]) -> None:
    config = getattr(transformers, f"{kind}Config")(**options)
    layout = parse_layout("tp=2,pp=2")
    few, shrunk = shrink_transformers(config, layout, parse_layout("tp=8,pp=4"))
    names = {"Gemma3Text": "Gemma3", "Bert": "BertForMaskedLM", "GPT2": "GPT2LMHead"}
    word = names.get(kind, kind)
    model = getattr(
        transformers, word if word.endswith("LM") else f"{word.removesuffix('LMHead')}ForCausalLM", None
    )
    model = model or transformers.GPT2LMHeadModel
    built = model(few)
    assert sum(p.numel() for p in built.parameters()) < 120_000
    tokens = torch.randint(0, few.vocab_size, (2, 9))
    assert torch.isfinite(built(tokens, labels=tokens).loss)
    heads = config.num_attention_heads, few.num_attention_heads
    kv = (getattr(config, "num_key_value_heads", heads[0]), getattr(few, "num_key_value_heads", heads[1]))
    assert heads[0] // kv[0] == heads[1] // kv[1]
    assert few.vocab_size % 2 and few.num_hidden_layers >= 4
    for name, (old, new) in shrunk.items():
        assert (getattr(config, name), getattr(few, name)) == (old, new)
    if hasattr(config, "layer_types") and config.layer_types:
        assert set(few.layer_types) == set(config.layer_types)
        assert len(few.layer_types) == few.num_hidden_layers


def a_llama(frozen: str = "", adapter: bool = False) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=8, num_attention_heads=8, vocab_size=99
    )
    model = transformers.LlamaForCausalLM(config)
    for index, layer in enumerate(model.model.layers):
        layer.requires_grad_(frozen != "first" or index >= 4)
    if frozen == "embed":
        model.model.embed_tokens.requires_grad_(False)
    if adapter:
        model.adapter = nn.Linear(2, 2)
    return model.double().eval()


def test_a_model_of_transformers_is_made_again_with_its_frozen_parameters() -> None:
    layout = parse_layout("pp=2")
    for frozen in ("", "embed", "first"):
        make, shrunk = shrink_model(partial(a_llama, frozen), layout)
        model = make()
        assert shrunk["num_hidden_layers"] == (8, 4) and model.dtype == torch.float64 and not model.training
        trained = {name: p.requires_grad for name, p in model.named_parameters()}
        assert trained["model.embed_tokens.weight"] == (frozen != "embed")
        assert trained["model.layers.0.mlp.up_proj.weight"] == (frozen != "first")
        assert trained["model.layers.3.mlp.up_proj.weight"]
        assert all(torch.equal(a, b) for a, b in zip(make().parameters(), model.parameters(), strict=True))


def test_a_model_that_its_configuration_does_not_describe_stays_whole() -> None:
    layout = parse_layout("pp=2")
    for make in (partial(a_llama, adapter=True), partial(nn.Linear, 2, 2)):
        assert shrink_model(make, layout) == (make, {})


# Batches -----------------------------------------------------------------------------------------------------------


def test_a_batch_keeps_ignored_labels_and_folds_ids() -> None:
    labels = torch.arange(8 * 20).view(8, 20)
    labels[0, :3] = -100
    batch = {
        "input_ids": labels.clamp_min(0),
        "labels": labels,
        "mask": torch.ones(8, 1, 20, 20),
        "weight": torch.rand(8),
    }
    few = shrink_batch(batch, 3, 9, 35)
    assert (
        few["input_ids"].shape == (3, 9) and few["mask"].shape == (3, 1, 9, 9) and few["weight"].shape == (3,)
    )
    assert int(few["input_ids"].max()) < 35 and few["labels"][0, :4].tolist() == [-100, -100, -100, 3]
    pictures, classes = shrink_batch((torch.rand(8, 3, 20, 20), torch.arange(8) + 100), 2, 9, 35)
    assert pictures.shape == (2, 3, 20, 20) and classes.tolist() == [100, 101]
    assert shrink_batch(torch.rand(2, 3), 5).shape == (2, 3)
