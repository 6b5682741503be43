"""The ssh command of a host."""

import shlex

import pytest

from shardwise.launch.backends.protocol import agent_command
from shardwise.launch.backends.ssh import SshLauncher
from shardwise.launch.hosts import Host


def test_the_last_word_is_the_agent_quoted_for_a_shell() -> None:
    command = SshLauncher(["-F", "my config"], 2222).command(Host("gpu1", (0,)), ["/a b/python", "-m", "x;y"])
    assert command[:3] == ["ssh", "-F", "my config"] and command[-4:-2] == ["2222", "--"]
    assert command[-2:] == ["gpu1", "exec '/a b/python' -m 'x;y'"]
    assert "BatchMode=yes" in command and "-p" not in SshLauncher().command(Host("gpu1", (0,)), ["x"])


@pytest.mark.parametrize("path", ["", "/src", "/a b:/c;d"])
def test_the_path_of_modules_is_part_of_the_agents_command(path: str) -> None:
    words = agent_command({"PYTHONPATH": path})
    assert words[-3:] == ["-P", "-m", "shardwise.launch.agent"]
    assert (words[:2] == ["env", f"PYTHONPATH={path}"]) == bool(path)
    assert shlex.split(shlex.join(words)) == words
