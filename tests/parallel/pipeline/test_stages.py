"""Models of the Hugging Face library are cut as they are; stages on ranks of their own give the same gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.errors import PlanError
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.models.gpt import Gpt, GptPolicy
from shardwise.parallel.pipeline.blocks import find_blocks, weigh
from shardwise.parallel.pipeline.check_cut import check_cut
from shardwise.parallel.pipeline.cut import cut
from shardwise.parallel.pipeline.messages import pack, unpack
from shardwise.parallel.pipeline.partition import partition
from shardwise.plan.mesh import Mesh
from tests.parallel.pipeline.chain import error_of_cut, gradients_of, trained

TOKENS = torch.randint(0, 29, (3, 6), generator=torch.Generator().manual_seed(0))
SMALL = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 29, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 8, "attn_pdrop": 0.0}
MODELS = {
    "LlamaForCausalLM": ("LlamaConfig", SMALL),
    "MistralForCausalLM": ("MistralConfig", SMALL | {"sliding_window": 3}),
    "Qwen2ForCausalLM": ("Qwen2Config", SMALL | {"tie_word_embeddings": True}),
    "Qwen3ForCausalLM": ("Qwen3Config", SMALL | {"head_dim": 4}),
    "GPT2LMHeadModel": ("GPT2Config", GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "BertForMaskedLM": (
        "BertConfig",
        SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}


def hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config, keys = MODELS[name]
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**keys)).double()
    return model


def padded(model: nn.Module) -> Tensor:
    mask = torch.ones_like(TOKENS)
    mask[1, 4:] = 0
    return model(input_ids=TOKENS, attention_mask=mask, labels=TOKENS, use_cache=False).loss


def from_ids(model: nn.Module) -> Tensor:
    return model(input_ids=TOKENS, labels=TOKENS).loss


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_models_are_cut_as_they_are(name: str) -> None:
    model = hugging_face(name)
    blocks = find_blocks(model)
    assert len(blocks) == 4
    weights, front, back = weigh(model, blocks)
    for stages in (2, 4):
        starts = partition("parameters", blocks, weights, stages, front, back)
        call: Callable[[nn.Module], Tensor]
        for call in (from_ids, padded) if name != "BertForMaskedLM" else (from_ids,):
            check_cut(model, call, starts)
            assert error_of_cut(model, call, starts) <= 1e-12


def test_an_encoder_and_decoder_asks_for_a_list() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=29, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).double()
    with pytest.raises(PlanError, match="list of layers"):
        check_cut(model, from_ids, ("encoder.block.1", "decoder.block.1"))


def on_ranks(world: World, microbatches: int) -> Any:
    """GPipe by hand, one stage per rank; every microbatch has another shape."""
    torch.manual_seed(0)
    model = Gpt(GptPolicy(family="gpt2", layers=4, width=8, heads=2, context=12, vocab=29)).double()
    starts = partition("uniform", find_blocks(model), [1] * 4, world.size)
    (stage,) = cut(model, starts, [world.rank]).values()
    clock = StepClock(30.0)
    peers = world.peers(
        world.group(Mesh(pp=world.size), "pp", CommPolicy(), clock, Traffic()), CommPolicy(timeout_s=30)
    )
    here, kept = world.rank, []
    losses = []
    for i in range(microbatches):
        tokens = torch.randint(0, 29, (1 + i % 2, 3 + i), generator=torch.Generator().manual_seed(i))
        received = unpack(*peers.receive(here - 1, f"activation {i}")) if here else None
        output = stage.run(lambda m, t=tokens: m(t, t), received)
        if stage.is_last:
            losses.append(output)
        else:
            peers.send(*pack(output), here + 1, f"activation {i}", "activations")
        kept.append((received, output))
    for i, (received, output) in enumerate(kept):
        if stage.is_last:
            output.backward()
        else:
            torch.autograd.backward(trained(output), unpack(*peers.receive(here + 1, f"gradient {i}")))
        if here:
            peers.send(*pack([t.grad for t in trained(received)]), here - 1, f"gradient {i}", "gradients")
    peers.flush()
    found = gradients_of({here: stage}, model)
    return {name: g.tolist() for name, g in found.items()}, [float(loss.detach()) for loss in losses]


@pytest.mark.parametrize("size", [2, 4])
def test_stages_on_ranks_give_the_gradients_of_the_whole_model(ranks: Any, size: int) -> None:
    torch.manual_seed(0)
    model = Gpt(GptPolicy(family="gpt2", layers=4, width=8, heads=2, context=12, vocab=29)).double()
    losses = []
    for i in range(5):
        tokens = torch.randint(0, 29, (1 + i % 2, 3 + i), generator=torch.Generator().manual_seed(i))
        loss = model(tokens, tokens)
        loss.backward()
        losses.append(float(loss.detach()))
    results = ranks(size).run(on_ranks, 5)
    assert results[-1][1] == pytest.approx(losses, rel=1e-12)
    total: dict[str, Tensor] = {}
    for found, _ in results:
        for name, gradient in found.items():
            assert name not in total or name == "embed.weight"
            total[name] = total.get(name, torch.zeros(())) + torch.tensor(gradient, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        assert float((total.pop(name) - parameter.grad).norm()) <= 1e-12 * float(parameter.grad.norm())
    assert not total
