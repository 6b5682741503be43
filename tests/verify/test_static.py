"""The static part finds gradients whose registered placement is not the one that the model's code gives them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.comm import duals
from shardwise.models import Gpt, GptPolicy
from shardwise.parallel.tensor import layers
from shardwise.plan.placement import Partial, PerRank, Replicate, Shard, ShardBlock
from shardwise.plan.registry import TensorInfo
from shardwise.verify import static
from shardwise.verify.static import StaticPart, put_together, static_problems

SHAPE: dict[str, Any] = {"family": "gpt2", "layers": 1, "width": 64, "heads": 4, "context": 32, "vocab": 128}
FAMILIES = ("gpt2", "llama")


def gpt(**given: Any) -> nn.Module:
    with torch.device("meta"):
        return Gpt(GptPolicy.model_validate(SHAPE | given))


def tokens(length: int = 32) -> dict[str, Tensor]:
    ids = torch.zeros(2, length, dtype=torch.int64)
    return {"tokens": ids, "targets": ids}


def check(
    make: Callable[[], nn.Module] = gpt,
    sequence: bool = True,
    ranks: int = 2,
    example: Any = None,
    table: Any = None,
    loss: Any = None,
    **settings: Any,
) -> StaticPart:
    tensor = {"sequence_parallel": sequence} | ({"table": table} if table else {})
    settings = {"mesh": {"tp": 2}, "tensor": tensor} | settings
    return static_problems(make, settings, ranks, tokens() if example is None else example, loss)


def is_clean(found: StaticPart) -> bool:
    return not found.problems and not found.unknown and found.operations > 100 and found.gradients > 5


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_model_has_no_problem_and_nothing_unknown(family: str, sequence: bool) -> None:
    found = check(lambda: gpt(family=family, dropout=0.1), sequence)
    assert is_clean(found), [*map(str, found.problems), *found.unknown]
    assert found.gradients == len([*gpt(family=family).named_parameters()])


@pytest.mark.parametrize(
    ("given", "settings", "ranks"),
    [
        ({"layers": 4}, {"mesh": {"tp": 2, "pp": 2}, "batch": {"accumulation": 2}}, 4),
        ({}, {"zero": {"stage": 3}}, 4),
        ({"tied_head": True}, {}, 2),
        ({}, {"precision": "bf16", "tiles": {"logits": 32, "mlp": 16}}, 2),
    ],
    ids=str,
)
def test_other_layouts_have_no_problem(given: Any, settings: Any, ranks: int) -> None:
    for sequence in (False, True):
        found = check(lambda: gpt(family="llama", **given), sequence, ranks, **settings)
        assert is_clean(found), [*map(str, found.problems), *found.unknown]


def test_a_pass_that_stays_whole_has_no_problem() -> None:
    assert is_clean(check(example=tokens(31)))


def test_experts_on_ranks_of_tp_are_unknown_and_no_problem() -> None:
    """With ep over the ranks of tp, rows that come back are summed in place by the next block."""
    settings = {"mesh": {"tp": 2, "ep": 2}, "optimizer": {"type": "adamw"}}
    found = static_problems(lambda: gpt(family="llama", experts={"count": 4}), settings, 2, tokens())
    assert found.problems == () and any("experts" in each.module for each in found.unknown)


def test_one_head_of_keys_on_a_rank_has_no_problem() -> None:
    """Attention in blocks views the only head in a shape that does not show it."""
    settings = {"mesh": {"tp": 2}, "optimizer": {"type": "adamw"}}
    found = static_problems(lambda: gpt(family="llama", kv_heads=2), settings, 2, tokens())
    assert found.problems == () and found.unknown == ()


@pytest.mark.parametrize("sequence", [False, True])
def test_experts_of_own_rows_have_no_problem(sequence: bool) -> None:
    """Ranks along tp route tokens of their own, so that the gradients of experts and router are addends."""
    found = check(lambda: gpt(family="llama", experts={"count": 4}), sequence)
    assert is_clean(found), [*map(str, found.problems), *found.unknown]


def test_one_rank_checks_nothing() -> None:
    assert check(mesh={}, ranks=1) == StaticPart()


def test_blooms_bug_is_a_sentence() -> None:
    """A norm on cut tokens whose gradient nobody sums trained BLOOM wrongly for 15 days."""
    found = check(table={"blocks.*.mlp_norm": "replicate"})
    names = {each.name: each for each in found.problems}
    assert set(names) == {"blocks.0.mlp_norm.weight", "blocks.0.mlp_norm.bias"}
    problem = names["blocks.0.mlp_norm.weight"]
    assert problem.module == "blocks.0.mlp_norm"
    assert problem.wanted == "gradient Replicate"
    assert problem.found == "gradient Partial"
    assert "models/layers.py:" in problem.line
    assert found.as_json()["problems"][0].keys() == {"name", "module", "line", "wanted", "found"}


@pytest.mark.parametrize("norm", ["norm", "blocks.*.attention_norm"])
def test_another_norm_without_a_sum_is_named(norm: str) -> None:
    found = check(table={norm: "replicate"})
    assert {each.name.rpartition(".")[0] for each in found.problems} == {norm.replace("*", "0")}


def _row_without_sum(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.weight)


_ROW = layers.RowLinear.forward


def _row_summed_twice(self: Any, x: Tensor) -> Tensor:
    return duals.reduce(_ROW(self, x), self.site)


def _column_without_copy(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.weight, self.bias)


def _embedding_without_sum(self: Any, ids: Tensor) -> Tensor:
    rows = layers.own_rows(ids, self.weight, self.rows, self.vocabulary, None)
    duals.note_move(self.site, "own rows", self.weight, rows, 0)
    return rows


def _row_with_bias_on_each_rank(self: Any, x: Tensor) -> Tensor:
    return duals.reduce(F.linear(x, self.weight, self.bias), self.site)


def _row_with_gelu_before_sum(self: Any, x: Tensor) -> Tensor:
    return duals.reduce(F.gelu(F.linear(x, self.weight)), self.site)


def _row_with_half_in_backward(self: Any, x: Tensor) -> Tensor:
    return duals.copy(_ROW(self, x), self.site)


@pytest.mark.parametrize(
    ("layer", "forward", "module", "found"),
    [
        (layers.RowLinear, _row_without_sum, "blocks.0", "Partial"),
        (layers.RowLinear, _row_summed_twice, "blocks.0.attention.out", "Replicate"),
        (layers.ColumnLinear, _column_without_copy, "blocks.0", "Partial"),
        (layers.VocabularyEmbedding, _embedding_without_sum, "", "Partial"),
        (layers.RowLinear, _row_with_bias_on_each_rank, "blocks.0.attention.out", "Partial"),
        (layers.RowLinear, _row_with_gelu_before_sum, "blocks.0.attention.out", "Partial"),
        (layers.RowLinear, _row_with_half_in_backward, "blocks.0", "Replicate"),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_wrong_layer_is_found(
    layer: Any, forward: Any, module: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "forward", forward)
    problems = check(sequence=False).problems
    assert any(each.module.startswith(module) and found in each.found for each in problems), problems


def test_foreign_rows_that_are_counted_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without zeros for the tokens of other ranks, each rank adds a row of its own."""

    def unmasked(tokens: Tensor, weight: Tensor, rows: slice, vocabulary: int, padding: Any) -> Tensor:
        return F.embedding((tokens - rows.start).clamp(0, len(weight) - 1), weight)

    monkeypatch.setattr(layers, "own_rows", unmasked)
    problems = check(sequence=False).problems
    assert [each.wanted for each in problems] == ["zeros for the rows that other ranks hold"]


def test_a_slice_in_place_of_a_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duals, "scatter", duals.cut)
    assert any("piece" in each.name and "Partial" in each.found for each in check().problems)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("blocks.0.mlp.down.bias", Partial()),
        ("blocks.0.mlp.up.weight", Replicate()),
        ("norm.weight", Shard(0)),
        ("blocks.0.mlp.router.weight", Replicate()),
    ],
    ids=str,
)
def test_a_wrong_registered_placement_is_found(
    name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plan = static.make_plan

    def planted(*args: Any) -> Any:
        plan = make_plan(*args)
        info = plan.registry.get("gradient", name)
        plan.registry._tensors["gradient", "", name] = replace(info, grad_placement={"tp": wrong})
        return plan

    monkeypatch.setattr(static, "make_plan", planted)
    experts = {"family": "llama", "experts": {"count": 4}} if "router" in name else {}
    assert {each.name for each in check(lambda: gpt(**experts), sequence=False).problems} == {name}


class OwnModel(nn.Module):
    """A user's model, whose middle computes on features that are cut."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.middle = nn.Linear(16, 32), nn.Linear(32, 16), middle

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(self.middle(y)).square().sum()


@pytest.mark.parametrize(
    "middle",
    [
        lambda y: y.softmax(-1),
        lambda y: F.layer_norm(y, y.shape[-1:]),
        lambda y: y * y.sum(-1, keepdim=True),
    ],
    ids=["softmax", "norm", "sum"],
)
def test_a_users_model_that_needs_whole_features_is_found(middle: Callable[[Tensor], Tensor]) -> None:
    problems = check(
        lambda: OwnModel(middle),
        sequence=False,
        example={"x": torch.zeros(2, 8, 16)},
        table={"up": "column", "down": "row"},
    ).problems
    assert any(__file__ in each.line for each in problems), problems


def test_a_users_right_model_has_no_problem() -> None:
    found = check(
        lambda: OwnModel(F.gelu),
        sequence=False,
        example={"x": torch.zeros(2, 8, 16)},
        table={"up": "column", "down": "row"},
    )
    assert not found.problems
    assert not found.unknown
    assert found.gradients == 4


SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def foreign(name: str) -> Callable[[], nn.Module]:
    transformers = pytest.importorskip("transformers")
    if name == "GPT2LMHeadModel":
        config = transformers.GPT2Config(
            vocab_size=128, n_positions=64, n_embd=64, n_layer=1, n_head=4, attn_pdrop=0.0
        )
    elif name == "BertForMaskedLM":
        config = transformers.BertConfig(**SMALL, attention_probs_dropout_prob=0.0)
    else:
        kind = name.removesuffix("ForCausalLM")
        config = getattr(transformers, f"{kind}Config")(**SMALL, num_key_value_heads=2)

    def make() -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, name)(config)
        return model

    return make


def labelled() -> dict[str, Tensor]:
    ids = torch.zeros(2, 32, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "MixtralForCausalLM"]
)
def test_foreign_models_have_no_problem(name: str) -> None:
    for sequence in (False, True):
        found = check(foreign(name), sequence, example=labelled())
        assert not found.problems, [*map(str, found.problems)]
        assert found.gradients > 10
        assert not found.unknown


def test_a_norm_of_transformers_llama_without_a_sum_is_named() -> None:
    norm = "model.layers.0.post_attention_layernorm"
    problems = check(foreign("LlamaForCausalLM"), example=labelled(), table={norm: "replicate"}).problems
    assert [each.name for each in problems] == [f"{norm}.weight"]
    assert "transformers" in problems[0].line


@pytest.mark.parametrize(
    ("sequence", "name", "gradient", "shape", "placement"),
    [
        (True, "blocks.0.mlp_norm", False, (2, 32, 64), Shard(1)),
        (True, "blocks.0.attention.qkv", False, (2, 32, 192), Shard(2, (ShardBlock(64, 4),) * 3)),
        (True, "blocks.0.mlp.down", True, (2, 32, 64), Shard(1)),
        (False, "blocks.0.mlp_norm", True, (2, 32, 64), Replicate()),
        (False, "blocks.0.mlp.up", True, (2, 32, 256), Shard(2)),
        (False, "nothing", False, None, None),
    ],
    ids=str,
)
def test_outputs_of_modules_are_registered(
    sequence: bool, name: str, gradient: bool, shape: Any, placement: Any
) -> None:
    info = check(sequence=sequence).placement_of_output(name, gradient)
    assert (info and info.shape) == shape
    assert (info and info.on("tp")) == placement


def test_a_missing_sum_is_seen_in_an_outputs_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers.RowLinear, "forward", _row_without_sum)
    info = check(sequence=False).placement_of_output("blocks.0.mlp.down")
    assert info is not None
    assert info.on("tp") == Partial()


@pytest.mark.parametrize(
    "where", [Replicate(), Partial(), Shard(1), Shard(1, (ShardBlock(4, 4),) * 2)], ids=str
)
def test_pieces_are_put_together(where: Any) -> None:
    whole = torch.arange(24.0).view(3, 8)
    pieces = [whole, whole]
    if where == Partial():
        pieces = [whole * 0.25, whole * 0.75]
    elif where == Shard(1):
        pieces = list(whole.chunk(2, 1))
    elif isinstance(where, Shard):
        pieces = [whole[:, [0, 1, 4, 5]], whole[:, [2, 3, 6, 7]]]
    info = TensorInfo("x", (3, 8), torch.float32, "activation", {"tp": where}, label="output")
    found = put_together(info, pieces)
    assert found is not None
    assert found.equal(whole)
    assert put_together(info, [pieces[0], pieces[1][:2]]) is None


def test_values_of_each_ranks_own_are_not_put_together() -> None:
    info = TensorInfo("x", (3, 8), torch.float32, "activation", {"tp": PerRank()}, label="output")
    assert put_together(info, [torch.zeros(3, 8), torch.ones(3, 8)]) is None
