"""A run that the tests of trained models share."""

from pathlib import Path

import pytest
import yaml

from shardwise.cli.rank import train
from shardwise.cli.request import CommandRequest


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("abc " * 500)
    config = {
        "model": {"name": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 16},
        "data": {"source": str(folder / "text.txt"), "validation_samples": 4},
        "batch": {"global_size": 4},
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 4, "sample_tokens": 0},
        "checkpoint": {"every": 2},
        "monitor": {"tensorboard": False, "picture": False},
        "output_dir": str(folder / "run"),
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert train(CommandRequest(str(folder / "config.yaml"))) == 0
    return folder / "run"
