"""Weights to start from: by slices, under several names, with errors that name the tensor."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from shardwise.base.errors import CheckpointError, ConfigError, DamagedError, MismatchError
from shardwise.models.gpt import GptPolicy
from shardwise.models.huggingface import parts_of
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
def test_a_file_with_our_names(policy: GptPolicy, tmp_path: Path) -> None:
    ours = {name: p.detach().bfloat16() for name, p in restless(policy).named_parameters()}
    safetensors.torch.save_file(ours, tmp_path / "weights.safetensors")
    check_all(open_weights(tmp_path, policy), ours)


def test_a_tied_tensor_under_its_second_name(tmp_path: Path) -> None:
    ours = {name: p.detach() for name, p in restless(GPT2).named_parameters()}
    stored = {("head.weight" if name == "embed.weight" else name): tensor for name, tensor in ours.items()}
    safetensors.torch.save_file(stored, tmp_path / "weights.safetensors")
    check_all(open_weights(tmp_path, GPT2), ours)


def test_an_index_of_several_files(tmp_path: Path) -> None:
    theirs, ours = stored_like_theirs(LLAMA)
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(theirs)}
    for file in set(weight_map.values()):
        part = {name: theirs[name] for name in theirs if weight_map[name] == file}
        safetensors.torch.save_file(part, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    check_all(open_weights(tmp_path, LLAMA), ours)

    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 files are missing: model-1\.safetensors"):
        open_weights(tmp_path, LLAMA)
    outside = {"a": "../secret.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": outside}))
    with pytest.raises(CheckpointError, match="outside its folder"):
        open_weights(tmp_path, LLAMA)


def test_parts_of_different_dtypes_are_promoted(tmp_path: Path) -> None:
    theirs, ours = stored_like_theirs(LLAMA)
    name = "model.layers.0.self_attn.k_proj.weight"
    theirs[name] = theirs[name].bfloat16()
    safetensors.torch.save_file(theirs, tmp_path / "model.safetensors")
    read = open_weights(tmp_path, LLAMA).read("blocks.0.attention.qkv.weight", 0, 24 * 64)
    assert read.dtype == torch.float32
    assert torch.allclose(read.view(64, 24), ours["blocks.0.attention.qkv.weight"], rtol=2**-7)


def test_the_own_names_of_a_user_s_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    safetensors.torch.save_file(model.state_dict(), tmp_path / "w.safetensors")
    source = open_weights(tmp_path / "w.safetensors")
    check_all(source, model.state_dict())
    source.check({name: p.shape for name, p in model.named_parameters()})
    with pytest.raises(MismatchError, match=r"1 tensors .*0\.weight is \[4, 3\], the model's is \[3, 4\]"):
        source.check({"0.weight": (3, 4), "0.bias": (4,)})
    with pytest.raises(
        MismatchError, match=r"1 of the model's 2 tensors are missing: 0\.weigth; did you mean"
    ):
        source.check({"0.weigth": (4, 3), "0.bias": (4,)})
    with pytest.raises(MismatchError, match="no tensor 'x'"):
        source.read("x", 0, 1)
    with pytest.raises(CheckpointError, match=r"elements \[0, 13\) of 0\.weight, which has 12"):
        source.read("0.weight", 0, 13)


def test_missing_and_wrong_tensors_are_named(tmp_path: Path) -> None:
    theirs, _ = stored_like_theirs(LLAMA)
    file = tmp_path / "model.safetensors"
    del theirs["model.layers.1.self_attn.k_proj.weight"]
    safetensors.torch.save_file(theirs, file)
    with pytest.raises(
        MismatchError, match=r"1 tensors of a llama .*missing: model\.layers\.1\.self_attn\.k_proj"
    ):
        open_weights(file, LLAMA)
    safetensors.torch.save_file({"something.weight": torch.ones(3)}, file)
    with pytest.raises(MismatchError, match=r"model\.embed_tokens\.weight.*; and \d+ more"):
        open_weights(file, LLAMA)
    theirs, _ = stored_like_theirs(LLAMA)
    theirs["model.norm.weight"] = torch.ones(7)
    safetensors.torch.save_file(theirs, file)
    with pytest.raises(MismatchError, match=r"model\.norm\.weight is \[7\], the model's is \[24\]"):
        open_weights(file, LLAMA)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        open_weights(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file; .*convert"):
        open_weights(tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        gpt_policy_from_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DamagedError, match="not the JSON that was written"):
        gpt_policy_from_huggingface(tmp_path)


def test_a_name_in_two_files(tmp_path: Path) -> None:
    for file in ("a", "b"):
        safetensors.torch.save_file({"w": torch.ones(1)}, tmp_path / f"{file}.safetensors")
    with pytest.raises(CheckpointError, match=r"w is in a\.safetensors and in b\.safetensors"):
        open_weights(tmp_path)


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    """Quantised weights have the shape of the real ones; cast to fractions they would train."""
    safetensors.torch.save_file({"w": torch.ones(3, dtype=torch.int8)}, tmp_path / "q.safetensors")
    source = open_weights(tmp_path / "q.safetensors")
    with pytest.raises(MismatchError, match="w is int8; are they quantised"):
        source.check({"w": (3,)})
    source.check({"w": (3,)}, {"w": torch.int8})


def test_two_tensors_at_one_place(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(DamagedError, match="a and b overlap"):
        open_weights(tmp_path / "x.safetensors")
