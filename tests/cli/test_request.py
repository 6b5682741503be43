"""A configuration file and the keys that the command line sets in it."""

from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError
from shardwise.cli.request import CommandRequest

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


def test_training_takes_it_with_a_model_set_beside_it(theirs: Path) -> None:
    config = CommandRequest(str(theirs), ("model.name=gpt", "model.layers=2", "zero.stage=1")).load()
    assert (config.batch.global_size, config.zero.stage, config.max_grad_norm) == (16, 1, 1.0)
    with pytest.raises(ConfigError, match="model is missing"):
        CommandRequest(str(theirs)).load()
