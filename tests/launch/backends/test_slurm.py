"""Allocations of SLURM, read without SLURM."""

from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError, UsageError
from shardwise.launch.backends.slurm import SlurmLauncher, tasks_per_node
from shardwise.launch.hosts import Host


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,3(x2)", [1, 3, 3]), ("8(x1)", [8])]
)
def test_counts_of_tasks(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text, len(counts)) == counts


@pytest.mark.parametrize(
    ("text", "nodes"), [("2(x3)", 2), ("", 1), ("0", 1), ("x", 1), ("2(x", 2), ("9999999", 1)]
)
def test_counts_that_are_none(text: str, nodes: int) -> None:
    with pytest.raises(ConfigError, match="give --ranks"):
        tasks_per_node(text, nodes)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (
        ("srun", "exit 1"),
        ("scontrol", 'test "$3" = "gpu[1-2],cpu" && printf "gpu1\\ngpu2\\ncpu\\n"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.usefixtures("programs")
def test_the_hosts_are_those_of_the_allocation() -> None:
    launcher = SlurmLauncher(
        ["--mem=0"], {"SLURM_JOB_NODELIST": "gpu[1-2],cpu", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    )
    assert launcher.hosts_here(None, None) == [Host("gpu1", (0, 1)), Host("gpu2", (0, 1)), Host("cpu", (0,))]
    assert launcher.hosts_here(4, 1) == [Host("gpu1", (0, 1, 2, 3))]
    with pytest.raises(UsageError, match="asked 4, have 3"):
        launcher.hosts_here(1, 4)
    command = launcher.command(Host("gpu2", (0,)), ["agent"])
    assert command[:2] == ["srun", "--mem=0"] and command[-2:] == ["--nodelist=gpu2", "agent"]
    with pytest.raises(UsageError, match="inside an allocation"):
        SlurmLauncher((), {}).check()
    with pytest.raises(ConfigError, match="scontrol show hostnames 'x' fails"):
        SlurmLauncher((), {"SLURM_JOB_NODELIST": "x"}).hosts_here(1, None)
