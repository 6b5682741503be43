"""The meter of an engine: marks around every wait of its computation for a collective or a message.

There are two places where the computation waits for other ranks: ``Group._run`` (comm/collectives.py) waits for
collectives, ``PointToPoint`` (comm/peers.py) for messages. Both ask the meter of their clock, which writes the waits in
the trace of the running list (plan/waits.py).

A thread that exchanges keys ahead of the computation waits beside the computation, so its waits are left out
(``beside``). Calls that are no part of a step, such as a save, are left out too: the ranks meet before such a call.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwise.plan.trace import Recording


class WaitMeter:
    """Measures the waits of one engine's computation for other ranks.

    Args:
        recording: The walker of the engine, whose running trace contains the waits.
    """

    def __init__(self, recording: Recording):
        self._recording = recording
        self._beside: set[int] = set()
        """Identifiers of the threads that wait beside the computation."""

    def begin(self) -> Any:
        """Return a mark in front of a wait; None if the calling thread waits beside the computation."""
        if threading.get_ident() in self._beside:
            return None
        return self._recording.trace.clock.mark()

    def end(self, axis: str, mark: Any) -> None:
        """Record that the wait for ranks of ``axis`` that began at ``mark`` is over; do nothing if ``mark`` is None."""
        if mark is not None:
            self._recording.trace.waits.add(axis, mark)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Leave out the waits of the calling thread inside the ``with`` block."""
        thread = threading.get_ident()
        self._beside.add(thread)
        try:
            yield
        finally:
            self._beside.discard(thread)
