"""Pinned host memory: its pages stay in place, so that a device copies from and to it beside the computation.

A host pins no more memory than it can spare, and no more than a limit of the system allows. If the host refuses,
pageable memory is used instead: the same numbers, but a device copies by way of a small pinned buffer of its driver's.
A copy then takes about twice as long and the caller waits for it, so that nothing of the copy is hidden. A warning is
logged once.

Threads of our loaders pin the batches that they read (``pin_batch``), so that the thread that launches does not copy
them. A device reads such a tensor after the call that took it has returned. Nobody may write into the tensor until
then, and its memory must not be used again before. torch's allocator of pinned memory holds a block back until the
copies from it are over. A tensor that was written since it was pinned, or memory that another loader pinned, is copied.

Cost: a page-locked allocation takes milliseconds, and torch keeps it, rounded up to a power of two, for the next one.
"""

import logging
from collections.abc import Callable, MutableMapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.base.pytree import rebuilt
from shardwise.base.ragged import Ragged

_log = logging.getLogger(__name__)

_PINNED_BATCHES: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
"""Versions of the living tensors that ``pin_batch`` made, when it made them."""


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


def pin_batch(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors in pinned memory, which copies to ``device`` may read without one more copy.

    Features of embedding tables stay as they are: the host reads their keys.

    Args:
        batch: A pytree.
        device: The device to which the batch will be copied. On a CPU the batch is returned itself.
    """
    if device.type == "cpu":
        return batch
    with torch.accelerator.device_index(device.index):  # a thread would make a context on device 0
        return _pinned_tree(batch)


def _pinned_tree(value: Any) -> Any:
    if isinstance(value, Ragged):
        return value
    if not isinstance(value, Tensor):
        return rebuilt(value, _pinned_tree)
    is_plain = type(value) is Tensor and value.layout is torch.strided and not value.requires_grad
    if not is_plain or value.device.type != "cpu" or not value.numel() or value.is_pinned():
        return value
    pinned = pinned_copy(value.contiguous())
    if pinned.is_pinned():
        _PINNED_BATCHES[pinned] = pinned._version
    return pinned


def is_pinned_batch(tensor: Tensor) -> bool:
    """Return True if ``pin_batch`` made a tensor, or the tensor of which it is a view, and nothing wrote into it since.

    A view must be contiguous, because a device reads other views by way of a copy on the host.
    """
    whole = tensor if tensor._base is None else tensor._base
    return _PINNED_BATCHES.get(whole) == tensor._version and tensor.is_contiguous()


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
