"""Sequences that are cut over ranks: dropout, evaluation, weights, checkpoints, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import DataError, PlanError, UsageError
from shardwise.comm.world import World
from shardwise.engine.engine import Engine
from shardwise.engine.parts.weighing import MicrobatchWeights
from shardwise.kernels.attention import plain_attention
from shardwise.kernels.attention_view import PackedDocuments
from shardwise.models import Bert, BertPolicy, Gpt, GptPolicy
from shardwise.parallel.context import attention, foreign, keys, region

VOCABULARY = 19


def make(**more: Any) -> Gpt:
    shape: dict[str, Any] = {
        "layers": 2,
        "width": 16,
        "heads": 4,
        "context": 32,
        "vocab": VOCABULARY,
        "hidden": 24,
    }
    torch.manual_seed(0)
    return Gpt(GptPolicy(**{**shape, **more})).double()


def begin(world: World, config: dict[str, Any], **model: Any) -> Engine:
    given = {"optimizer": {"type": "sgd", "lr": 0.1}, "max_grad_norm": 1.0, **config}
    return shardwise.initialize(make(**model), given, world=world)


def batch(length: int, step: int = 0) -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (2, length + 1), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].clone()
    targets[0, : length // 2] = -100
    return {"tokens": tokens[:, :-1], "targets": targets}


def numbers(
    world: World,
    config: dict[str, Any],
    lengths: list[int],
    weights: list[float] | None,
    model: dict[str, Any],
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, norms and weights of three steps, and an evaluation, of lengths in turn."""
    engine, found = begin(world, config, **model), []
    for step in range(3):
        each = batch(lengths[step % len(lengths)], step)
        result = engine.train_step([each], weights)
        found += [result.loss, float(result.grad_norm or 0)]
    found += [engine.evaluate([(each, None)]), engine.evaluate([(each, 3.0), (batch(5), 1.0)])]
    predicted = engine.predict([{"tokens": each["tokens"]}])[0]
    state = {**engine.state_dict(), "logits": predicted}
    engine.close()
    return found, state


CASES: dict[str, tuple[dict[str, Any], list[int], list[float] | None, dict[str, Any]]] = {
    "dropout": ({}, [12, 13], None, {"dropout": 0.3}),
    "dropout, learned positions": ({"recompute": "full"}, [7], None, {"dropout": 0.3, "family": "gpt2"}),
    "shorter than the chunks": ({"zero": {"stage": 3}}, [1, 2, 3], None, {}),
    "a weight that is given": ({}, [12], [5.0], {}),
    "microbatches alike": ({"batch": {"weigh_by": "batches"}}, [9], None, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(ranks: Any, name: str) -> None:
    config, *case = CASES[name]
    found = ranks(2).run(numbers, {**config, "mesh": {"cp": 2}}, *case)
    wanted, state = numbers(World(0, 1), config, *case)  # type: ignore[arg-type]
    for got, weights in found:
        assert got == pytest.approx(wanted, rel=1e-11)
        for key, value in state.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-10, atol=1e-12)


def saved(world: World, config: dict[str, Any], folder: str, loads: bool) -> dict[str, Tensor]:
    engine = begin(world, {**config, "optimizer": {"type": "adamw", "lr": 0.01}})
    if loads:
        engine.load(folder)
    else:
        engine.train_step([batch(12)])
        engine.save(folder)
        engine.wait_for_save()
    found = {**engine.state_dict(), "moment": engine.full_tensor("embed.weight", "exp_avg_sq")}
    engine.close()
    return found


def test_a_checkpoint_loads_on_any_cut(ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    first, *_ = ranks(4).run(saved, {"mesh": {"cp": 4}, "zero": {"stage": 3}}, folder, False)
    for size, config in (
        (1, {"mesh": {"cp": 1}}),
        (4, {"mesh": {"cp": 2, "tp": 2}, "zero": {"stage": 1}}),
    ):
        for found in ranks(size).run(saved, config, folder, True):
            assert all(torch.equal(found[name], first[name]) for name in first)


# Refused -----------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.rnn = nn.LSTM(8, VOCABULARY, batch_first=True)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.rnn(self.embed(tokens))[0]
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def refused(world: World) -> list[str]:
    said = []
    policy = GptPolicy(layers=1, width=8, heads=2, context=8, vocab=VOCABULARY)
    own = Gpt(policy, attention=lambda q, k, v: plain_attention(q, k, v))
    both_ways = Bert(BertPolicy(layers=1, width=8, heads=2, context=8, vocab=VOCABULARY))
    for model in (Plain(), own, both_ways):
        try:
            shardwise.initialize(model, {"mesh": {"cp": 2}}, world=world)
        except PlanError as error:
            said.append(str(error))
    engine = begin(world, {"mesh": {"cp": 2}, "zero": {"stage": 3}})
    before = engine.state_dict()
    for given in (
        lambda: engine.train_step([batch(40)]),
        lambda: engine.train_step([batch(8, world.rank)]),
    ):
        try:
            given()
        except (UsageError, DataError) as error:
            said.append(str(error))
            engine.discard()
    after = engine.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items()), "no weight has moved"
    engine.close()
    return said


def test_what_cannot_be_cut_is_refused(ranks: Any) -> None:
    by_rank = ranks(2).run(refused)
    assert by_rank[0] == by_rank[1], "one sentence on all ranks"
    for said in by_rank:
        foreign, own, both_ways, long, unlike = said
        assert "attention function of its own" in own and "positions" in both_ways
        assert "rnn (LSTM) mixes tokens" in foreign
        assert "40 tokens but its context is 32" in long
        assert "different batches" in unlike and "along cp" in unlike


# Models of transformers --------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}
LAYERS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
FOREIGN: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "mistral": {**SMALL, "sliding_window": 5},
    "gemma3_text": {**SMALL, **LAYERS},
    "gpt_oss": {**SMALL, **LAYERS, "num_local_experts": 2, "num_experts_per_tok": 1},
    "mixtral": {**SMALL, **dict(num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5)}
    | {"experts_implementation": "eager"},
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}


def foreign_numbers(world: World, kind: str, config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of two steps and an evaluation; the model's own fp32 inside is the noise."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **FOREIGN[kind])
    )
    model = model if kind == "gpt_oss" else model.double()
    given = {"optimizer": {"type": "sgd", "lr": 0.1}, "max_grad_norm": 1.0, **config}
    engine, found = shardwise.initialize(model, given, world=world), []
    for step in range(2):
        tokens = torch.randint(VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(step))
        labels = tokens.clone()
        labels[0, :5] = -100
        each: dict[str, Any] = {"input_ids": tokens, "labels": labels}
        if step:  # transformers' trainer gives the divisor of the loss
            each["num_items_in_batch"] = torch.tensor(19)
        result = engine.train_step([each])
        found += [result.loss, float(result.grad_norm or 0), result.weight]
    found.append(engine.evaluate([(each, None)]))
    state = {name: tensor.double() for name, tensor in engine.state_dict().items()}
    engine.close()
    return found, state


@pytest.mark.parametrize("kind", FOREIGN)
def test_models_of_transformers_equal_one_process(ranks: Any, kind: str) -> None:
    """Windows, sinks, a scale of its own, learned positions; labels are shifted before the cut."""
    wanted, state = foreign_numbers(World(0, 1), kind, {})
    for got, weights in ranks(2).run(foreign_numbers, kind, {"mesh": {"cp": 2}, "zero": {"stage": 3}}):
        assert got == pytest.approx(wanted, rel=2e-6)
        for name, value in state.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=2e-6)


def refused_of_transformers(world: World) -> list[str]:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **SMALL))
    engine, said = shardwise.initialize(model, {"mesh": {"cp": 2}}, world=world), []
    tokens = torch.ones(2, 8, dtype=torch.long)
    try:
        engine(input_ids=tokens, labels=tokens).logits.argmax(-1)
    except UsageError as error:
        said.append(str(error))
        engine.discard()
    mask = tokens.clone()
    mask[0, 0] = 0
    for more in ({"attention_mask": mask}, {"attention_mask": {"full": mask}}, {"position_ids": tokens}):
        try:
            engine.train_step([{"input_ids": tokens, "labels": tokens, **more}])
        except UsageError as error:
            said.append(str(error))
            engine.discard()
    engine.close()
    return said


def test_padding_and_positions_of_transformers_are_refused(ranks: Any) -> None:
    for said in ranks(2).run(refused_of_transformers):
        logits, padding, masks, positions = said
        assert "those of its own tokens" in logits
        assert "attention_mask with zeros" in padding and masks == padding and "position_ids" in positions


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"layer_types": ["sliding_attention", "chunked_attention"]}, "chunked_attention"),
        ({"is_causal": False}, "later tokens"),
    ],
)
def test_other_mixing_of_tokens_is_found(more: dict[str, Any], named: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **SMALL))
    assert foreign.takes_interface(model) and not foreign.other_mixing(model)
    vars(model.config).update(more)
    assert named in foreign.other_mixing(model)


def test_a_convolution_of_tokens_is_found() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **SMALL))
    model.model.layers[0].mixer = nn.Conv1d(16, 16, 3)
    assert "mixer (Conv1d)" in foreign.other_mixing(model)


# Planted mistakes --------------------------------------------------------------------------------------------------


def gradients_of_keys_stay_abroad() -> Any:
    right = attention._return

    def wrong(gradients: Tensor, site: Any) -> Any:
        arrive = right(gradients, site)
        return lambda: tuple(torch.zeros_like(each) for each in arrive())

    return patch.object(attention, "_return", wrong)


def positions_of_a_part_begin_anew() -> Any:
    right = region.ContextRegion._pieces

    def wrong(self: Any, given: Any, cut: Any) -> dict[str, Any]:
        pieces = right(self, given, cut)
        return pieces | {"positions": torch.arange(len(pieces["positions"]))}

    return patch.object(region.ContextRegion, "_pieces", wrong)


def targets_of_other_tokens() -> Any:
    right = region.ContextRegion._pieces

    def wrong(self: Any, given: Any, cut: Any) -> dict[str, Any]:
        pieces = right(self, given, cut)
        return pieces | {"targets": pieces["targets"].roll(1, 1)}

    return patch.object(region.ContextRegion, "_pieces", wrong)


def ranks_weigh_alike() -> Any:
    return patch.object(MicrobatchWeights, "of_loss", lambda self, loss, batch: 1.0)


def foreign_keys_are_not_seen() -> Any:
    return patch.object(attention, "_leave", lambda k, v, site, what: lambda: None)


def a_token_sees_the_next_one() -> Any:
    right = keys.seen_groups

    def wrong(*args: Any) -> Any:
        groups = right(*args)
        later = [tuple(run._replace(position=run.position + 1) for run in each.queries) for each in groups]
        return [replace(each, queries=runs) for each, runs in zip(groups, later, strict=True)]

    return patch.object(keys, "seen_groups", wrong)


def ends_of_documents_are_ignored() -> Any:
    right = region.packed_documents

    def wrong(documents: Tensor, shape: Any) -> PackedDocuments:
        found = right(documents, shape)
        return PackedDocuments(((0,),) * len(found.starts), found.length)

    return patch.object(region, "packed_documents", wrong)


def positions_go_on_through_documents() -> Any:
    return patch.object(region.SequenceCut, "positions", lambda self, places: places)


def packed(length: int) -> dict[str, Tensor]:
    """A batch of two sequences, each with two documents."""
    documents = torch.stack([torch.arange(length) >= length // 3, torch.arange(length) >= length // 2]).long()
    return batch(length) | {"documents": documents}


MISTAKES = {
    each.__name__: each
    for each in (
        gradients_of_keys_stay_abroad,
        positions_of_a_part_begin_anew,
        targets_of_other_tokens,
        ranks_weigh_alike,
        foreign_keys_are_not_seen,
        a_token_sees_the_next_one,
        ends_of_documents_are_ignored,
        positions_go_on_through_documents,
    )
}


def planted(world: World) -> dict[str, str]:
    said = {}
    for name, mistake in MISTAKES.items():
        keys.plan_exchange.cache_clear()
        with mistake():
            engine = begin(
                world,
                {
                    "mesh": {"cp": 2},
                    "context": "planned",
                    "zero": {"stage": 3},
                    "check_first_step": "auto",
                },
                # Rotary angles of a document depend on distances alone, which positions that go on leave as they are.
                family="gpt2",
            )
            try:
                engine.train_step([packed(13) if "documents" in name else batch(13)])
            except PlanError as error:
                said[name] = str(error)
                engine.discard()
            engine.close()
    keys.plan_exchange.cache_clear()
    return said


def test_the_check_of_the_first_step_sees_planted_mistakes(ranks: Any) -> None:
    for said in ranks(2).run(planted):
        assert said.keys() == MISTAKES.keys()
        assert all("uncut" in each for each in said.values()), said
