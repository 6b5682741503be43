"""What rates are measured with may be missing or full."""

import errno
import os
from pathlib import Path

import pytest
import torch

from shardwise.base.errors import ConfigError
from shardwise.base.hardware import ASSUMED_HARDWARE
from shardwise.memory.direct_io import DirectFile
from shardwise.simulate.rates import measured_hardware, with_disk


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


def test_the_disk_of_a_folder_is_measured_once(tmp_path: Path) -> None:
    found = with_disk(ASSUMED_HARDWARE, tmp_path, "tables.defaults.tiers.disk")
    assert found.disk_request_s != ASSUMED_HARDWARE.disk_request_s
    assert found.memory_bytes_s["disk"] != ASSUMED_HARDWARE.memory_bytes_s["disk"]
    assert found.memory_bytes_s["host"] == ASSUMED_HARDWARE.memory_bytes_s["host"]
    assert with_disk(found, tmp_path / "none", "key") is found
    with pytest.raises(ConfigError, match="tables.named.C1.tiers.disk: .*/none does not exist"):
        with_disk(ASSUMED_HARDWARE, tmp_path / "none", "tables.named.C1.tiers.disk")
