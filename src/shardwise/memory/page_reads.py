"""Many reads of whole pages in one call, without the interpreter's lock.

A read of 4 KiB takes a disk some tens of microseconds, and several are under way on threads. In Python each costs
another few microseconds with the interpreter's lock, during which nothing else of the process computes. A compiled loop
calls ``pread`` of the C library instead. It knows no errors: the first request that does not return all its bytes ends
the loop, and the caller repeats that request with ``DirectFile.read_pages``, which raises what the system says.

Cost: 0.3 us a request on the processor, beside the system's own work.
Shapes: n requests.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.kernels.tables.compiled import CompiledLoop, has_numba, loop
from shardwise.memory.direct_io import Bytes, DirectFile

__all__ = ["compile_loops", "read_many"]

Numbers = npt.NDArray[np.int64]


class _Pread(CompiledLoop):
    """Loop that calls ``pread`` of the C library."""

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        from numba.core import types

        signature = types.intp(types.int32, types.intp, types.intp, types.int64)
        found: Callable[..., Any] = types.ExternalFunction("pread", signature)
        return found


_pread = _Pread(lambda descriptor, address, size, offset: -1)


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
