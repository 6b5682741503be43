"""Work of a pass: its operations, counted while it runs on shapes, and the seconds that they take on some hardware.

    product      a matrix product, a convolution or attention, by class: kind, dtype and FLOPs of one (base/hardware.py)
    other        any other operation that reads or writes memory, by class (arithmetic, function, copy) and bytes of one
    view         changes no memory, and is not counted

An operation takes as long as the slower of its arithmetic and its memory, and the time to start it (a roofline):

    seconds = Σ over products  n · max(FLOPs / FLOP/s at this size, bytes / rate of the memory)
              + Σ over others  n · bytes / rate of the class at this size  +  operations · operation_s

Hardware without rates of classes touches all bytes of others at the rate of its memory. ``operation_s`` includes the
Python and the views around an operation, and autograd's part of it.

Cost: counting takes some microseconds per operation; the seconds of a Unit's work take a look into a table per class.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardwise.base.hardware import Hardware, OperationClass, Product, ProductKind
from shardwise.observe.flops import is_repeated
from shardwise.passes.absent import AbsentTensor
from shardwise.precision.policy import NAMES

_NONE: Mapping[Any, int] = MappingProxyType({})
_UNCOUNTED = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "_unsafe_view"}
)
"""Operations that neither read nor write memory."""
_FUNCTIONS = frozenset(
    {
        "exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tanh", "erf", "pow", "sigmoid",
        "silu", "silu_backward", "gelu", "gelu_backward", "mish", "mish_backward", "softplus",
        "softplus_backward", "log_sigmoid_forward", "elu", "_softmax", "_log_softmax", "logsumexp",
        "native_dropout", "bernoulli", "tanh_backward", "sigmoid_backward", "_log_softmax_backward_data",
    }
)  # fmt: skip
"""Operations that compute a function of each element, whose arithmetic takes longer than its memory."""
_COPIES = frozenset({"copy", "clone", "_to_copy", "cat", "stack"})
"""Operations that copy, and change the order of elements if a tensor is not contiguous."""
_BATCHED = frozenset({"bmm", "baddbmm"})


class Work(NamedTuple):
    """Operations of a part of a pass."""

    products: Mapping[Product, int] = _NONE
    """Number of products of each class."""
    product_bytes: Mapping[Product, int] = _NONE
    """Bytes that all products of a class read and write."""
    calls: int = 0
    """Operations that read or write memory, products included."""
    repeated_flops: int = 0
    """FLOPs of products that a backward pass recomputes."""
    others: Mapping[tuple[OperationClass, int], int] = _NONE
    """Number of other operations, by class and bytes that one touches."""

    def then(self, later: "Work") -> "Work":
        """Return both parts as one."""
        return Work(
            Counter(self.products) + Counter(later.products),
            Counter(self.product_bytes) + Counter(later.product_bytes),
            self.calls + later.calls,
            self.repeated_flops + later.repeated_flops,
            Counter(self.others) + Counter(later.others),
        )

    @property
    def flops(self) -> int:
        """FLOPs of all products."""
        return sum(product.flops * calls for product, calls in self.products.items())

    def seconds(self, hardware: Hardware, touched_bytes: float, tier: str) -> float:
        """Return the seconds of the work and of other operations that touch so many bytes.

        Args:
            hardware: Rates of a rank.
            touched_bytes: Bytes that operations other than products read and write. Those whose class was not counted
                are priced by the rate of the memory.
            tier: Tier of the memory in which the rank computes.
        """
        seconds = self.calls * hardware.operation_s
        if hardware.operations:
            for (of_class, nbytes), calls in self.others.items():
                touched_bytes -= calls * nbytes
                seconds += calls * nbytes / hardware.operation_bytes_s(of_class, nbytes, tier)
        seconds += hardware.touched_s(max(touched_bytes, 0), tier)
        for product, calls in self.products.items():
            memory_s = hardware.touched_s(self.product_bytes.get(product, 0), tier)
            product_s = hardware.product_s(product._replace(dtype=peak_dtype(hardware, product.dtype)), calls)
            seconds += max(product_s, memory_s)
        return seconds


def peak_dtype(hardware: Hardware, dtype: str) -> str:
    """Return the dtype by whose peak products in ``dtype`` are priced.

    A device without units for a dtype computes in fp32; without a figure for fp32, the slowest known one is taken.
    """
    if dtype in hardware.peaks:
        return dtype
    return "fp32" if "fp32" in hardware.peaks else min(hardware.peaks, key=lambda each: hardware.peaks[each])


NO_WORK = Work()


class WorkCounter:
    """Counter of the operations of a pass that runs on shapes.

    Args:
        repeats: Function that returns True while a backward pass computes a forward pass again.
    """

    def __init__(self, repeats: Callable[[], bool] = is_repeated) -> None:
        self._repeats = repeats
        self._products: Counter[Product] = Counter()
        self._bytes: Counter[Product] = Counter()
        self._others: Counter[tuple[OperationClass, int]] = Counter()
        self._calls = 0
        self._repeated = 0

    def count(self, func: Any, args: Any, kwargs: Any, out: Any, flops: int, touched: int = 0) -> None:
        """Count one operation.

        Args:
            func: The operation, of torch's dispatcher.
            args: Positional arguments.
            kwargs: Keyword arguments.
            out: Its result.
            flops: Its FLOPs; 0 if the operation is no product.
            touched: Bytes that it reads and writes, if it is no product.
        """
        name = str(func._overloadpacket).removeprefix("aten.")
        if (
            func.is_view
            or name in _UNCOUNTED
            or not any(isinstance(each, Tensor) for each in tree_leaves(out))
        ):
            return
        self._calls += 1
        if not flops:
            if touched:
                self._others[_class_of(name, (args, kwargs, out)), touched] += 1
            return
        tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor)]
        product = Product(_kind_of(name), _dtype_of(name, tensors), flops)
        self._products[product] += 1
        self._bytes[product] += sum(map(bytes_in_memory, tensors))
        if self._repeats():
            self._repeated += flops

    def take(self) -> Work:
        """Return the work since the last call of ``take``."""
        taken = Work(dict(self._products), dict(self._bytes), self._calls, self._repeated, dict(self._others))
        for each in (self._products, self._bytes, self._others):
            each.clear()
        self._calls = self._repeated = 0
        return taken


def bytes_in_memory(tensor: Tensor) -> int:
    """Return the bytes of memory that hold a tensor: an expanded one lies there once, an absent one nowhere."""
    if isinstance(tensor, AbsentTensor):
        return 0
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _kind_of(name: str) -> ProductKind:
    if "convolution" in name:
        return "convolution"
    if name.removesuffix("_") in _BATCHED:
        return "batched"
    return "attention" if "attention" in name else "product"


def _class_of(name: str, tensors: Any) -> OperationClass:
    """Return the class of an operation that is no product, from its name and the tensors that it reads and writes."""
    plain = name.removesuffix("_")
    if plain in _FUNCTIONS:
        return "function"
    if plain not in _COPIES:
        return "arithmetic"
    is_ordered = all(each.is_contiguous() for each in tree_leaves(tensors) if isinstance(each, Tensor))
    return "arithmetic" if is_ordered else "copy"


def _dtype_of(name: str, tensors: list[Tensor]) -> str:
    """Return the name of the dtype in which a product multiplies."""
    if name.startswith("_scaled"):
        found = next((each.dtype for each in tensors if each.dtype.itemsize == 1), None)
        if found is not None and found.is_floating_point:
            return "fp8"
    dtypes = [each.dtype for each in tensors if each.dtype.is_floating_point]
    first = dtypes[0] if dtypes else torch.float32
    return NAMES.get(first, "fp8" if first.itemsize == 1 else "fp32")
