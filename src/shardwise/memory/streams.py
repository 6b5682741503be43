"""Streams and events of a device: work that runs beside the computation, and the waits between streams.

    host       launches all of it, and waits only for the norm
    copies     batch of a microbatch, from pinned memory ----+                                 ``to_device``
    compute                              F B  F B  F B ...  <+  waits for the copy that it reads; NORM STEP
    comm       UNSHARD REDUCE ...  torch's own, one of each communicator; torch's waits order it and compute
    down       gradients of Units whose masters lie in host memory, at STEP                    ``to_host``
               tensors that autograd saves in a block (tiers/activations.py)                  ``begin_down``
    copies     their updated weights; the tiers' thread waits for both (tiers/tier.py)        ``to_be_written``
               weights, and saved tensors of blocks, ahead of their use                        ``to_computation``
    keys       keys of the steps ahead (engine/step/keys_ahead.py), whose thread waits for them     ``beside``

The host runs ahead of the device, so a copy is in flight while the device computes what was launched before it.

[Note: memory of two streams] An allocator reuses a tensor's memory for the next request on the stream that made it, as
soon as the host drops the tensor. A reader on another stream must therefore record the use (``keep_for``); else the
memory may be overwritten before it is read.

The recorded memory comes back late: a host has to see that the other stream is past the point at which the tensor was
dropped, and a host that runs a whole pass ahead sees that late. So a copy to the device, or to the host, of memory that
is dropped often records nothing. The computation waits for the copy before the caller drops the memory.

On a CPU work is done when its call returns: no stream is needed, and nothing runs beside the computation.
"""

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor

from shardwise.memory.pinned import (
    check_copies,
    is_pinned_batch,
    note_copy,
    pinned_copy,
    pinned_empty,
)


def passed(device: torch.device) -> Callable[[], bool] | None:
    """Return a function that checks whether the device has passed this point of its current stream.

    The function may be called from any thread and does not wait.

    Args:
        device: The device.

    Returns:
        The function, or None if torch has no events for ``device``.
    """
    try:
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
    except (RuntimeError, NotImplementedError):
        return None
    return event.query


def beside(device: torch.device) -> torch.Stream | None:
    """Return a new stream beside the computation, a context to work in, or None on a CPU."""
    return None if device.type == "cpu" else torch.Stream(device)


def run_beside(stream: torch.Stream, work: Callable[[], object]) -> Callable[[], object]:
    """Run ``work`` on ``stream``, after all work that is on the current stream now.

    The caller keeps what ``work`` reads until the computation has waited. See [Note: memory of two streams].

    Args:
        stream: The stream.
        work: The function.

    Returns:
        A function that makes later work on the current stream wait for ``work``.
    """
    stream.wait_stream(torch.accelerator.current_stream(stream.device))
    with stream:
        work()
        arrived = torch.Event(stream.device)
        arrived.record(stream)
    return lambda: torch.accelerator.current_stream(stream.device).wait_event(arrived)


@cache
def _copies(device: torch.device) -> torch.Stream:
    """Return the stream for all copies from the host, one for all engines."""
    return torch.Stream(device)


@cache
def _copies_down(device: torch.device) -> torch.Stream:
    """Return the stream for all copies to the host, so that copies from the host do not wait behind them."""
    return torch.Stream(device)


def to_device(tensor: Tensor, device: torch.device, is_ours: bool = False) -> Tensor:
    """Copy a tensor to a device. From host memory the copy runs beside the computation, and no host waits for it.

    The source of the copy is pinned memory of our own, so the caller may write into ``tensor`` as soon as this
    function returns. A tensor that a loader's thread pinned (``pin_batch``) is read later, by the device; the caller
    may drop it, but must not write into it, which a later call or the step refuses.

    Args:
        tensor: The tensor, pinned or not.
        device: The device.
        is_ours: True if ``tensor`` is pinned memory that nothing writes into again, which saves a copy.

    Returns:
        The tensor on the device.

    Raises:
        UsageError: If a tensor of an earlier call, pinned by a loader, was written after that call.
    """
    if device.type == "cpu" or tensor.device.type != "cpu" or tensor.requires_grad or tensor.is_sparse:
        return tensor.to(device)
    with torch.no_grad():
        is_batch = not is_ours and is_pinned_batch(tensor)
        if not is_ours:
            check_copies()
        pinned = tensor if is_ours or is_batch else pinned_copy(tensor)
        stream, here = _copies(device), torch.accelerator.current_stream(device)
        with stream:
            there = pinned.to(device, non_blocking=True)
            if is_batch:
                note_copy(tensor, passed(device))
        here.wait_stream(stream)
        keep_for(here, (there,))
    return there


def to_computation(source: Tensor, into: Tensor) -> Callable[[], object]:
    """Begin to copy pinned host memory into memory of the device, beside the computation.

    The caller keeps ``into`` until the computation has waited. See [Note: memory of two streams].

    Args:
        source: The pinned memory.
        into: The memory of the device.

    Returns:
        A function that makes later work on the current stream wait for the copy.
    """
    return to_be_filled(into)(source)


def to_be_filled(into: Tensor) -> Callable[[Tensor], Callable[[], object]]:
    """Return a function that begins to copy pinned host memory into ``into``, from any thread.

    The copy starts after all work that is on the current stream now, which may still read ``into``. The caller keeps
    ``into`` until the computation has waited. See [Note: memory of two streams].

    Args:
        into: The memory of the device.

    Returns:
        A function of the source. It returns a function that makes later work on the current stream wait for the
        copy.
    """
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
    """Copy from pinned memory on the side stream after ``free``, and return the event behind the copy."""
    stream = _copies(into.device)
    stream.wait_event(free)
    with stream:
        into.copy_(source, non_blocking=True)
        arrived = torch.Event(into.device)
        arrived.record(stream)
    return arrived


def begin_down(tensor: Tensor, into: Tensor | None = None) -> Tensor:
    """Begin to copy a device tensor, as it is at this point of the current stream, into pinned memory.

    The caller keeps ``tensor`` until the computation has waited (``down_by_now``). Otherwise an allocator would
    get the memory back only after a host has seen an event, which is late for a host that runs ahead.

    Args:
        tensor: The tensor on the device.
        into: The pinned memory, or None for new memory.

    Returns:
        The pinned memory, which the copy fills beside the computation.
    """
    there = pinned_empty(tensor.shape, tensor.dtype) if into is None else into
    stream = _copies_down(tensor.device)
    stream.wait_stream(torch.accelerator.current_stream(tensor.device))
    with stream:
        there.copy_(tensor, non_blocking=True)
    return there


def down_by_now(device: torch.device) -> Callable[[], object]:
    """Return a function that makes later work on the current stream wait for the copies to the host begun so far."""
    arrived = torch.Event(device)
    arrived.record(_copies_down(device))
    return lambda: torch.accelerator.current_stream(device).wait_event(arrived)


def begin_down_freely(tensor: Tensor) -> Tensor:
    """Begin to copy a device tensor into pinned memory as ``begin_down`` does; the caller need not keep the tensor."""
    there = begin_down(tensor)
    keep_for(_copies_down(tensor.device), (tensor,))
    return there


def wait_for_copies_down(device: torch.device) -> None:
    """Wait, once for all, until the copies to the host begun so far are over."""
    arrived = torch.Event(device)
    arrived.record(_copies_down(device))
    arrived.synchronize()


def to_host(tensor: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
    """Begin to copy a tensor, as it is at this point of the current stream, into pinned memory.

    Args:
        tensor: The tensor.
        into: The pinned memory, or None for new memory.

    Returns:
        A function that waits for the copy, in any thread, and returns it. Without ``into`` a tensor on a CPU is
        returned itself.
    """
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
    """Return a function that waits, in any thread, until the device has passed this point of the current stream."""
    if device.type == "cpu":
        return lambda: None
    here = torch.Event(device)
    here.record(torch.accelerator.current_stream(device))
    return here.synchronize


def to_be_written(target: Tensor) -> Callable[[Callable[[Tensor], None]], None]:
    """Return a function that writes numbers of the host into ``target``, from any thread.

    The write starts after all work that is on the current stream now, and has ended when the call returns.

    Args:
        target: The tensor to write.

    Returns:
        A function whose argument is a function that fills host memory with the numbers.
    """
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
    """Record that a stream uses tensors of another stream. See [Note: memory of two streams].

    Args:
        stream: The stream that reads the tensors.
        tensors: The tensors. Tensors on the host, such as all keys of dynamic tables, belong to no stream and
            are skipped.
    """
    for tensor in tensors:
        if tensor.device.type != "cpu":
            tensor.record_stream(stream)
