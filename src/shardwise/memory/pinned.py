"""Pinned host memory: its pages stay in place, so that a device copies from and to it beside the computation.

A host pins no more memory than it can spare, and no more than a limit of the system allows. If the host refuses,
pageable memory is used instead: the same numbers, but a device copies by way of a small pinned buffer of its driver's.
A copy then takes about twice as long and the caller waits for it, so that nothing of the copy is hidden. A warning is
logged once.

Threads of our loaders pin the batches that they read (``pin_batch``), so that the thread that launches does not copy
them. A device reads such a tensor after the call that took it has returned. Nobody may write into the tensor until
then, and its memory must not be used again before. torch's allocator of pinned memory holds a block back until the
copies from it are over. A tensor that was written since it was pinned, or memory that another loader pinned, is copied.

[Note: writes into a pinned batch] A write into a batch while a copy of it may be under way would change the numbers of
a microbatch, on some runs. So each copy is noted with the version counter that its tensor has when the copy begins. The
next copy and the step compare the counter (``check_copies``) and forget the copies that are over; nobody waits for
the device. A write after the copy, but before that comparison, is refused too, since nobody knows when the copy ended.
Writes that torch does not count (by NumPy, or through ``tensor.data``) are not seen.

Cost: a page-locked allocation takes milliseconds, and torch keeps it, rounded up to a power of two, for the next one.
"""

import logging
import threading
from collections.abc import Callable, MutableMapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.base.errors import UsageError
from shardwise.base.pytree import rebuilt, tensors_by_path
from shardwise.base.ragged import Ragged

_log = logging.getLogger(__name__)


class _PinnedEntry(NamedTuple):
    """A tensor that ``pin_batch`` made."""

    version: int
    """Version counter of the tensor when it was made."""
    path: str
    """Path of the tensor in its batch; "" if the batch is the tensor."""


_PINNED_BATCHES: MutableMapping[Tensor, _PinnedEntry] = WeakIdKeyDictionary()
"""The living tensors that ``pin_batch`` made."""


class _BegunCopy(NamedTuple):
    """A copy from a pinned batch that a device may still be running."""

    tensor: Tensor
    """The source, which is kept so that its version counter can be read."""
    version: int
    path: str
    is_over: Callable[[], bool]


class _BegunCopies(threading.local):
    """The copies that the running thread has begun, in order: the thread that launches them compares them too."""

    def __init__(self) -> None:
        self.copies: list[_BegunCopy] = []


_BEGUN = _BegunCopies()


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
        pinned = _pinned_tree(batch)
    for path, tensor in tensors_by_path(pinned):
        entry = _PINNED_BATCHES.get(tensor)
        if entry is not None:
            _PINNED_BATCHES[tensor] = entry._replace(path=path)
    return pinned


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
        _PINNED_BATCHES[pinned] = _PinnedEntry(pinned._version, "")
    return pinned


def is_pinned_batch(tensor: Tensor) -> bool:
    """Return True if ``pin_batch`` made a tensor, or the tensor of which it is a view, and nothing wrote into it since.

    A view must be contiguous, because a device reads other views by way of a copy on the host.
    """
    entry = _PINNED_BATCHES.get(_whole(tensor))
    return entry is not None and entry.version == tensor._version and tensor.is_contiguous()


def note_copy(tensor: Tensor, is_over: Callable[[], bool] | None) -> None:
    """Note that a device has begun to copy from a pinned batch. See [Note: writes into a pinned batch].

    Args:
        tensor: The tensor, for which ``is_pinned_batch`` is True.
        is_over: Function that returns whether the device has ended the copy, without waiting. With None the copy is
            compared once.
    """
    path = _PINNED_BATCHES[_whole(tensor)].path
    _BEGUN.copies.append(_BegunCopy(tensor, tensor._version, path, is_over or (lambda: True)))


def check_copies() -> None:
    """Check that nobody has written into pinned batches from which copies may be under way, without waiting.

    Copies of the calling thread that are over are forgotten. See [Note: writes into a pinned batch].

    Raises:
        UsageError: If a batch was written since its copy began.
    """
    begun = _BEGUN.copies
    if not begun:
        return
    # Whether a copy is over is read before its version: a write in between would else be missed.
    _BEGUN.copies = [each for each in begun if not each.is_over() and each.tensor._version == each.version]
    for tensor, version, path, _ in begun:
        if tensor._version != version:
            entry = f"entry {path!r} of a batch" if path else "a batch"
            raise UsageError(
                f"batch: {entry} (shape {list(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}) was written "
                "after it was passed to the engine. A loader pinned its memory, and the device may have copied it "
                "after the write, so that the numbers of this microbatch are undefined. Write into a clone "
                "(tensor.clone()), or write before the batch is passed; to go on, drop the gradients of the step with "
                "engine.discard() on all ranks"
            )


def _whole(tensor: Tensor) -> Tensor:
    """Return the tensor of which ``tensor`` is a view, or ``tensor`` itself."""
    return tensor if tensor._base is None else tensor._base


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
