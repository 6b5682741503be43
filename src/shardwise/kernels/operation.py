"""A function of ours as one operation, seen whole by torch's function modes, as torch's own are.

    @operation("product")                what ``precision.operations`` makes of it: "product" or "fp32"
    def attention(q, k, v): ...

A mode that chooses dtypes operation by operation would otherwise look into the function, and mix the dtypes of tensors
that belong together. Without a mode a call costs a fifth of a microsecond more.

    @device_operation("turned(Tensor x, Tensor cos, Tensor sin) -> Tensor", of_inputs)

makes one operation of torch's dispatcher of a function that is one launch on a device: what counts operations counts
one, and a compiler that traces it asks ``of_inputs`` for the results' shapes. It has no gradient: the caller is an
``autograd.Function``. A call costs 4 microseconds, where ``torch.library.custom_op`` takes 15.
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
"""The attribute that says what an operation is."""

_LIBRARY = torch.library.Library("shardwise", "FRAGMENT")


def operation(kind: Literal["product", "fp32"]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a function that takes its tensors by position."""

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
    """Decorator of a function that is one operation on a device; ``of_inputs`` makes empty results of its arguments,
    of which the first is a tensor."""

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(first: Tensor, *rest: Any) -> Any:
            if first.device.type == "cpu":
                return function(first, *rest)
            with torch.accelerator.device_index(first.device.index):  # Triton launches on the current one
                return function(first, *rest)

        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"shardwise::{name}", of_inputs, lib=_LIBRARY)
        call: Callable[..., Any] = getattr(torch.ops.shardwise, name).default
        return call

    return made
