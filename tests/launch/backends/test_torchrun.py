"""The command of torch's agent, and what it gets in its environment."""

import pytest

from shardwise.base.errors import ConfigError
from shardwise.launch.backends.torchrun import become_torchrun, torchrun_command, torchrun_environment
from shardwise.launch.hosts import HostRanks
from shardwise.launch.local import RankProgram


def test_addresses_are_numeric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.launch.backends.torchrun.own_address", lambda address: "10.0.0.2")
    here = HostRanks(4, 8, 4, "10.0.0.1", 29500)
    command = torchrun_command(
        RankProgram("module", "train", ("a b", "--x")), here, 2, 1, ["--max-restarts=1"]
    )
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert {"--nnodes=2", "--node-rank=1", "--local-addr=10.0.0.2", "--master-addr=10.0.0.1"} <= set(command)
    assert command[-5:] == ["--max-restarts=1", "--module", "train", "a b", "--x"]
    alone = torchrun_command(RankProgram("program", "ls"), HostRanks(2, 2), 1, 0)
    assert alone[3:] == ["--standalone", "--nproc-per-node=2", "--no-python", "ls"]


def test_the_agents_store_is_apart_from_that_of_the_ranks() -> None:
    found = torchrun_environment(HostRanks(1, 1, slots=(1,)), {"X": "1"}, {"CUDA_VISIBLE_DEVICES": "4,5"})
    assert found == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "X": "1", "CUDA_VISIBLE_DEVICES": "5"}


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="torchrun cannot be started: .*No such file"):
        become_torchrun(["/absent/python"], {})
