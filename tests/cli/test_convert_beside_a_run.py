"""``shardwise convert`` of a folder that a run saves into meanwhile, and of files that are no text."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.engine.step.test_mid_step import Click, click

import shardwise.checkpoint
from shardwise import Vectors
from shardwise.base.errors import DamagedError, UsageError
from shardwise.cli.convert import _export, _tokenise
from shardwise.comm.world import join


def test_a_step_that_is_removed_meanwhile_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = click(join(quiet=True), Click())
    steps = tmp_path / "steps"
    engine.train_step([{"keys": [[1, 2]]}])
    engine.save(steps, asynchronous=False)
    engine.train_step([{"keys": [[3]]}])
    verify = shardwise.checkpoint.verify
    calls: list[Path] = []

    def removed_first(step: Path, *arguments: Any) -> list[str]:
        calls.append(step)
        if len(calls) == 1:
            engine.save(steps, asynchronous=False)
            shutil.rmtree(step)
            return ["bytes 0..32256 do not match their CRC-32"]
        return verify(step, *arguments)

    monkeypatch.setattr(shardwise.checkpoint, "verify", removed_first)
    _export(steps, tmp_path / "out")
    assert [step.name for step in calls] == ["step_00000001", "step_00000002"]
    assert Vectors(tmp_path / "out").step == 2
    monkeypatch.setattr(shardwise.checkpoint, "verify", lambda step: ["flipped"])
    with pytest.raises(DamagedError, match="flipped; nothing was exported"):
        _export(steps, tmp_path / "other")
    engine.close()


def test_binary_files_of_hugectr_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(16))
    (tmp_path / "emb_vector").write_bytes(bytes(64))
    with pytest.raises(UsageError, match="sparse model of HugeCTR"):
        _tokenise(str(tmp_path), tmp_path / "out", "bytes", "*")
