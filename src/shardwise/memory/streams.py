"""Streams and events of a device: what the host asks of work that it has not waited for.

On a CPU work is done when its call returns, so there is nothing to ask.
"""

from collections.abc import Callable

import torch


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
