"""Destinations of the ranks' output.

    with a log folder       every rank writes to ``rank_00000.log`` and so on; rank 0 also to the terminal
    without                 rank 0 writes to the terminal, the others too, each line tagged with its rank

On a host without rank 0, its first rank takes rank 0's part. This rank keeps the terminal itself as its standard
output, so that it can draw there. Output that passes through the launcher is copied by one thread per pipe, which
never stops reading: a full pipe would stop the rank.
"""

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardwise.base.errors import ConfigError
from shardwise.base.words import counted
from shardwise.observe.log import log_path

_LONGEST_LINE_BYTES = 1 << 16
_OPEN_FILES = 24
"""Number of files that a launcher has open besides the pipes of its ranks."""


class RankStreams(NamedTuple):
    """File descriptors for one rank; None stands for the launcher's own."""

    stdout: int | None
    stderr: int | None


def _write_all(descriptor: int, chunk: bytes) -> bool:
    """Write everything and return True; return False if the reader is gone."""
    try:
        while chunk:
            chunk = chunk[os.write(descriptor, chunk) :]
    except OSError:
        return False
    return True


class PipeTarget:
    """The destination of a pipe's bytes, which gets whole lines if two sources are mixed.

    ``tag`` begins each line. A carriage return ends a line too, because bars of progress use nothing else. A line of
    more than 64 KiB is written in several parts, so that neither memory nor time grows with it.
    """

    def __init__(self, descriptor: int, tag: bytes | None = None) -> None:
        self._descriptor, self._tag = descriptor, tag
        self._rest: list[bytes] = []
        """Pieces of the line that has no end yet, without line ends."""
        self._rest_bytes = 0
        self._is_after_return = False
        self._is_read = True

    def take(self, chunk: bytes) -> None:
        """Write ``chunk``, unless the reader is gone. An empty chunk marks the end."""
        if self._tag is not None:
            chunk = self._lines(self._tag, chunk)
        if self._is_read and chunk:
            self._is_read = _write_all(self._descriptor, chunk)

    def _lines(self, tag: bytes, chunk: bytes) -> bytes:
        """Return the lines that ``chunk`` ends, each with the tag and one line end."""
        is_at_end = not chunk
        if self._is_after_return and chunk[:1] == b"\n":  # the second half of one line end
            chunk = chunk[1:]
        self._is_after_return = chunk[-1:] == b"\r"
        lines = []
        for part in chunk.splitlines(keepends=True):
            body = part.rstrip(b"\r\n")
            self._rest.append(body)
            self._rest_bytes += len(body)
            # A bar of progress writes an empty part before its first carriage return; an empty line is a program's own.
            if part[-1:] == b"\n" or (part[-1:] == b"\r" and self._rest_bytes):
                lines.append(self._taken_rest())
        if self._rest_bytes and (is_at_end or self._rest_bytes >= _LONGEST_LINE_BYTES):
            lines.append(self._taken_rest())
        return b"".join([tag + line + b"\n" for line in lines])

    def _taken_rest(self) -> bytes:
        line = b"".join(self._rest)
        self._rest, self._rest_bytes = [], 0
        return line


class JobOutput:
    """The pipes, threads and files of one job's output.

    Args:
        logs: Folder of the ranks' logs; None: no logs.
        first: Rank that has the terminal; None: no rank of this host.
    """

    def __init__(self, logs: Path | None, first: int | None = 0) -> None:
        self._logs = logs
        self._first = first
        """Rank that has the terminal; None: no rank of this host."""
        self._threads: list[threading.Thread] = []
        self._ours: list[int] = []
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)

    def check_room(self, ranks: int) -> None:
        """Check that this process may have enough pipes for ``ranks`` ranks.

        Raises:
            ConfigError: if not; the message contains the number of files needed and the limit.
        """
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        needed = (2 if self._logs is not None else 2 * ranks) + _OPEN_FILES
        if limit != resource.RLIM_INFINITY and needed > limit:
            raise ConfigError(
                f"launch: the output of {counted(ranks, 'rank')} passes through some {needed} open files, and this "
                f"process may have {limit}; raise the limit (ulimit -n), or give --logs"
            )

    def log_of(self, rank: int) -> Path | None:
        """Return the log file of one rank, or None."""
        return None if self._logs is None else log_path(self._logs, rank)

    @contextlib.contextmanager
    def streams(self, rank: int) -> Iterator[RankStreams]:
        """Yield the descriptors for one rank; they are closed after the ``with`` block, when its process has them."""
        log = self.log_of(rank)
        opened: list[int] = []
        try:
            if log is None and rank == self._first:
                yield RankStreams(None, None)
            elif log is None:
                tag = f"[rank {rank}] ".encode()
                opened += [self._copy([PipeTarget(1, tag)]), self._copy([PipeTarget(2, tag)])]
                yield RankStreams(*opened)
            else:
                file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                if rank != self._first:
                    opened.append(file)
                    yield RankStreams(file, file)
                else:
                    self._ours.append(file)
                    stdout = None if os.isatty(1) else self._copy([PipeTarget(1), PipeTarget(file, b"")])
                    stderr = self._copy([PipeTarget(2), PipeTarget(file, b"")])
                    opened += [d for d in (stdout, stderr) if d is not None]
                    yield RankStreams(stdout, stderr)
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _copy(self, targets: list[PipeTarget]) -> int:
        """Start a thread that copies a new pipe to ``targets``, and return the pipe's end for the rank."""
        source, sink = os.pipe()

        def run() -> None:
            chunk = b"x"
            while chunk:
                chunk = os.read(source, 1 << 16)
                for target in targets:
                    target.take(chunk)
            os.close(source)

        thread = threading.Thread(target=run, name="rank-output", daemon=True)
        thread.start()
        self._threads.append(thread)
        return sink

    def close(self, until_s: float) -> None:
        """Wait, for ``until_s`` seconds at most, until all output of the ranks has been copied."""
        for thread in self._threads:
            thread.join(until_s)
        # A thread that still waits serves a process that escaped the job; its file must stay open.
        if not any(thread.is_alive() for thread in self._threads):
            for descriptor in self._ours:
                os.close(descriptor)
            self._ours.clear()
