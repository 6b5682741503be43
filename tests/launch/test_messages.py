"""Messages between launcher and agents."""

import json
import os
import threading

import pytest

from shardwise.launch.hosts import HostRanks
from shardwise.launch.local import RankProgram
from shardwise.launch.messages import AgentOrder, decoded, encoded, lines, write_all

ORDER = AgentOrder(
    HostRanks(2, 4, 2, "10.0.0.1", 4711, "eth0", (3, 1)),
    RankProgram("script", "a b.py", ("", "$(x)", "\udcff", "é\n"), wants_local_rank=True),
    "/some/folder",
    "secret",
    {"NAME": "a b"},
    "logs",
    core_list="0-3",
)


def test_an_order_passes_unchanged() -> None:
    line = encoded({"order": ORDER.to_plain()})
    assert line.count(b"\n") == 1 and line.isascii()
    message = decoded(line)
    assert message is not None and AgentOrder.from_plain(message["order"]) == ORDER


@pytest.mark.parametrize(
    "line", [b"", b"Welcome to gpu1!", b"[1]", b"{}", b'{"a": 1, "b": 2}', b"\xff", b"[" * 100_000]
)
def test_what_is_no_message_is_none(line: bytes) -> None:
    assert decoded(line) is None


def test_an_order_with_unknown_fields_is_refused() -> None:
    with pytest.raises(TypeError):
        AgentOrder.from_plain(ORDER.to_plain() | {"other": 1})


def test_lines_arrive_whole_and_silence_is_seen() -> None:
    source, sink = os.pipe()
    os.write(sink, b"one\ntw")
    found = lines(source)
    assert next(found) == b"one"
    assert next(found) is None, "half a line is not one"
    os.write(sink, b"o\nthree")
    assert next(found) == b"two"
    os.close(sink)
    assert list(found) == [], "half a line before the end is dropped"
    os.close(source)


def test_a_line_without_end_ends_the_reading() -> None:
    source, sink = os.pipe()
    writer = threading.Thread(target=os.write, args=(sink, b"x" * 5000))
    writer.start()
    assert list(lines(source, limit_bytes=1000)) == []
    writer.join()
    os.close(sink)
    os.close(source)


def test_writing_does_not_wait_for_a_reader_that_is_gone_or_asleep() -> None:
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    assert not write_all(sink, b"x" * (1 << 20), 0.0), "the pipe is full"
    os.close(source)
    assert not write_all(sink, json.dumps({"ping": 1}).encode(), 0.0), "nobody reads"
    os.close(sink)
