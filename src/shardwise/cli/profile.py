"""``--profile N`` and ``--memory-snapshot FILE``: records of a few steps of every rank.

    --profile 3                      a torch trace of steps 3 to 5, for chrome://tracing or Perfetto
    --memory-snapshot memory.pickle  the allocations of these steps, or of steps 1 to 3 without --profile

A trace names the Actions of the Plan (``observe/action_ranges.py``).
"""

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from shardwise.base.errors import UsageError

_log = logging.getLogger(__name__)
_SKIPPED_STEPS = 2
"""Number of steps before the first traced step: they allocate, compile and connect."""
_SNAPSHOT_STEPS = 3
"""Number of steps of a memory snapshot without ``--profile``, from the first step on."""
_MOST_EVENTS = 1_000_000
"""Allocations and releases that a memory snapshot keeps, the last ones."""

ActionNames = Callable[[], contextlib.AbstractContextManager[None]]
"""Function that returns a context in which the profiler sees the names of Actions."""


class ProfileRequest(NamedTuple):
    """The part of the user's request that concerns records of single steps."""

    steps: int = 0
    """Number of steps to trace."""
    memory_snapshot: str | None = None
    """File from whose name those of the ranks' memory snapshots are made; None: no snapshot."""


NO_PROFILE = ProfileRequest()
"""The request for no records of single steps."""


def device_type_of(wanted: str) -> str:
    """Return the type of the device that ``comm.device`` selects on this host, before any rank has started."""
    if wanted != "auto":
        return wanted.partition(":")[0]
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if found is None else found.type


def check_snapshot(file: str | None, device_type: str) -> None:
    """Check that the device can record its allocations.

    Args:
        file: Value of ``--memory-snapshot``; None if it is not given.
        device_type: Type of the device on which the ranks compute.

    Raises:
        UsageError: if a snapshot is requested on another device than CUDA's.
    """
    if file is not None and device_type != "cuda":
        raise UsageError(
            f"train: --memory-snapshot {file} records torch's allocator for CUDA devices, and this run computes on "
            f"{device_type!r}; leave it out. The column memory of metrics.csv has the peak of every step, and "
            "`shardwise train CONFIG --check --memory 80GiB` says what the steps take"
        )


def activities_of(device: torch.device) -> list[ProfilerActivity]:
    """Return what the profiler records on ``device``."""
    found = [ProfilerActivity.CPU]
    if device.type == "cuda":
        found.append(ProfilerActivity.CUDA)
    elif device.type == "xpu":
        found.append(ProfilerActivity.XPU)
    return found


class StepWindow(ABC):
    """A record that begins before one step and is written after a later step; with ``steps`` 0 it does nothing.

    Args:
        path: The file to write.
        skipped: Number of steps before the first recorded step.
        steps: Number of recorded steps.
    """

    def __init__(self, path: Path, skipped: int, steps: int) -> None:
        self.path = path
        self._skipped, self._steps = skipped, steps
        self._seen = 0
        self._is_open = False

    @property
    def recorded_steps(self) -> int:
        """Number of steps that the record contains so far."""
        return self._seen - self._skipped

    def before_step(self) -> None:
        """Begin the record if all skipped steps are over."""
        if self._steps and self._seen == self._skipped:
            self._is_open = True
            self.begin()

    def after_step(self) -> None:
        """Write the record if it contains enough steps."""
        self._seen += 1
        if self.recorded_steps == self._steps:
            self.close()

    def close(self) -> None:
        """Write the record, also if the run ended early."""
        if self._is_open:
            self._is_open = False
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.end()

    @abstractmethod
    def begin(self) -> None:
        """Begin to record."""

    @abstractmethod
    def end(self) -> None:
        """Stop recording and write the file."""


class StepProfile(StepWindow):
    """Trace of some steps by ``torch.profiler``, with the names of Actions.

    Args:
        path: The file to write.
        steps: Number of steps to trace.
        device: The device on which the rank computes.
        names: Context that names the Actions.
    """

    def __init__(
        self, path: Path, steps: int, device: torch.device, names: ActionNames = contextlib.nullcontext
    ) -> None:
        super().__init__(path, _SKIPPED_STEPS, steps)
        self._device, self._names = device, names
        self._profiler: profile | None = None
        self._named = contextlib.ExitStack()

    def begin(self) -> None:
        """Start the profiler, and name the Actions from now on."""
        self._profiler = profile(activities=activities_of(self._device), record_shapes=True)
        self._profiler.start()
        self._named.enter_context(self._names())

    def end(self) -> None:
        """Stop the profiler and write the trace."""
        assert self._profiler is not None, "a record that ends has begun"
        profiler, self._profiler = self._profiler, None
        self._named.close()
        profiler.stop()
        profiler.export_chrome_trace(str(self.path))
        _log.info("trace of %d steps: %s", self.recorded_steps, self.path)


class MemorySnapshot(StepWindow):
    """Allocations of some steps on a CUDA device, with the Python stack of each."""

    def begin(self) -> None:
        """Start to record allocations."""
        torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS, stacks="python")

    def end(self) -> None:
        """Write the allocations and stop recording them."""
        try:
            torch.cuda.memory._dump_snapshot(str(self.path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        _log.info("memory snapshot of %d steps: %s", self.recorded_steps, self.path)


def snapshot_path(file: str, rank: int) -> Path:
    """Return the file of one rank's memory snapshot: ``memory_rank_00000.pickle`` for ``memory.pickle``."""
    path = Path(file)
    return path.with_name(f"{path.stem}_rank_{rank:05d}{path.suffix or '.pickle'}")


def step_windows(
    request: ProfileRequest, folder: Path, rank: int, device: torch.device, names: ActionNames
) -> list[StepWindow]:
    """Return the records that a run makes of single steps.

    Args:
        request: The user's request.
        folder: Folder of the traces.
        rank: This rank.
        device: The device on which the rank computes.
        names: Context that names the Actions.
    """
    windows: list[StepWindow] = []
    if request.memory_snapshot is not None:
        path = snapshot_path(request.memory_snapshot, rank)
        first, steps = (_SKIPPED_STEPS, request.steps) if request.steps else (0, _SNAPSHOT_STEPS)
        windows.append(MemorySnapshot(path, first, steps))
    if request.steps:
        windows.append(StepProfile(folder / f"rank_{rank:05d}.json", request.steps, device, names))
    return windows
