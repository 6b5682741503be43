"""Streams and events of a device: what runs beside the computation, and who waits for whom.

    host       launches all of it, and waits for the norm alone
    copies     batch of a microbatch, from pinned memory ----+                                 ``to_device``
    compute                              F B  F B  F B ...  <+  waits for the copy that it reads; NORM STEP
    comm       UNSHARD REDUCE ...  torch's own, one of each communicator; torch's waits order it and compute
    down       gradients of Units whose masters lie in host memory, at STEP                    ``to_host``
               what autograd saves in a block (memory/activations.py)                          ``begin_down``
    copies     their updated weights; the tiers' thread waits for both (memory/tier.py)        ``to_be_written``
               weights, and what blocks have saved, ahead of their use                         ``to_computation``
    keys       keys of the steps ahead (engine/keys_ahead.py), whose thread waits for them     ``beside``

The host runs ahead of the device, so a copy is on its way while the device computes what was launched before it.

[Note: memory of two streams] An allocator gives a tensor's memory to the next who asks on the stream that made it, as
soon as the host lets go of the tensor. Who reads it on another stream says so (``keep_for``).

On a CPU work is done when its call returns: there is nothing to ask, and nothing runs beside.
"""

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor

from shardwise.memory.pinned import pinned_copy, pinned_empty


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


def beside(device: torch.device) -> torch.Stream | None:
    """A stream beside the computation, a context to work in; None on a CPU."""
    return None if device.type == "cpu" else torch.Stream(device)


@cache
def _copies(device: torch.device) -> torch.Stream:
    """One for all that comes from the host, however many engines there are."""
    return torch.Stream(device)


@cache
def _copies_down(device: torch.device) -> torch.Stream:
    """One for all that goes to the host: what comes from it does not wait behind."""
    return torch.Stream(device)


def to_device(tensor: Tensor, device: torch.device, is_ours: bool = False) -> Tensor:
    """``tensor`` there. From host memory it goes beside the computation, and no host waits for it.

    What is copied from is pinned memory of our own: the caller may write into ``tensor``, pinned or not, as soon as
    this returns. ``is_ours``: it is such memory already, and nobody writes into it again.
    """
    if device.type == "cpu" or tensor.device.type != "cpu" or tensor.requires_grad or tensor.is_sparse:
        return tensor.to(device)
    with torch.no_grad():
        pinned = tensor if is_ours else pinned_copy(tensor)
        stream, here = _copies(device), torch.accelerator.current_stream(device)
        with stream:
            there = pinned.to(device, non_blocking=True)
        here.wait_stream(stream)
        keep_for(here, (there,))
    return there


def to_computation(source: Tensor, into: Tensor) -> Callable[[], object]:
    """Begin to copy pinned host memory into memory of the device, beside the computation. The call that is returned
    makes what the current stream does next wait for it."""
    return to_be_filled(into)(source)


def to_be_filled(into: Tensor) -> Callable[[Tensor], Callable[[], object]]:
    """What begins to copy pinned host memory into ``into``, in any thread, once all that stands in the current stream
    now is done with it. The call that it returns makes what the current stream does next wait for the copy."""
    if into.device.type == "cpu":

        def copy(source: Tensor) -> Callable[[], object]:
            into.copy_(source)
            return lambda: None

        return copy
    free = torch.Event(into.device)
    free.record(torch.accelerator.current_stream(into.device))

    def begin(source: Tensor) -> Callable[[], object]:
        arrived = _copy_behind(free, source, into)
        return lambda: torch.accelerator.current_stream(into.device).wait_event(arrived)

    return begin


def _copy_behind(free: torch.Event, source: Tensor, into: Tensor) -> torch.Event:
    """Copies from pinned memory on the side stream, once ``free`` is there; recorded behind it."""
    stream = _copies(into.device)
    stream.wait_event(free)
    with stream:
        into.copy_(source, non_blocking=True)
        arrived = torch.Event(into.device)
        arrived.record(stream)
    keep_for(stream, (into,))
    return arrived


def begin_down(tensor: Tensor, into: Tensor | None = None) -> Tensor:
    """Pinned memory (``into``, or new), into which ``tensor`` of a device, as it is at this point of the current
    stream, is copied beside the computation.

    The caller keeps ``tensor`` until the computation has waited (``down_by_now``): memory that an allocator may give
    away only when a host has seen an event would come back late to a host that runs ahead.
    """
    there = pinned_empty(tensor.shape, tensor.dtype) if into is None else into
    stream = _copies_down(tensor.device)
    stream.wait_stream(torch.accelerator.current_stream(tensor.device))
    with stream:
        there.copy_(tensor, non_blocking=True)
    return there


def down_by_now(device: torch.device) -> Callable[[], object]:
    """The call that is returned makes what the current stream does next wait for what has begun to go down so far."""
    arrived = torch.Event(device)
    arrived.record(_copies_down(device))
    return lambda: torch.accelerator.current_stream(device).wait_event(arrived)


def to_host(tensor: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
    """Begin to copy ``tensor``, as it is at this point of the current stream, into pinned memory (``into``, or new).
    The call that is returned waits for it, in any thread, and has the copy; without ``into`` a tensor on a CPU comes as
    it is."""
    if tensor.device.type == "cpu":
        here = tensor if into is None else into.copy_(tensor)
        return lambda: here
    there, stream = begin_down(tensor, into), _copies_down(tensor.device)
    arrived = torch.Event(tensor.device)
    arrived.record(stream)
    keep_for(stream, (tensor,))

    def arrive() -> Tensor:
        arrived.synchronize()
        return there

    return arrive


def reached(device: torch.device) -> Callable[[], object]:
    """The call that is returned waits, in any thread, until the device has come past this point of the current
    stream."""
    if device.type == "cpu":
        return lambda: None
    here = torch.Event(device)
    here.record(torch.accelerator.current_stream(device))
    return here.synchronize


def to_be_written(target: Tensor) -> Callable[[Callable[[Tensor], None]], None]:
    """What writes numbers of the host into ``target``, in any thread, once all that stands in the current stream now is
    done with it; it is written when the call returns. The call is told what fills host memory with them."""
    if target.device.type == "cpu":
        return lambda fill: fill(target)
    free = torch.Event(target.device)
    free.record(torch.accelerator.current_stream(target.device))

    def write(fill: Callable[[Tensor], None]) -> None:
        pinned = pinned_empty(target.shape, target.dtype)
        fill(pinned)
        _copy_behind(free, pinned, target).synchronize()

    return write


def keep_for(stream: torch.Stream, tensors: Iterable[Tensor]) -> None:
    """[Note: memory of two streams] Tensors on the host, such as all keys of dynamic tables, belong to no stream."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            tensor.record_stream(stream)
