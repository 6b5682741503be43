"""State on disk: bytes of a rank that do not fit on the device or the host, read and written in blocks.

    file of a kind      | owner's range, from a multiple of 4096 | the next owner's | ...
    owner's range       | block 0: 8 MiB | block 1 | ... | the rest |

Requests are cut into blocks; a few threads move each block directly between the disk and the tensor's memory
(``direct_io``). The CRC-32 of a block is computed when the block is written, kept in memory and compared when the block
is read: a flipped bit or a lost write is an error before any code gets the value. A part of a block is read by way of
the whole block.

Requests of one block run in the order in which they were made, so a read after a write returns what was written.
Requests of different blocks run concurrently, those of weights first: the computation waits for weights, while masters,
moments and gradients have until their Unit's next window.

The files are removed at the end. If the disk fails, training resumes from a checkpoint, never from these files.

Paper: ZeRO-Infinity, Rajbhandari et al. 2021, arXiv:2104.07857.
Cost:  a read or write of each byte; its CRC on these threads (``kernels/crc.py``: several times as fast as a disk,
       with numba; without it about as fast); memory of a block a thread, touched if a tensor does not begin on a
       page (``aligned_empty`` makes tensors that do).
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

from shardwise.base.errors import DamagedStateError, TierError
from shardwise.base.words import in_words
from shardwise.kernels.crc import crc32
from shardwise.memory.direct_io import Bytes, DirectFile, aligned_empty, bytes_of, rounded_up
from shardwise.tiers.scratch_folder import ScratchFolder

__all__ = ["BLOCK_BYTES", "DiskScratch"]

BLOCK_BYTES = 8 * 2**20
_THREADS = 2
SPARE_BYTES = _THREADS * BLOCK_BYTES
"""Memory that the threads of a scratch hold for blocks that do not begin on a page."""
_EXIT_PATIENCE_S = 30.0
"""Seconds to wait for the blocks in hand when a scratch is closed."""

Operation = Literal["read", "write"]


@dataclass(slots=True)
class _DiskBlock:
    """A block of one owner's range."""

    kind: str
    owner: str
    number: int
    offset: int
    """Offset of the block in the file."""
    size: int
    checksum: int = 0
    last: Future[None] | None = None
    """The last request of the block, which the next request follows, or None if nothing was written yet."""


class DiskScratch:
    """A rank's state on disk: one file a kind ("master", "exp_avg" ...), the owners' ranges one after another.

    Args:
        folder: Folder of the files.
        rank: Number of the rank.
        local_ranks: Number of ranks on this host.
        threads: Number of threads that read and write.
        block_bytes: Bytes of a block, a multiple of the alignment.

    Raises:
        ConfigError: If the folder is missing or cannot hold files.
        UsageError: If another run uses the folder; the error names that run.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        local_ranks: int,
        threads: int = _THREADS,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        """Claim the folder for this rank and remove the files of dead runs."""
        assert block_bytes % rounded_up(1) == 0, f"a block of {block_bytes} bytes is not whole pages"
        self.bytes_read: Counter[str] = Counter()
        """Bytes of the blocks that were read, by kind, without the padding at their end."""
        self.bytes_written: Counter[str] = Counter()
        self._block_bytes = block_bytes
        self._blocks: dict[tuple[str, str], list[_DiskBlock]] = {}
        crc32(
            bytes_of(torch.zeros(rounded_up(1), dtype=torch.uint8))
        )  # compile the CRC now, and not in the first step
        spares = [bytes_of(aligned_empty(block_bytes, torch.uint8)) for _ in range(threads)]
        self._folder = ScratchFolder(folder, rank, local_ranks)
        self._threads = _DiskThreads(spares, self._folder)
        # If the scratch is dropped without ``close``, the threads leave and remove the files. [Note: finalizers]
        weakref.finalize(self, self._threads.crew.ask_to_leave).atexit = False

    def reserve(
        self, wanted: Mapping[str, Mapping[str, int]], shares: Mapping[float, int] | None = None
    ) -> None:
        """Make the files. Called once, before all requests.

        Args:
            wanted: Bytes by kind and owner.
            shares: Bytes that other values of ``offload.fraction`` would need, for the error.

        Raises:
            ConfigError: If the space is missing. The error states the need of all ranks of this host, the free
                space, and a fraction that fits.
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
        """Begin to fill a tensor from an owner's range; the tensor may not be used until the future is done.

        Args:
            kind: Kind of the state.
            owner: Name of the owner.
            into: The tensor, contiguous and on the CPU.
            first: First byte in the owner's range.

        Returns:
            A future. Its errors are DamagedStateError if the bytes are not those that were written, and
            TierError if the disk fails. After the first error of a scratch every request fails with the same
            error.
        """
        return self._ask("read", kind, owner, into, first)

    def write(self, kind: str, owner: str, source: Tensor, first: int = 0) -> Future[None]:
        """Begin to write whole blocks of an owner's range; the tensor may not change until the future is done.

        Args:
            kind: Kind of the state.
            owner: Name of the owner.
            source: The tensor, contiguous and on the CPU.
            first: First byte in the owner's range.

        Returns:
            A future with the errors of ``read``.
        """
        return self._ask("write", kind, owner, source, first)

    def close(self) -> None:
        """Remove the files; requests that have not begun fail, and a second call does nothing."""
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
"""Function that moves one block, with the spare memory of its thread; it raises nothing."""


class _JobQueue:
    """Jobs that wait for a thread: urgent jobs first, and jobs of equal urgency in their order.

    A finalizer puts jobs too, so the queues are SimpleQueues, which the collector may enter at any point.
    """

    def __init__(self) -> None:
        self._urgent: SimpleQueue[_Job] = SimpleQueue()
        self._others: SimpleQueue[_Job | None] = SimpleQueue()
        self._came: SimpleQueue[None] = SimpleQueue()
        """As many items as there are jobs in both queues."""

    def put(self, job: _Job | None, is_urgent: bool = False) -> None:
        """Add a job; None makes the thread that takes it leave."""
        if is_urgent and job is not None:
            self._urgent.put(job)
        else:
            self._others.put(job)
        self._came.put(None)

    def get(self) -> _Job | None:
        """Return the next job, and wait if there is none."""
        self._came.get()
        try:
            return self._urgent.get_nowait()
        except Empty:
            return self._others.get()


class _DiskCrew:
    """The threads of a scratch, their queue and the folder.

    The last thread to leave ends the folder, so that no file is closed while a thread may still use its
    descriptor.

    Threads and exit handlers refer to a crew for as long as they exist. So a crew refers neither to its scratch
    nor to an error, whose traceback refers to the scratch: otherwise a dropped scratch could not be collected.
    """

    def __init__(self, spares: Sequence[Bytes], folder: ScratchFolder) -> None:
        self.jobs = _JobQueue()
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
        """Make each thread leave after the jobs that were put before.

        A finalizer calls this function, so it takes no lock and waits for nothing. A collected scratch has no
        jobs left, because each job refers to the scratch.
        """
        for _ in self._threads:
            self.jobs.put(None)

    def end(self) -> None:
        """Remove the files, after the jobs that were put before; do nothing in a fork."""
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
    """The threads of a scratch, with the order and the first error of its requests.

    Jobs that wait for no earlier request run by urgency, then in their order.

    Args:
        spares: Spare memory of each thread, allocated by the caller: a thread that failed to allocate would
            leave requests waiting.
        folder: The folder of the files.
    """

    def __init__(self, spares: Sequence[Bytes], folder: ScratchFolder) -> None:
        """Start one thread for each piece of spare memory."""
        self.order = threading.RLock()
        self.failure: BaseException | None = None
        """The error with which all jobs fail that have not begun."""
        self.crew = _DiskCrew(spares, folder)
        self._folder = folder

    def submit_behind(
        self, before: Future[None] | None, is_urgent: bool, run: Callable[[Bytes], None], done: Future[None]
    ) -> None:
        """Submit ``run`` as soon as ``before`` is over, whose error only its own requester gets. No thread waits."""
        # Popped when the job begins: a future keeps its callbacks, and ``run`` would keep its tensor's memory.
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
        """Record an error if it is the first, and return the first error."""
        with self.order:
            if self.failure is None:
                self.failure = error
            return self.failure

    def end(self) -> None:
        """Remove the files after the running jobs; the other jobs fail. Do nothing in a fork."""
        if self._folder.is_ours():
            self.fail(
                TierError("state on disk was closed while requests were under way, or before they were made")
            )
            self.crew.end()


def _all_done(parts: list[Future[None]]) -> Future[None]:
    """Return a future that is done when all parts are, with the first part's error.

    Threads may use the request's memory until all parts are done.
    """
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
