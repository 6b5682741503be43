"""Fused projections, biases for each head and state-space mixers of transformers, cut: gradients and text are those
of the whole model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.errors import PlanError
from shardwise.comm.world import World
from shardwise.parallel.tensor.apply import make_parallel, table_of
from shardwise.parallel.tensor.layout import parse
from tests.engine.nets import seeded
from tests.foreign.wide import wide
from tests.parallel.tensor.whole import TOLERANCE, differences, tensor_group, worst

transformers = pytest.importorskip("transformers")

VOCABULARY, TOKENS = 51, 6
SIZE = dict(vocab_size=VOCABULARY, hidden_size=32, use_cache=False)
LAYERS = dict(num_hidden_layers=1, num_attention_heads=4)


def t(name: str, **keys: Any) -> Callable[[], nn.Module]:
    config = {"GPTBigCode": dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)}.get(name, {})

    def make() -> nn.Module:
        made: nn.Module = getattr(transformers, f"{name}ForCausalLM")(
            getattr(transformers, f"{name}Config")(**SIZE, **config, **keys)
        )
        return made

    return make


FALCON = dict(hidden_dropout=0.0, attention_dropout=0.0, **LAYERS)
MODELS = {
    "bloom": t("Bloom", n_layer=1, n_head=4),
    "mpt": t("Mpt", n_layers=1, n_heads=4, max_seq_len=16),
    "codegen": t("CodeGen", n_layer=1, n_head=8, rotary_dim=4, n_positions=16),
    "gpt_bigcode": t("GPTBigCode", n_layer=1, n_head=4, n_positions=16),
    "falcon": t("Falcon", **FALCON),
    "falcon, key heads": t("Falcon", **FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon, alibi": t("Falcon", **FALCON, alibi=True, multi_query=False),
    "neox japanese": t("GPTNeoXJapanese", hidden_dropout=0.0, attention_dropout=0.0, **LAYERS),
    "mamba": t("Mamba", num_hidden_layers=1, state_size=3, time_step_rank=4, use_bias=True),
}


def moved(name: str) -> nn.Module:
    """In fp64, norms and biases away from 1 and 0."""
    with wide():
        model: nn.Module = seeded(MODELS[name])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def tokens() -> Tensor:
    return torch.randint(1, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(3))


def loss_of(model: nn.Module) -> Tensor:
    with wide():
        loss: Tensor = model(input_ids=tokens(), labels=tokens()).loss
    return loss


def measured(world: World, name: str) -> dict[str, float]:
    found = differences(world, lambda: moved(name), loss_of, sequence=True)
    whole, cut = moved(name).eval(), moved(name).eval()
    make_parallel(cut, table_of(cut), tensor_group(world), sequence=True)
    settings = dict(max_new_tokens=3, do_sample=False, use_cache=True, pad_token_id=0, eos_token_id=None)
    texts = [model.generate(tokens(), **settings) for model in (whole, cut)]
    return found | {"text": float(not texts[0].equal(texts[1]))}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_text_are_those_of_one_process(ranks: Any, name: str) -> None:
    distance, where = worst(ranks(2).run(measured, name))
    assert distance <= TOLERANCE, where


class Around(nn.Module):
    """A user's class around a model, which hides the plan that the model brings."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = moved("codegen")

    def forward(self, **given: Any) -> Any:
        return self.inner(**given)


def measured_inside(world: World) -> dict[str, float]:
    return differences(world, Around, loss_of, sequence=True)


def test_a_fused_matrix_inside_a_user_s_class(ranks: Any) -> None:
    """Transformers 5.24 sizes CodeGen's quarters by another attribute, so gradients were 138 % wrong."""
    distance, where = worst(ranks(2).run(measured_inside))
    assert distance <= TOLERANCE, where


@pytest.mark.parametrize("name", MODELS)
def test_attention_and_feed_forward_are_cut(name: str) -> None:
    model = MODELS[name]()
    rows = table_of(model).rows
    cut = [words for words in rows.values() if parse("", words).kind in ("column", "row")]
    linears = [each for each in model.modules() if isinstance(each, nn.Linear)]
    assert len(cut) == len(linears) - (2 if name == "mamba" else 1), "but the head and a mixer's dt_proj"


@pytest.mark.parametrize(
    ("name", "keys"),
    [("Falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 1}), ("CodeGen", {"n_head": 4})],
)
def test_heads_that_may_not_be_parted_are_refused(ranks: Any, name: str, keys: dict[str, Any]) -> None:
    """One key head with all queries in its block; four groups of one head."""
    for text in ranks(2).run(refused, name, keys):
        assert "do not divide over tp=2" in text


def refused(world: World, name: str, keys: dict[str, Any]) -> str:
    model = t(name, **keys)()
    with pytest.raises(PlanError) as caught:
        make_parallel(model, table_of(model), tensor_group(world), sequence=True)
    return str(caught.value)
