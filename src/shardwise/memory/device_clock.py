"""The clock of a trace beside an accelerator: the times at which the device ran the work that the host launched.

A mark is an event, whose time is computed from the last event of which the host knows the time:

    anchor    an event in front of the norm, which every step reads: when the read returns, the event is some
              microseconds old, and the host's clock gives its time. The clock adds no wait of its own
    time(e)   the host's time at the anchor + the device's time between the two events

Cost: an event a mark, about 2 µs of the host.
"""

import time
from collections.abc import Sequence

import torch

from shardwise.plan.trace import HostClock, TraceClock


class DeviceClock:
    """The clock of a device with timed events.

    Args:
        device: The device.

    Raises:
        RuntimeError: If torch cannot time events on the device.
        NotImplementedError: If torch cannot time events on the device.
    """

    runs_behind = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._anchor: tuple[torch.Event, float] | None = None
        self._point()

    def mark(self) -> torch.Event:
        """Return a mark at this point of the current stream."""
        event = self._point()
        event.record()
        return event

    def seconds(self, marks: Sequence[torch.Event]) -> list[float]:
        """Return the times at which the device passed the marks, and wait for those that it has not passed.

        Args:
            marks: The marks.

        Returns:
            Seconds of the host's monotonic clock.
        """
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
        """Use a mark as the reference of later times.

        Args:
            mark: The mark of work whose result the host has just read.
        """
        self._anchor = mark, time.perf_counter()

    def _point(self) -> torch.Event:
        return torch.Event(self._device, enable_timing=True)


def clock_of(device: torch.device) -> TraceClock:
    """Return the clock of a device: the host's for a CPU, and for a device whose events torch does not time."""
    if device.type == "cpu":
        return HostClock()
    try:
        return DeviceClock(device)
    except (RuntimeError, NotImplementedError):
        return HostClock()
