"""Pinned host memory: its pages stay in place, so that a device copies from and to it beside the computation.

A host pins no more memory than it can spare, and no more than a limit of the system allows. If the host refuses,
pageable memory is used instead: the same numbers, but a device copies by way of a small pinned buffer of its driver's.
A copy then takes about twice as long and the caller waits for it, so that nothing of the copy is hidden. A warning is
logged once.

Cost: a page-locked allocation takes milliseconds, and torch keeps it, rounded up to a power of two, for the next one.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


def pinned_empty(shape: int | Sequence[int], dtype: torch.dtype, pins: bool = True) -> Tensor:
    """Return host memory for copies to and from an accelerator.

    Args:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        pins: False for pageable memory.

    Returns:
        A pinned tensor; a pageable one without ``pins``, or if the host cannot pin more.
    """
    return _made(lambda pins: torch.empty(shape, dtype=dtype, pin_memory=pins), pins)


def pinned_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a host tensor in pinned memory, with the same order of elements."""
    return _made(lambda pins: torch.empty_like(tensor, pin_memory=pins), True).copy_(tensor)


def _made(make: Callable[[bool], Tensor], pins: bool) -> Tensor:
    try:
        return make(pins)
    except RuntimeError as error:  # of the driver, or of torch's allocator
        if not pins:
            raise
        _tell(str(error).partition("\n")[0])
        return make(False)


@cache
def _tell(why: str) -> None:
    """Log a warning, once for each reason."""
    _log.warning(
        "this host pins no more memory (%s): pageable memory takes the place. Copies between it and the device take "
        "about twice as long, and the computation waits for them; give the host more memory, raise the limit of locked "
        "memory (ulimit -l), or move less (offload.fraction)",
        why,
    )
