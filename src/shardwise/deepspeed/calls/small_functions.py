"""Small functions that scripts import from DeepSpeed, most of them from ``runtime.utils``."""

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.base.errors import UsageError
from shardwise.deepspeed.calls.device import get_accelerator


def empty_cache() -> None:
    """Return the memory that torch caches on the device to the system."""
    get_accelerator().empty_cache()


def memory_status(*args: Any, **kwargs: Any) -> None:
    """Do nothing; ``see_memory_usage`` logs the memory in use."""


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> Tensor:
    """Clip gradients with torch's function, for models without an engine; an engine clips by ``gradient_clipping``."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return the call ``base(args, name=value)`` as text."""
    inner = [repr(each) for each in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
    return f"{base}({', '.join(inner)})"


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the borders of ``num_parts`` runs of items; the first runs are larger by one if the items do not divide.

    Raises:
        UsageError: if there is less than one part.
    """
    if num_parts < 1:
        raise UsageError(f"partition_uniform: {num_parts} parts; expected at least 1")
    size, more = divmod(num_items, num_parts)
    borders = [0]
    for part in range(num_parts):
        borders.append(borders[-1] + size + (part < more))
    return borders


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the borders of ``num_parts`` runs of items whose weights differ least: the smallest sum of squares.

    Raises:
        UsageError: if there is less than one part.
    """
    if num_parts < 1:
        raise UsageError(f"partition_balanced: {num_parts} parts; expected at least 1")
    sums = [0.0, *prefix_sum_inc(weights)]
    best: list[tuple[float, list[int]]] = [(0.0 if not end else math.inf, [0]) for end in range(len(sums))]
    for _ in range(num_parts):
        best = [
            min(
                (best[begin][0] + (sums[end] - sums[begin]) ** 2, [*best[begin][1], end])
                for begin in range(end + 1)
            )
            for end in range(len(sums))
        ]
    return best[-1][1]


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Return the sums of the first 1, 2, ... weights."""
    return list(accumulate(weights))


def noop_context(*ignored: Any, **named: Any) -> Any:
    """Return a context that does nothing."""
    return nullcontext()


def noop_decorator(function: Any) -> Any:
    """Return ``function`` without wrapping it."""
    return function


def ensure_directory_exists(filename: str | Path) -> None:
    """Make the folder of the file ``filename`` if it does not exist."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return a copy of a structure with every tensor copied to ``device``.

    A file of the copy then contains only the elements of each tensor, without the larger buffer of which the tensor
    may be a view.
    """
    if isinstance(item, Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(each, device) for each in item)
    return item


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return the nested attribute ``a.b`` of ``model``, given its dotted name."""
    for step in module_name.split("."):
        model = getattr(model, step)
    return model


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Return whether torch's version is between the bounds, both included; None is no bound."""
    own = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    bounds: Iterable[tuple[float | None, bool]] = ((min_version, True), (max_version, False))
    for bound, is_least in bounds:
        if bound is None:
            continue
        limit = tuple(map(int, str(bound).split(".")))
        if (own < limit) if is_least else (own > limit):
            return False
    return True


def is_deepcompile_supported() -> bool:
    """Return False: DeepCompile is not here; ``"compile": {"deepcompile": true}`` compiles the blocks."""
    return False


def is_triton_available() -> bool:
    """Return False: there are no Triton kernels of DeepSpeed's here."""
    return False
