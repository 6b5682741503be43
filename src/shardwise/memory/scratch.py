"""State on disk: the bytes of a rank that neither the device nor the host has room for, read and written in blocks.

    file of a kind      | owner's range, from a multiple of 4096 | the next owner's | ...
    owner's range       | block 0: 8 MiB | block 1 | ... | the rest |

Requests are cut into blocks; a few threads move each straight between the disk and the tensor's memory (``direct_io``).
The CRC-32 of a block is summed as it is written, kept in memory and compared as it is read: a flipped bit or a lost
write is an error before anyone has the value. A part of a block is read by way of the whole.

Requests of one block run in the order in which they were made, so what reads after a write reads what was written.
Those of different blocks run beside one another, weights' first: the computation waits for them, while masters, moments
and gradients have until their Unit's next window.

Scratch is scratch: it is removed at the end, and whatever the disk does, the checkpoint survives and not it.

Paper: ZeRO-Infinity, Rajbhandari et al. 2021, arXiv:2104.07857.
Cost:  a read or write of each byte; its CRC on the threads here (``kernels/crc.py``: several times as fast as a disk,
       with numba; without it about as fast); memory of a block a thread, touched where a tensor does not begin on a
       page (``aligned_empty`` makes those that do).
"""

import atexit
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal

import torch
from torch import Tensor

from shardwise.kernels.crc import crc32
from shardwise.memory.direct_io import Bytes, DirectFile, aligned_empty, bytes_of, rounded_up
from shardwise.memory.scratch_folder import ScratchFolder
from shardwise.plan.errors import DamagedStateError, TierError
from shardwise.plan.words import in_words

__all__ = ["BLOCK_BYTES", "DiskScratch"]

BLOCK_BYTES = 8 * 2**20
_THREADS = 2
SPARE_BYTES = _THREADS * BLOCK_BYTES
"""What the threads of a scratch hold for blocks that do not begin on a page."""
_EXIT_PATIENCE_S = 30.0
"""For the blocks in hand where a scratch is closed."""

Operation = Literal["read", "write"]


@dataclass(slots=True)
class _DiskBlock:
    """A block of one owner's range."""

    kind: str
    owner: str
    number: int
    offset: int
    """In the file."""
    size: int
    checksum: int = 0
    last: Future[None] | None = None
    """The request after which the next one comes; None where nothing was written yet."""


class DiskScratch:
    """A rank's state on disk: one file a kind ("master", "exp_avg" ...), the owners' ranges one after another."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        local_ranks: int,
        threads: int = _THREADS,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        """Claims the folder for this rank and removes what dead runs left there.

        Errors: ConfigError for a folder that is missing or takes no files; UsageError names another run that uses it.
        """
        assert block_bytes % rounded_up(1) == 0, f"a block of {block_bytes} bytes is not whole pages"
        self.bytes_read: Counter[str] = Counter()
        """Of the blocks that were read, by kind. What they are padded with at their end is not counted."""
        self.bytes_written: Counter[str] = Counter()
        self._block_bytes = block_bytes
        self._blocks: dict[tuple[str, str], list[_DiskBlock]] = {}
        crc32(
            bytes_of(torch.zeros(rounded_up(1), dtype=torch.uint8))
        )  # compiled here, and not in the first step
        spares = [bytes_of(aligned_empty(block_bytes, torch.uint8)) for _ in range(threads)]
        self._folder = ScratchFolder(folder, rank, local_ranks)
        self._threads = _DiskThreads(spares, self._folder)
        # Dropped and not closed: the threads leave and remove the files. [Note: finalizers]
        weakref.finalize(self, self._threads.crew.ask_to_leave).atexit = False

    def reserve(
        self, wanted: Mapping[str, Mapping[str, int]], shares: Mapping[float, int] | None = None
    ) -> None:
        """Makes the files: kind -> owner -> bytes. Once, before all requests.

        ``shares``: bytes of them by other values of ``offload.fraction``. Errors: ConfigError where the space is not
        there, with what is needed by all ranks of this host, what is free, and which fraction fits.
        """
        assert not self._folder.files, "the space of a scratch is reserved once"
        sizes: dict[str, int] = {}
        for kind, owners in wanted.items():
            start = 0
            for owner, size in owners.items():
                step = self._block_bytes
                self._blocks[kind, owner] = [
                    _DiskBlock(kind, owner, number, start + first, min(step, size - first))
                    for number, first in enumerate(range(0, size, step))
                ]
                start += rounded_up(size)
            sizes[kind] = start
        self._folder.reserve(sizes, shares)

    def read(self, kind: str, owner: str, into: Tensor, first: int = 0) -> Future[None]:
        """Fills ``into`` from byte ``first`` of the owner's range. Nobody may touch it until the future is done.

        The future's errors: DamagedStateError where the bytes are not those that were written; TierError where the disk
        fails. After the first error of a scratch every request fails with it.
        """
        return self._ask("read", kind, owner, into, first)

    def write(self, kind: str, owner: str, source: Tensor, first: int = 0) -> Future[None]:
        """Whole blocks, from byte ``first`` of the owner's range. ``source`` may not change until the future is done.

        Errors: as of ``read``.
        """
        return self._ask("write", kind, owner, source, first)

    def close(self) -> None:
        """Removes the files. Requests that have not begun fail; safe to call twice."""
        self._threads.end()

    def _ask(self, operation: Operation, kind: str, owner: str, tensor: Tensor, first: int) -> Future[None]:
        assert (kind, owner) in self._blocks, f"no space was reserved for {kind} of {owner}"
        data, blocks, step = bytes_of(tensor), self._blocks[kind, owner], self._block_bytes
        size = sum(block.size for block in blocks)
        last = first + data.nbytes
        assert 0 <= first <= last <= size, f"bytes {first} to {last} of {size} of {kind} of {owner}"
        touched = blocks[first // step : -(-last // step)] if data.nbytes else []
        parts: list[Future[None]] = []
        with self._threads.order:
            jobs: list[Callable[[Bytes], None]] = []
            for block in touched:
                begin = block.number * step
                skip = max(first - begin, 0)
                part = data[begin + skip - first : min(begin + block.size, last) - first]
                if operation == "write":
                    assert part.nbytes == block.size, (
                        f"{kind} of {owner}: bytes {first} to {last} cut block {block.number} of those written whole"
                    )
                else:
                    assert block.last is not None, (
                        f"{kind} of {owner}: block {block.number} was never written"
                    )
                done: Future[None] = Future()
                jobs.append(self._job(operation, block, part, skip, done))
                parts.append(done)
            for block, job, done in zip(touched, jobs, parts, strict=True):
                before, block.last = block.last, done
                self._threads.submit_behind(before, kind == "weight", job, done)
        return _all_done(parts)

    def _job(
        self,
        operation: Operation,
        block: _DiskBlock,
        part: Bytes,
        skip: int,
        done: Future[None],
    ) -> Callable[[Bytes], None]:
        def run(spare: Bytes) -> None:
            try:
                if self._threads.failure is not None:
                    raise self._threads.failure
                if operation == "write":
                    self._write(block, part, spare)
                else:
                    self._read(block, part, skip, spare)
            except BaseException as error:
                done.set_exception(self._threads.fail(error))
            else:
                done.set_result(None)

        return run

    def _write(self, block: _DiskBlock, data: Bytes, spare: Bytes) -> None:
        block.checksum = crc32(data)
        file = self._folder.files[block.kind]
        try:
            file.write(data, block.offset, spare)
        except OSError as error:
            raise _disk_failed("write", file, block, error) from error
        with self._threads.order:
            self.bytes_written[block.kind] += block.size

    def _read(self, block: _DiskBlock, part: Bytes, skip: int, spare: Bytes) -> None:
        file = self._folder.files[block.kind]
        whole = part if part.nbytes == block.size else bytes_of(aligned_empty(block.size, torch.uint8))
        try:
            file.read(whole, block.offset, spare)
        except OSError as error:
            if file.size_bytes() < block.offset + block.size:
                raise _damaged(file, block, "the file has been cut short") from error
            raise _disk_failed("read", file, block, error) from error
        if crc32(whole) != block.checksum:
            raise _damaged(file, block, "its bytes are not those that were written (CRC-32)")
        if whole is not part:
            part[:] = whole[skip : skip + part.nbytes]
        with self._threads.order:
            self.bytes_read[block.kind] += block.size


_Job = Callable[[Bytes], None]
"""Moves one block. Given spare memory of its thread; raises nothing."""


class _Jobs:
    """Jobs that wait for a thread: the urgent ones first, and those of a kind in the order in which they came.

    A finalizer puts jobs too, so the queues are SimpleQueues, which the collector may enter at any point."""

    def __init__(self) -> None:
        self._urgent: SimpleQueue[_Job] = SimpleQueue()
        self._others: SimpleQueue[_Job | None] = SimpleQueue()
        self._came: SimpleQueue[None] = SimpleQueue()
        """As many as there are jobs in both."""

    def put(self, job: _Job | None, is_urgent: bool = False) -> None:
        """One more; None is the last of a thread."""
        if is_urgent and job is not None:
            self._urgent.put(job)
        else:
            self._others.put(job)
        self._came.put(None)

    def get(self) -> _Job | None:
        """The next one, as soon as there is one."""
        self._came.get()
        try:
            return self._urgent.get_nowait()
        except Empty:
            return self._others.get()


class _DiskCrew:
    """The threads themselves, their queue and the folder, which the last thread to leave ends: no file is closed while
    a thread may still use its descriptor.

    Threads and exit handlers refer to a crew for as long as they exist. So a crew refers neither to its scratch nor to
    an error, whose traceback refers to the scratch: a scratch that is dropped could not be collected.
    """

    def __init__(self, spares: Sequence[Bytes], folder: ScratchFolder) -> None:
        self.jobs = _Jobs()
        self._folder = folder
        self._lock = threading.Lock()
        self._left = 0
        self._threads = [
            threading.Thread(target=self._run, args=(spare,), name=f"shardwise-disk-{n}", daemon=True)
            for n, spare in enumerate(spares)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.end)

    def ask_to_leave(self) -> None:
        """Have each thread leave after the jobs that were put before. Called by a finalizer: takes no lock and waits
        for nothing; a scratch that is collected has no jobs left, because each of them refers to it."""
        for _ in self._threads:
            self.jobs.put(None)

    def end(self) -> None:
        """Remove the files, after the jobs that were put before. Does nothing in a fork."""
        if not self._folder.is_ours():
            return
        self.ask_to_leave()
        for thread in self._threads:
            thread.join(_EXIT_PATIENCE_S)

    def _run(self, spare: Bytes) -> None:
        while (run := self.jobs.get()) is not None:
            run(spare)
            del run  # the last job's tensor must not live as long as this thread waits for another
        with self._lock:
            self._left += 1
            is_last = self._left == len(self._threads)
        if is_last:
            self._folder.end()
            atexit.unregister(self.end)


class _DiskThreads:
    """Runs jobs in threads: of those that nothing holds up the urgent ones, then in the order in which they came."""

    def __init__(self, spares: Sequence[Bytes], folder: ScratchFolder) -> None:
        """``spares``: of each thread. One that found no memory for its own would be missed by those that wait."""
        self.order = threading.RLock()
        self.failure: BaseException | None = None
        """What all jobs that have not begun fail with."""
        self.crew = _DiskCrew(spares, folder)
        self._folder = folder

    def submit_behind(
        self, before: Future[None] | None, is_urgent: bool, run: Callable[[Bytes], None], done: Future[None]
    ) -> None:
        """Submit ``run`` as soon as ``before`` is over, whose error its own requester receives. No thread waits."""
        # Let go of when it begins: a future keeps its callbacks, and ``run`` its tensor's memory.
        held = [run]

        def submit(_: Future[None] | None) -> None:
            with self.order:
                failure = self.failure
                if failure is None:
                    self.crew.jobs.put(held.pop(), is_urgent)
            if failure is not None:
                done.set_exception(failure)

        if before is None:
            submit(None)
        else:
            before.add_done_callback(submit)

    def fail(self, error: BaseException) -> BaseException:
        """The first error."""
        with self.order:
            if self.failure is None:
                self.failure = error
            return self.failure

    def end(self) -> None:
        """Remove the files, after the jobs in hand; the others fail. Does nothing in a fork."""
        if self._folder.is_ours():
            self.fail(
                TierError("state on disk was closed while requests were under way, or before they were made")
            )
            self.crew.end()


def _all_done(parts: list[Future[None]]) -> Future[None]:
    """Done when all are, with the first one's error: until then threads may touch the request's memory."""
    whole: Future[None] = Future()
    whole.set_running_or_notify_cancel()
    left, lock = len(parts), threading.Lock()
    if not parts:
        whole.set_result(None)

    def count(_: Future[None]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        errors = [error for part in parts if (error := part.exception()) is not None]
        if errors:
            whole.set_exception(errors[0])
        else:
            whole.set_result(None)

    for part in parts:
        part.add_done_callback(count)
    return whole


def _disk_failed(operation: Operation, file: DirectFile, block: _DiskBlock, error: OSError) -> TierError:
    return TierError(
        f"{file.path}: {operation} of {block.kind} of {block.owner}, block {block.number} ({block.size} bytes at "
        f"{block.offset}): {in_words(error)}; look to the disk or give another offload.disk_path, and resume from the "
        "last checkpoint"
    )


def _damaged(file: DirectFile, block: _DiskBlock, what: str) -> TierError:
    return DamagedStateError(
        f"{file.path}: {block.kind} of {block.owner}, block {block.number} ({block.size} bytes at {block.offset}): "
        f"{what}; look to the disk or give another offload.disk_path, and resume from the last checkpoint"
    )
