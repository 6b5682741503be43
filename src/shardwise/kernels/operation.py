"""A function of ours as one operation, seen whole by torch's function modes, as torch's own are.

    @operation("product")                what ``precision.operations`` makes of it: "product" or "fp32"
    def attention(q, k, v): ...

A mode that chooses dtypes operation by operation would otherwise look into the function, and mix the dtypes of tensors
that belong together. Without a mode a call costs a fifth of a microsecond more.
"""

from collections.abc import Callable
from functools import wraps
from typing import Literal, ParamSpec, TypeVar

from torch.overrides import handle_torch_function, has_torch_function

P = ParamSpec("P")
R = TypeVar("R")
KIND = "_operation"
"""The attribute that says what an operation is."""


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
