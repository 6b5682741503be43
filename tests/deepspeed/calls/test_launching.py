"""Hosts, slots, and the command that starts the launcher."""

import subprocess
import sys
from typing import Any

import pytest

from shardwise.deepspeed.calls import launching
from shardwise.deepspeed.calls.launching import LauncherError, parse_resource_filter

HOSTS = {"a": [0, 1, 2], "b": [0, 1]}


@pytest.mark.parametrize(
    ("include", "exclude", "found"),
    [
        ("", "", HOSTS),
        ("b", "", {"b": [0, 1]}),
        ("b:1@a:2,0", "", {"a": [0, 2], "b": [1]}),
        ("a:1,1@a:0", "", {"a": [0, 1]}),
        ("", "a@b:0", {"b": [1]}),
        ("", "a:0,1,2@b", {}),
    ],
)
def test_slots_that_are_used(include: str, exclude: str, found: dict[str, list[int]]) -> None:
    assert parse_resource_filter(HOSTS, include, exclude) == found


def test_wrong_hosts_and_slots() -> None:
    for include, exclude in (("a", "b"), ("c", ""), ("a:7", ""), ("", "a:0@5:"), ("a:x", "")):
        with pytest.raises(LauncherError):
            parse_resource_filter(HOSTS, include, exclude)
    assert launching._parse_hostfile(["# hosts", "", "a slots=2", " b slots=1"]) == {"a": 2, "b": 1}
    for lines in ([], ["a"], ["a b slots=1"], ["a slots=1", "a slots=2"]):
        with pytest.raises(ValueError, match="hostfile"):
            launching._parse_hostfile(lines)
    assert launching.parse_range_list("0,2-4,6") == [0, 2, 3, 4, 6]
    for text in ("8,2", "6-2", "0,2-6,5", "x"):
        with pytest.raises(ValueError, match="rising order"):
            launching.parse_range_list(text)
    with pytest.raises(ValueError, match="leave out --num_gpus"):
        launching.main(["--num_gpus", "1", "-i", "localhost", "train.py"])
    assert launching.fetch_hostfile("/nowhere/hosts") is None


def test_the_command_starts_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def run(command: list[str], check: bool) -> Any:
        started.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit) as ended:
        launching.main(["--num_gpus", "2", "train.py", "--include", "x"])
    assert ended.value.code == 3
    assert started == [
        [
            sys.executable,
            "-m",
            "shardwise",
            "launch",
            "--as-deepspeed",
            "--num_gpus",
            "2",
            "train.py",
            "--include",
            "x",
        ]
    ]
