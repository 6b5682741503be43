"""A pretended accelerator: tensors that say they lie on ``pretend:0``, with their bytes in host memory.

    tensor    a plain torch.Tensor of torch's device type for backends in Python; its storage says ``pretend:0`` and
              points into the host storage that hangs on it, so views, ``p.data = view``, slots, version counters and
              what autograd saved behave as on a real device
    Bench     a dispatch mode that runs each operation on host views of its tensors, and counts
    register  once in a process, which never does anything else afterwards

What a ``Bench`` counts, each under the line of ours that asked for it (``file:function``; "autograd" where a thread of
autograd's asked):

    syncs       what makes the host wait for the device on CUDA: reads of numbers, copies between host and device that
                are pageable or not ``non_blocking``, operations whose result's size lies in the data (``nonzero``,
                ``unique``, an index by booleans, ``repeat_interleave`` without ``output_size``), synchronize
    operations  all that would launch a kernel: no views, no allocations. With ``fuses_attention`` an attention without
                a mask is one operation each way, as on a device that has a fused kernel (math attention is some thirty)
    misplaced   operations over tensors on both sides, but for numbers of dim 0; refused as CUDA refuses them

    races       uses of the same bytes by two streams, or a stream and the host, that no event orders (timelines.py)

What streams other than the computation's copy comes as late as it may, and there are NaNs until then. Memory is that of
a caching allocator. Times it cannot show.
"""

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import shardwise
from tests.accelerator.timelines import (
    WHERE,
    Block,
    Line,
    RankTimelines,
    Tenant,
    Timelines,
    run_all,
    run_needed,
)

NAME = "pretend"
IS_POSSIBLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
"""torch before 2.13 knows no backends in Python."""
MEMORY_BYTES = 1 << 30
Sync = tuple[str, str]
"""(what, file:function)."""

_ROOT = str(Path(shardwise.__file__).parent)
_HOST_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_ATEN = torch.ops.aten
_READS = {
    "_local_scalar_dense": "item",
    "equal": "equal",
    "is_nonzero": "item",
    "_linalg_check_errors": "linalg",
}
_SIZED_BY_DATA = {
    "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    "bincount", "histc", "embedding_renorm_",
}  # fmt: skip
_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_VIEWS = {"_unsafe_view", "_reshape_alias"}
"""Views that torch does not call views."""
_INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_DESCRIBES = {"resize_", "set_", "as_strided_", "t_", "transpose_", "squeeze_", "unsqueeze_", "detach_"}
"""Change what a tensor says of its memory, in place."""


class Misplaced(RuntimeError):
    """Tensors of one operation lie on the host and on the device."""


def register() -> torch.device:
    """The device, made known to this process; a second call does nothing."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        backend_registration._setup_privateuseone_for_python_backend(NAME, _Backend())
        for name, stand_in in _ACCELERATOR.items():
            setattr(torch.accelerator, name, stand_in)
        torch.Stream, torch.Event = _Stream, _Event  # type: ignore[misc, assignment]
        torch.Tensor.record_stream = _record_stream  # type: ignore[method-assign, assignment]
        F.scaled_dot_product_attention = _scaled_dot_product_attention
        threading.Thread.run = _run_in_mode  # type: ignore[method-assign]
        threading.Thread.start = _start_in_rank  # type: ignore[method-assign]
    return torch.device(NAME, 0)


# Tensors ------------------------------------------------------------------------------------------------------------


def on_device(host: Tensor) -> Tensor:
    """A device tensor over the memory of ``host``."""
    there = host.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        there.data_ptr(), torch.device(NAME, 0), there.nbytes()
    )
    storage.host = there  # kept as long as torch keeps the storage
    if Bench.current is not None:
        Bench.current.give_memory(storage)
    return _described(host.dtype, storage, host)


def on_host(tensor: Tensor) -> Tensor:
    """The bytes of a device tensor, as a host tensor over the same memory."""
    host = torch.empty(0, dtype=tensor.dtype)
    host.set_(
        tensor.untyped_storage().host,  # type: ignore[attr-defined]
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
    )
    return host


def is_on_device(value: Any) -> bool:
    """Whether it is a tensor of the pretended device."""
    return isinstance(value, Tensor) and value.device.type == NAME


def _described(dtype: torch.dtype, storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """A device tensor over ``storage`` that lies in it as ``like`` does."""
    made = torch._C._acc.create_empty_tensor((0,), dtype)  # type: ignore[attr-defined]
    set_to: Any = _ATEN.set_.source_Storage_storage_offset
    set_to.redispatch(_HOST_KEY, made, storage, like.storage_offset(), like.shape, like.stride())
    return made


# Counting -----------------------------------------------------------------------------------------------------------


class Bench(TorchDispatchMode):
    """See the module's docstring. ``with Bench() as bench:`` around all that uses the device."""

    current: "Bench | None" = None
    _entered: list["Bench"] = []  # noqa: RUF012 - of the process
    """Benches that are in use, of several ranks too, which share their timelines."""

    def __init__(self, hurry: int | None = None, fuses_attention: bool = False) -> None:
        super().__init__()
        self.fuses_attention = fuses_attention
        self.timelines = Timelines(hurry)
        self.syncs: Counter[Sync] = Counter()
        self.operations: Counter[str] = Counter()
        self.misplaced: list[str] = []
        self._data = _Data()
        self._is_paused = threading.local()

    def __enter__(self) -> Any:
        if Bench._entered:
            self.timelines = Bench._entered[-1].timelines
        Bench._entered.append(self)
        Bench.current = self
        self._data.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._data.__exit__(*error)
        Bench._entered.remove(self)
        Bench.current = Bench._entered[-1] if Bench._entered else None

    def clear(self) -> None:
        """Count from nothing."""
        self.syncs.clear()
        self.operations.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, this thread's operations are not counted: they are the bench's own."""
        before = getattr(self._is_paused, "flag", False)
        self._is_paused.flag = True
        try:
            yield
        finally:
            self._is_paused.flag = before

    def sync(self, what: str) -> None:
        """Count one; the host has waited for the running stream."""
        if not self.is_paused:
            self.syncs[what, place()] += 1
            _Event.waited = _Event.recorded
            self._is_paused.has_waited = True

    @property
    def is_paused(self) -> bool:
        """Whether what this thread does is the bench's own."""
        return getattr(self._is_paused, "flag", False)

    @property
    def races(self) -> list[str]:
        """Pairs of uses that no event orders, of all ranks."""
        return self.timelines.races

    @property
    def rank(self) -> RankTimelines:
        """The timelines of the running thread's rank."""
        return self.timelines.of(WHERE.rank)

    @property
    def line(self) -> Line:
        """The running thread's stream."""
        return self.rank.line(WHERE.streams[-1].stream_id if WHERE.streams else 0)

    def give_memory(self, storage: Any) -> None:
        """Let the allocator serve a new storage."""
        if not self.is_paused:
            storage.tenant = self.rank.take(storage.nbytes(), self.line)

    def uses_of(self, func: Any, args: Any, kwargs: Any) -> list[tuple[Tensor, Block, bool]]:
        """(tensor, its block, whether it is written), of an operation's arguments; of the host the pinned ones."""
        found: dict[int, tuple[Tensor, Block, bool]] = {}
        for place, (name, writes) in enumerate(_arguments(func)):
            value = args[place] if place < len(args) else kwargs.get(name)
            for each in value if isinstance(value, (list, tuple)) else (value,):
                block = _block_of(each)
                if block is not None:
                    found[id(each)] = each, block, writes or (id(each) in found and found[id(each)][2])
        return list(found.values())

    def operation(self, name: str) -> None:
        """Count one."""
        if not self.is_paused:
            self.operations[name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each.__torch_dispatch__ is not Tensor.__torch_dispatch__ for each in types):
            return NotImplemented  # tensors of a class of their own answer first
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        leaves, form = tree_flatten((args, kwargs))
        device = [leaf for leaf in leaves if is_on_device(leaf)]
        wanted = kwargs.get("device")
        goes_there = wanted is not None and torch.device(wanted).type == NAME
        if name in ("pin_memory", "_pin_memory", "is_pinned"):
            return _pinned(name, args[0])
        if not device and not goes_there:
            return self._on_host(func, name, args, kwargs)
        if name in _DESCRIBES:
            if name == "resize_" and not self.is_paused:  # which may move the bytes
                run_all(self.line.mark())
            return _describe(name, func, args, kwargs)
        self._is_paused.has_waited = False
        if name in ("_to_copy", "copy_", "_copy_from", "copy"):
            self._count_copy(name, args, kwargs)
        elif name == "record_stream":
            return _record_stream(*args)
        else:
            self._check_places(func, name, leaves, device)
            self._count_sync(func, name, args, kwargs)
            if not _is_view(func, name) and name not in _ALLOCATES and name not in _READS:
                self.operation(name)
        hosts = {id(leaf): on_host(leaf) for leaf in device}
        inner_args, inner_kwargs = tree_unflatten([hosts.get(id(leaf), leaf) for leaf in leaves], form)
        if "device" in inner_kwargs:
            inner_kwargs["device"] = torch.device("cpu")
        if goes_there or inner_kwargs.get("pin_memory"):
            inner_kwargs.pop("pin_memory", None)
        to_host = name == "_to_copy" and wanted is not None and not goes_there
        if name == "_to_copy":
            inner_kwargs.pop("non_blocking", None)
        result = self._run(func, name, (args, kwargs), (inner_args, inner_kwargs))
        if to_host or name in _READS:
            if to_host and kwargs.get("non_blocking"):
                result.untyped_storage().pinned = True  # as torch makes it
                self._wrote(name, [result])
            return result
        if name == "_to_copy" and result.untyped_storage().data_ptr() in {
            each.untyped_storage().data_ptr() for each in (*hosts.values(), *args) if isinstance(each, Tensor)
        }:
            result = result.clone()
        given = {id(host): leaf for leaf in device for host in (hosts[id(leaf)],)}
        storages = {host.untyped_storage()._cdata: leaf for leaf in device for host in (hosts[id(leaf)],)}
        if name == "copy_" and not is_on_device(args[0]):
            return args[0]

        made: list[Tensor] = []

        def back(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in given:
                return given[id(value)]
            source = storages.get(value.untyped_storage()._cdata)
            if source is not None:
                return _described(value.dtype, source.untyped_storage(), value)
            made.append(on_device(value))
            return made[-1]

        answer = tree_map(back, result)
        if made and name not in _ALLOCATES:
            self._wrote(name, made)
        return answer

    def uses(self, read: Sequence[Tensor], written: Sequence[Tensor]) -> list[tuple[Tensor, Block, bool]]:
        """(tensor, its block, whether it is written) of what is read and what is written."""
        both = [(each, False) for each in read] + [(each, True) for each in written]
        found = [(each, _block_of(each), writes) for each, writes in both]
        return [(each, block, writes) for each, block, writes in found if block is not None]

    def _run(self, func: Any, name: str, outer: Any, inner: Any) -> Any:
        """Run an operation on host views of its tensors, on the running stream."""
        if self.is_paused:
            return func(*inner[0], **inner[1])
        waited = self._is_paused.has_waited
        line, is_copy = self.line, name in ("copy_", "_to_copy")
        if _is_view(func, name) or name in _ALLOCATES:
            return func(*inner[0], **inner[1])
        uses = self.uses_of(func, *outer)
        func = _FUSED_ATTENTION.get(name, func)
        known = line.launch()
        self.rank.use(line, uses, f"{name} of {place()}" if line is not self.rank.default else name, known)
        if waited:
            run_all(known)
            result = func(*inner[0], **inner[1])
            self.rank.host_knows(known)
            return result
        if is_copy and line is not self.rank.default:
            source = inner[0][0] if name == "_to_copy" else inner[0][1]
            target = (
                torch.empty_like(source, dtype=inner[1].get("dtype")) if name == "_to_copy" else inner[0][0]
            )
            touched = blocks_of(uses, 2) if name == "copy_" else None  # what _to_copy makes has no block yet
            self.rank.copy(line, known, lambda: target.copy_(source), target, touched)
            return target
        run_needed(known, [block for _, block, _ in uses])
        return func(*inner[0], **inner[1])

    def _wrote(self, name: str, made: list[Tensor]) -> None:
        """Note that an operation has written its results."""
        if self.is_paused:
            return
        self.rank.use(self.line, self.uses([], made), name, self.line.mark())

    def _on_host(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """An operation of the host, which may use memory that the device copies from or to."""
        if not self.is_paused and not _is_view(func, name):
            for tensor, block, writes in self.uses_of(func, args, kwargs):
                self.rank.host_use(tensor, block, writes, f"{name} of {place()}")
        return _without_pins(func, args, kwargs)

    def _check_places(self, func: Any, name: str, leaves: list[Any], device: list[Tensor]) -> None:
        if not device:
            return
        strict = "fused" in name
        hosts = [
            leaf for leaf in leaves
            if isinstance(leaf, Tensor) and not is_on_device(leaf) and (leaf.dim() or strict)
        ]  # fmt: skip
        if not hosts:
            return
        if name in _INDEXES:
            self.sync("index of the host")
            return
        shapes = ", ".join(f"{tuple(leaf.shape)} on {leaf.device.type}" for leaf in [*hosts[:2], *device[:2]])
        self.misplaced.append(f"{name} in {place()}: {shapes}")
        raise Misplaced(f"{func}: tensors on both sides: {shapes}")

    def _count_sync(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        if name in _READS:
            self.sync(_READS[name])
        elif name in _SIZED_BY_DATA:
            self.sync(name.strip("_"))
        elif (
            name == "repeat_interleave"
            and "Tensor" in func._overloadname
            and kwargs.get("output_size") is None
        ):
            self.sync("repeat_interleave")
        elif name in _INDEXES:
            masks = [
                each
                for each in args[1]
                if isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8)
            ]
            is_fill = (
                len(args) > 2 and args[2].numel() == 1 and not is_on_device(args[2]) and len(args[1]) == 1
            )
            if masks and not is_fill:
                self.sync("boolean index")

    def _count_copy(self, name: str, args: Any, kwargs: Any) -> None:
        """One between host and device is a sync where the host waits for it."""
        self.operation("copy")
        if name == "_to_copy":
            source, target = args[0], None
            there = (
                torch.device(kwargs["device"]).type
                if kwargs.get("device") is not None
                else source.device.type
            )
            is_async = bool(kwargs.get("non_blocking"))
        else:
            target, source = args[0], args[1]
            there = target.device.type
            is_async = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        if source.device.type == there:
            return
        if there == NAME:
            if not (is_async and _is_pinned(source)):
                self.sync("copy to the device")
        elif not (is_async and (target is None or _is_pinned(target))):
            self.sync("copy to the host")


def blocks_of(uses: Sequence[tuple[Tensor, Block, bool]], tensors: int) -> frozenset[Block] | None:
    """The blocks of the uses of so many tensors; None if the block of one of them is not known."""
    return frozenset(block for _, block, _ in uses) if len(uses) == tensors else None


def _is_view(func: Any, name: str) -> bool:
    return bool(func.is_view) or name in _VIEWS or name == "detach"


def place() -> str:
    """Where we are: the innermost line of the package's, as ``file:function``."""
    frame = sys._getframe(1)
    while frame is not None:
        code: CodeType = frame.f_code
        if code.co_filename.startswith(_ROOT):
            return f"{code.co_filename[len(_ROOT) + 1 :]}:{_function_of(code)}"
        frame = frame.f_back  # type: ignore[assignment]
    return "autograd" if threading.current_thread() is not threading.main_thread() else "the test"


def _function_of(code: CodeType) -> str:
    """The name of a function, of a method without its class, of a lambda its function's."""
    parts = code.co_qualname.replace("<lambda>", "").replace("<listcomp>", "").replace("<genexpr>", "")
    names = [part for part in parts.replace("<locals>", "").split(".") if part]
    return names[-1]


@cache
def _arguments(func: Any) -> tuple[tuple[str, bool], ...]:
    """(name, whether the operation writes it) of each argument."""
    return tuple(
        (each.name, each.alias_info is not None and each.alias_info.is_write)
        for each in func._schema.arguments
    )


def _block_of(value: Any) -> Block | None:
    """Memory of a tensor of the device, or of pinned memory of the host."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    if is_on_device(value):
        tenant: Tenant | None = getattr(value.untyped_storage(), "tenant", None)
        return None if tenant is None else tenant.block
    if type(value) not in (Tensor, nn.Parameter) or value.device.type != "cpu":
        return None
    storage: Any = value.untyped_storage()
    if not getattr(storage, "pinned", False):
        return None
    if not hasattr(storage, "block"):
        storage.block = Block(storage.nbytes(), None)
    return storage.block  # type: ignore[no-any-return]


class _Data(TorchFunctionMode):
    """What torch does below the dispatcher: ``parameter.data = tensor`` across devices, which it grants CUDA and no
    backend in Python, ``torch.tensor(..., device=)``, which copies from the host, and the choice of an attention
    kernel."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and not is_on_device(args[0]):
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == NAME:
                return func(*args, **{**kwargs, "device": "cpu"}).to(device)
        if func is torch.Tensor.new_tensor and is_on_device(args[0]) and kwargs.get("device") is None:
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)).to(args[0].device)
        if func == torch.Tensor.data.__set__ and args[0].device != args[1].device:  # type: ignore[attr-defined]
            parameter, data = args
            version = parameter._version
            made = data.data
            made = (
                nn.Parameter(made, parameter.requires_grad) if isinstance(parameter, nn.Parameter) else made
            )
            with torch._C.DisableTorchFunction():
                torch._C._swap_tensor_impl(parameter, made)
            torch._C._autograd._unsafe_set_version_counter((parameter,), (version,))
            return None
        if func is _TORCHS_ATTENTION and (fused := _fused_attention(*args, **kwargs)) is not None:
            return fused
        if func is torch.Tensor.__repr__ and is_on_device(args[0]):
            return f"on {NAME}: {on_host(args[0].detach())!r}"
        return func(*args, **kwargs)


# Attention ----------------------------------------------------------------------------------------------------------


_TORCHS_ATTENTION = F.scaled_dot_product_attention


def _scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
    """torch's function, which a mode sees; where none runs (inside an operation of the package's) the choice of a
    kernel is here."""
    is_seen = torch._C._len_torch_function_stack()
    fused = None if is_seen else _fused_attention(*args, **kwargs)
    return _TORCHS_ATTENTION(*args, **kwargs) if fused is None else fused


def _fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """The result of torch's operation for fused kernels of other devices; None where CUDA has no such kernel either,
    and with a mask or dropout."""
    if Bench.current is None or not Bench.current.fuses_attention:
        return None
    if attn_mask is not None or dropout_p or q.dtype == torch.float64 or not is_on_device(q) or q.dim() != 4:
        return None
    found = _ATEN._scaled_dot_product_fused_attention_overrideable(q, k, v, is_causal=is_causal, scale=scale)
    return found[0]  # type: ignore[no-any-return]


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    debug: bool = False,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """The forward pass on the host; its result lies as those of CUDA's kernels do: [B, T, H, K], transposed."""
    out = _TORCHS_ATTENTION(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    nothing = torch.empty(0, dtype=torch.int64)
    rows = torch.zeros(q.shape[:3])
    laid = out.transpose(1, 2).contiguous().transpose(1, 2)
    return laid, rows, nothing, nothing, q.shape[2], k.shape[2], nothing, nothing, nothing


def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    asked: Any,
    out: Tensor,
    *rest: Any,
    scale: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The backward pass on the host, by the formula."""
    is_causal, size, group = rest[6], q.shape[-1], q.shape[1] // k.shape[1]
    factor = size**-0.5 if scale is None else scale
    wide_q, wide_g, wide_k, wide_v = (each.float() for each in (q, grad, k, v))
    wide_k, wide_v = wide_k.repeat_interleave(group, 1), wide_v.repeat_interleave(group, 1)
    scores = wide_q @ wide_k.mT * factor
    if is_causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    weights = scores.softmax(-1)
    d_weights = wide_g @ wide_v.mT
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True)) * factor
    d_q, d_k, d_v = d_scores @ wide_k, d_scores.mT @ wide_q, weights.mT @ wide_g
    d_k, d_v = (each.unflatten(1, (-1, group)).sum(2) for each in (d_k, d_v))
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), torch.empty(0)


_FUSED_ATTENTION: dict[str, Any] = {
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
}


# What lies beside tensors -------------------------------------------------------------------------------------------


def _is_pinned(tensor: Tensor) -> bool:
    return bool(getattr(tensor.untyped_storage(), "pinned", False))


def _pinned(name: str, tensor: Tensor) -> Any:
    if name == "is_pinned":
        return not is_on_device(tensor) and _is_pinned(tensor)
    made = tensor.clone()
    made.untyped_storage().pinned = True  # type: ignore[attr-defined]
    return made


def _without_pins(func: Any, args: Any, kwargs: Any) -> Any:
    """On host tensors alone: torch has nothing that could pin memory here."""
    pins = bool(kwargs.pop("pin_memory", False))
    if func._schema.name == "aten::record_stream":
        raise NotImplementedError("aten::record_stream of a host tensor, which CUDA refuses")
    if func is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], Tensor):
        return args[0]  # a tensor that stands for a number of Python's comes through a mode as the number
    made = func(*args, **kwargs)
    if pins:
        made.untyped_storage().pinned = True
    return made


def _describe(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Operations that change what a tensor says of its memory."""
    tensor = args[0]
    if name == "resize_":
        host = on_host(tensor)
        needed = torch.Size(args[1]).numel() * tensor.itemsize + tensor.storage_offset() * tensor.itemsize
        if needed > tensor.untyped_storage().nbytes():
            new = on_device(torch.empty(args[1], dtype=tensor.dtype))
            on_host(new).view(-1)[: host.numel()].copy_(host.reshape(-1))
            return _set(tensor, new)
        return _set(tensor, tensor, on_host(tensor).resize_(args[1]))
    if name == "set_":
        if len(args) > 1 and isinstance(args[1], Tensor):
            return _set(tensor, args[1])
        if len(args) == 1:
            return _set(tensor, on_device(torch.empty(0, dtype=tensor.dtype)))
        if len(args) == 2:
            count = args[1].nbytes() // tensor.itemsize
            args = (tensor, args[1], 0, (count,), (1,))
        inner: Any = _ATEN.set_.source_Storage_storage_offset
        return inner.redispatch(_HOST_KEY, *args)
    if name == "detach_":
        return tensor
    host = on_host(tensor)
    return _set(tensor, tensor, func(host, *args[1:], **kwargs))


def _set(tensor: Tensor, source: Tensor, like: Tensor | None = None) -> Tensor:
    like = source if like is None else like
    set_to: Any = _ATEN.set_.source_Storage_storage_offset
    set_to.redispatch(
        _HOST_KEY, tensor, source.untyped_storage(), like.storage_offset(), like.shape, like.stride()
    )
    return tensor


class _Backend(backend_registration._DummyBackendModule if IS_POSSIBLE else object):  # type: ignore[misc]
    """What torch asks of ``torch.pretend``."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    @contextmanager
    def device(self, index: Any) -> Iterator[None]:
        yield


def _synchronize(*_: Any) -> None:
    if Bench.current is not None:
        Bench.current.sync("synchronize")
        Bench.current.rank.synchronize()


class _Stream:
    """A stream: one timeline of each rank that uses it."""

    _made = itertools.count(1)

    def __init__(self, device: Any = None, number: int | None = None, **_: Any) -> None:
        self.device = torch.device(NAME, 0)
        self.stream_id = next(_Stream._made) if number is None else number

    @property
    def line(self) -> Line | None:
        return None if Bench.current is None else Bench.current.rank.line(self.stream_id)

    def synchronize(self) -> None:
        if Bench.current is not None and self.line is not None:
            Bench.current.sync("synchronize")
            Bench.current.rank.host_knows(self.line.mark())

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Any) -> None:
        if stream.line is not None:
            self._wait(stream.line.mark())

    def wait_event(self, event: Any) -> None:
        self._wait(event.known)

    def _wait(self, known: dict[Line, int]) -> None:
        if self.line is not None:
            self.line.learn(known)

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record(self)
        return event

    def __enter__(self) -> "_Stream":
        WHERE.streams = (*WHERE.streams, self)
        return self

    def __exit__(self, *_: Any) -> None:
        WHERE.streams = WHERE.streams[:-1]


def _current_stream(device: Any = None) -> _Stream:
    return WHERE.streams[-1] if WHERE.streams else _Stream(number=0)


def _set_stream(stream: _Stream) -> None:
    WHERE.streams = (*WHERE.streams[:-1], stream)


def _record_stream(tensor: Tensor, stream: _Stream) -> None:
    if not is_on_device(tensor):
        raise NotImplementedError("record_stream: a tensor on the host belongs to no stream")
    block = _block_of(tensor)
    if block is not None and stream.line is not None:
        block.users.add(stream.line)


class _Event:
    """It has happened when it is recorded. One with times: when the host has next waited for the device, and the
    device's clock goes on by a second at each."""

    recorded = 0
    """Seconds of the device's clock."""
    waited = 0
    """As far as the host has waited."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **_: Any) -> None:
        self.device = torch.device(NAME, 0)
        self._has_time = enable_timing
        self._at_s = 0
        self.known: dict[Line, int] = {}

    def record(self, stream: Any = None) -> None:
        if self._has_time:
            _Event.recorded += 1
            self._at_s = _Event.recorded
        line = (stream or _current_stream()).line
        self.known = {} if line is None else line.mark()

    def wait(self, stream: Any = None) -> None:
        (stream or _current_stream()).wait_event(self)

    def query(self) -> bool:
        bench = Bench.current
        if self._has_time or bench is None:
            return self._at_s <= _Event.waited
        return all(bench.rank.host.get(line, 0) >= count for line, count in self.known.items())

    def synchronize(self) -> None:
        if Bench.current is not None:
            Bench.current.sync("synchronize")
            Bench.current.rank.host_knows(self.known)
        _Event.waited = _Event.recorded

    def elapsed_time(self, other: Any) -> float:
        if not (self._at_s and self.query() and other.query()):
            raise RuntimeError("the device has not come past both events")
        return 1e3 * float(other._at_s - self._at_s)


_ACCELERATOR: dict[str, Callable[..., Any]] = {
    "synchronize": _synchronize,
    "current_stream": _current_stream,
    "set_stream": _set_stream,
    "device_count": lambda: 1,
    "set_device_index": lambda index: None,
    "current_device_index": lambda: 0,
    "get_memory_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
    "memory_stats": lambda device=None: _memory(),
    "max_memory_allocated": lambda device=None: _memory().get("allocated_bytes.all.peak", 0),
    "memory_allocated": lambda device=None: _memory().get("allocated_bytes.all.current", 0),
    "memory_reserved": lambda device=None: _memory().get("reserved_bytes.all.current", 0),
    "max_memory_reserved": lambda device=None: _memory().get("reserved_bytes.all.peak", 0),
    "reset_peak_memory_stats": lambda device=None: (
        None if Bench.current is None else Bench.current.rank.reset_peaks()
    ),
    "empty_cache": lambda: None,
}
_thread_run, _thread_start = threading.Thread.run, threading.Thread.start


def _memory() -> dict[str, int]:
    return {} if Bench.current is None else Bench.current.rank.memory_stats()


def _start_in_rank(thread: threading.Thread) -> None:
    """A thread belongs to the rank of the thread that starts it."""
    thread.rank = WHERE.rank  # type: ignore[attr-defined]
    _thread_start(thread)


def _run_in_mode(thread: threading.Thread) -> None:
    """Modes belong to a thread; a device does not."""
    WHERE.rank = getattr(thread, "rank", 0)
    if Bench.current is None:
        _thread_run(thread)
        return
    with _Elsewhere(Bench.current), _Data():
        _thread_run(thread)


class _Elsewhere(TorchDispatchMode):
    """A Bench in another thread."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self._bench = bench

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._bench.__torch_dispatch__(func, types, args, kwargs)
