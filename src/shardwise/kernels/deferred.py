"""Deferred products: the gradient of a weight, computed later than the gradient of its layer's input.

    y  = x Wᵀ + b
    I    dx = dy W,   db = Σ dy        when autograd reaches the layer
    W    dW = dyᵀ x                    later, from x and dy, which wait in a queue

``W`` reads no weight. A schedule that runs I of a microbatch as early as its neighbours need the gradient, and W where
a rank would wait, has less idle time. Autograd walks the graph once, so a recomputed block runs its forward pass twice
in all. The products and their order are those of autograd, so gradients have the same bits.

A function of autograd with a weight takes a ``Deferral`` and returns ``later(deferral, product)`` as the gradient of
the weight: the product itself outside of I, and None in I, after the product has been queued. A layer calls
``deferral_of`` in each forward pass. The result is None, and autograd computes the gradient in I, for a weight that the
queue does not have, that has hooks of the user's, or that autocast converts.

Gradients that autograd computes in I for other parameters of the same Unit (norms, biases) wait in the queue too, so
that a Unit is reduced once for each microbatch, behind W, and not once for each half.

Paper: Qi et al. 2023, arXiv:2401.10241 (zero bubble pipeline parallelism).
Cost:  from I to W the memory of x and dy of each layer: N·K + N·M elements; x is shared by layers with the same input.
Shapes: N tokens, K inputs, M outputs; x [..., K], W [M, K] (``transposed``: [K, M]), dy [..., M].
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Product = Callable[[], Tensor]
"""Function that computes the gradient of a weight."""


class ProductQueue:
    """The products that wait for W, by microbatch and Unit.

    A queue is open while I runs. ``own`` names the parameters whose gradients may wait.
    """

    def __init__(self) -> None:
        self._units: dict[int, int] = {}
        """Unit of each parameter that may wait, by the parameter's ``id``."""
        self._parameters: list[nn.Parameter] = []
        """The same parameters, which keeps their ids from being used again."""
        self._waiting: dict[tuple[int, int], dict[nn.Parameter, list[Product]]] = {}
        """Products in the order in which autograd reached their layers, by (microbatch, Unit)."""
        self._running: int | None = None
        """The microbatch whose I runs."""
        self._storages: dict[tuple[int, int], dict[int, int]] = {}
        """Bytes of the storages that wait, by (microbatch, Unit) and identity."""
        self.most_bytes = 0
        """Most bytes that have waited at once."""
        self._products_of: set[int] = set()
        """Parameters of which a layer's product has waited, by ``id``; of others a gradient of I waits."""
        self._watches: OrderedDict[int, tuple[int, Callable[[Tensor], Any]]] = OrderedDict()
        """Functions that get the gradients of a parameter, by handle."""

    def own(self, parameters: Mapping[nn.Parameter, int]) -> None:
        """Let the gradients of ``parameters`` wait.

        Args:
            parameters: The Unit of each parameter.
        """
        self._parameters = list(parameters)
        self._units = {id(parameter): unit for parameter, unit in parameters.items()}

    @cached_property
    def units(self) -> frozenset[int]:
        """The Units of the parameters whose gradients may wait."""
        return frozenset(self._units.values())

    @property
    def is_open(self) -> bool:
        """True while I runs, so that products wait."""
        return self._running is not None

    def open(self, microbatch: int) -> None:
        """Begin I of a microbatch."""
        self._running = microbatch

    def close(self) -> None:
        """End I of the running microbatch, so that no product waits any more."""
        self._running = None

    def has(self, parameter: Tensor) -> bool:
        """Return True if the gradient of ``parameter`` may wait."""
        return id(parameter) in self._units

    def watch(self, parameter: Tensor, function: Callable[[Tensor], Any]) -> RemovableHandle:
        """Call ``function`` with each gradient of ``parameter`` that W computes.

        A hook on the parameter sees no gradient in I. It keeps products from waiting unless its attribute
        ``watches_w`` is true, which says that it is given to this method too.

        Args:
            parameter: The parameter.
            function: The function.

        Returns:
            Handle that removes the function.
        """
        handle = RemovableHandle(self._watches)
        self._watches[handle.id] = id(parameter), function
        return handle

    def put_product(self, parameter: nn.Parameter, product: Product, *held: Tensor) -> None:
        """Add the product of a layer, of which autograd sees no gradient; arguments as for ``put``."""
        self._products_of.add(id(parameter))
        self.put(parameter, product, *held)

    def put(self, parameter: nn.Parameter, product: Product, *held: Tensor) -> None:
        """Add a product for the gradient of ``parameter`` in the running microbatch.

        Args:
            parameter: The parameter.
            product: Function that computes the gradient, or an addend of it.
            held: Tensors that the function keeps in memory.
        """
        assert self._running is not None, "products wait only while I runs"
        key = self._running, self._units[id(parameter)]
        self._waiting.setdefault(key, {}).setdefault(parameter, []).append(product)
        storages = self._storages.setdefault(key, {})
        for tensor in held:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        self.most_bytes = max(self.most_bytes, self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that wait."""
        every: dict[int, int] = {}
        for storages in self._storages.values():
            every |= storages
        return sum(every.values())

    def take(self, microbatch: int, unit: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Compute and yield the gradients of a Unit's parameters in a microbatch, and remove them from the queue.

        Args:
            microbatch: The microbatch.
            unit: The Unit.
        """
        key = microbatch, unit
        waiting = self._waiting.pop(key, {})
        while waiting:
            parameter = next(iter(waiting))
            with torch.no_grad():
                first, *others = waiting.pop(parameter)
                gradient = first()
                for product in others:  # autograd adds up the gradients of several uses in this order
                    gradient = gradient + product()
                    del product
                del first, others  # frees what the products hold while the gradient is added up
            if self._watches and id(parameter) in self._products_of:
                for watched, function in self._watches.values():
                    if watched == id(parameter):
                        function(gradient)
            yield parameter, gradient
            del gradient
        self._storages.pop(key, None)

    def left(self, microbatch: int) -> list[int]:
        """Return the Units of which products of a microbatch still wait."""
        return [unit for waiting, unit in self._waiting if waiting == microbatch]

    def clear(self) -> None:
        """Drop all products, because no W will follow."""
        self._waiting.clear()
        self._storages.clear()
        self._running = None


class DefersProducts:
    """Base class of modules that compute the gradients of some weights in W if a queue is set from outside."""

    product_weights: ClassVar[tuple[str, ...]] = ("weight",)
    """Names of these weights in the module."""
    products: ProductQueue | None = None
    """The products that wait for W; None: none wait."""


class Deferral(NamedTuple):
    """The place where a product of one layer waits."""

    queue: ProductQueue
    parameter: nn.Parameter
    form: Callable[[Tensor], Tensor] | None = None
    """Function from the gradient of what the layer multiplies by to that of the parameter; None if both are one."""

    @property
    def is_open(self) -> bool:
        """True while I runs, so that the product waits."""
        return self.queue.is_open


def deferral_of(
    queue: ProductQueue | None,
    parameter: Tensor | None,
    x: Tensor,
    form: Callable[[Tensor], Tensor] | None = None,
) -> Deferral | None:
    """Return where the gradient of ``parameter`` waits, or None if autograd is to compute it in I.

    Args:
        queue: The queue of the layer's stage, or None.
        parameter: The layer's parameter.
        x: Input of the layer.
        form: As ``Deferral`` has it.
    """
    if queue is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    if not isinstance(parameter, nn.Parameter) or not parameter.requires_grad or not queue.has(parameter):
        return None
    if _has_hooks(parameter) or torch.is_autocast_enabled(x.device.type):
        return None
    return Deferral(queue, parameter, form)


def _has_hooks(parameter: Any) -> bool:
    """Return True if the user has hooks on a gradient, which expect it in the backward pass; the engine has one."""
    with torch._C.DisableTorchFunctionSubclass():  # a released parameter's Python override is slow
        hooks = (parameter._backward_hooks or {}).values()
        watches_w = all(getattr(hook, "watches_w", False) for hook in hooks)
        return not watches_w or len(parameter._post_accumulate_grad_hooks or ()) > 1


def later(deferral: Deferral | None, product: Product, *held: Tensor) -> Tensor | None:
    """Return ``product()``, or None after the product has been queued for W.

    Args:
        deferral: Where the product waits; None: it does not.
        product: Function that computes the gradient of what the layer multiplies by.
        held: Tensors that the function keeps in memory.
    """
    if deferral is None or not deferral.is_open:
        return product()
    form = deferral.form
    deferral.queue.put_product(
        deferral.parameter, product if form is None else lambda: form(product()), *held
    )
    return None


def deferred_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, queue: ProductQueue | None, transposed: bool = False
) -> Tensor:
    """Return x Wᵀ + b, whose weight's gradient waits for W.

    Args:
        x: Input [..., K].
        weight: Weight [M, K], or [K, M] if ``transposed``.
        bias: Bias [M], or None.
        queue: The queue of the layer's stage, or None.
        transposed: True if the weight is stored as [inputs, outputs], as in transformers' ``Conv1D``.
    """
    deferral = deferral_of(queue, weight, x)
    if deferral is None:
        return _product(x, weight, bias, transposed)
    result: Tensor = _DeferredLinear.apply(x, weight, bias, transposed, deferral)
    return result


def is_plain_linear(module: nn.Module) -> bool:
    """Return True for a linear layer that computes nothing else: torch's, transformers' ``Conv1D``, their like."""
    if "forward" in vars(module) or not isinstance(module._parameters.get("weight"), nn.Parameter):
        return False
    return type(module).forward is nn.Linear.forward or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Return True for transformers' ``Conv1D``, whose weight is stored as [inputs, outputs]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    if not transposed:
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    y = rows.mm(weight) if bias is None else torch.addmm(bias, rows, weight)
    return y.view(*x.shape[:-1], weight.shape[1])


def weight_product(grad: Tensor, x: Tensor, transposed: bool = False) -> Tensor:
    """Return dyᵀ x, the gradient of a weight [M, K]; its transpose if ``transposed``.

    Args:
        grad: Gradient of the output [..., M].
        x: Input [..., K].
        transposed: True if the weight is stored as [inputs, outputs].
    """
    grads, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    return rows.t().mm(grads) if transposed else grads.t().mm(rows)


class _DeferredLinear(torch.autograd.Function):
    """Linear layer whose backward pass may be differentiated again, for losses on gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, deferral: Deferral
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.deferral = transposed, deferral
        return _product(x, weight, bias, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grads = grad.reshape(-1, grad.shape[-1])
        d_x = d_weight = None
        if needs_x:
            d_x = grads.mm(weight.t() if ctx.transposed else weight).view(x.shape)
        if needs_weight:
            transposed = ctx.transposed  # the product that waits must not hold ctx, and with it the graph
            d_weight = later(ctx.deferral, lambda: weight_product(grad, x, transposed), grad, x)
        return d_x, d_weight, grads.sum(0) if needs_bias else None, None, None
