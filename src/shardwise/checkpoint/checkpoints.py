"""Checkpoints: the folder of steps of one run, saved while training continues and loaded on any number of ranks.

    checkpoints = Checkpoints("runs/gpt/checkpoints", peers)
    checkpoints.save(200, items, {"consumed_samples": 12800})     # returns after a copy to host memory
    checkpoints.wait()                                            # until it is committed; raises its failure
    loaded = checkpoints.load(items)                              # newest whole step, or None

Every rank makes the same calls in the same order. A save waits for the save before it. The writing thread is not a
daemon: a process that ends normally finishes its save first.

    a save in the background fails ── logged by ``warn`` ──► the next ``save`` tries again ── committed: forgotten
                                                              it fails, ``policy.tolerate_failures`` + 1 in a row: the
                                                              ``save`` after it raises
                                                          ──► ``wait`` or ``load`` comes next: it raises
"""

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.base.errors import CheckpointError, TierError
from shardwise.checkpoint.files import FileSystem
from shardwise.checkpoint.layout import LayoutSizes
from shardwise.checkpoint.load import CheckpointLoad, Choose, LoadedCheckpoint, StepReader
from shardwise.checkpoint.manifest import BaseStep
from shardwise.checkpoint.peers import CheckpointCoordinator, JobRanks, SingleRank
from shardwise.checkpoint.piece import FlatSlice, TensorPieces, check_pieces
from shardwise.checkpoint.policy import CheckpointPolicy
from shardwise.checkpoint.save import CheckpointSave, CheckpointWriter, FullStep, StepContents
from shardwise.checkpoint.steps import CheckpointFolder, StepDirectory, open_step, step_name
from shardwise.memory.pinned import pinned_empty

_NICENESS = 10
"""Niceness of a thread that writes behind training."""


class HostBuffer:
    """Host memory for a copy of this rank's pieces, reused by every save.

    The memory consists of pages of one size, and pieces are cut where a page ends. Torch rounds pinned memory up to a
    power of two, so that 17 GiB in one allocation would pin 32.
    """

    _ALIGN_BYTES = 64
    """Alignment of each tensor: a multiple of every dtype's size."""
    _PAGE_BYTES = 1 << 30

    def __init__(self) -> None:
        self._pages: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """Bytes of all pages."""
        return sum(page.nbytes for page in self._pages)

    def copy(self, items: Sequence[TensorPieces]) -> list[TensorPieces]:
        """Return ``items`` with their tensors copied into the buffer; the copies are complete on return."""
        check_pieces(items)
        tensors = [piece.tensor for item in items for piece in item.pieces]
        offsets, total = [], 0
        for tensor in tensors:
            offsets.append(total)
            total += -(-tensor.numel() * tensor.dtype.itemsize // self._ALIGN_BYTES) * self._ALIGN_BYTES
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        self._reserve(total, pinned=bool(devices))
        places = iter(offsets)
        copied = []
        for item in items:
            pieces = [part for piece in item.pieces for part in self._put(piece, next(places))]
            copied.append(item._replace(pieces=pieces))
        for device in devices:
            torch.accelerator.synchronize(device)
        return copied

    def _reserve(self, total: int, pinned: bool) -> None:
        """Allocate pages for ``total`` bytes; all pages but the last are full."""
        size = self._PAGE_BYTES
        for place, start in enumerate(range(0, total, size)):
            wanted = min(size, total - start)
            if place == len(self._pages):
                self._pages.append(torch.empty(0, dtype=torch.uint8))
            if self._pages[place].numel() < wanted:
                self._pages[place] = torch.empty(0, dtype=torch.uint8)  # free the old page first
                self._pages[place] = pinned_empty(wanted, torch.uint8, pinned)

    def _put(self, piece: FlatSlice, offset: int) -> Iterator[FlatSlice]:
        """Copy ``piece`` to ``offset`` and yield a slice for each page that it lies in.

        An empty piece is yielded as it is.
        """
        tensor, each = piece.tensor, piece.tensor.dtype.itemsize
        tensor = tensor.detach() if isinstance(tensor, Tensor) else tensor.cpu()
        if not tensor.numel():
            yield piece
        done = 0
        while done < tensor.numel():
            page, start = divmod(offset + done * each, self._PAGE_BYTES)
            count = min(tensor.numel() - done, (self._PAGE_BYTES - start) // each)
            place = self._pages[page][start : start + count * each].view(tensor.dtype)
            place.copy_(tensor[done : done + count], non_blocking=True)
            yield FlatSlice(piece.start + done, piece.start + done + count, place)
            done += count


class Checkpoints:
    """The steps in one folder.

    Use one object per folder and run: two objects would count as two writers.

    Args:
        root: Folder of the steps.
        peers: Ranks of the job; None: a single process.
        policy: When and how to save.
        run: Name of the run in the manifest.
        warn: Function that takes one line of a warning; None: logging.
        sizes: Sizes at which files are cut.
        files: Access to the file system; tests replace it.
    """

    def __init__(
        self,
        root: Path | str,
        peers: JobRanks | None = None,
        policy: CheckpointPolicy | None = None,
        *,
        run: str = "",
        warn: Callable[[str], None] | None = None,
        sizes: LayoutSizes | None = None,
        files: FileSystem | None = None,
    ) -> None:
        self.root = Path(root)
        self.policy = policy or CheckpointPolicy()
        self._peers: JobRanks = peers or SingleRank()
        self._files = files or FileSystem()
        self._folder = CheckpointFolder(self.root, self._files)
        self._sizes = sizes or LayoutSizes()
        self._warn = warn or logging.getLogger("shardwise.checkpoint").warning
        self._writer = CheckpointWriter(
            run=run or secrets.token_hex(4),
            keep_last=self.policy.keep_last,
            keep_every=self.policy.keep_every,
            keep_best=max(self.policy.keep_best, 1),
            read_back=self.policy.read_back,
            warn=self._warn,
        )
        self._buffer = HostBuffer()
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        """Failure of the last save, or None."""
        self._failures = 0
        """Number of saves in a row that failed."""
        self.failed_saves = 0
        """Number of all saves that failed."""

    # -- saving

    def save(
        self,
        step: int,
        items: Sequence[TensorPieces],
        trainer: Mapping[str, Any],
        *,
        aliases: Mapping[str, Sequence[str]] | None = None,
        write_aliases: bool = False,
        texts: Mapping[str, str] | None = None,
        asynchronous: bool | None = None,
        copies: Sequence[TensorPieces] = (),
        best: Sequence[int] = (),
        base: BaseStep | None = None,
        mark: int = 0,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """Save ``items`` as step ``step``.

        A failure in the foreground is raised at once. A failure in the background is logged, and raised by a later call
        if too many follow one another.

        Args:
            step: Number of the step.
            items: Tensors to save, with this rank's pieces.
            trainer: State of the trainer, as JSON values.
            aliases: Other names of tied tensors, by the name under which they are saved; noted in the manifest.
            write_aliases: Also write tied tensors under each alias.
            texts: Contents of small files by path, such as ``model/config.json``.
            asynchronous: Write while training continues; None: as the policy says.
            copies: More items, which read the same however long the save takes: they are written without a copy.
            best: Numbers of the steps that were saved with a score, best first. The first ``keep_best`` of those that
                exist, at least one, are kept whatever ``keep_last`` is.
            base: The full step that this one continues; None if the items are the whole state.
            mark: Number of the save, by which ``last_full`` names it.
            on_end: Function that is called once the save has ended, committed or failed, in the thread that wrote; not
                called if this method raises before it writes.

        Raises:
            CheckpointError: if the step is not saved, or earlier saves failed too often.
            TierError: if state on disk cannot be read.
        """
        # Before anything may raise, so that all ranks count the same calls.
        coordinator = self._open(f"save of step {step}")
        self._end_save_before()
        behind = self.policy.asynchronous if asynchronous is None else asynchronous
        held, files = [*items, *copies], texts or {}
        contents = StepContents(
            step, held, dict(trainer), aliases or {}, write_aliases, files, best, base, mark
        )
        if not 0 <= step < 10**15:
            raise CheckpointError(f"step {step}: expected a number from 0 to 10^15 - 1")
        if behind:
            self._begin_behind(coordinator, contents, items, copies, on_end)
        else:
            self._save_now(coordinator, contents, on_end)

    def _end_save_before(self) -> None:
        """Wait until the save before this one has ended.

        Raises:
            CheckpointError: if that save failed, and earlier saves failed too often.
        """
        self.join()
        if self._failures > self.policy.tolerate_failures:
            self.wait()
        self._failure = None

    def _save_now(
        self, coordinator: CheckpointCoordinator, contents: StepContents, on_end: Callable[[], None] | None
    ) -> None:
        """Write a step while the caller waits."""
        try:
            self._save(coordinator, contents)
        finally:
            if on_end is not None:
                on_end()
        self._failures = 0

    def _begin_behind(
        self,
        coordinator: CheckpointCoordinator,
        contents: StepContents,
        items: Sequence[TensorPieces],
        copies: Sequence[TensorPieces],
        on_end: Callable[[], None] | None,
    ) -> None:
        """Copy ``items``, and write the copies and ``copies`` in a thread."""
        try:
            contents = replace(contents, items=[*self._buffer.copy(items), *copies])
        except Exception as error:
            self._report(coordinator, error)
        self._thread = threading.Thread(
            target=self._behind, args=(coordinator, contents, on_end), name="shardwise-save"
        )
        self._thread.start()
        self._set_priority(self._thread, _NICENESS)

    def _report(self, coordinator: CheckpointCoordinator, error: Exception) -> None:
        """Post a failure in place of the first phase, so that no rank waits for this one."""

        def fail() -> None:
            raise error

        try:
            coordinator.gather("specs", fail)
        finally:
            coordinator.end()

    def _save(self, coordinator: CheckpointCoordinator, contents: StepContents) -> None:
        try:
            with coordinator.at_work():
                CheckpointSave(
                    self._folder, self._files, self._sizes, self._writer, coordinator, contents
                ).run()
        except (CheckpointError, TierError) as error:
            kind = type(error) if isinstance(error, TierError) else CheckpointError
            raise kind(f"{self.root}: step {contents.step} was not saved: {error}") from error

    def _behind(
        self, coordinator: CheckpointCoordinator, contents: StepContents, on_end: Callable[[], None] | None
    ) -> None:
        try:
            self._save(coordinator, contents)
            self._failures = 0
        except Exception as error:
            failure = (
                error
                if isinstance(error, CheckpointError)
                else CheckpointError(
                    f"{self.root}: step {contents.step} was not saved: {type(error).__name__}: {error}"
                )
            )
            failure.__cause__ = error.__cause__ or error
            self._failure = failure
            self._failures += 1
            self.failed_saves += 1
            allowed = self.policy.tolerate_failures
            then = (
                f"training continues and the next save tries again ({self._failures} failed in a row, "
                f"checkpoint.tolerate_failures: {allowed})"
                if self._failures <= allowed
                else f"the next save ends the run: {self._failures} failed in a row"
            )
            self._warn(f"{failure}; {then}")
        finally:
            if on_end is not None:
                on_end()

    @staticmethod
    def _set_priority(thread: threading.Thread, niceness: int | None) -> None:
        """Set the niceness of the thread that writes, or the caller's, if the system has priorities of threads.

        Only a privileged process may lower it again; otherwise the thread keeps its own.
        """
        if hasattr(os, "setpriority") and thread.native_id is not None:
            with contextlib.suppress(OSError):  # also if the thread has just ended
                wanted = os.getpriority(os.PRIO_PROCESS, 0) if niceness is None else niceness
                os.setpriority(os.PRIO_PROCESS, thread.native_id, wanted)

    def wait(self) -> None:
        """Wait until the background save, if any, is committed.

        Raises:
            CheckpointError: if that save failed.
        """
        self.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def join(self) -> None:
        """Wait until the background save, if any, has ended, committed or failed."""
        if self._thread is not None:
            # The caller waits for the thread, which on a busy machine would hardly run beside other processes.
            self._set_priority(self._thread, None)
            with self._peers.joining(self._thread.ident or 0):
                self._thread.join()
            self._thread = None

    def last_full(self) -> FullStep | None:
        """Return the last full step of this object, once a save in the background has ended.

        Returns:
            The step on rank 0; None on other ranks, before the first full save, or if the step is no longer there.
        """
        self.join()
        full = self._writer.full
        if full is None:
            return None
        try:
            manifest = open_step(self.root / step_name(full.step), self._files)
        except CheckpointError:
            return None
        return full if manifest.sha256 == full.sha256 else None

    @property
    def copy_bytes(self) -> int:
        """Bytes of host memory into which background saves copy."""
        return self._buffer.bytes

    @property
    def saving(self) -> bool:
        """True while a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    # -- loading

    def load(
        self,
        items: Choose,
        *,
        path: Path | str | None = None,
        partial: bool = False,
        is_checked: bool = False,
        examine: Callable[[StepReader], None] | None = None,
        look_first: Callable[[], None] | None = None,
    ) -> LoadedCheckpoint | None:
        """Fill ``items`` from the newest whole step, or only from the step at ``path``.

        Args:
            items: Tensors to fill, or a function of the manifest that returns them.
            path: Folder of the step; None: the newest whole step.
            partial: Allow the step to hold more tensors of a kind than are requested.
            is_checked: True if an earlier load of parts of the same step has just checked every block. Blocks that are
                read are still checked.
            examine: Function that may read the step before anything is filled. It refuses the step on all ranks by
                raising DamagedError.
            look_first: Function that runs on rank 0 before it looks for steps. It ends the load on all ranks by raising
                CheckpointError.

        Returns:
            The loaded step; None if the folder has no step.

        Raises:
            CheckpointError: if the step cannot be loaded.
        """
        coordinator = self._open("load")
        self.wait()
        load = CheckpointLoad(
            self._folder, self._files, coordinator, self._warn, partial, is_checked, examine
        )
        with coordinator.at_work():
            try:
                if path is None:
                    return load.newest(items, look_first)
                return load.exactly(Path(path), items)
            finally:
                coordinator.end()

    def steps(self) -> list[StepDirectory]:
        """Return the steps in the folder as this process sees them, newest first."""
        return self._folder.scan()

    def _open(self, purpose: str) -> CheckpointCoordinator:
        return CheckpointCoordinator(self._peers, purpose, self.policy.timeout_s)
