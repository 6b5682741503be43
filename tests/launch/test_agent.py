"""The agent of one host, spoken to over its standard streams. Nothing imports torch."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.launch.hosts import HostRanks
from shardwise.launch.local import RankProgram
from shardwise.launch.messages import PROTOCOL, AgentOrder, encoded

pytestmark = pytest.mark.timeout(60)


class Agent:
    """An agent that this process started."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardwise.launch.agent"], stdin=pipe, stdout=pipe
        )

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(encoded(message))
        self.process.stdin.flush()

    def next(self, name: str) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line)
            if name in message:
                return message[name]
        raise AssertionError(f"the agent ended without {name}")


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.process.kill()
    made.process.communicate()


def order(folder: Path, text: str, here: HostRanks | None = None) -> dict[str, Any]:
    (folder / "program.py").write_text(text)
    program = RankProgram("script", "program.py")
    return {"order": AgentOrder(here or HostRanks(1, 1), program, str(folder), "secret", {}).to_plain()}


def test_hello_pong_failure_and_end(agent: Agent, tmp_path: Path) -> None:
    hello = agent.next("hello")
    assert (hello["protocol"], hello["version"]) == (PROTOCOL, shardwise.__version__)
    before = time.monotonic()
    agent.send({"ping": 5})
    number, clock = agent.next("pong")
    assert number == 5 and before <= clock <= time.monotonic(), "one machine has one clock"
    agent.send(order(tmp_path, "import sys\nprint('said')\nraise ValueError('the cause')"))
    assert agent.next("listens_at") > 0
    failure = agent.next("failure")
    assert failure["headline"] == "ValueError: the cause" and "Traceback" in failure["traceback"]
    assert agent.next("ended") == 1
    assert agent.process.wait(10) == 0


@pytest.mark.parametrize("message", [{"unknown": 1}, {"signal": 12345}, {"order": {"here": {}}}])
def test_a_message_that_is_none_ends_the_agent(agent: Agent, message: dict[str, Any]) -> None:
    agent.next("hello")
    agent.send(message)
    assert agent.next("ended") == 1
    assert agent.process.wait(10) == 0


def test_a_folder_that_is_not_there_is_refused(agent: Agent, tmp_path: Path) -> None:
    sent = order(tmp_path, "")
    sent["order"]["folder"] = str(tmp_path / "absent")
    agent.send(sent)
    sentence, code = agent.next("refused")
    assert "absent cannot be entered on this host" in sentence and code == 2


@pytest.mark.soak
def test_silence_and_the_end_of_the_connection_end_the_ranks(agent: Agent, tmp_path: Path) -> None:
    agent.send(
        order(
            tmp_path,
            "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)",
        )
    )
    path = tmp_path / "pid"
    while not (path.exists() and path.read_text()):
        time.sleep(0.02)
    assert agent.process.wait(15) == 0, "nothing is sent, as after a cable was pulled"
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)
