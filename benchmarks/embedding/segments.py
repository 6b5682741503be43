"""Lines of rows read and written per second through ``RowSegments``, beside a plain file and an LSM store.

    python benchmarks/embedding/segments.py FOLDER [--lines 80 272 1040] [--mib 512] [--batch 8192] [--rounds 7]

Each contender holds the same rows. A round reads one batch of drawn rows and writes another with each of them, in
turns. All of them get rows and lines as arrays and return lines in one array.

    plain      a line at row x line bytes of one file past the page cache: the rows sorted, preadv of whole pages into
               memory by as many threads as ours has, neighbours not joined; a write reads the pages, changes the line
               and writes the pages back
    cached     the same file by way of the page cache: pread and pwrite of a line. With a file smaller than memory it
               measures the cache and no disk
    ours       RowSegments: append, index, CRC-32 of each record compared, compaction after each write as in a step
    rocksdb    RocksDB, if ``rocksdict`` is installed: direct reads, no log, block cache of 8 MiB, no compression

``--json FILE`` writes the figures too.
"""

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from shardwise.memory.direct_io import aligned_empty, bytes_of
from shardwise.tiers.row_segments import RowSegments

PAGE = 4096
THREADS = 4


class Store(AbstractContextManager["Store"]):
    """Rows of one contender."""

    def write(self, rows: np.ndarray, lines: np.ndarray) -> None:
        raise NotImplementedError

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class Plain(Store):
    """One file past the page cache."""

    def __init__(self, folder: Path, rows: int, width: int) -> None:
        self.width = width
        path = folder / "plain"
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.file, 0, (rows * width // PAGE + 2) * PAGE)
        path.unlink()
        self.pool = ThreadPoolExecutor(THREADS)
        most = (width // PAGE + 2) * PAGE
        self.spares = [bytes_of(aligned_empty(most, torch.uint8)) for _ in range(THREADS)]

    def each(self, rows: np.ndarray, do: Callable[[int, np.ndarray, int], None]) -> None:
        order = np.argsort(rows)

        def some(part: int) -> None:
            spare = self.spares[part]
            for place in np.array_split(order, THREADS)[part].tolist():
                begin = int(rows[place]) * self.width
                first, last = begin // PAGE * PAGE, -(-(begin + self.width) // PAGE) * PAGE
                pages = spare[: last - first]
                os.preadv(self.file, [pages.data], first)
                do(place, pages[begin - first :][: self.width], first)

        list(self.pool.map(some, range(THREADS)))

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        def copy(place: int, line: np.ndarray, first: int) -> None:
            out[place] = line

        self.each(rows, copy)

    def write(self, rows: np.ndarray, lines: np.ndarray) -> None:
        # One thread: pages of neighbouring rows overlap.
        spare = self.spares[0]
        for place in np.argsort(rows).tolist():
            begin = int(rows[place]) * self.width
            first, last = begin // PAGE * PAGE, -(-(begin + self.width) // PAGE) * PAGE
            pages = spare[: last - first]
            os.preadv(self.file, [pages.data], first)
            pages[begin - first :][: self.width] = lines[place]
            os.pwritev(self.file, [pages.data], first)

    def fill(self, rows: int, lines: np.ndarray) -> None:
        step = lines.shape[0] * PAGE
        data = bytes_of(aligned_empty(step, torch.uint8).random_())
        for first in range(0, rows * self.width // PAGE * PAGE, step):
            os.pwritev(self.file, [data.data], first)

    def __exit__(self, *_: Any) -> None:
        self.pool.shutdown()
        os.close(self.file)


class Cached(Store):
    """One file by way of the page cache."""

    def __init__(self, folder: Path, rows: int, width: int) -> None:
        self.width = width
        path = folder / "cached"
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        path.unlink()

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        for place in np.argsort(rows).tolist():
            os.preadv(self.file, [out[place].data], int(rows[place]) * self.width)

    def write(self, rows: np.ndarray, lines: np.ndarray) -> None:
        for place in np.argsort(rows).tolist():
            os.pwritev(self.file, [lines[place].data], int(rows[place]) * self.width)

    def __exit__(self, *_: Any) -> None:
        os.close(self.file)


class Ours(Store):
    """RowSegments."""

    def __init__(self, folder: Path, rows: int, width: int) -> None:
        self.made = RowSegments(folder, "table 'benchmark'", width, rows, threads=THREADS)

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        self.made.read(torch.from_numpy(rows), torch.from_numpy(out))

    def write(self, rows: np.ndarray, lines: np.ndarray) -> None:
        self.made.write(torch.from_numpy(rows), torch.from_numpy(lines))
        self.made.compact(4 * lines.nbytes)

    def __exit__(self, *_: Any) -> None:
        print(f"    {self.made.figures()}")
        self.made.close()


class Rocks(Store):
    """RocksDB."""

    def __init__(self, folder: Path, rows: int, width: int) -> None:
        import rocksdict

        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        blocks = rocksdict.BlockBasedOptions()
        blocks.set_block_cache(rocksdict.Cache(8 * 2**20))
        blocks.set_bloom_filter(10, False)
        options.set_block_based_table_factory(blocks)
        self.path = folder / "rocksdb"
        self.db = rocksdict.Rdict(str(self.path), options)
        writes = rocksdict.WriteOptions()
        writes.disable_wal = True
        self.db.set_write_options(writes)
        self.rocksdict = rocksdict

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        keys = [row.to_bytes(8, "big") for row in np.sort(rows).tolist()]
        for place, line in zip(np.argsort(rows).tolist(), self.db[keys], strict=True):
            out[place] = np.frombuffer(line, np.uint8)

    def write(self, rows: np.ndarray, lines: np.ndarray) -> None:
        batch = self.rocksdict.WriteBatch(raw_mode=True)
        for row, line in zip(rows.tolist(), lines, strict=True):
            batch.put(row.to_bytes(8, "big"), line.tobytes())
        self.db.write(batch)

    def __exit__(self, *_: Any) -> None:
        self.db.close()
        self.rocksdict.Rdict.destroy(str(self.path))


def contenders() -> dict[str, type[Store]]:
    """Return the contenders that are installed, by name."""
    found: dict[str, type[Store]] = {"plain": Plain, "cached": Cached, "ours": Ours}
    if importlib.util.find_spec("rocksdict") is not None:
        found["rocksdb"] = Rocks
    return found


def one_width(folder: Path, width: int, rows: int, batch: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return lines read and written per second, the median of all rounds, by contender."""
    draw = np.random.default_rng(0)
    lines, out = draw.integers(0, 256, (batch, width), np.uint8), np.empty((batch, width), np.uint8)
    seconds: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        made = {name: stack.enter_context(each(folder, rows, width)) for name, each in contenders().items()}
        for name, store in made.items():
            seconds[name] = {"read": [], "write": []}
            for first in range(0, rows, batch):
                some = np.arange(first, min(first + batch, rows))
                if isinstance(store, Plain):
                    store.fill(rows, lines)
                    break
                store.write(some, lines[: len(some)])
        for turn in range(rounds):
            names = list(made)[:: 1 if turn % 2 else -1]
            asked, given = draw.permutation(rows)[:batch], draw.permutation(rows)[:batch]
            for name in names:
                begin = time.perf_counter()
                made[name].read(asked, out)
                middle = time.perf_counter()
                made[name].write(given, lines)
                seconds[name]["read"].append(middle - begin)
                seconds[name]["write"].append(time.perf_counter() - middle)
    return {
        name: {what: batch / statistics.median(took) for what, took in each.items()}
        for name, each in seconds.items()
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lines", type=int, nargs="+", default=[80, 272, 1040], help="bytes of a line")
    parser.add_argument("--mib", type=int, default=512, help="bytes of all lines")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for width in asked.lines:
        rows = asked.mib * 2**20 // width
        found[width] = one_width(asked.folder, width, rows, min(asked.batch, rows), asked.rounds)
        for name, rates in found[width].items():
            print(
                f"{width:5} bytes  {name:8} {rates['read']:10,.0f} reads/s {rates['write']:10,.0f} writes/s",
                flush=True,
            )
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
