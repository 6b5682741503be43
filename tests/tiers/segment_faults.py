"""A campaign of faults for rows on disk: calls to the disk that fail, lie or change bytes at drawn places."""

import errno
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from shardwise.base.errors import DamagedError, TierError
from shardwise.memory import page_reads
from shardwise.memory.direct_io import Bytes, DirectFile, aligned_empty, bytes_of
from shardwise.tiers.row_segments import RowSegments

WIDTH, ROWS = 80, 2000
SMALL = {"segment_bytes": 4 * 4096, "block_bytes": 4096}

HONEST = ("no space", "failed", "short")
"""Faults that the system reports."""
LYING = ("lost", "torn", "flipped", "elsewhere")
"""Faults that change bytes and that nobody reports."""


class FailingDisk:
    """The calls of ``DirectFile``, some of which fail or lie."""

    def __init__(
        self, draw: random.Random, rate: float, faults: Sequence[str], flips_in: int | None = None
    ) -> None:
        """Make a disk; "flipped" changes a bit in each ``flips_in`` bytes of a read, or one of all if it is None."""
        self.draw, self.rate, self.faults, self.flips_in = draw, rate, faults, flips_in
        self.happened: Counter[str] = Counter()
        self.is_on = True
        self._init, self._read, self._write = DirectFile.__init__, DirectFile._read, DirectFile._write

    def drawn(self, *possible: str) -> str:
        """Return the fault of this call, or nothing."""
        known = [each for each in possible if each in self.faults]
        if not self.is_on or not known or self.draw.random() > self.rate:
            return ""
        fault = self.draw.choice(known)
        self.happened[fault] += 1
        return fault

    def init(self, file: DirectFile, path: Path, size_bytes: int) -> None:
        if self.drawn("no space"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        is_on, self.is_on = self.is_on, False  # the file reads a page of its own while it is made
        try:
            self._init(file, path, size_bytes)
        finally:
            self.is_on = is_on

    def read(self, file: DirectFile, parts: Sequence[Bytes], offset: int) -> int:
        fault = self.drawn("failed", "short", "flipped", "elsewhere")
        if fault == "failed":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if fault == "elsewhere" and offset >= 4096:
            return self._read(file, parts, offset - 4096)
        moved = self._read(file, parts, offset)
        if fault == "short":
            return moved - 4096
        if fault == "flipped":
            every = self.flips_in or parts[0].nbytes
            parts[0][self.draw.randrange(every) :: every] ^= 1 << self.draw.randrange(8)
        return moved

    def write(self, file: DirectFile, parts: Sequence[Bytes], offset: int) -> int:
        fault = self.drawn("no space", "failed", "short", "lost", "torn")
        if fault in ("no space", "failed"):
            reason = errno.ENOSPC if fault == "no space" else errno.EIO
            raise OSError(reason, os.strerror(reason))
        if fault == "short":
            return 0
        total = sum(part.nbytes for part in parts)
        if fault == "lost":
            return total
        if fault == "torn":
            half = bytes_of(aligned_empty(parts[0].nbytes, torch.uint8).zero_())
            cut = self.draw.randrange(1, 8) * 512
            half[:cut] = parts[0][:cut]
            return self._write(file, [half, *parts[1:]], offset)
        return self._write(file, parts, offset)

    def patched(self) -> "patch.multiple[None]":
        """Return a context in which every file is on this disk."""
        disk = self
        return patch.multiple(
            DirectFile,
            __init__=lambda self, path, size_bytes: disk.init(self, path, size_bytes),
            _read=lambda self, parts, offset: disk.read(self, parts, offset),
            _write=lambda self, parts, offset: disk.write(self, parts, offset),
        )


def lines_of(rows: Tensor, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (len(rows), WIDTH), np.uint8))


class Expected:
    """For each row the lines that it may have: one, or the old and the new one of a write that failed."""

    def __init__(self) -> None:
        self.lines: dict[int, list[bytes | None]] = {}

    def of(self, row: int) -> list[bytes | None]:
        return self.lines.get(row, [None])

    def write(self, rows: Tensor, lines: Tensor, failed: bool) -> None:
        for row, line in zip(rows.tolist(), lines.numpy(), strict=True):
            self.lines[row] = [*(self.of(row) if failed else ()), line.tobytes()]

    def check(self, rows: Tensor, lines: Tensor) -> None:
        for row, line in zip(rows.tolist(), lines.numpy(), strict=True):
            found = line.tobytes()
            assert found in self.of(row), f"row {row} has bytes that it was never given"
            self.lines[row] = [found]


def campaign(folder: Path, seed: int) -> Counter[str]:
    """Run drawn operations on a failing disk, and return the faults that happened and the errors that came.

    Right bytes, or an error: DamagedError only if the disk has lied.
    """
    draw = random.Random(seed)
    faults = HONEST if seed % 2 else (*HONEST, *LYING)
    disk = FailingDisk(draw, draw.choice((0.03, 0.1)), faults)
    expected, errors = Expected(), Counter[str]()

    def tried(call: Callable[[], object]) -> bool:
        try:
            call()
            return True
        except DamagedError as error:
            assert sum(disk.happened[fault] for fault in LYING), f"no byte was changed: {error}"
            errors["damaged"] += 1
        except TierError as error:
            assert sum(disk.happened[fault] for fault in HONEST), f"no call failed: {error}"
            errors["failed"] += 1
        return False

    made = RowSegments(folder, "table 't'", WIDTH, ROWS, threads=2, **SMALL)
    with disk.patched(), patch.object(page_reads, "has_numba", lambda: False):
        for turn in range(60):
            rows = torch.tensor(draw.sample(range(ROWS), draw.choice((5, 80, 300))))
            what = draw.choices(("write", "read", "remove", "compact", "save"), (5, 5, 1, 2, 0.5))[0]
            if what == "write":
                lines = lines_of(rows, seed * 1000 + turn)
                done = tried(lambda made=made, rows=rows, lines=lines: made.write(rows, lines))
                expected.write(rows, lines, not done)
                if not done and draw.random() < 0.7:
                    disk.is_on = False
                    if tried(lambda made=made, rows=rows, lines=lines: made.write(rows, lines)):
                        expected.write(rows, lines, False)
                    disk.is_on = True
            elif what == "read":
                held = made.holds(rows)
                for row in rows[~held].tolist():
                    assert None in expected.of(row), f"row {row} is lost"
                rows = rows[held]
                out = torch.empty(len(rows), WIDTH, dtype=torch.uint8)
                if tried(lambda made=made, rows=rows, out=out: made.read(rows, out)):
                    expected.check(rows, out)
            elif what == "remove":
                made.remove(rows)
                for row in rows.tolist():
                    expected.lines.pop(row, None)
            elif what == "compact":
                tried(lambda made=made: made.compact(draw.choice((5000, 10**6))))
            else:
                tried(lambda made=made: save(made, expected))
        disk.is_on = False
    made.close()
    return disk.happened + errors


def save(made: RowSegments, expected: Expected) -> None:
    snapshot = made.snapshot()
    try:
        rows = made.holds(torch.arange(ROWS)).nonzero()[:, 0]
        assert len(rows) == made.rows_held()
        out = torch.zeros(len(rows), made.line_bytes, dtype=torch.uint8)
        snapshot.read(rows, snapshot.positions(rows), out)
        expected.check(rows, out)
    finally:
        snapshot.close()


def killed_writer(folder: Path, seed: int) -> None:
    """Kill a process at a drawn moment of writes and compaction; the next one starts without its files."""
    draw = random.Random(seed)
    ready, say = os.pipe()
    child = os.fork()
    if not child:
        try:
            made = RowSegments(folder, "table 't'", WIDTH, ROWS, threads=2, **SMALL)
            os.write(say, b"+")
            for turn in range(10**6):
                rows = torch.tensor(random.Random(turn).sample(range(ROWS), 300))
                made.write(rows, lines_of(rows, turn))
                made.compact(20_000)
        finally:
            os._exit(1)
    os.close(say)
    assert os.read(ready, 1) == b"+"
    os.close(ready)
    time.sleep(draw.random() * 0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    made = RowSegments(folder, "table 't'", WIDTH, ROWS, threads=2, **SMALL)
    assert not made.holds(torch.arange(ROWS)).any()
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["shardwise.lock", "shardwise.rank0.lock"], left
    rows = torch.arange(500)
    made.write(rows, lines_of(rows, seed))
    out = torch.empty(500, WIDTH, dtype=torch.uint8)
    made.read(rows, out)
    assert torch.equal(out, lines_of(rows, seed))
    made.close()


def limited(folder: Path, seed: int) -> None:
    """Write in a process whose files are limited to less than a segment, and again without the limit."""
    import resource

    child = os.fork()
    if not child:
        try:
            made = RowSegments(folder, "table 't'", WIDTH, ROWS, threads=2, **SMALL)
            rows = torch.arange(ROWS)
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (random.Random(seed).randrange(100, 16_000), hard))
            try:
                made.write(rows, lines_of(rows, seed))
            except TierError as error:
                assert "no row is lost" in str(error), error
            else:
                raise AssertionError("the limit does not count")
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            made.write(rows, lines_of(rows, seed))
            out = torch.empty(ROWS, WIDTH, dtype=torch.uint8)
            made.read(rows, out)
            assert torch.equal(out, lines_of(rows, seed))
            made.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
