"""What rates are measured with may be missing or full."""

import errno
import os
from pathlib import Path

import pytest
import torch

from shardwise.base.errors import ConfigError
from shardwise.memory.direct_io import DirectFile
from shardwise.simulate.rates import measured_hardware


def test_a_folder_that_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--check --memory`` ended in a FileNotFoundError of a file that nobody had named."""
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match="offload.disk_path: .*/none does not exist"):
        measured_hardware(cpu, torch.float32, tmp_path / "none")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(DirectFile, "write", full)
    with pytest.raises(ConfigError, match="offload.disk_path: .*No space left"):
        measured_hardware(cpu, torch.float32, tmp_path)
    assert not list(tmp_path.iterdir())
