"""A function of this package as one operation, which torch's function modes see as a whole, as they see torch's own.

    @operation("product")                the treatment in ``precision.operations``: "product" or "fp32"
    def attention(q, k, v): ...

A mode that chooses dtypes operation by operation would otherwise act inside the function, and mix the dtypes of tensors
that belong together. Without a mode a call costs a fifth of a microsecond more.

    @device_operation("turned(Tensor x, Tensor cos, Tensor sin) -> Tensor", of_inputs)

makes one operation of torch's dispatcher from a function that is one launch on a device: tools that count operations
count one, and a compiler that traces it gets the results' shapes from ``of_inputs``. It has no gradient: the caller is
an ``autograd.Function``. A call costs 4 microseconds, where ``torch.library.custom_op`` takes 15.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

P = ParamSpec("P")
R = TypeVar("R")
KIND = "_operation"
"""Name of the attribute that has the kind of an operation."""

_LIBRARY = torch.library.Library("shardwise", "FRAGMENT")


def operation(kind: Literal["product", "fp32"]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function that takes its tensors by position.

    Args:
        kind: treatment under autocast: "product" or "fp32".
    """

    def made(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if has_torch_function(args):
                result: R = handle_torch_function(run, args, *args, **kwargs)
                return result
            return function(*args, **kwargs)

        setattr(run, KIND, kind)
        return run

    return made


def device_operation(
    schema: str, of_inputs: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a function that is one operation on a device.

    Args:
        schema: name and signature, in the language of torch.library.
        of_inputs: makes empty results from the arguments, of which the first is a tensor.
    """

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(first: Tensor, *rest: Any) -> Any:
            if first.device.type == "cpu":
                return function(first, *rest)
            with torch.accelerator.device_index(first.device.index):  # Triton launches on the current device
                return function(first, *rest)

        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"shardwise::{name}", of_inputs, lib=_LIBRARY)
        call: Callable[..., Any] = getattr(torch.ops.shardwise, name).default
        return call

    return made
