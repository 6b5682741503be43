"""Bytes that this process holds in RAM or on its accelerator.

    resident       pages in RAM; a page shared by k processes counts k times over k processes
    proportional   the same with each shared page divided by its sharers, so that ranks add up to the host's use

The first costs one small read. The second walks the page tables (milliseconds for a large process), so it belongs
in benchmarks and not in every step.
"""

import contextlib
import ctypes
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

_MIB = 2**20
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameter numbers of glibc's ``mallopt``."""
_APART_BYTES = _MIB
MAPPED_BYTES = 32 * _MIB
"""Least size of a piece that glibc allocates outside the heap, and returns to the system as soon as it is freed."""
_KEPT_FREE_BYTES = 256 * _MIB
_FREED_BYTES = 64 * _MIB


def _field_of(file: str, field: str) -> int | None:
    """Return the value in bytes of a ``Name:   123 kB`` line of a file under /proc."""
    try:
        text = Path(file).read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


def resident_bytes() -> int | None:
    """Return the bytes of this process in RAM now; None if the system does not report them."""
    return _field_of("/proc/self/status", "VmRSS")


def peak_resident_bytes() -> int:
    """Return the most that :func:`resident_bytes` has been since the process began."""
    known = _field_of("/proc/self/status", "VmHWM")
    if known is not None:
        return known
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def proportional_bytes() -> int | None:
    """Return the bytes of this process in RAM with shared pages divided by their sharers; None if unknown."""
    return _field_of("/proc/self/smaps_rollup", "Pss")


class MemoryInUse(NamedTuple):
    """Memory columns of one record, in bytes."""

    memory: int | None
    """On an accelerator, the peak of tensors since the last record; else resident memory now."""
    memory_allocated: int | None = None
    """On an accelerator, the bytes of tensors now."""
    memory_reserved: int | None = None
    """On an accelerator, the peak that torch held since the last record: tensors and cached blocks."""


def taken(device: torch.device) -> MemoryInUse:
    """Return the memory for one record, and reset the peaks for the next record."""
    if device.type == "cpu":
        return MemoryInUse(resident_bytes())
    stats = torch.accelerator.memory_stats(device)
    torch.accelerator.reset_peak_memory_stats(device)
    names = ("allocated_bytes.all.peak", "allocated_bytes.all.current", "reserved_bytes.all.peak")
    return MemoryInUse(*(stats.get(name) for name in names))


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that are still free on ``device``, for all processes together; None if unknown."""
    if device.type == "cpu":
        return _field_of("/proc/meminfo", "MemAvailable")
    free, _ = torch.accelerator.get_memory_info(device)
    return int(free)


def give_back_free(device: torch.device) -> None:
    """Return cached memory of the allocators to the system, or to other users of the device."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    elif sys.platform.startswith("linux"):
        with contextlib.suppress(AttributeError):  # a C library other than glibc
            ctypes.CDLL(None).malloc_trim(0)


class HeapTrimmer:
    """Counter of freed host memory, which returns the heap's free memory to the system from time to time."""

    def __init__(self) -> None:
        self._bytes = 0

    def note(self, size: int) -> None:
        """Record that ``size`` bytes of host memory were freed."""
        self._bytes += size
        if self._bytes >= _FREED_BYTES:
            self._bytes = 0
            give_back_free(torch.device("cpu"))


def keep_freed_memory() -> bool:
    """Let the heap keep the tensors that a step frees, for the next step; return True if the heap is glibc's.

    glibc returns freed memory at the end of the heap to the system, and memory outside the heap always. A step whose
    tensors take more than its limits, which depend on what was freed before, writes to zeroed pages anew each time:
    some thousand page faults. With the limits that are set here tensors of less than 32 MiB, the most that glibc comes
    to itself, lie in the heap from the start, and up to 256 MiB of free memory stay at its end. Larger tensors go back
    as before.
    """
    set_heap = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if set_heap is None:
        return False
    set_heap(_MMAP_THRESHOLD, MAPPED_BYTES)
    set_heap(_TRIM_THRESHOLD, _KEPT_FREE_BYTES)
    return True


@contextlib.contextmanager
def apart_from_the_heap() -> Iterator[None]:
    """Allocate host memory from 1 MiB on outside the heap inside the ``with`` block, so that it is returned when freed.

    In the heap, aligned tensors that come and go beside objects that stay leave holes that no tensor of their size fits
    into: the heap grows by most of what passes through. Without glibc nothing changes. After the block, memory from 32
    MiB on is allocated outside the heap, the limit that glibc itself reaches in a process that has freed as much at
    once.
    """
    set_heap = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if set_heap is None:
        yield
        return
    set_heap(_MMAP_THRESHOLD, _APART_BYTES)
    try:
        yield
    finally:
        set_heap(_MMAP_THRESHOLD, MAPPED_BYTES)
        set_heap(_TRIM_THRESHOLD, 64 * _MIB)
