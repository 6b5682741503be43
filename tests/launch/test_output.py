"""Lines of several sources on one terminal: whole, tagged, bounded."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import shardwise.launch.output as module
from shardwise.base.errors import ConfigError
from shardwise.launch.output import JobOutput, PipeTarget


@pytest.fixture
def shown(tmp_path: Path) -> Callable[..., str]:
    def show(*chunks: bytes) -> str:
        path = tmp_path / "out"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        target = PipeTarget(descriptor, b"> ")
        for chunk in chunks:
            target.take(chunk)
        target.take(b"")
        os.close(descriptor)
        return path.read_text()

    return show


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"a\nb", b"c\n"], ["a", "bc"]),
        ([b"a\n\n", b"\nb"], ["a", "", "", "b"]),
        ([b"\r 1%\r 2%", b"\r 3%\n", b"done\n"], [" 1%", " 2%", " 3%", "done"]),
        ([b"a\r\nb\r", b"\nc\r", b"d"], ["a", "b", "c", "d"]),
        ([b"\r\r\r", b"\r"], []),
        ([b"no end"], ["no end"]),
        ([], []),
    ],
)
def test_lines_are_whole(shown: Callable[..., str], chunks: list[bytes], lines: list[str]) -> None:
    assert shown(*chunks) == "".join(f"> {line}\n" for line in lines)


def test_a_line_without_end_is_written_in_parts(
    shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LONGEST_LINE_BYTES", 10)
    assert shown(b"12345", b"67890", b"123", b"4567890", b"x\n") == "> 1234567890\n> 1234567890\n> x\n"


def test_a_bar_of_progress_is_seen_before_its_last_line(capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that writes carriage returns alone was shown at its end, after time that grew with its square."""
    output = JobOutput(None)
    with output.streams(1) as streams:
        assert streams.stdout is not None
        bar = os.dup(streams.stdout)
    os.write(bar, b"\r 50%\r 60%")
    said, until = "", time.monotonic() + 20
    while "50%" not in said and time.monotonic() < until:
        said += capfd.readouterr().out
        time.sleep(0.01)
    assert said == "[rank 1]  50%\n", "the bar still goes on"
    writer = threading.Thread(target=lambda: [os.write(bar, b"x" * 65536) for _ in range(160)])
    writer.start()
    writer.join(60)
    os.close(bar)
    assert not writer.is_alive(), "10 MB without a line end, and the rank still waits"
    output.close(20)
    said += capfd.readouterr().out
    assert said.count("x") == 160 * 65536


def test_too_few_descriptors_are_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.resource, "getrlimit", lambda which: (64, 64))
    JobOutput(None).check_room(20)
    JobOutput(tmp_path).check_room(1000)
    with pytest.raises(
        ConfigError, match=r"64 ranks passes through some 152 open files.* may have 64; .*ulimit -n"
    ):
        JobOutput(None).check_room(64)
