"""Host memory whose pages stay where they are, so that a device copies from and to it beside the computation.

A host pins no more than it can spare, and no more than a limit of the system allows. Where it refuses, pageable memory
takes the place: the same numbers, for which a device goes by way of a small pinned buffer of its driver's. A copy then
takes about twice as long and whoever asked for it waits, so that nothing of it is hidden. That is said once.

Cost: a page-locked allocation takes milliseconds, and torch keeps it, rounded up to a power of two, for the next one.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


def pinned_empty(shape: int | Sequence[int], dtype: torch.dtype, pins: bool = True) -> Tensor:
    """Host memory for copies to and from an accelerator; without ``pins``, and where the host has no more, pageable."""
    return _made(lambda pins: torch.empty(shape, dtype=dtype, pin_memory=pins), pins)


def pinned_copy(tensor: Tensor) -> Tensor:
    """``tensor`` of the host once more, in such memory, in the order in which its elements lie."""
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
    """Once for each reason."""
    _log.warning(
        "this host pins no more memory (%s): pageable memory takes the place. Copies between it and the device take "
        "about twice as long, and the computation waits for them; give the host more memory, raise the limit of locked "
        "memory (ulimit -l), or move less (offload.fraction)",
        why,
    )
