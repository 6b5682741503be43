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
"""Names of glibc's ``mallopt``."""
_APART_BYTES = _MIB
_FREED_BYTES = 64 * _MIB


def _field_of(file: str, field: str) -> int | None:
    """Value in bytes of a ``Name:   123 kB`` line of a file under /proc."""
    try:
        text = Path(file).read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


def resident_bytes() -> int | None:
    """Memory of this process in RAM now; None where the system does not say."""
    return _field_of("/proc/self/status", "VmRSS")


def peak_resident_bytes() -> int:
    """Most that :func:`resident_bytes` has been since the process began."""
    known = _field_of("/proc/self/status", "VmHWM")
    if known is not None:
        return known
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def proportional_bytes() -> int | None:
    """Memory of this process in RAM with shared pages divided by their sharers; None where unknown."""
    return _field_of("/proc/self/smaps_rollup", "Pss")


class MemoryInUse(NamedTuple):
    """What a record says, in bytes."""

    memory: int | None
    """On an accelerator the most that tensors took since the record before, else resident memory now."""
    memory_allocated: int | None = None
    """On an accelerator what tensors take now."""
    memory_reserved: int | None = None
    """On an accelerator the most that torch held since the record before: its tensors, and what it keeps for others."""


def taken(device: torch.device) -> MemoryInUse:
    """For one record; the peaks of the next one begin here."""
    if device.type == "cpu":
        return MemoryInUse(resident_bytes())
    stats = torch.accelerator.memory_stats(device)
    torch.accelerator.reset_peak_memory_stats(device)
    names = ("allocated_bytes.all.peak", "allocated_bytes.all.current", "reserved_bytes.all.peak")
    return MemoryInUse(*(stats.get(name) for name in names))


def available_bytes(device: torch.device) -> int | None:
    """Memory that could still be taken on ``device``, by all its processes together; None where unknown."""
    if device.type == "cpu":
        return _field_of("/proc/meminfo", "MemAvailable")
    free, _ = torch.accelerator.get_memory_info(device)
    return int(free)


def give_back_free(device: torch.device) -> None:
    """What allocators keep for later goes back to where they have it from: to the system, or to other users of the
    device."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    elif sys.platform.startswith("linux"):
        with contextlib.suppress(AttributeError):  # another library than glibc
            ctypes.CDLL(None).malloc_trim(0)


class Freed:
    """Counts what is let go of bit by bit, so that it does not wait in the heap for what comes next."""

    def __init__(self) -> None:
        self._bytes = 0

    def note(self, size: int) -> None:
        """So many bytes of host memory are not needed any more."""
        self._bytes += size
        if self._bytes >= _FREED_BYTES:
            self._bytes = 0
            give_back_free(torch.device("cpu"))


@contextlib.contextmanager
def apart_from_the_heap() -> Iterator[None]:
    """Host memory from 1 MiB on that is taken inside goes back to the system as soon as it is free.

    In the heap, aligned tensors that come and go beside objects that stay leave holes which none of their size fits
    into: it grows by most of what passes through. Elsewhere than in glibc nothing changes. Afterwards memory from 32
    MiB on lies apart: as far as glibc itself would go in a process that has freed as much at once.
    """
    set_heap = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if set_heap is None:
        yield
        return
    set_heap(_MMAP_THRESHOLD, _APART_BYTES)
    try:
        yield
    finally:
        set_heap(_MMAP_THRESHOLD, 32 * _MIB)
        set_heap(_TRIM_THRESHOLD, 64 * _MIB)
