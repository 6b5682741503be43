"""Loops that numba compiles at their first call, if it is installed; numba is not imported before.

    @loop
    def _add(x, y): ...              # compiled without the interpreter's lock when _add(...) is called

A loop may call other loops, and ``prefetch``: a table is far larger than any cache, and its lines, requested a few rows
ahead (``ahead``), arrive while earlier rows are worked on. The distance matters: gathering 106,000 rows of width 16
from a table of 10 M, on one Zen 5 core, takes 1.5 ms with 8 rows between request and use, 0.7 with 32, 0.55 with 64.

Machine code is kept in ``~/.cache/shardwise``, in a folder that belongs to the user with mode 0700, because numba reads
the code back with pickle. If there is no such folder, each process compiles anew. Its name contains a digest of this
package, because numba does not notice a change of a loop in another file.

Cost: about a second for a loop's first call with new dtypes, milliseconds from the folder.
"""

import functools
import hashlib
import importlib.util
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_log = logging.getLogger(__name__)

_LINE_BYTES = 64
_AHEAD_BYTES, _LEAST_AHEAD, _MOST_AHEAD = 8192, 8, 64

_DTYPES = (torch.float32, torch.float64)

_declaring = threading.Lock()


class CompiledLoop:
    """Function in the part of Python that numba compiles; ``python`` is the function itself."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.python = function

    def __call__(self, *arguments: Any) -> Any:
        """Run the compiled function."""
        return self.compiled(*arguments)

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        """Compiled function, compiled at its first use."""
        import numba

        source = self.python
        assert isinstance(source, FunctionType), "a loop is a plain function"
        known = {
            name: value.compiled
            if isinstance(value, CompiledLoop) and name in source.__code__.co_names
            else value
            for name, value in source.__globals__.items()
        }
        function = FunctionType(source.__code__, known, source.__name__, source.__defaults__)
        function.__qualname__, function.__module__ = source.__qualname__, source.__module__
        folder = cache_folder()
        with _cached_in(folder):
            return numba.njit(nogil=True, error_model="numpy", cache=folder is not None)(function)


class _LinePrefetch(CompiledLoop):
    """Loop that requests the lines of ``array[row, :width]``; as Python it does nothing.

    It is an intrinsic, because a compiled function that gets an array counts its references, atomically, and that costs
    more than the row.
    """

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        from llvmlite import ir
        from numba.core import cgutils, types
        from numba.extending import intrinsic

        def prefetch(typing_context: Any, array: Any, row: Any, width: Any) -> Any:
            def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                kind, row_kind, width_kind = signature.args
                at = context.cast(builder, arguments[1], row_kind, types.intp)
                stop = context.cast(builder, arguments[2], width_kind, types.intp)
                held = context.make_array(kind)(context, builder, arguments[0])
                pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
                shape = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
                call = builder.module.declare_intrinsic("llvm.prefetch", [pointer], shape)

                def ask(column: Any) -> None:
                    item = cgutils.get_item_pointer(context, builder, kind, held, [at, column])
                    builder.call(call, [builder.bitcast(item, pointer), word(0), word(3), word(1)])

                line = _LINE_BYTES // context.get_abi_sizeof(context.get_data_type(kind.dtype))
                count = stop.type
                with cgutils.for_range_slice(builder, count(0), stop, count(line), count) as (column, _):
                    ask(column)
                ask(builder.sub(stop, count(1)))
                return context.get_dummy_value()

            return types.void(array, row, width), build

        return intrinsic(prefetch)


class Instruction(CompiledLoop):
    """Operation that a compiled loop contains as a few machine instructions; as Python it does nothing.

    Args:
        function: Python function with the operation's one to four arguments.
        result: returns numba's type of the result from the types of the arguments.
        build: writes the instructions, from numba's context, builder, signature and the arguments' values.
    """

    def __init__(
        self, function: Callable[..., Any], result: Callable[..., Any], build: Callable[..., Any]
    ) -> None:
        super().__init__(function)
        self._result, self._build = result, build

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        """The operation as numba's intrinsic."""
        from numba.extending import intrinsic

        result, build = self._result, self._build

        def typed(*given: Any) -> Any:
            return result(*given)(*given), build

        makers: dict[int, Callable[..., Any]] = {
            1: lambda context, a: typed(a),
            2: lambda context, a, b: typed(a, b),
            3: lambda context, a, b, c: typed(a, b, c),
            4: lambda context, a, b, c, d: typed(a, b, c, d),
        }
        return intrinsic(makers[self.python.__code__.co_argcount])  # type: ignore[no-any-return,attr-defined]


def loop(function: Callable[..., Any]) -> CompiledLoop:
    """Return a loop that is compiled at its first call."""
    return CompiledLoop(function)


prefetch = _LinePrefetch(lambda array, row, width: None)


def _as_int64(context: Any, builder: Any, signature: Any, arguments: Any) -> list[Any]:
    """Return the integers that an instruction is given, as values of 64 bits."""
    from numba.core import types

    pairs = zip(arguments, signature.args, strict=True)
    return [context.cast(builder, value, kind, types.int64) for value, kind in pairs]


def _build_number(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    from llvmlite import ir

    address, place = _as_int64(context, builder, signature, arguments)
    return builder.load(builder.gep(builder.inttoptr(address, ir.IntType(64).as_pointer()), [place]))


def _build_copy(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    from llvmlite import ir

    target, source, count = _as_int64(context, builder, signature, arguments)
    pointer, word, bit = ir.IntType(8).as_pointer(), ir.IntType(64), ir.IntType(1)
    shape = ir.FunctionType(ir.VoidType(), [pointer, pointer, word, bit])
    copy = builder.module.declare_intrinsic("llvm.memcpy", [pointer, pointer, word], shape)
    to, of = (builder.inttoptr(address, pointer) for address in (target, source))
    builder.call(copy, [to, of, count, bit(0)])
    return context.get_dummy_value()


def _build_prefetch(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    from llvmlite import ir

    (address,) = _as_int64(context, builder, signature, arguments)
    pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    shape = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
    call = builder.module.declare_intrinsic("llvm.prefetch", [pointer], shape)
    builder.call(call, [builder.inttoptr(address, pointer), word(0), word(3), word(1)])
    return context.get_dummy_value()


def _int64(*given: Any) -> Any:
    from numba import types

    return types.int64


def _nothing(*given: Any) -> Any:
    from numba import types

    return types.void


number_at = Instruction(lambda address, place: None, _int64, _build_number)
"""The int64 at a place of the array that begins at an address."""
prefetch_at = Instruction(lambda address: None, _nothing, _build_prefetch)
"""A request for the line of memory at an address, which arrives while the loop goes on."""
copy_bytes = Instruction(lambda target, source, count: None, _nothing, _build_copy)
"""A copy of a number of bytes from one address to another; the two ranges do not overlap."""


@loop
def ahead(row_bytes: int) -> int:
    """Return the number of rows between the request for a row's lines and their use: about 8 KiB, at least 8 rows."""
    return min(_MOST_AHEAD, max(_LEAST_AHEAD, _AHEAD_BYTES // row_bytes))


def array(tensor: Tensor) -> np.ndarray:
    """Return the memory of a tensor that is only read, or a contiguous copy, because loops have no strides."""
    return tensor.detach().contiguous().numpy()


def runs_compiled(*tensors: Tensor) -> bool:
    """Return whether the compiled loop serves these tensors: integers, fp32 or fp64 on the CPU, with numba."""
    return is_installed() and all(
        tensor.device.type == "cpu" and (not tensor.dtype.is_floating_point or tensor.dtype in _DTYPES)
        for tensor in tensors
    )


@functools.cache
def has_numba() -> bool:
    """Return whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def is_installed() -> bool:
    """Return whether numba is installed; if not, log the consequence once."""
    if has_numba():
        return True
    _log.warning(
        "numba is not installed: embedding tables run on plain torch operations, with the same results and several "
        "times slower; pip install numba makes them fast"
    )
    return False


@functools.cache
def cache_folder() -> Path | None:
    """Return the folder for machine code, which only the user can access; None if there is none."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    try:
        folder = Path.home() / ".cache" / "shardwise" / f"loops-{digest.hexdigest()[:16]}"
        return folder if own_folder(folder) else None
    except (OSError, RuntimeError) as error:
        _log.info("compiled loops are not kept: %s", error)
        return None


def own_folder(folder: Path) -> bool:
    """Make ``folder`` with mode 0700 and return whether it is safe.

    A safe folder belongs to this user, is no link, and is closed to all others.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        _log.warning("%s is not a folder of this user's own: compiled loops are not kept", folder)
        return False
    if stat.S_IMODE(found.st_mode) & 0o077:
        _log.warning("%s is open to other users: compiled loops are not kept; chmod 700 mends it", folder)
        return False
    return os.access(folder, os.W_OK)


@contextmanager
def _cached_in(folder: Path | None) -> Iterator[None]:
    """Set numba's cache folder inside the context and restore it after.

    numba reads the folder from its settings when a function is declared; without the restore, other packages' loops
    would be cached there too. The settings are those of the whole process: of two threads without the lock, the second
    would restore the first's folder and leave it set.
    """
    import numba

    settings: Any = numba.config
    with _declaring:
        before = settings.CACHE_DIR
        if folder is not None:
            settings.CACHE_DIR = str(folder)
        try:
            yield
        finally:
            settings.CACHE_DIR = before
