"""Many reads of whole pages in one call, without the interpreter's lock.

A disk answers a read of 4 KiB after about a hundred microseconds, and works on dozens of reads together. In Python each
read costs another few microseconds with the interpreter's lock, during which nothing else of the process computes.
Compiled loops talk to the system instead, in one of two ways:

    PageQueue    one thread hands over many reads and collects those that are done    Linux native AIO
    read_many    one read after another, on as many threads as the caller has         pread

``read_many`` serves where the system refuses a queue, as some containers and machines with another byte order do. With
as many threads as a queue has reads, each thread would wait for the interpreter's lock before and after its reads.

The loops know no errors: a request that does not return all its bytes is reported by its number, and the caller repeats
it with ``DirectFile.read_pages``, which raises what the system says.

Reference: Linux manual pages io_setup(2), io_submit(2), io_getevents(2).
Cost: 0.3 us a request on the processor, beside the system's own work.
Shapes: n requests, d of them under way.
"""

import ctypes
import functools
import platform
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.kernels.tables.compiled import CompiledLoop, has_numba, loop
from shardwise.memory.direct_io import Bytes, DirectFile

__all__ = ["PageQueue", "compile_loops", "read_many"]

Numbers = npt.NDArray[np.int64]

_CALLS = {
    "x86_64": {"setup": 206, "destroy": 207, "events": 208, "submit": 209},
    "aarch64": {"setup": 0, "destroy": 1, "submit": 2, "events": 4},
}
"""Numbers of the system's calls by machine."""
_REQUEST_WORDS, _EVENT_WORDS = 8, 4
"""Words of 8 bytes of the system's ``struct iocb`` and ``struct io_event``."""


class _Pread(CompiledLoop):
    """Loop that calls ``pread`` of the C library."""

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        from numba.core import types

        signature = types.intp(types.int32, types.intp, types.intp, types.int64)
        found: Callable[..., Any] = types.ExternalFunction("pread", signature)
        return found


_pread = _Pread(lambda descriptor, address, size, offset: -1)


class _Syscall(CompiledLoop):
    """Loop that calls ``syscall`` of the C library, with five arguments."""

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        from numba.core import types

        found: Callable[..., Any] = types.ExternalFunction("syscall", types.int64(*[types.int64] * 6))
        return found


_syscall = _Syscall(lambda number, first, second, third, fourth, fifth: -1)


@loop
def _read_together(
    calls: np.ndarray,
    context: int,
    memory: np.ndarray,
    addresses: np.ndarray,
    descriptors: np.ndarray,
    into: int,
    places: np.ndarray,
    sizes: np.ndarray,
    offsets: np.ndarray,
    missed: np.ndarray,
) -> int:
    """Read all requests, write the numbers of those that did not come whole to ``missed``, and return their number.

    ``memory`` has d requests, d addresses of requests and d events, in words; ``addresses`` has where these begin.
    """
    count, depth = sizes.size, memory.size // (_REQUEST_WORDS + 1 + _EVENT_WORDS)
    requests, pointers = 0, depth * _REQUEST_WORDS
    events = pointers + depth
    free = np.arange(depth)  # of the places of requests, the first ``depth - under_way``
    given, under_way, wrong = 0, 0, 0
    while given < count or under_way:
        batch = min(depth - under_way, count - given)
        for k in range(batch):
            place = free[depth - under_way - 1 - k]
            at = requests + place * _REQUEST_WORDS
            each = given + k
            memory[at] = each * depth + place  # comes back with the event
            memory[at + 1] = 0
            memory[at + 2] = descriptors[each] << 32  # the lower half is the operation: 0 is a read
            memory[at + 3] = into + places[each]
            memory[at + 4] = sizes[each]
            memory[at + 5] = offsets[each]
            memory[at + 6] = 0
            memory[at + 7] = 0
            memory[pointers + k] = addresses[0] + place * _REQUEST_WORDS * 8
        if batch:
            sent = _syscall(calls[0], context, batch, addresses[1], 0, 0)
            if sent <= 0 and not under_way:
                # The system takes no request, for example of a closed file: the caller repeats the first of them.
                missed[wrong] = given
                wrong += 1
                given += 1
                continue
            given += max(sent, 0)
            under_way += max(sent, 0)
        # A signal interrupts the call; it is made again, because the reads under way write into the caller's memory.
        done = _syscall(calls[1], context, 1, depth, addresses[2], 0)
        for k in range(done):
            name, read = memory[events + k * _EVENT_WORDS], memory[events + k * _EVENT_WORDS + 2]
            if read != sizes[name // depth]:
                missed[wrong] = name // depth
                wrong += 1
            free[depth - under_way] = name % depth
            under_way -= 1
    return wrong


@loop
def _read_all(
    descriptors: np.ndarray, address: int, places: np.ndarray, sizes: np.ndarray, offsets: np.ndarray
) -> int:
    for i in range(sizes.size):
        if _pread(np.int32(descriptors[i]), address + places[i], sizes[i], offsets[i]) != sizes[i]:
            return i
    return sizes.size


def compile_loops() -> None:
    """Compile the loop of this module, so that the first step does not wait for it."""
    if has_numba():
        nothing = np.empty(0, np.int64)
        _read_all(nothing, 0, nothing, nothing, nothing)
        _read_together(nothing, 0, nothing, nothing, nothing, 0, nothing, nothing, nothing, nothing)


def read_many(
    files: Sequence[DirectFile], into: Bytes, places: Numbers, sizes: Numbers, offsets: Numbers
) -> int:
    """Read ranges of files until one of them does not come whole.

    Args:
        files: File of each request, n in all.
        into: Memory to fill, which begins on a page.
        places: Offset of each request in ``into``, a multiple of the alignment: [n].
        sizes: Bytes of each request, a multiple of the alignment: [n].
        offsets: Offset of each request in its file, a multiple of the alignment: [n].

    Returns:
        Number of requests that were read, from the first on; 0 without numba, and for files by way of the page cache.
    """
    if not len(files) or not has_numba() or not all(file.is_direct for file in files):
        return 0
    assert int((places + sizes).max()) <= into.nbytes, "requests end in the memory"
    descriptors = np.array([file.descriptor for file in files], np.int64)
    return int(_read_all(descriptors, into.ctypes.data, places, sizes, offsets))


class PageQueue:
    """Reads that the system works on together, for one caller at a time.

    Args:
        depth: Most reads under way.
    """

    def __init__(self, depth: int) -> None:
        """Open the queue, if the system has one."""
        self._end: weakref.finalize[[int, ctypes.c_ulong], PageQueue] | None = None
        self._context = ctypes.c_ulong(0)
        self._lock = threading.Lock()
        self._memory = np.zeros(depth * (_REQUEST_WORDS + 1 + _EVENT_WORDS), np.int64)
        first = self._memory.ctypes.data
        pointers = first + 8 * depth * _REQUEST_WORDS
        self._addresses = np.array([first, pointers, pointers + 8 * depth], np.int64)
        calls = _CALLS.get(platform.machine()) if sys.byteorder == "little" else None
        if calls is None:
            return
        self._calls = np.array([calls["submit"], calls["events"]], np.int64)
        setup, size = ctypes.c_long(calls["setup"]), ctypes.c_long(depth)
        if ctypes.CDLL(None).syscall(setup, size, ctypes.byref(self._context)) == 0:
            self._end = weakref.finalize(self, _destroy, calls["destroy"], self._context)
            self._end.atexit = False  # the system destroys it with the process

    @property
    def is_open(self) -> bool:
        """True if the queue can read."""
        return self._end is not None and self._end.alive and has_numba()

    @property
    def nbytes(self) -> int:
        """Bytes of the memory for requests and events."""
        return self._memory.nbytes

    def read(
        self, files: Sequence[DirectFile], into: Bytes, places: Numbers, sizes: Numbers, offsets: Numbers
    ) -> Numbers:
        """Read ranges of files, and return the numbers of the requests that did not come whole.

        Args:
            files: File of each request, n in all; none of them by way of the page cache.
            into: Memory to fill, which begins on a page.
            places: Offset of each request in ``into``, a multiple of the alignment: [n].
            sizes: Bytes of each request, a multiple of the alignment: [n].
            offsets: Offset of each request in its file, a multiple of the alignment: [n].
        """
        if not len(files):
            return np.empty(0, np.int64)
        assert int((places + sizes).max()) <= into.nbytes, "requests end in the memory"
        descriptors = np.array([file.descriptor for file in files], np.int64)
        missed = np.empty(len(files), np.int64)
        with self._lock:
            assert self.is_open, "a closed queue reads nothing"
            count = _read_together(
                self._calls,
                self._context.value,
                self._memory,
                self._addresses,
                descriptors,
                into.ctypes.data,
                places,
                sizes,
                offsets,
                missed,
            )
        return np.sort(missed[:count])

    def close(self) -> None:
        """Close the queue; a second call does nothing."""
        with self._lock:
            if self._end is not None:
                self._end()


def _destroy(call: int, context: ctypes.c_ulong) -> None:
    ctypes.CDLL(None).syscall(ctypes.c_long(call), context)
