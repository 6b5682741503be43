"""A DeepSpeed configuration on the command line: written in our keys, and trained with as it is."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.data.clicks.criteo_text import lines, write
from tests.engine.step.test_mid_step import Click, click

import shardwise.checkpoint
from shardwise import Vectors
from shardwise.base.errors import DamagedError, UsageError
from shardwise.cli.convert import _export, _tokenise, _translate
from shardwise.cli.main import main
from shardwise.comm.world import join
from shardwise.config.run import load
from shardwise.data.clicks import ClickSchema, PackedClicks, SparseFeature

TEXT = """
# of a tutorial
train_batch_size: 16
optimizer: {type: "Adam", params: {lr: 1e-3}}
fp16: {"enabled": false, "hysteresis": 3}
zero_optimization: {stage: 2, overlap_comm: true}
"""


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(TEXT)
    return path


def test_it_is_written_in_our_keys_and_every_key_is_answered(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _translate(theirs, tmp_path / "run.yaml")
    said = capsys.readouterr().out.splitlines()
    assert said[:7] == [
        "train_batch_size: 16 -> batch.global_size: 16",
        'optimizer.type: "Adam" -> optimizer.type: "adamw"',
        "optimizer.params.lr: 0.001 -> optimizer.lr: 0.001",
        "fp16.enabled: false no effect here: it asks for nothing",
        "fp16.hysteresis: 3 no effect here: fp16.enabled is false",
        "zero_optimization.stage: 2 -> zero.stage: 2",
        "zero_optimization.overlap_comm: true -> zero.reductions_under_way: 0 for false, else auto",
    ]
    assert "gradient_clipping: 1.0 left out, so as there: max_grad_norm: 1.0" in said
    ours = load(tmp_path / "run.yaml")
    assert ours.model_dump() == load(theirs).model_dump() and not ours.translated


def test_our_own_configuration_is_not_converted(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"zero": {"stage": 2}}')
    with pytest.raises(UsageError, match="holds no key of DeepSpeed's"):
        _translate(tmp_path / "a.json", tmp_path / "run.yaml")


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["shardwise", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out + captured.err


def test_a_log_becomes_packed_clicks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write(tmp_path / "log.tsv", [*lines(20), "broken"])
    out = tmp_path / "log.clicks"
    code, said = call(monkeypatch, capsys, "convert", str(log), str(out))
    assert code != 0 and "log.tsv:21: 1 columns" in said.replace("\n", "")
    assert not out.exists()
    code, said = call(monkeypatch, capsys, "convert", str(log), str(out), "--malformed-limit", "1")
    assert code == 0 and "13 numbers, 26 features" in said and "1 malformed rows skipped" in said
    assert len(PackedClicks(out)) == 20


def test_a_table_becomes_packed_clicks_with_the_columns_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What types leave open is refused until it is named."""
    pytest.importorskip("pyarrow")
    log, out = tmp_path / "log.txt", tmp_path / "log.clicks"
    log.write_text("click;buy;age;user\n1;0;30;u1\n0;1;31;u2\n")
    given = ("convert", str(log), str(out), "--separator", ";", "--label", "click")
    code, said = call(monkeypatch, capsys, *given)
    assert code != 0 and "as a second label does" in " ".join(said.split()) and not out.exists()
    code, said = call(monkeypatch, capsys, *given, "--dense", "age")
    assert code != 0 and "--sparse" in said
    code, said = call(monkeypatch, capsys, *given, "--dense", "age", "--sparse", "user")
    assert code == 0 and "2 rows, 1 numbers, 1 features" in " ".join(said.split()), said
    assert PackedClicks(out).schema == ClickSchema(("age",), (SparseFeature("user"),))


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
