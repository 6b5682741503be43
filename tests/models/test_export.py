"""Models to and from Hugging Face: the same logits on both sides, in both directions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.base.errors import ConfigError, MismatchError
from shardwise.models.export import write_huggingface
from shardwise.models.gpt import Gpt, GptPolicy
from shardwise.models.source import gpt_policy_from_huggingface, open_weights
from tests.models.shapes import GPT2, LLAMA, restless, tokens

# transformers and what it imports warn of their own deprecations.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

STRETCH = {"factor": 4, "original_context": 8}
POLICIES = {
    "llama": LLAMA,
    "llama tied": GptPolicy.model_validate(LLAMA.model_dump() | {"tied_head": True}),
    "llama stretched": GptPolicy.model_validate(
        LLAMA.model_dump() | {"rope_theta": 500.0, "rope_scaling": STRETCH}
    ),
    "mixtral": GptPolicy.model_validate(LLAMA.model_dump() | {"experts": {"count": 4}}),
    "gpt2": GPT2,
    "gpt2 untied": GptPolicy.model_validate(GPT2.model_dump() | {"tied_head": False}),
}
every = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def filled(policy: GptPolicy, folder: Path) -> Gpt:
    """A model that takes its weights from a folder, in two cuts each."""
    with torch.device("meta"):
        model = Gpt(policy)
    model.to_empty(device="cpu")
    source = open_weights(folder, policy)
    for name, parameter in model.named_parameters():
        middle = parameter.numel() // 2
        pieces = [source.read(name, 0, middle), source.read(name, middle, parameter.numel())]
        parameter.data.copy_(torch.cat(pieces).view(parameter.shape))
    return model


def theirs(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@every
def test_transformers_opens_the_folder_and_computes_the_same(policy: GptPolicy, tmp_path: Path) -> None:
    model = restless(policy)
    write_huggingface(tmp_path, policy, model.named_parameters())
    opened, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    x = tokens(length=16)
    with torch.no_grad():
        assert torch.allclose(opened.eval()(x).logits, model(x), atol=1e-5)


@every
def test_what_was_exported_comes_back(policy: GptPolicy, tmp_path: Path) -> None:
    model = restless(policy)
    write_huggingface(tmp_path, policy, model.named_parameters())
    assert gpt_policy_from_huggingface(tmp_path).resolved() == policy.resolved()
    again = filled(policy, tmp_path)
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


def llama_config() -> Any:
    return transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, rms_norm_eps=1e-6,
    )  # fmt: skip


def mistral_config() -> Any:
    return transformers.MistralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip


def mixtral_config() -> Any:
    return transformers.MixtralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
        experts_implementation="eager",  # the default product knows no fp64 on a processor
    )  # fmt: skip


def gpt2_config() -> Any:
    return transformers.GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=3, n_positions=16)


@pytest.mark.parametrize("config", [llama_config, mistral_config, mixtral_config, gpt2_config])
def test_their_models_compute_the_same_here(config: Callable[[], Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    ours = filled(gpt_policy_from_huggingface(tmp_path), tmp_path)
    x = tokens(length=16)
    with torch.no_grad():
        assert torch.allclose(model(x).logits, ours(x), atol=1e-5)
        assert torch.allclose(model.double()(x).logits, ours.double()(x), atol=1e-5)


def test_16_bit_and_a_dtype_of_one_s_choice(tmp_path: Path) -> None:
    model = restless(LLAMA).bfloat16()
    write_huggingface(tmp_path / "narrow", LLAMA, model.named_parameters())
    assert json.loads((tmp_path / "narrow/config.json").read_text())["dtype"] == "bfloat16"
    write_huggingface(tmp_path / "wide", LLAMA, model.named_parameters(), dtype=torch.float32)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("narrow", "wide")]
    assert sizes[1] > 1.7 * sizes[0]
    assert torch.equal(theirs(tmp_path / "narrow").lm_head.weight, theirs(tmp_path / "wide").lm_head.weight)


def test_a_second_name_of_a_tied_tensor_is_left_out(tmp_path: Path) -> None:
    model = restless(GPT2)
    write_huggingface(tmp_path, GPT2, model.state_dict().items())
    assert torch.equal(theirs(tmp_path).lm_head.weight, model.embed.weight)


def test_tensors_that_are_not_the_model_s(tmp_path: Path) -> None:
    tensors = dict(restless(LLAMA).named_parameters())
    with pytest.raises(MismatchError, match="no tensors; expected 15"):
        write_huggingface(tmp_path, LLAMA, [])
    with pytest.raises(MismatchError, match="no tensor 'nrom.weight'; did you mean 'norm.weight'"):
        write_huggingface(tmp_path, LLAMA, [("nrom.weight", tensors["norm.weight"])])
    with pytest.raises(MismatchError, match=r"norm\.weight has shape \[3\], the model's is \[24\]"):
        write_huggingface(tmp_path, LLAMA, [("norm.weight", torch.ones(3))])
    del tensors["norm.weight"]
    with pytest.raises(MismatchError, match="1 tensors were never written: model.norm.weight"):
        write_huggingface(tmp_path, LLAMA, tensors.items())
    assert not list(tmp_path.iterdir())


def test_a_shape_that_transformers_has_no_name_for(tmp_path: Path) -> None:
    policy = GptPolicy(layers=1, width=20, heads=3, head_size=8, context=8, vocab=10)
    with pytest.raises(ConfigError, match="width 20 does not divide by heads 3"):
        write_huggingface(tmp_path, policy, Gpt(policy).named_parameters())


def test_experts_that_no_mixtral_has(tmp_path: Path) -> None:
    experts = {"count": 4, "first": 1, "shared": 1, "router": {"score": "sigmoid"}}
    policy = GptPolicy.model_validate(LLAMA.model_dump() | {"experts": experts})
    with pytest.raises(
        ConfigError, match=r"here experts\.shared, experts\.first, .*, experts\.router\.score say"
    ):
        write_huggingface(tmp_path, policy, Gpt(policy).named_parameters())
    assert not (tmp_path / "config.json").exists()
