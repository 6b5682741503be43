"""Tiers: weights, masters and moments that lie elsewhere than on the device, and the thread that updates them.

    tier      between steps                    during an update
    device    on the device                    on the device, by the caller's thread
    host      in host memory, pinned           in host memory, beside the device: gradients come down, weights go up
    disk      in files of this rank            in host memory, in one of a few blocks (staging)

An update needs the norm of all gradients, and an updated weight is not needed before its Unit computes again. So STEP
of a Unit on a tier begins when the norm is known. One thread runs the updates in the order of the list, while the next
step's forward pass computes the Units before; code that uses the Unit's weights waits (``Weight.finish_update``):

    caller    NORM STEP(u0) | UNSHARD(u0) F(u0)  UNSHARD(u1) F(u1)  UNSHARD(u2) F(u2) ...
    thread                  | LOAD(u1) LOAD(u2) STEP(u1) STORE(u1)  STEP(u2) STORE(u2) ...
    disk                    |  read u1  read u2         write u1           write u2

The numbers are those of an update at the step's end, to the bit: same kernels, same gradients, same divisor, no step
late.

Papers: ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840; ZeRO-Infinity, Rajbhandari et al. 2021, arXiv:2104.07857;
SuperOffload, Lian et al. 2025, arXiv:2509.21271 (which speculates that no gradient is clipped).

Cost: host memory for 2 x ``buffers`` Units of the largest size, if state lies on a disk; its bytes read and written
once a step, a weight's also read for every window.
"""

import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from shardwise.memory.direct_io import mapped_empty, rounded_up
from shardwise.memory.pinned import pinned_empty
from shardwise.memory.streams import to_be_filled, to_host
from shardwise.plan.placement import Tier
from shardwise.tiers.scratch import DiskScratch

Result = TypeVar("Result")


class StagingMemory:
    """Blocks of host memory that state passes through on its way from and to a disk.

    Args:
        limit: Most blocks in use. One more block is made if all are in use and none is being written.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._free: list[Tensor] = []
        self._used = self._used_bytes = 0
        self._leaving: deque[tuple[Tensor, Sequence[Future[None]]]] = deque()
        """Blocks that are being written, oldest first."""

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, in use or not."""
        return self._used_bytes + sum(block.nbytes for block in self._free)

    def take(self, nbytes: int) -> Tensor:
        """Return a block of ``nbytes`` bytes, aligned to a page.

        If all blocks are in use, wait for the first that is being written. If none is being written, make one
        block more than the limit.
        """
        while self._used >= self._limit and self._leaving:
            self._wait_for_one()
        self._free.sort(key=lambda block: block.nbytes)
        place = next((i for i, block in enumerate(self._free) if block.nbytes >= nbytes), None)
        if place is not None:
            block = self._free.pop(place)
        else:
            while self._free and self._used + len(self._free) >= self._limit:
                self._free.pop(0)
            block = mapped_empty(nbytes)
        self._used += 1
        self._used_bytes += block.nbytes
        return block

    def give(self, block: Tensor, writes: Sequence[Future[None]] = ()) -> None:
        """Give back a block, which is free as soon as ``writes`` are done.

        Args:
            block: The block.
            writes: Writes that still read the block.
        """
        self._leaving.append((block, writes))
        while self._leaving and all(write.done() for write in self._leaving[0][1]):
            self._wait_for_one()

    def settle(self) -> None:
        """Wait for all writes.

        Raises:
            TierError: If a write failed.
        """
        while self._leaving:
            self._wait_for_one()

    def empty(self) -> None:
        """Wait for all writes, and release the free blocks.

        Raises:
            TierError: If a write failed.
        """
        self.settle()
        self._free.clear()

    def _wait_for_one(self) -> None:
        block, writes = self._leaving.popleft()
        self._used -= 1
        self._used_bytes -= block.nbytes
        self._free.append(block)
        for write in writes:
            write.result()


def threads_beside(device: torch.device, local_ranks: int) -> int:
    """Return the number of threads that update state on tiers, at least 1.

    The number is this rank's share of the host's cores without the cores that compute (beside an accelerator,
    the one thread that launches), and at most the number of threads that torch may use (OMP_NUM_THREADS).

    Args:
        device: The device of the computation.
        local_ranks: Number of ranks on this host.

    Returns:
        The number of threads.
    """
    cores = os.cpu_count() or 1
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    computing = torch.get_num_threads() if device.type == "cpu" else 1
    return max(1, min(torch.get_num_threads(), min(bound, cores // local_ranks) - computing))


class TierResources:
    """The files, the staging memory and the thread that all state on tiers of an engine shares.

    Args:
        scratch: Files on the disk, or None if no state lies on a disk.
        buffers: Units whose state is read ahead (``offload.buffers``).
        threads: Threads that one operation of the tiers' thread may use.
    """

    def __init__(self, scratch: DiskScratch | None, buffers: int, threads: int = 1):
        self.scratch = scratch
        self.limit = 2 * buffers
        """Most blocks of staging memory, and most gradients in flight to the disk."""
        self.staging = StagingMemory(self.limit)
        self.leaving: deque[Future[None]] = deque()
        """Writes of gradients in flight to the disk, oldest first."""
        self._going_down: deque[Callable[[], None]] = deque()
        """Gradients in flight to the host that are to be written to the disk."""
        self._thread = ThreadPoolExecutor(1, "shardwise tiers")
        self._failure: BaseException | None = None
        self._limit(threads)

    def _limit(self, threads: int) -> None:
        """Set the number of threads that operations of the tiers' thread may use.

        [Note: threads of the tiers] torch keeps this number for each thread, and gives new threads the number
        that was set last. So the caller's number is set again afterwards; else threads made later would get the
        tiers' number.
        """
        others = torch.get_num_threads()

        def limit() -> None:
            torch.get_num_threads()  # the first call in a thread copies the number that was set last
            torch.set_num_threads(threads)

        self.begin(limit).result()
        torch.set_num_threads(others)

    def begin(self, job: Callable[[], None]) -> "Future[None]":
        """Run a job in the tiers' thread, after all jobs that began before.

        Args:
            job: The job, which runs without gradients.

        Returns:
            A future of the job. After the first error, the future of every later job raises the same error.
        """
        return self._thread.submit(self._do, job)

    def _do(self, job: Callable[[], None]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            with torch.no_grad():
                job()
        except BaseException as error:
            self._failure = error
            raise

    def let_down(self, arrived: Callable[[], None], waits: bool) -> None:
        """Queue a gradient that is being copied to the host and then goes to the disk.

        Args:
            arrived: Function that waits for the copy and begins the write.
            waits: True to call ``arrived`` only after the next gradient was queued.
        """
        self._going_down.append(arrived)
        while len(self._going_down) > waits:
            self._going_down.popleft()()

    def all_down(self) -> None:
        """Begin to write every queued gradient to the disk."""
        while self._going_down:
            self._going_down.popleft()()

    def settle(self) -> None:
        """Wait until everything that began is done and on the disk.

        Raises:
            TierError: If the disk failed.
            DamagedError: If bytes read are not those that were written.
        """
        self.begin(self.staging.settle).result()

    def rest(self) -> None:
        """Wait as ``settle`` does, and release the staging blocks until they are needed again.

        Raises:
            TierError: If the disk failed.
            DamagedError: If bytes read are not those that were written.
        """
        self.begin(self.staging.empty).result()

    def close(self) -> None:
        """Wait for the running job, cancel the others and remove the files; errors are dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self.scratch is not None:
            self.scratch.close()


def after(first: "Future[None]", then: Callable[[], Result]) -> "Future[Result]":
    """Call a function as soon as a future is over, in the thread that ended the future.

    Args:
        first: The future.
        then: The function.

    Returns:
        A future of the result of ``then``, or of the error of ``first`` or ``then``.
    """
    done: Future[Result] = Future()

    def go_on(_: "Future[None]") -> None:
        try:
            first.result()
            done.set_result(then())
        except BaseException as error:
            done.set_exception(error)

    first.add_done_callback(go_on)
    return done


class TierTensor(NamedTuple):
    """One of a bucket's flat tensors that lie on a tier."""

    elements: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.elements * self.dtype.itemsize


@dataclass
class NextWeight:
    """The next value of a weight on the device that adopts its updates one step late."""

    numbers: Tensor
    """Host memory with the updated range of this rank."""
    update: "Future[None] | None" = None
    """The update that writes ``numbers``, until it is adopted."""


@dataclass
class _OpenTierState:
    """State that is in memory between two steps."""

    holders: int = 0
    here: set[str] = field(default_factory=set)
    """Kinds that are in memory."""
    changed: set[str] = field(default_factory=set)


class TierState:
    """The state of one bucket that lies on a tier, flat, by kind: "weight", "master", "exp_avg" ...

    ``followers`` are called with the tensors whenever they move; while the state lies on the disk, the tensors
    are empty.

    Args:
        what: Name of the bucket in errors and files.
        tier: "host" or "disk".
        kinds: Sizes and dtypes of the tensors, by kind.
        tiers: Files, staging memory and thread of the engine.
        pins: True to pin host memory.
    """

    def __init__(
        self, what: str, tier: Tier, kinds: Mapping[str, TierTensor], tiers: TierResources, pins: bool
    ):
        self.what = what
        self.tier = tier
        self.kinds = dict(kinds)
        self.tiers = tiers
        self.followers: list[Callable[[Mapping[str, Tensor]], None]] = []
        self._opening = _OpenTierState()
        self._block: Tensor | None = None
        self._reads: list[Future[None]] = []
        self._writes: dict[str, Future[None]] = {}
        """Writes of the running update, by kind."""
        self.has_gradient = False
        """True if the gradient of the running step lies on this tier."""
        self._arrived: Callable[[], Tensor] = lambda: self.tensors["grad"]
        self.next: NextWeight | None = None
        """The next value of the weight, if updates count one step late."""
        self._nowhere = {kind: torch.empty(0, dtype=each.dtype) for kind, each in self.kinds.items()}
        self.tensors: Mapping[str, Tensor]
        """Tensors by kind; empty ones while the state lies on the disk."""
        if tier == "disk":
            self._take_block()
            self.tensors = self._views()
            for tensor in self.tensors.values():
                tensor.zero_()
        else:
            self.tensors = {
                kind: pinned_empty(each.elements, each.dtype, pins).zero_()
                for kind, each in self.kinds.items()
            }

    @property
    def master(self) -> str:
        """Kind of the tensor that the optimizer updates: a weight of the master's dtype is its own master."""
        return "master" if "master" in self.kinds else "weight"

    @property
    def updated(self) -> list[str]:
        """Kinds that an update reads.

        Left out are a weight that is rounded from its master, and a gradient that has not left the device.
        """
        left_out = {"weight"} - {self.master} | {"grad"} - ({"grad"} if self.has_gradient else set())
        return [kind for kind in self.kinds if kind not in left_out]

    @property
    def nbytes(self) -> int:
        """Bytes of all kinds on the tier."""
        return sum(kind.nbytes for kind in self.kinds.values())

    def _take_block(self) -> None:
        size = sum(rounded_up(kind.nbytes) for kind in self.kinds.values())
        self._block = self.tiers.staging.take(size)

    def _views(self) -> dict[str, Tensor]:
        assert self._block is not None, f"{self.what}: its state is in no block"
        found, start = {}, 0
        for name, kind in self.kinds.items():
            found[name] = self._block[start : start + kind.nbytes].view(kind.dtype)
            start += rounded_up(kind.nbytes)
        return found

    def _point(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        for follower in self.followers:
            follower(tensors)

    # In the thread ---------------------------------------------------------------------------------------------

    def load(self, kinds: Collection[str]) -> None:
        """Run LOAD: begin to read ``kinds`` from the disk into a block."""
        scratch = self.tiers.scratch
        assert scratch is not None and self._block is None, f"{self.what}: its state is here already"
        self._take_block()
        views = self._views()
        self._reads = [scratch.read(kind, self.what, views[kind]) for kind in kinds]

    def arrive(self) -> None:
        """Wait for the reads that ``load`` began.

        Raises:
            TierError: If the disk failed.
            DamagedError: If the bytes are not those that were written.
        """
        if self.tier != "disk":
            return
        for read in self._reads:
            read.result()
        self._reads = []
        self._point(self._views())

    def begin_write(self, kind: str) -> None:
        """Begin to write one kind to the disk; later reads return the new numbers."""
        if self.tier == "disk":
            scratch = self.tiers.scratch
            assert scratch is not None and self._block is not None, f"{self.what}: its state is not here"
            self._writes[kind] = scratch.write(kind, self.what, self.tensors[kind])

    def store(self, kinds: Collection[str] | None = None) -> None:
        """Run STORE: begin to write the state to the disk and give the block back.

        Args:
            kinds: Kinds to write; None for all. Kinds whose write has begun already, and the gradient, are left
                out.
        """
        for kind in self.kinds:
            if kind not in self._writes and kind != "grad" and (kinds is None or kind in kinds):
                self.begin_write(kind)
        self._leave(list(self._writes.values()))
        self._writes = {}

    def _leave(self, writes: Sequence[Future[None]] = ()) -> None:
        assert self._block is not None, f"{self.what}: its state is not here"
        self._point(self._nowhere)
        self.tiers.staging.give(self._block, writes)
        self._block = None

    # From outside ----------------------------------------------------------------------------------------------

    def finish_update(self) -> None:
        """Wait for an update that counts one step late.

        Raises:
            TierError: If the disk failed.
            DamagedError: If bytes read are not those that were written.
        """
        if self.next is not None and self.next.update is not None:
            self.next.update.result()

    def leave(self, gradient: Tensor) -> None:
        """Move the gradient of a step to this tier.

        Args:
            gradient: The reduced gradient of this rank's master; the caller may drop it afterwards.
        """
        self.has_gradient = True
        if self.tier != "disk":
            self._arrived = to_host(gradient, self.tensors["grad"])
            return
        arrive = to_host(gradient)
        self.tiers.let_down(lambda: self._write_gradient(arrive()), waits=gradient.device.type != "cpu")

    def _write_gradient(self, gradient: Tensor) -> None:
        scratch, leaving = self.tiers.scratch, self.tiers.leaving
        assert scratch is not None, "a disk has files"
        leaving.append(scratch.write("grad", self.what, gradient))
        while len(leaving) > self.tiers.limit:
            leaving.popleft().result()

    def gradient(self) -> Tensor:
        """Return the gradient that ``leave`` moved. Called in the tiers' thread after LOAD."""
        return self.tensors["grad"] if self.tier == "disk" else self._arrived()

    def bring(self, kind: str, into: Tensor, behind: "Future[None] | None" = None) -> Callable[[], object]:
        """Begin to bring all of one kind into memory of the device.

        Args:
            kind: The kind.
            into: The memory of the device.
            behind: A future to wait for first, whose error is passed on, or None.

        Returns:
            A function that waits for the copy.
        """
        if kind == "grad":
            self.tiers.all_down()
        filled = to_be_filled(into)

        def begin() -> Callable[[], object]:
            if self.tier != "disk":
                if kind == "grad":
                    self._arrived()
                return filled(self.tensors[kind])
            scratch = self.tiers.scratch
            assert scratch is not None, "a disk has files"
            if into.device.type == "cpu":
                return scratch.read(kind, self.what, into).result
            host = pinned_empty(into.shape, into.dtype)
            begun = after(scratch.read(kind, self.what, host), lambda: filled(host))
            return lambda: begun.result()()

        if behind is None:
            return begin()
        begun = after(behind, begin)
        return lambda: begun.result()()

    @contextmanager
    def opened(
        self, changes: bool = False, kinds: Collection[str] | None = None
    ) -> Iterator[Mapping[str, Tensor]]:
        """Keep tensors in memory inside the context.

        The context is entered only between steps, when the last update is over.

        Args:
            changes: True to write the tensors back at the end.
            kinds: Kinds to read and write; None for all.

        Yields:
            The tensors by kind.

        Raises:
            TierError: If the disk failed.
            DamagedError: If bytes read are not those that were written.
        """
        if self.tier != "disk":
            yield self.tensors
            return
        wanted = {kind for kind in self.kinds if kind != "grad" and (kinds is None or kind in kinds)}
        opening = self._opening
        if not opening.holders:
            self.tiers.begin(lambda: self._come(wanted)).result()
        assert wanted <= opening.here, f"{self.what}: {wanted - opening.here} are not in memory"
        opening.changed |= wanted if changes else set()
        opening.holders += 1
        try:
            yield self.tensors
        finally:
            opening.holders -= 1
            if not opening.holders:
                changed, opening.changed = opening.changed, set()
                self.tiers.begin(lambda: self.store(changed) if changed else self._leave()).result()

    def _come(self, wanted: set[str]) -> None:
        """Read ``wanted`` in the tiers' thread, after any STORE that is still queued.

        New state, which was never stored, is all in memory already.
        """
        if self._block is not None:
            self._opening.here = set(self.kinds) - {"grad"}
            self._opening.changed = set(self._opening.here)
            return
        self._opening.here = wanted
        self.load(wanted)
        self.arrive()
