"""Streams and events of a device: what runs beside the computation, and who waits for whom.

    host       launches all of it, and waits for the norm alone
    copies     batch of a microbatch, from pinned memory ----+                                 ``to_device``
    compute                              F B  F B  F B ...  <+  waits for the copy that it reads; NORM STEP
    comm       UNSHARD REDUCE ...  torch's own, one of each communicator; torch's waits order it and compute
    keys       keys of the steps ahead (engine/keys_ahead.py), whose thread waits for them     ``beside``

The host runs ahead of the device, so a copy is on its way while the device computes what was launched before it.

[Note: memory of two streams] An allocator gives a tensor's memory to the next who asks on the stream that made it, as
soon as the host lets go of the tensor. Who reads it on another stream says so (``keep_for``).

On a CPU work is done when its call returns: there is nothing to ask, and nothing runs beside.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

from shardwise.plan.trace import HostClock, TraceClock


def passed(device: torch.device) -> Callable[[], bool] | None:
    """Whether the device has come past this point of its current stream, to be asked from any thread, without waiting.

    None where torch has no events for ``device``.
    """
    try:
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
    except (RuntimeError, NotImplementedError):
        return None
    return event.query


class DeviceClock:
    """Times on a device: a mark is an event, resolved against the last one of which the host knows the time.

        anchor    an event in front of the norm, which every step reads: when the read returns, the event is some
                  microseconds old, and the host's clock says when that is. Nothing is waited for that was not before
        time(e)   host's time at the anchor + what the device says lies between the two

    Cost: an event a mark, about 2 µs of the host.
    """

    runs_behind = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._anchor: tuple[torch.Event, float] | None = None
        self._point()

    def mark(self) -> torch.Event:
        """See ``TraceClock``: this point of the current stream."""
        event = self._point()
        event.record()
        return event

    def seconds(self, marks: Sequence[torch.Event]) -> list[float]:
        """See ``TraceClock``."""
        for mark in marks:
            if not mark.query():
                mark.synchronize()
        if marks and self._anchor is None:  # nothing was read so far
            mark = self.mark()
            mark.synchronize()
            self.anchor(mark)
        if self._anchor is None:
            return []
        anchor, at_s = self._anchor
        return [at_s + anchor.elapsed_time(mark) / 1e3 for mark in marks]

    def anchor(self, mark: torch.Event) -> None:
        """See ``TraceClock``."""
        self._anchor = mark, time.perf_counter()

    def _point(self) -> torch.Event:
        return torch.Event(self._device, enable_timing=True)


def clock_of(device: torch.device) -> TraceClock:
    """The host's for a CPU, and for a device whose events torch does not time."""
    if device.type == "cpu":
        return HostClock()
    try:
        return DeviceClock(device)
    except (RuntimeError, NotImplementedError):
        return HostClock()


def beside(device: torch.device) -> torch.Stream | None:
    """A stream beside the computation, a context to work in; None on a CPU."""
    return None if device.type == "cpu" else torch.Stream(device)


@cache
def _copies(device: torch.device) -> torch.Stream:
    """One for all batches, however many engines there are."""
    return torch.Stream(device)


def to_device(tensor: Tensor, device: torch.device, is_ours: bool = False) -> Tensor:
    """``tensor`` there. From host memory it goes beside the computation, and no host waits for it.

    What is copied from is pinned memory of our own: the caller may write into ``tensor``, pinned or not, as soon as
    this returns. ``is_ours``: it is such memory already, and nobody writes into it again.
    """
    if device.type == "cpu" or tensor.device.type != "cpu" or tensor.requires_grad or tensor.is_sparse:
        return tensor.to(device)
    with torch.no_grad():
        pinned = tensor if is_ours else torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        stream, here = _copies(device), torch.accelerator.current_stream(device)
        with stream:
            there = pinned.to(device, non_blocking=True)
        here.wait_stream(stream)
        keep_for(here, (there,))
    return there


def keep_for(stream: torch.Stream, tensors: Iterable[Tensor]) -> None:
    """[Note: memory of two streams] Tensors on the host, such as all keys of dynamic tables, belong to no stream."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            tensor.record_stream(stream)
