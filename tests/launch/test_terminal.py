"""Streams that go away."""

import os
import subprocess
import sys

import pytest

from shardwise.launch.terminal import PipeSafeStream, lasting_console

_SAYS = """
import sys
from shardwise.launch.terminal import lasting_console, open_standard_streams
open_standard_streams()
console = lasting_console()
for number in range(8_000):
    console.print("line", number)
sys.stderr.write("done")
"""


def test_a_reader_that_has_enough_does_not_end_the_run() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SAYS], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"line 0\n"
        process.stdout.close()
        assert process.stderr.read() == b"done"
    assert process.returncode == 0


def test_streams_that_were_never_there() -> None:
    code = _SAYS.replace('sys.stderr.write("done")', 'open("/proc/self/comm").close()')
    command = [
        sys.executable,
        "-c",
        f"{code}\nimport os; os._exit(7 if os.path.exists('/proc/self/fd/1') else 3)",
    ]
    closed = subprocess.run(["/bin/sh", "-c", 'exec "$@" >&- 2>&- <&-', "sh", *command], check=False)
    assert closed.returncode == 7


def test_a_stream_that_breaks_is_silent_from_then_on(capfd: pytest.CaptureFixture[str]) -> None:
    source, sink = os.pipe()
    stream = os.fdopen(sink, "w")
    lasting = PipeSafeStream(stream)
    os.close(source)
    lasting.write("x" * 100_000)
    lasting.flush()
    assert not lasting.isatty() and lasting.write("more") == 4
    stream.close()  # flushes what is left, to nobody
    console = lasting_console()
    console.print("seen")
    assert capfd.readouterr().out == "seen\n"
