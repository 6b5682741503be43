"""``zero_to_fp32``: the whole model in fp32, as a dictionary and as files, whatever its size."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from shardwise.deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from torch import Tensor, nn

from shardwise.base.errors import CheckpointError, UsageError
from shardwise.checkpoint import CheckpointPolicy, Checkpoints, FlatSlice, TensorPieces
from shardwise.checkpoint.layout import LayoutSizes
from tests.deepspeed.files import test_their_checkpoint as theirs
from tests.deepspeed.files.test_their_checkpoint import pickled, plain  # noqa: F401  fixtures
from tests.largest_made import LargestMade

ROWS = 300
BLOCK_BYTES = 2**12


class Net(nn.Module):
    """Tied, half of it with masters, and a buffer of another dtype: five tensors under six names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, 64)
        self.body = nn.Linear(64, 32)
        self.head = nn.Linear(64, ROWS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.arange(5))
        self.frozen = nn.Linear(8, 8, bias=False)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """One of our steps, in small blocks, under a tag."""
    torch.manual_seed(0)
    model = Net()

    def item(kind: str, name: str, tensor: Tensor) -> TensorPieces:
        flat = tensor.detach().contiguous().view(-1)
        return TensorPieces(kind, name, tuple(tensor.shape), tensor.dtype, [FlatSlice(0, flat.numel(), flat)])

    items = [item("buffer", "seen", model.seen)]
    for name, parameter in model.named_parameters():
        items.append(item("weight", name, parameter.bfloat16()))
        if name != "frozen.weight":
            items += [item("master", name, parameter), item("exp_avg", name, parameter * 2)]
    folder = tmp_path / "saved" / "global_step3"
    sizes, policy = LayoutSizes(block_bytes=BLOCK_BYTES), CheckpointPolicy(asynchronous=False)
    aliases = {"embed.weight": ["head.weight"]}
    Checkpoints(folder, policy=policy, sizes=sizes).save(3, items, {"engine": {"step": 3}}, aliases=aliases)
    (folder.parent / "latest").write_text("global_step3")
    return folder.parent


def expected() -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {name: tensor.detach() for name, tensor in Net().state_dict().items()}
    return found | {"frozen.weight": found["frozen.weight"].bfloat16().float()}


def read(folder: Path, is_safe: bool) -> dict[str, Tensor]:
    """All of a folder's files together, each name once."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix != ".json":
            part = load_file(file) if is_safe else torch.load(file, weights_only=True)
            assert not found.keys() & part.keys()
            found |= part
    return found


def assert_alike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_a_dictionary_and_a_model(saved: Path) -> None:
    assert_alike(get_fp32_state_dict_from_zero_checkpoint(saved), expected())
    torch.manual_seed(1)
    assert_alike(dict(load_state_dict_from_zero_checkpoint(Net(), saved).state_dict()), expected())


@pytest.mark.parametrize("is_safe", [True, False])
@pytest.mark.parametrize("limit", [None, "5GB", "16KB", 1])
def test_files_have_the_same_numbers(saved: Path, tmp_path: Path, is_safe: bool, limit: Any) -> None:
    """In one file, or in several with an index that transformers and DeepSpeed read; nothing else is left behind."""
    out, suffix = tmp_path / "out", "safetensors" if is_safe else "bin"
    stem = "model" if is_safe else "pytorch_model"
    convert_zero_checkpoint_to_fp32_state_dict(saved, out, limit, is_safe)
    assert_alike(read(out, is_safe), expected())
    names = sorted(path.name for path in out.iterdir())
    if limit in (None, "5GB"):
        assert names == [f"{stem}.{suffix}"]
        return
    index = json.loads((out / f"{stem}.{suffix}.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert names == sorted([*files, f"{stem}.{suffix}.index.json"])
    assert files[0] == f"{stem}-00001-of-{len(files):05d}.{suffix}" and len(files) > 1
    assert index["weight_map"].keys() == expected().keys()
    ties = 2 if is_safe else 1
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes * (ties if name == "embed.weight" else 1)
        for name, tensor in expected().items()
        if name != "head.weight"
    )


@pytest.mark.parametrize("is_safe", [True, False])
def test_a_block_is_in_memory_at_a_time(saved: Path, tmp_path: Path, is_safe: bool) -> None:
    """The model was, twice for safetensors; its largest tensor is 19 blocks here."""
    with LargestMade() as made:
        convert_zero_checkpoint_to_fp32_state_dict(saved, tmp_path, None, is_safe)
    assert 0 < made.largest <= BLOCK_BYTES


def test_a_step_of_theirs(tmp_path: Path, plain: Any, pickled: None) -> None:  # noqa: F811
    model, optimizer = plain
    theirs.save(tmp_path / "theirs" / "global_step3", 2, model, optimizer)
    step = tmp_path / "theirs" / "global_step3"
    convert_zero_checkpoint_to_fp32_state_dict(
        step.parent, tmp_path / "out", tag=step.name, safe_serialization=True
    )
    found = read(tmp_path / "out", True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_what_is_no_size_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_shard_size: 'large' is no size; expected"):
        convert_zero_checkpoint_to_fp32_state_dict(saved, tmp_path / "out", "large")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("is_safe", [True, False])
def test_files_of_another_number_are_refused(saved: Path, tmp_path: Path, is_safe: bool) -> None:
    """Both ways round; files of the same names are written anew."""
    out = tmp_path / "out"
    for first, second in ((None, 40_000), (40_000, None)):
        out = tmp_path / f"{first}"
        for _ in range(2):
            convert_zero_checkpoint_to_fp32_state_dict(saved, out, first, is_safe)
        before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
        with pytest.raises(CheckpointError, match=r"holds (pytorch_)?model.* of a model in another number"):
            convert_zero_checkpoint_to_fp32_state_dict(saved, out, second, is_safe)
        assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_leaving_frozen_parameters_out_is_refused(saved: Path, tmp_path: Path) -> None:
    """It was taken, and they came all the same."""
    with pytest.raises(UsageError, match="exclude_frozen_parameters: True: a step does not say which"):
        get_fp32_state_dict_from_zero_checkpoint(saved, exclude_frozen_parameters=True)
    with pytest.raises(UsageError, match="exclude_frozen_parameters: True"):
        convert_zero_checkpoint_to_fp32_state_dict(saved, tmp_path / "out", exclude_frozen_parameters=True)
    assert not (tmp_path / "out").exists()
