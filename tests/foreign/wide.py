"""Models of transformers round to fp32 inside, whatever their weights are. Here they do not: all fp32 is fp64.

So that a layout can be held to one process to 1e-9, and a fault of 1e-7 is not taken for rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class _Wide(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args, kwargs = tree_map(_widened, (args, kwargs or {}))
        return function(*args, **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def wide() -> Iterator[None]:
    """While it lasts whatever would be made in fp32, or cast to it, is fp64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)
