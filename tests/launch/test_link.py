"""The connection to an agent: clocks, output and silence, with a process that says what a test wants."""

import base64
import queue
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from shardwise.launch.failure import RankFailure, first
from shardwise.launch.hosts import Host
from shardwise.launch.link import AgentLink, HostEvent
from shardwise.launch.messages import encoded


def linked(
    *messages: dict[str, object], words: str = "", tail: str = ""
) -> tuple[AgentLink, "queue.Queue[HostEvent]"]:
    text = b"".join(encoded(message) for message in messages)
    program = f"import sys, time; sys.stderr.write({words!r}); sys.stdout.buffer.write({text!r}); "
    program += f"sys.stdout.flush(); {tail}"
    pipe = subprocess.PIPE
    events: queue.Queue[HostEvent] = queue.Queue()
    process = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe)
    return AgentLink(Host("gpu1", (0,)), 3, process, events), events


def closed(link: AgentLink) -> None:
    link.hang_up()
    link.kill()


def test_a_failure_of_a_clock_that_is_two_seconds_off_keeps_its_place() -> None:
    link, events = linked({"pong": [10.0, 13.0]}, {"failure": asdict(RankFailure(2, 12.5, 1, "second"))})
    found = events.get(timeout=10)
    assert (found.node, found.name) == (3, "failure")
    link.clock.learn(20.0, 22.1, 20.2)  # a round trip of 0.2 s: the clock there is 2 s ahead
    link.clock.learn(30.0, 39.0, 35.0)  # a slower one does not count
    failure = link.failure(found.value)
    assert failure.time_s == pytest.approx(10.5) and failure.host == "gpu1"
    assert (
        first([failure, RankFailure(0, 10.7, 1, "third"), RankFailure(1, 9.0, 1, "first")]).headline
        == "first"
    )
    with pytest.raises(ValueError, match="rank is a str"):
        link.failure(asdict(RankFailure(2, 1.0, 1, "x")) | {"rank": "2"})
    closed(link)


def test_a_connection_that_ends_reports_the_words_of_its_program() -> None:
    link, events = linked(words="ssh: connect to host gpu1 port 22: No route to host\n")
    assert events.get(timeout=10) == HostEvent(
        3, "lost", "ssh: connect to host gpu1 port 22: No route to host"
    )
    closed(link)


def test_output_is_shown_in_whole_lines(capfd: pytest.CaptureFixture[str]) -> None:
    def output(number: int, text: bytes) -> dict[str, object]:
        return {"output": [number, base64.b64encode(text).decode()]}

    link, events = linked(output(1, b"one\nha"), output(2, b"error\n"), output(1, b"lf\nlast"), {"ended": 0})
    assert events.get(timeout=10) == HostEvent(3, "ended", 0) and link.is_over
    closed(link)
    said = capfd.readouterr()
    assert (said.out, said.err) == ("one\nhalf\nlast\n", "error\n")


def test_a_host_is_silent_after_its_hello_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.launch.link.SILENCE_S", 0.05)
    link, events = linked(tail="time.sleep(60)")
    time.sleep(0.1)
    assert not link.is_silent(), "a host that starts takes its time"
    closed(link)
    link, events = linked({"hello": {}}, tail="time.sleep(60)")
    events.get(timeout=10)
    time.sleep(0.1)
    assert link.is_silent()
    closed(link)
