"""What ``describe`` tells of a step and of a folder."""

from pathlib import Path

import pytest

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint import CheckpointPolicy, Checkpoints, FolderSummary, StepSummary, describe

from .crew import SHAPES, TINY, items_of, make_state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoints = Checkpoints(tmp_path, policy=CheckpointPolicy(asynchronous=False), sizes=TINY, run="gpt")
    for step in (1, 2):
        checkpoints.save(step, items_of(make_state(step)), {"step": step, "layout": {"dp": 2}})
    return tmp_path


def test_a_step(folder: Path) -> None:
    found = describe(folder / "step_00000002")
    assert isinstance(found, StepSummary)
    assert (found.step, found.run, found.generation, found.is_whole) == (2, "gpt", 1, True)
    assert found.damage == () and found.trainer == {"step": 2, "layout": {"dp": 2}}
    assert {(row.kind, row.name) for row in found.tensors} == set(SHAPES)
    row = next(row for row in found.tensors if (row.kind, row.name) == ("master", "embed.weight"))
    assert (row.shape, row.dtype, row.bytes, len(row.files)) == ((40, 12), "F32", 1920, 2)
    assert found.bytes_by_kind is not None and found.bytes_by_kind["weight"] == 960 + 24 + 864 + 864 + 4
    assert found.elements == 480 + 12 + 432 + 432 + 1
    assert found.bytes == sum(path.stat().st_size for path in folder.glob("step_00000002/**/*.*")) - (
        (folder / "step_00000002" / "manifest.json").stat().st_size
    )


def test_a_damaged_step(folder: Path) -> None:
    path = folder / "step_00000002" / "state" / "master-00004-of-00004.safetensors"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    found = describe(folder / "step_00000002")
    assert isinstance(found, StepSummary) and found.damage is not None
    assert [(damage.file, damage.tensors) for damage in found.damage] == [
        ("state/master-00004-of-00004.safetensors", ("master 'embed.weight'",))
    ]
    assert not found.is_whole and found.tensors
    unchecked = describe(folder / "step_00000002", check=False)
    assert isinstance(unchecked, StepSummary) and unchecked.damage is None


def test_a_folder(folder: Path) -> None:
    (folder / "step_00000001" / "manifest.json").write_text("{}")
    (folder / "step_00000003.tmp-1-ab").mkdir()
    found = describe(folder)
    assert isinstance(found, FolderSummary)
    assert [(step.step, step.is_whole) for step in found.steps] == [(2, True), (0, False)]
    assert "does not match" in found.steps[1].problem or "do not match" in found.steps[1].problem
    assert found.latest == "step_00000002" and found.leftovers == ("step_00000003.tmp-1-ab",)


def test_neither(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a step"):
        describe(tmp_path)
    (tmp_path / "ok.py").touch()
    with pytest.raises(
        CheckpointError, match="ok.py is a file; expected a folder: a step, or a folder of steps"
    ):
        describe(tmp_path / "ok.py")
    (tmp_path / "ok.pt").touch()
    with pytest.raises(CheckpointError, match="ok.pt is a file; .*; shardwise convert reads it"):
        describe(tmp_path / "ok.pt")
    with pytest.raises(CheckpointError, match="no such directory"):
        describe("x" * 300)
    with pytest.raises(CheckpointError, match="no such directory"):
        describe(tmp_path / "nowhere")
