"""Storages: the memory that operations allocate, counted from its creation to its end, with its origin.

A dispatch mode sees every operation below autograd, in a pass on shapes and in a real engine alike:

    held      bytes of all storages created in the mode that are alive
    most      the largest ``held`` since the caller last set it
    log       each creation (+1) and each end (-1), from which the composition of ``held`` at any moment follows

An origin is the operation and the line of source that called it: the innermost line that belongs neither to torch nor
to this package, or else the innermost line of a model of this package. An operation of a backward pass has the line of
the forward operation whose gradient it computes (autograd numbers its nodes in the order of the forward pass).

Cost: some 5 µs for each storage, with origins as much again. Not counted: memory that an operation allocates and frees
inside itself, and memory that no operation of torch allocates.
"""

import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.observe.flops import flops_of
from shardwise.passes.absent import AbsentTensor
from shardwise.simulate.work import WorkCounter, bytes_in_memory

_OURS = str(Path(__file__).resolve().parents[1]) + "/"
_MODELS = f"{_OURS}models/"
_STDLIB = str(Path(sysconfig.get_paths()["stdlib"])) + "/"
_MEASURES = ("simulate/passes.py", "simulate/placements.py")
"""Files whose functions ``measure``, ``measure_evaluation`` and ``derive`` run models; lines further outward are not
the model's."""
_TORCH = str(Path(torch.__file__).resolve().parent) + "/"


class StorageOrigin(NamedTuple):
    """Size and origin of storages that are alike."""

    unit: str
    """Name of the Unit in whose share of a pass they were created; of Units of one kind the first."""
    what: str
    """Operation that created them, such as ``aten.mm``."""
    line: str
    """``file:line`` of the source that called the operation; empty if no such line is known."""
    nbytes: int
    """Bytes of one of them."""


StorageCounts = Mapping[StorageOrigin, int]
"""Numbers of storages by origin; negative for storages of earlier shares that ended."""


def bytes_of_counts(counts: StorageCounts) -> int:
    """Return the bytes of all storages in ``counts``."""
    return sum(origin.nbytes * count for origin, count in counts.items())


def added(first: StorageCounts, second: StorageCounts) -> dict[StorageOrigin, int]:
    """Return the sums of two counts, without zeros."""
    if not second:
        return dict(first)
    total = dict(first)
    for origin, count in second.items():
        now = total.get(origin, 0) + count
        if now:
            total[origin] = now
        else:
            del total[origin]
    return total


class LogEntry(NamedTuple):
    """The creation or the end of one storage."""

    origin: StorageOrigin
    change: int
    """1 for a creation, -1 for an end."""


def composition(log: Iterable[LogEntry]) -> tuple[StorageCounts, StorageCounts]:
    """Return the composition of the largest sum of a part of a log, and that of its end, both relative to its start."""
    entries = list(log)
    held = most = 0
    place = 0
    for i, (origin, change) in enumerate(entries, 1):
        held += change * origin.nbytes
        if held > most:
            most, place = held, i
    return _counts(entries[:place]), _counts(entries)


def _counts(entries: Iterable[LogEntry]) -> StorageCounts:
    found: Counter[StorageOrigin] = Counter()
    for origin, change in entries:
        found[origin] += change
    return {origin: count for origin, count in found.items() if count}


class StorageCounter(TorchDispatchMode):
    """Counter of the bytes of storages created inside the ``with`` block that are still alive."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.held = 0
        self.most = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], Tensor):
            return args[0]  # autograd keeps a divisor as a tensor, which modes are given as a number
        out = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):
            given = {id(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor) and id(tensor) not in given:
                    self._see(tensor, func)
        self.ran(func, args, kwargs or {}, out)
        return out

    def sees(self, tensor: Tensor) -> bool:
        """Return whether the storage of ``tensor`` counts."""
        return tensor.device.type != "meta" and not isinstance(tensor, AbsentTensor)

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note an operation that has run; does nothing here."""

    def created(self, func: Any, storage_bytes: int) -> Any:
        """Return what is to be known of a storage when it ends; ``held`` counts it already."""

    def ended(self, made: Any, storage_bytes: int) -> None:
        """Note the end of a storage with what ``created`` returned; ``held`` no longer counts it."""

    def _see(self, tensor: Tensor, func: Any) -> None:
        if not self.sees(tensor):
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self.held += size
        self.most = max(self.most, self.held)
        made = self.created(func, size)

        def gone(_: Any) -> None:
            del self._seen[key]
            self.held -= size
            self.ended(made, size)

        self._seen[key] = ref(storage, gone)


class LiveBytes(StorageCounter):
    """Counter of the bytes of storages created inside the ``with`` block that are still alive, and of FLOPs.

    Args:
        records: True to keep the log of storages with their origins.
    """

    def __init__(self, records: bool = False) -> None:
        super().__init__()
        self.flops = 0
        self.work = WorkCounter()
        """Operations by class, which the caller takes."""
        self.touched = 0
        """Bytes read and written by operations other than products."""
        self.log: list[LogEntry] = []
        """Creations and ends of storages, if they are recorded; the caller may empty it."""
        self.unit = ""
        """Name of the Unit for origins, set by the caller."""
        self._records = records
        self._lines: dict[int, str] = {}
        """Lines of forward operations, by the numbers of their autograd nodes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.equal.default and args[0].dtype == torch.uint8:
            return True  # states of generators, which are not used in this pass (passes/recompute.py)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count the FLOPs and the bytes of an operation."""
        flops = flops_of(func, args, kwargs, out)
        self.flops += flops
        is_view = getattr(func, "is_view", False)
        touched = 0 if flops or is_view else touched_bytes(func, args, kwargs, out)
        self.touched += touched
        self.work.count(func, args, kwargs, out, flops, touched)

    def created(self, func: Any, storage_bytes: int) -> StorageOrigin | None:
        """Return the origin of a storage, if origins are recorded."""
        if not self._records:
            return None
        made = StorageOrigin(self.unit, str(func._overloadpacket), self._line(), storage_bytes)
        self.log.append(LogEntry(made, 1))
        return made

    def ended(self, made: StorageOrigin | None, storage_bytes: int) -> None:
        """Record the end of a storage."""
        if made is not None:
            self.log.append(LogEntry(made, -1))

    def _line(self) -> str:
        """Return the line of the running operation; in a backward pass that of the forward operation."""
        line = line_of_model(sys._getframe(4))
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        if line:
            # The node of this operation, or of the function around it, was numbered last.
            self._lines.setdefault(torch._C._autograd._get_sequence_nr() - 1, line)  # type: ignore[attr-defined]
        elif node is not None:
            line = self._lines.get(node._sequence_nr(), "")
        return line


def line_of_model(frame: FrameType | None) -> str:
    """Return ``file:line`` of the innermost frame of a model, outward from ``frame``; empty if none runs.

    A frame of a user's file counts first, up to the innermost frame of the code that measures; then a model of this
    package.
    """
    own = ""
    while frame is not None:
        kind = _kind_of(frame.f_code)
        if kind == "user":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if kind == "model" and not own:
            own = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if kind == "end":
            break
        frame = frame.f_back
    return own


def line_of_error(error: BaseException) -> str:
    """Return ``file:line`` of the innermost frame of a model through which an error came; empty if there is none."""
    lines: dict[str, str] = {}
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        lines[_kind_of(code)] = f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return lines.get("user", lines.get("model", ""))


_KINDS: dict[CodeType, str] = {}


def _kind_of(code: CodeType) -> str:
    """Return ``user``, ``model`` or ``ours`` for the file of a function, and ``end`` for one that runs models."""
    known = _KINDS.get(code)
    if known is None:
        known = _KINDS[code] = _kind_of_file(code.co_filename, code.co_name)
    return known


def _kind_of_file(file: str, function: str) -> str:
    if file.startswith(_MODELS):
        return "model"
    if file.startswith(_OURS):
        runs_models = function in ("measure", "measure_evaluation", "derive")
        return "end" if file.endswith(_MEASURES) and runs_models else "ours"
    if file.startswith((_TORCH, "<")) or (file.startswith(_STDLIB) and "site-packages" not in file):
        return "ours"
    return "user"


def touched_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes that an operation reads and writes, each memory once.

    A lookup reads as much as it returns, and an addition to places of a tensor reads and writes as much of the tensor
    as it adds.
    """
    name = str(func._overloadpacket).removeprefix("aten.")
    made = sum(bytes_in_memory(each) for each in tree_leaves(out) if isinstance(each, Tensor))
    if not made or name in _TOUCH_NOTHING:
        return 0
    if name in _ADD_TO_PLACES:
        # Behind the tensor come the places and what is added there.
        behind = [
            bytes_in_memory(each) for each in tree_leaves((args[1:], kwargs)) if isinstance(each, Tensor)
        ]
        return sum(behind) + 2 * behind[-1]
    read = sum(bytes_in_memory(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
    return made + (min(read, made) if name in _PICK else read)


_TOUCH_NOTHING = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "_unsafe_view"}
)
_ADD_TO_PLACES = frozenset({"scatter_add_", "index_add_", "index_put_"})
_PICK = frozenset({"embedding", "index", "index_select", "gather", "_embedding_bag", "_unsafe_index"})
