"""Python code with gradients as one operator of a compiled graph.

    self._opaque = OpaqueModule(self, lambda module, x, mask: module.routed(x, mask)[0])
    ...
    if torch.compiler.is_compiling():
        return self._opaque(x, mask)

``torch.compile`` can trace no code whose sizes depend on values that the host reads, such as experts that exchange as
many rows as were routed to them. The compiler would break the graph of a block there, and twice: before the code and
after it. As an operator the code is one node of the graph, whose result has the shape of its first input, and runs
uncompiled:

    opaque              forward: runs the code on detached inputs and keeps the graph that autograd recorded
    opaque_gradients    backward: runs that graph backward, and returns the gradients of the inputs

Parameters are no inputs: the code uses them as it does uncompiled, whether their weights have been gathered or not, and
the backward pass adds to their gradients and calls their hooks.

The graph of a pass lies in a Python object in whose memory a tensor of one byte was made (``state``), and is found by
the address of that byte. The compiled code saves the tensor as it saves any other, and the object ends with the storage
of the tensor: after the backward pass, or with a loss that never has one. A pass that is computed again makes a new
one, with the same value.

[Note: results of an opaque module] Compiled code may write into the memory of the result. So the last operation of the
code must not need its own result in the backward pass: an addition or an exchange is right, a sigmoid is wrong.

Cost: uncompiled, nothing. In a graph, a detached tensor for each input and a backward pass inside a backward pass.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise.base.errors import UsageError

_LIBRARY = torch.library.Library("shardwise", "FRAGMENT")
_AUTOGRAD_KEYS = [
    getattr(torch._C.DispatchKey, name)
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")
]
_NUMBERS = itertools.count()
_MODULES: "weakref.WeakValueDictionary[int, OpaqueModule]" = weakref.WeakValueDictionary()
_PASSES: "weakref.WeakValueDictionary[int, _PassGraph]" = weakref.WeakValueDictionary()


class OpaqueModule:
    """A module whose forward pass is one operator in a compiled graph.

    Args:
        module: The module; a layer holds its own ``OpaqueModule``, which therefore holds it weakly.
        function: Function from the module and its inputs, each a tensor or None, to a tensor like the first input.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Tensor]) -> None:
        self._module = weakref.ref(module)
        self._function = function
        number = next(_NUMBERS)
        with torch.device("cpu"):
            self.tag = torch.tensor(number)
        """Number of this object, in a tensor on the CPU."""
        self._anchor = torch.zeros((), requires_grad=True, device="cpu")
        """Input that makes the result require gradients if parameters do and no other input does; its gradient is 0."""
        _MODULES[number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts of a copy, which belongs to the copy of the module."""
        return OpaqueModule, (self._module(), self._function)

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        """Return the result; for code that a compiler traces."""
        first = inputs[0]
        assert first is not None, "the first input is a tensor"
        device = first.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        tensors = [each for each in inputs if each is not None]
        present = [each is not None for each in inputs]
        if not torch.is_grad_enabled():
            found: Tensor = _OPAQUE(self.tag, False, present, [False] * len(tensors), cast, tensors)[0]
            return found
        needs = [each.requires_grad for each in tensors]
        out: Tensor = _OpaqueFunction.apply(self.tag, self._anchor, present, needs, cast, *tensors)
        return out

    def run(self, present: Sequence[bool], tensors: Sequence[Tensor]) -> Tensor:
        """Run the code on ``tensors``, the inputs that are present."""
        module = self._module()
        assert module is not None, "a compiled graph that runs belongs to a module"
        rest = iter(tensors)
        return self._function(module, *(next(rest) if is_there else None for is_there in present))


class _PassGraph(bytearray):
    """The graph of one pass, and the memory of the tensor that keeps it alive."""

    out: Tensor | None
    leaves: list[Tensor]


def _made_state(out: Tensor, leaves: list[Tensor]) -> Tensor:
    graph = _PassGraph(1)
    graph.out, graph.leaves = out, leaves
    state = torch.frombuffer(graph, dtype=torch.uint8)
    _PASSES[state.data_ptr()] = graph
    return state


def _graph_of(state: Tensor) -> _PassGraph:
    graph = _PASSES.get(state.data_ptr())
    if graph is None or graph.out is None:
        raise UsageError(
            "backward: a compiled block with experts runs its backward pass a second time, or a hook of "
            "torch.autograd.graph.saved_tensors_hooks gave back a copy of a tensor on the CPU; run backward once for "
            "each forward pass and leave tensors on the CPU as they are, or set compile: none"
        )
    return graph


def _opaque(
    tag: Tensor,
    keeps: bool,
    present: Sequence[bool],
    needs: Sequence[bool],
    cast: torch.dtype | None,
    tensors: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    module = _MODULES.get(int(tag))
    assert module is not None, "the module that was compiled holds its OpaqueModule"
    inputs = [each.detach().requires_grad_(need) for each, need in zip(tensors, needs, strict=True)]
    device = tensors[0].device.type
    context: AbstractContextManager[Any] = nullcontext() if cast is None else torch.autocast(device, cast)
    with _recorded(), torch.set_grad_enabled(keeps), context:  # a compiled graph runs without autocast
        out = module.run(present, inputs).contiguous()
    if not out.requires_grad:
        return out, torch.zeros(1, dtype=torch.uint8, device="cpu")
    return out.detach(), _made_state(out, [each for each in inputs if each.requires_grad])


def _opaque_gradients(grad: Tensor, state: Tensor, wanted: Sequence[Tensor]) -> list[Tensor]:
    graph = _graph_of(state)
    out, leaves = graph.out, graph.leaves
    graph.out, graph.leaves = None, []
    assert out is not None, "_graph_of has checked it"
    with _recorded():
        torch.autograd.backward(out, grad)
    taken = {grad.untyped_storage()._cdata}
    results = []
    of_anchor: list[Tensor | None] = [None]
    for leaf, like in zip(leaves or of_anchor, wanted, strict=True):
        found = None if leaf is None else leaf.grad
        if found is None:
            found = torch.zeros_like(like, memory_format=torch.contiguous_format)
        elif not found.is_contiguous() or found.untyped_storage()._cdata in taken:
            found = found.clone(memory_format=torch.contiguous_format)  # results share no memory
        taken.add(found.untyped_storage()._cdata)
        results.append(found)
    return results


def _recorded() -> AbstractContextManager[Any]:
    """Return a context in which autograd records operations, which the dispatcher prevents inside an operator."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)  # type: ignore[no-any-return]


def _define(name: str, schema: str, body: Callable[..., Any], of_inputs: Callable[..., Any]) -> Any:
    # ``nondeterministic_seeded``: two calls are never one; ``cudagraph_unsafe``: the host reads counts.
    tags = (torch.Tag.cudagraph_unsafe, torch.Tag.nondeterministic_seeded)
    _LIBRARY.define(f"{name}{schema}", tags=tags)
    _LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardwise::{name}", of_inputs, lib=_LIBRARY)
    return getattr(torch.ops.shardwise, name).default


_OPAQUE = _define(
    "opaque",
    "(Tensor tag, bool keeps, bool[] present, bool[] needs, ScalarType? cast, Tensor[] tensors) -> (Tensor, Tensor)",
    _opaque,
    lambda tag, keeps, present, needs, cast, tensors: (
        tensors[0].new_empty(tensors[0].shape),
        torch.empty(1, dtype=torch.uint8, device="cpu"),
    ),
)
_OPAQUE_GRADIENTS = _define(
    "opaque_gradients",
    "(Tensor grad, Tensor state, Tensor[] wanted) -> Tensor[]",
    _opaque_gradients,
    lambda grad, state, wanted: [each.new_empty(each.shape) for each in wanted],
)


class _OpaqueFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tag: Tensor,
        anchor: Tensor,
        present: list[bool],
        needs: list[bool],
        cast: torch.dtype | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.needs = needs
        out, state = _OPAQUE(tag, True, present, needs, cast, list(tensors))
        # The compiler drops a backward operator without any result.
        wanted = [each for each, need in zip(tensors, needs, strict=True) if need] or [anchor]
        ctx.save_for_backward(state, *wanted)
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        state, *wanted = ctx.saved_tensors
        found = _OPAQUE_GRADIENTS(grad.contiguous(), state, wanted)
        if not any(ctx.needs):
            return None, found[0], None, None, None, *(None for _ in ctx.needs)
        rest = iter(found)
        return None, None, None, None, None, *(next(rest) if need else None for need in ctx.needs)
