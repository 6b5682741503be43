"""When a device did what the host launched: the clock of a trace, beside an accelerator.

A mark is an event, resolved against the last one of which the host knows the time:

    anchor    an event in front of the norm, which every step reads: when the read returns, the event is some
              microseconds old, and the host's clock says when that is. Nothing is waited for that was not before
    time(e)   host's time at the anchor + what the device says lies between the two

Cost: an event a mark, about 2 µs of the host.
"""

import time
from collections.abc import Sequence

import torch

from shardwise.plan.trace import HostClock, TraceClock


class DeviceClock:
    """See the module's docstring. Errors: RuntimeError, NotImplementedError where torch times no events there."""

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
