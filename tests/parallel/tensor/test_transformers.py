"""Models of transformers, cut by the table of their shape or by their own plan, equal the whole ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.errors import PlanError, UsageError
from shardwise.comm.world import World
from shardwise.kernels.dropout import EqualPart
from shardwise.parallel.tensor.apply import make_parallel, table_of
from shardwise.parallel.tensor.layout import dropout_cuts
from shardwise.parallel.tensor.region import WithheldLogits
from tests.engine.nets import LLAMA, seeded
from tests.parallel.tensor.whole import TOLERANCE, differences, tensor_group, worst

transformers = pytest.importorskip("transformers")

VOCABULARY = 51
LLAMA_LIKE = LLAMA | dict(vocab_size=VOCABULARY)
GPT2_LIKE = dict(
    vocab_size=VOCABULARY,
    n_positions=32,
    n_embd=16,
    n_layer=2,
    n_head=4,
    attn_pdrop=0.0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
)
BERT_LIKE = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
STARCODER_LIKE = LLAMA_LIKE | dict(residual_dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0)


def t(name: str) -> Any:
    return getattr(transformers, name)


def with_own_loss() -> nn.Module:
    """A model whose forward makes a loss of its logits itself, past ``loss_function``, as Granite Speech does."""

    class Own(t("LlamaForCausalLM")):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    return Own(t("LlamaConfig")(**LLAMA_LIKE))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: t("LlamaForCausalLM")(t("LlamaConfig")(**LLAMA_LIKE)),
    "llama, tied": lambda: t("LlamaForCausalLM")(
        t("LlamaConfig")(**LLAMA_LIKE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    ),
    "llama, own loss": with_own_loss,
    "mistral": lambda: t("MistralForCausalLM")(t("MistralConfig")(**LLAMA_LIKE, sliding_window=4)),
    "gemma": lambda: t("GemmaForCausalLM")(t("GemmaConfig")(**LLAMA_LIKE, head_dim=4)),
    "gemma2": lambda: t("Gemma2ForCausalLM")(t("Gemma2Config")(**LLAMA_LIKE, head_dim=4, sliding_window=4)),
    "gemma3": lambda: t("Gemma3ForCausalLM")(
        t("Gemma3TextConfig")(**LLAMA_LIKE, head_dim=4, sliding_window=4)
    ),
    "qwen2": lambda: t("Qwen2ForCausalLM")(t("Qwen2Config")(**LLAMA_LIKE)),
    "qwen3": lambda: t("Qwen3ForCausalLM")(t("Qwen3Config")(**LLAMA_LIKE, head_dim=8)),
    "gpt2": lambda: t("GPT2LMHeadModel")(t("GPT2Config")(**GPT2_LIKE)),
    "bert": lambda: t("BertForMaskedLM")(t("BertConfig")(**BERT_LIKE)),
    "roberta": lambda: t("RobertaForMaskedLM")(t("RobertaConfig")(**BERT_LIKE)),
    "bert, classes": lambda: t("BertForSequenceClassification")(t("BertConfig")(**BERT_LIKE, num_labels=3)),
    "llama, classes": lambda: t("LlamaForSequenceClassification")(
        t("LlamaConfig")(**LLAMA_LIKE | {"pad_token_id": 0}, num_labels=3)
    ),
    "starcoder2": lambda: t("Starcoder2ForCausalLM")(t("Starcoder2Config")(**STARCODER_LIKE)),
    "olmo2": lambda: t("Olmo2ForCausalLM")(t("Olmo2Config")(**LLAMA_LIKE)),
}


CAUSAL = [name for name in MODELS if not any(word in name for word in ("bert", "classes", "own loss"))]


def moved(name: str) -> nn.Module:
    """A model whose norms and biases are not at 1 and 0."""
    model: nn.Module = seeded(MODELS[name])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    model.config.use_cache = False
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):  # theirs rounds to fp32
            module.forward = partial(_rms_norm, module)
    if name in CAUSAL:
        model.loss_function = ForCausalLMLoss
    return model


def _rms_norm(module: nn.Module, x: Tensor) -> Tensor:
    if hasattr(module, "eps"):  # Gemma's
        return nn.functional.rms_norm(x, module.weight.shape, 1 + module.weight, module.eps)
    return nn.functional.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def ForCausalLMLoss(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """transformers' loss without its rounding to fp32."""
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )


def batch(name: str) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(3))
    if "classes" in name:
        return tokens, torch.tensor([1, 2])
    labels = tokens.clone()
    labels[0, 3] = -100
    return tokens, labels


def gradients(world: World, name: str, sequence: bool) -> dict[str, float]:
    tokens, labels = batch(name)
    return differences(
        world, lambda: moved(name), lambda model: model(input_ids=tokens, labels=labels).loss, sequence
    )


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_one_process(ranks: Any, name: str, sequence: bool) -> None:
    distance, where = worst(ranks(2).run(gradients, name, sequence))
    assert distance <= TOLERANCE, where


@pytest.mark.parametrize("name", ["llama", "qwen3", "starcoder2"])
def test_four_ranks_share_two_key_value_heads(ranks: Any, name: str) -> None:
    distance, where = worst(ranks(4).run(gradients, name, True))
    assert distance <= TOLERANCE, where


def continued(world: World, name: str) -> list[Any]:
    tokens, labels = batch(name)
    whole, cut = moved(name).eval(), moved(name).eval()
    make_parallel(cut, table_of(cut), tensor_group(world), sequence=True)
    settings = dict(max_new_tokens=6, do_sample=False, use_cache=True, pad_token_id=0, eos_token_id=None)
    texts = [model.generate(tokens[:, :5], **settings).tolist() for model in (whole, cut)]
    with torch.no_grad():
        expected, found = whole(tokens, labels=labels), cut(tokens, labels=labels)
    training = cut(tokens, labels=labels)
    return [
        *texts,
        float((expected.logits - found.logits).abs().max()),
        float((expected.loss - found.loss).abs()),
        isinstance(training.logits, WithheldLogits),
    ]


@pytest.mark.parametrize("name", CAUSAL)
def test_generation_is_equal_and_part_of_the_logits_never_passes_for_all(ranks: Any, name: str) -> None:
    for expected, found, logits, loss, hidden in ranks(2).run(continued, name):
        assert found == expected
        assert logits < 1e-10 and loss < 1e-10
        assert hidden, "training logits are cut: they are not given out"


@pytest.mark.parametrize("name", MODELS)
def test_which_models_can_cut_the_sequence(name: str) -> None:
    table = table_of(MODELS[name]())
    by_plan = name in ("starcoder2", "olmo2")
    assert table.sequence == (not by_plan)
    assert ("the model's own plan" in table.note) == by_plan
    assert ("self_attn" in table.note) == (name == "olmo2"), "its norms read all heads"
    assert table.causal_loss == (name in CAUSAL)


def attention_dropout(world: World) -> str:
    model = t("GPT2LMHeadModel")(t("GPT2Config")(**GPT2_LIKE | {"attn_pdrop": 0.1}))
    with pytest.raises(PlanError) as caught:
        make_parallel(model, table_of(model), tensor_group(world), sequence=True)
    return str(caught.value)


def test_dropout_inside_attention_is_refused(ranks: Any) -> None:
    assert "config.attn_pdrop is 0.1" in ranks(2).run(attention_dropout)[0]


def uneven_gradients(world: World, name: str, tokens: int) -> dict[str, float]:
    """Of a pass of 8 tokens and one of another number, whose graphs live together."""
    given, labels = batch(name)

    def loss_of(model: nn.Module) -> Tensor:
        long = model(input_ids=given, labels=labels).loss
        short = model(input_ids=given[:, :tokens], labels=labels[:, :tokens].contiguous()).loss
        loss: Tensor = long + 2 * short
        return loss

    return differences(world, lambda: moved(name), loss_of, sequence=True)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "bert"])
def test_a_pass_whose_tokens_do_not_divide_leaves_the_sequence_whole(ranks: Any, name: str) -> None:
    """Seven tokens on two ranks, in one step with eight: norms and row biases are summed over tp in both."""
    distance, where = worst(ranks(2).run(uneven_gradients, name, 7))
    assert distance <= TOLERANCE, where


def single_places(world: World) -> dict[str, float]:
    given = batch("llama")[0]
    return differences(
        world,
        lambda: moved("llama"),
        lambda model: model(given, logits_to_keep=1).logits.square().sum(),
        sequence=True,
    )


def test_logits_of_single_places_leave_the_sequence_whole(ranks: Any) -> None:
    distance, where = worst(ranks(2).run(single_places))
    assert distance <= TOLERANCE, where


def withheld(world: World) -> list[str]:
    given, labels = batch("llama")
    model = moved("llama")
    make_parallel(model, table_of(model), tensor_group(world), sequence=True)
    logits, texts = model(input_ids=given, labels=labels).logits, []
    for use in (
        lambda: logits.shape,
        lambda: logits[:, -1],
        lambda: logits + 1,
        lambda: torch.softmax(logits, -1),
    ):
        with pytest.raises(UsageError) as caught:
            use()
        texts.append(str(caught.value))
    return texts


def test_any_use_of_withheld_logits_names_the_ways_to_get_them(ranks: Any) -> None:
    for text in ranks(2).run(withheld)[0]:
        assert "engine.log_probs(batch, targets)" in text and "tensor.gather_logits: true" in text


class Scaled(nn.Linear):
    """What many do to a linear layer: a factor in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def subclassed(world: World, style: str, instance: bool) -> str:
    model = seeded(MODELS["llama"])
    layer, leaf = (model.model.layers[0].mlp, "down_proj") if style == "row" else (model, "lm_head")
    given = getattr(layer, leaf)
    if instance:
        given.forward = lambda x: 3 * nn.functional.linear(x, given.weight)
    else:
        given.__class__ = Scaled
    with pytest.raises(PlanError) as caught:
        make_parallel(model, table_of(model), tensor_group(world), sequence=True)
    return str(caught.value)


@pytest.mark.parametrize("instance", [False, True], ids=["class", "instance"])
@pytest.mark.parametrize("style", ["row", "head"])
def test_a_linear_layer_with_a_forward_of_its_own_is_refused_by_name(
    ranks: Any, style: str, instance: bool
) -> None:
    text = ranks(2).run(subclassed, style, instance)[0]
    assert ("layers.0.mlp.down_proj" if style == "row" else "lm_head") in text
    assert ("was replaced on the instance" if instance else "is a Scaled whose forward is its own") in text


class Blended(nn.Embedding):
    """Uses its weight for more than the lookup."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) - self.weight.mean(0)


def blended(world: World) -> str:
    model = moved("llama")
    model.model.embed_tokens.__class__ = Blended
    make_parallel(model, table_of(model), tensor_group(world), sequence=True)
    with pytest.raises(PlanError) as caught:
        model(batch("llama")[0])
    return str(caught.value)


def test_an_embedding_that_needs_all_rows_is_refused_by_name(ranks: Any) -> None:
    text = ranks(2).run(blended)[0]
    assert "model.embed_tokens is a Blended, whose forward uses its weight in mean" in text


def dropouts(name: str, config: str, **dropping: float) -> dict[str, Any]:
    model = t(name)(t(config)(**(GPT2_LIKE if "GPT2" in name else BERT_LIKE) | dropping))
    return dropout_cuts(model, table_of(model), 1, 2, sequence=True)


def test_dropout_is_cut_in_the_blocks_and_whole_outside() -> None:
    cut = EqualPart(1, 2, 1)
    gpt2 = dropouts("GPT2LMHeadModel", "GPT2Config", resid_pdrop=0.1, embd_pdrop=0.1)
    assert gpt2 == {
        f"transformer.h.{i}.{leaf}": cut for i in (0, 1) for leaf in ("attn.resid_dropout", "mlp.dropout")
    }
    bert = dropouts("BertForSequenceClassification", "BertConfig", hidden_dropout_prob=0.1)
    assert bert == {
        f"bert.encoder.layer.{i}.{leaf}.dropout": cut
        for i in (0, 1)
        for leaf in ("attention.output", "output")
    }
    # One of the two is not in this one's layers; a row for it matched nothing, and the model was refused.
    xl = dropouts("XLMRobertaXLForMaskedLM", "XLMRobertaXLConfig", hidden_dropout_prob=0.1)
    assert xl == {f"roberta.encoder.layer.{i}.attention.output.dropout": cut for i in (0, 1)}
