"""Tiers: weights, masters and moments that lie elsewhere than on the device, and the thread that updates them there.

    tier      between steps                    for an update
    device    on the device                    there, by the caller's thread
    host      in host memory, pinned           there, beside the device: gradients come down, weights go up
    disk      in files of this rank            in host memory, in one of a few blocks (staging)

An update needs the norm of all gradients, and nobody needs an updated weight before its Unit computes again. So STEP of
a Unit on a tier only begins when the norm is known. One thread does what the list has, in its order, while the next
step's forward pass computes the Units before; whoever uses the Unit's weights waits (``Weight.finish_update``):

    caller    NORM STEP(u0) | UNSHARD(u0) F(u0)  UNSHARD(u1) F(u1)  UNSHARD(u2) F(u2) ...
    thread                  | LOAD(u1) LOAD(u2) STEP(u1) STORE(u1)  STEP(u2) STORE(u2) ...
    disk                    |  read u1  read u2         write u1           write u2

Numbers are those of an update at the step's end, to the bit: same kernels, same gradients, same divisor, no step late.

Papers: ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840; ZeRO-Infinity, Rajbhandari et al. 2021, arXiv:2104.07857;
SuperOffload, Lian et al. 2025, arXiv:2509.21271 (which speculates that no gradient is clipped).

Cost: host memory for 2 x ``buffers`` Units of the largest size, where state lies on a disk; its bytes read and written
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

from shardwise.memory.direct_io import aligned_empty, rounded_up
from shardwise.memory.pinned import pinned_empty
from shardwise.memory.scratch import DiskScratch
from shardwise.memory.streams import to_be_filled, to_host
from shardwise.plan.placement import Tier

Result = TypeVar("Result")


class Staging:
    """Blocks of host memory, at most ``limit``, that state passes through on its way from and to a disk."""

    def __init__(self, limit: int):
        self._limit = limit
        self._free: list[Tensor] = []
        self._used = self._used_bytes = 0
        self._leaving: deque[tuple[Tensor, Sequence[Future[None]]]] = deque()
        """Blocks that are being written, the first of them first."""

    @property
    def nbytes(self) -> int:
        """Of all blocks, in use or not."""
        return self._used_bytes + sum(block.nbytes for block in self._free)

    def take(self, nbytes: int) -> Tensor:
        """Return a block of so many bytes, on a page. If all are in use, wait for the first that is being written; if
        none is, the block is one more than the limit."""
        while self._used >= self._limit and self._leaving:
            self._wait_for_one()
        self._free.sort(key=lambda block: block.nbytes)
        place = next((i for i, block in enumerate(self._free) if block.nbytes >= nbytes), None)
        if place is not None:
            block = self._free.pop(place)
        else:
            while self._free and self._used + len(self._free) >= self._limit:
                self._free.pop(0)
            block = aligned_empty(nbytes, torch.uint8)
        self._used += 1
        self._used_bytes += block.nbytes
        return block

    def give(self, block: Tensor, writes: Sequence[Future[None]] = ()) -> None:
        """The block is free as soon as ``writes`` are done."""
        self._leaving.append((block, writes))
        while self._leaving and all(write.done() for write in self._leaving[0][1]):
            self._wait_for_one()

    def settle(self) -> None:
        """All writes are done. Errors: TierError."""
        while self._leaving:
            self._wait_for_one()

    def empty(self) -> None:
        """All is written, and free blocks are given back. Errors: TierError."""
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
    """How many threads update state on tiers, at least one: what this rank has of the host's cores, without those that
    compute (beside an accelerator the one thread that launches), and no more than torch may use here
    (OMP_NUM_THREADS)."""
    cores = os.cpu_count() or 1
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    computing = torch.get_num_threads() if device.type == "cpu" else 1
    return max(1, min(torch.get_num_threads(), min(bound, cores // local_ranks) - computing))


class Tiers:
    """What all state of an engine that lies on tiers shares: files, staging memory, the thread."""

    def __init__(self, scratch: DiskScratch | None, buffers: int, threads: int = 1):
        self.scratch = scratch
        self.limit = 2 * buffers
        """Blocks of staging memory, and gradients on their way to the disk."""
        self.staging = Staging(self.limit)
        self.leaving: deque[Future[None]] = deque()
        """Gradients on their way to the disk, the first of them first."""
        self._going_down: deque[Callable[[], None]] = deque()
        """Those on their way to the host that go on to the disk."""
        self._thread = ThreadPoolExecutor(1, "shardwise tiers")
        self._failure: BaseException | None = None
        self._limit(threads)

    def _limit(self, threads: int) -> None:
        """[Note: threads of the tiers] torch keeps the number that a thread's operations may use with that thread, and
        hands the number that was set last to threads to come: they are to have the caller's."""
        others = torch.get_num_threads()

        def limit() -> None:
            torch.get_num_threads()  # the first call of a thread takes over what was set last
            torch.set_num_threads(threads)

        self.begin(limit).result()
        torch.set_num_threads(others)

    def begin(self, job: Callable[[], None]) -> "Future[None]":
        """``job`` after all that began before. Its result, and that of every later one, is the first error."""
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
        """A gradient goes down to the host, and by ``arrived`` to the disk; now, or (``waits``) when the next one has
        begun to go down."""
        self._going_down.append(arrived)
        while len(self._going_down) > waits:
            self._going_down.popleft()()

    def all_down(self) -> None:
        """Every gradient is in memory, or on its way to the disk."""
        while self._going_down:
            self._going_down.popleft()()

    def settle(self) -> None:
        """Everything that began is done, and on the disk. Errors: TierError, DamagedError."""
        self.begin(self.staging.settle).result()

    def rest(self) -> None:
        """As ``settle``, and the blocks that state passes through are given back until they are needed again."""
        self.begin(self.staging.empty).result()

    def close(self) -> None:
        """The end: files are removed. What is under way ends first; its errors are nobody's any more."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self.scratch is not None:
            self.scratch.close()


def after(first: "Future[None]", then: Callable[[], Result]) -> "Future[Result]":
    """What ``then`` returns, called as soon as ``first`` is over, in the thread that ended it; its error, or that of
    ``first``."""
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
        """Of all elements."""
        return self.elements * self.dtype.itemsize


@dataclass
class NextWeight:
    """What a weight becomes that lies on the device and adopts its updates one step late."""

    numbers: Tensor
    """In host memory, of what this rank updates."""
    update: "Future[None] | None" = None
    """What writes them, until they are adopted."""


@dataclass
class _Opening:
    """Of state that is in memory between two steps."""

    holders: int = 0
    here: set[str] = field(default_factory=set)
    """Kinds."""
    changed: set[str] = field(default_factory=set)


class TierState:
    """What of one bucket lies on a tier, flat, by kind: "weight", "master", "exp_avg" ...

    Followers are told where the tensors are whenever that changes; while they are on the disk these are empty.
    """

    def __init__(self, what: str, tier: Tier, kinds: Mapping[str, TierTensor], tiers: Tiers, pins: bool):
        self.what = what
        self.tier = tier
        self.kinds = dict(kinds)
        self.tiers = tiers
        self.followers: list[Callable[[Mapping[str, Tensor]], None]] = []
        self._opening = _Opening()
        self._block: Tensor | None = None
        self._reads: list[Future[None]] = []
        self._writes: dict[str, Future[None]] = {}
        """Of the update under way, by kind."""
        self.has_gradient = False
        """Whether the gradient of the running step is here."""
        self._arrived: Callable[[], Tensor] = lambda: self.tensors["grad"]
        self.next: NextWeight | None = None
        """Where updates count one step late."""
        self._nowhere = {kind: torch.empty(0, dtype=each.dtype) for kind, each in self.kinds.items()}
        self.tensors: Mapping[str, Tensor]
        """By kind; empty ones while they lie on the disk."""
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
        """Which of them the optimizer updates: a weight of its dtype is its own master."""
        return "master" if "master" in self.kinds else "weight"

    @property
    def updated(self) -> list[str]:
        """Kinds that an update reads: all but a weight that is rounded from its master, and a gradient that has not
        left the device."""
        left_out = {"weight"} - {self.master} | {"grad"} - ({"grad"} if self.has_gradient else set())
        return [kind for kind in self.kinds if kind not in left_out]

    @property
    def nbytes(self) -> int:
        """On its tier."""
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
        """LOAD: begin to read, into a block."""
        scratch = self.tiers.scratch
        assert scratch is not None and self._block is None, f"{self.what}: its state is here already"
        self._take_block()
        views = self._views()
        self._reads = [scratch.read(kind, self.what, views[kind]) for kind in kinds]

    def arrive(self) -> None:
        """The state is here. Errors: TierError, DamagedError."""
        if self.tier != "disk":
            return
        for read in self._reads:
            read.result()
        self._reads = []
        self._point(self._views())

    def begin_write(self, kind: str) -> None:
        """Begin to write one kind; who asks to read it from now on gets the new numbers."""
        if self.tier == "disk":
            scratch = self.tiers.scratch
            assert scratch is not None and self._block is not None, f"{self.what}: its state is not here"
            self._writes[kind] = scratch.write(kind, self.what, self.tensors[kind])

    def store(self, kinds: Collection[str] | None = None) -> None:
        """STORE: begin to write what is not under way, or of it ``kinds`` alone, and give the block back."""
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
        """One that counts a step late, and whose weights nobody waits for, is over. Errors: TierError, DamagedError."""
        if self.next is not None and self.next.update is not None:
            self.next.update.result()

    def leave(self, gradient: Tensor) -> None:
        """The gradient of a step follows the master, and is let go of here."""
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
        """What left. In the thread, behind LOAD."""
        return self.tensors["grad"] if self.tier == "disk" else self._arrived()

    def bring(self, kind: str, into: Tensor, behind: "Future[None] | None" = None) -> Callable[[], object]:
        """Begin to bring all of one kind into ``into``, where the model computes, as soon as ``behind`` is over, whose
        error is that of this. The call that is returned waits."""
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
        """The tensors are in memory inside; ``changes``: and are written back at the end. ``kinds``: of no others is
        anything read or written (default: all).

        Between steps alone, when the last update is over. Errors: TierError, DamagedError.
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
        """In the thread, behind a STORE that is still to come. New state is all here already."""
        if self._block is not None:
            self._opening.here = set(self.kinds) - {"grad"}
            self._opening.changed = set(self._opening.here)
            return
        self._opening.here = wanted
        self.load(wanted)
        self.arrive()
