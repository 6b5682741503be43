"""A DeepSpeed configuration on the command line: written in our keys, and trained with as it is."""

from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError, UsageError
from shardwise.cli.convert import _translate
from shardwise.cli.request import Request
from shardwise.config.run import load

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


def test_training_takes_it_with_a_model_set_beside_it(theirs: Path) -> None:
    config = Request(str(theirs), ("model.name=gpt", "model.layers=2", "zero.stage=1")).load()
    assert (config.batch.global_size, config.zero.stage, config.max_grad_norm) == (16, 1, 1.0)
    with pytest.raises(ConfigError, match="model is missing"):
        Request(str(theirs)).load()
