"""Bytes a second through ``DiskScratch``, beside plain reads and writes of 8 MiB on the same disk.

    python benchmarks/offload/disk.py FOLDER [--mib 1536] [--unit-mib 64] [--threads 2] [--rounds 7]

Both read and write as an update does: state of three kinds passes through memory, Unit by Unit; while one is written
the next is read. Each round measures both, in turns.

    plain   threads that call os.preadv and os.pwritev on files opened with O_DIRECT, from and into memory on a page
    ours    the same Units through DiskScratch: CRC-32 of every block summed and compared, order of requests kept
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from shardwise.memory.direct_io import aligned_empty, bytes_of
from shardwise.tiers.scratch import BLOCK_BYTES, DiskScratch

KINDS = ("master", "exp_avg", "exp_avg_sq")
Move = Callable[[str, int, Tensor], list[Future[None]]]
"""Begins to read or write a Unit of a kind."""


def one_step(read: Move, write: Move, units: int, staging: list[dict[str, Tensor]]) -> float:
    """Seconds of reading and writing every Unit once, the next one read while one is written."""
    begun = time.perf_counter()
    writes: list[list[Future[None]]] = [[] for _ in staging]

    def begin_read(unit: int) -> list[Future[None]]:
        place = unit % len(staging)
        wait(writes[place])
        return [done for kind in KINDS for done in read(kind, unit, staging[place][kind])]

    ahead = begin_read(0)
    for unit in range(units):
        here, ahead = ahead, begin_read(unit + 1) if unit + 1 < units else []
        for done in here:
            done.result()
        place = unit % len(staging)
        writes[place] = [done for kind in KINDS for done in write(kind, unit, staging[place][kind])]
    for done in (done for each in writes for done in each):
        done.result()
    return time.perf_counter() - begun


@contextmanager
def plain(folder: Path, units: int, unit_bytes: int, threads: int) -> Iterator[tuple[Move, Move]]:
    """Blocks by a pool of threads."""
    files = {}
    for kind in KINDS:
        path = folder / f"plain.{kind}"
        files[kind] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(files[kind], 0, units * unit_bytes)
        path.unlink()
    pool = ThreadPoolExecutor(threads)

    def mover(call: Callable[[int, list[memoryview], int], int]) -> Move:
        def whole(descriptor: int, data: memoryview, offset: int) -> None:
            assert call(descriptor, [data], offset) == len(data)

        def move(kind: str, unit: int, tensor: Tensor) -> list[Future[None]]:
            data = bytes_of(tensor).data
            return [
                pool.submit(whole, files[kind], data[first : first + BLOCK_BYTES], unit * unit_bytes + first)
                for first in range(0, unit_bytes, BLOCK_BYTES)
            ]

        return move

    yield mover(os.preadv), mover(os.pwritev)
    pool.shutdown()
    for descriptor in files.values():
        os.close(descriptor)


@contextmanager
def ours(folder: Path, units: int, unit_bytes: int, threads: int) -> Iterator[tuple[Move, Move]]:
    """Through a scratch."""
    made = DiskScratch(folder, 0, 1, threads)
    made.reserve({kind: {str(unit): unit_bytes for unit in range(units)} for kind in KINDS})
    yield (
        lambda kind, unit, into: [made.read(kind, str(unit), into)],
        lambda kind, unit, source: [made.write(kind, str(unit), source)],
    )
    made.close()


def main() -> None:
    """Prints a line a round and the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mib", type=int, default=1536, help="state of all kinds")
    parser.add_argument("--unit-mib", type=int, default=64, help="a Unit's state of one kind")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    unit_bytes = asked.unit_mib * 2**20
    units = asked.mib * 2**20 // (len(KINDS) * unit_bytes)
    moved = 2 * units * unit_bytes * len(KINDS)
    staging = [{kind: aligned_empty(unit_bytes, torch.uint8).random_() for kind in KINDS} for _ in range(2)]
    sizes = (asked.folder, units, unit_bytes, asked.threads)
    ratios, rates = [], []
    with plain(*sizes) as plain_moves, ours(*sizes) as our_moves:
        for read, write in (plain_moves, our_moves):
            for unit in range(units):
                wait([done for kind in KINDS for done in write(kind, unit, staging[0][kind])])
            one_step(read, write, units, staging)  # blocks that were only reserved cost more the first time
        for round_ in range(asked.rounds):
            pair = [plain_moves, our_moves][:: 1 if round_ % 2 else -1]
            took = {id(each): one_step(*each, units, staging) for each in pair}
            theirs, own = moved / took[id(plain_moves)] / 1e6, moved / took[id(our_moves)] / 1e6
            rates.append((theirs, own))
            ratios.append(own / theirs)
            print(
                f"round {round_}: plain {theirs:6.0f} MB/s, ours {own:6.0f} MB/s, ratio {own / theirs:.2f}",
                flush=True,
            )
    theirs, own = (statistics.median(each) for each in zip(*rates, strict=True))
    print(
        f"median: plain {theirs:.0f} MB/s, ours {own:.0f} MB/s, ratio of a round {statistics.median(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
