"""Names, shapes and configurations of Hugging Face's files: ours, or one sentence that says why not."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from shardwise.base.errors import ConfigError, MismatchError
from shardwise.models.gpt import Gpt, GptPolicy
from shardwise.models.huggingface import joined_shape, parts_of
from shardwise.models.source import WeightSource, gpt_policy_from_huggingface, open_weights
from tests.models.shapes import BOTH, GPT2, LLAMA, NAMES, restless

both = pytest.mark.parametrize("policy", BOTH, ids=NAMES)


def stored_like_theirs(policy: GptPolicy) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A model's tensors under the published names, written out by hand here, and under ours."""
    ours = {name: p.detach() for name, p in restless(policy).named_parameters()}
    theirs = {}
    for name, parts in parts_of(policy).items():
        tensor = ours[name].flatten(0, 1) if parts[0].experts else ours[name]
        pieces = tensor.split([part.our_shape[0] for part in parts])
        for part, piece in zip(parts, pieces, strict=True):
            theirs[part.name] = (piece.T if part.transposed else piece).contiguous()
    return theirs, ours


def check_all(source: WeightSource, expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert source.shape(name) == tuple(tensor.shape)
        assert source.dtype(name) == tensor.dtype
        flat, total = tensor.reshape(-1), tensor.numel()
        for start, stop in ((0, total), (total // 5, total - total // 7), (total // 3, total // 2), (1, 1)):
            assert torch.equal(source.read(name, start, stop), flat[start:stop]), name


@both
def test_the_table_covers_the_model(policy: GptPolicy) -> None:
    for tied in (True, False):
        p = GptPolicy.model_validate(policy.model_dump() | {"tied_head": tied})
        shapes = {name: tuple(q.shape) for name, q in Gpt(p).named_parameters()}
        assert {name: joined_shape(parts) for name, parts in parts_of(p).items()} == shapes


@both
def test_a_file_with_their_names(policy: GptPolicy, tmp_path: Path) -> None:
    theirs, ours = stored_like_theirs(policy)
    safetensors.torch.save_file(theirs, tmp_path / "model.safetensors")
    check_all(open_weights(tmp_path / "model.safetensors", policy), ours)
    check_all(open_weights(tmp_path, policy), ours)


def test_gpt2_s_own_files_leave_out_the_prefix_and_hold_buffers(tmp_path: Path) -> None:
    theirs, ours = stored_like_theirs(GPT2)
    theirs = {name.removeprefix("transformer."): tensor for name, tensor in theirs.items()}
    theirs["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    safetensors.torch.save_file(theirs, tmp_path / "model.safetensors")
    check_all(open_weights(tmp_path, GPT2), ours)


def test_a_missing_head_suggests_the_tie(tmp_path: Path) -> None:
    theirs, _ = stored_like_theirs(LLAMA)
    del theirs["lm_head.weight"]
    safetensors.torch.save_file(theirs, tmp_path / "model.safetensors")
    with pytest.raises(MismatchError, match="set model.tied_head: true"):
        open_weights(tmp_path, LLAMA)


def test_a_vocabulary_of_another_size_where_that_is_allowed(tmp_path: Path) -> None:
    theirs, ours = stored_like_theirs(LLAMA)
    safetensors.torch.save_file(theirs, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    larger = GptPolicy.model_validate(LLAMA.model_dump() | {"vocab": LLAMA.vocab + 3})
    with pytest.raises(MismatchError, match="vocab is"):
        open_weights(tmp_path, larger)
    with pytest.raises(MismatchError, match=r"lm_head\.weight is"):
        open_weights(tmp_path, larger, ["embed.*"])
    source = open_weights(tmp_path, larger, ["embed.*", "head.*"])
    assert sorted(ours.keys() - source.names()) == ["embed.weight", "head.weight"]
    check_all(source, {name: ours[name] for name in source.names()})


def test_heads_that_shapes_do_not_tell(tmp_path: Path) -> None:
    """8 heads of 64 have the shapes of 16 heads of 32, and another function."""
    theirs, _ = stored_like_theirs(LLAMA)
    safetensors.torch.save_file(theirs, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    open_weights(tmp_path, LLAMA)
    halved = GptPolicy.model_validate(LLAMA.model_dump() | {"heads": 8, "kv_heads": 4, "head_size": 4})
    with pytest.raises(MismatchError, match=r"heads is 8, there it is 4; kv_heads is 4, there it is 2"):
        open_weights(tmp_path, halved)


LLAMA_CONFIG = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
}


def policy_from(tmp_path: Path, **keys: object) -> GptPolicy:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG | keys))
    return gpt_policy_from_huggingface(tmp_path)


def test_configurations_of_llama(tmp_path: Path) -> None:
    assert policy_from(tmp_path).resolved() == LLAMA.resolved()
    assert policy_from(tmp_path, rope_theta=5e5).rope_theta == 5e5
    assert (
        policy_from(tmp_path, rope_parameters={"rope_theta": 6e5, "rope_type": "default"}).rope_theta == 6e5
    )
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    scaling["original_max_position_embeddings"] = 8192
    stretched = policy_from(tmp_path, rope_scaling=scaling, rope_theta=5e5)
    assert stretched.rope_scaling is not None
    assert (stretched.rope_scaling.factor, stretched.rope_theta) == (32, 5e5)
    assert policy_from(tmp_path, model_type="mistral", sliding_window=8).context == 8
    assert policy_from(tmp_path, model_type="mistral", sliding_window=None).context == 16


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "bert"}, "model_type is 'bert'; a Gpt can be a llama, a mistral, a mixtral, a gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which a Gpt does not compute; expected 'silu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rotary positions of type 'yarn'"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"model_type": "gpt2"}, "key 'n_layer' of a gpt2 model is missing"),
    ],
)
def test_configurations_that_a_gpt_does_not_compute(tmp_path: Path, keys: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy_from(tmp_path, **keys)
