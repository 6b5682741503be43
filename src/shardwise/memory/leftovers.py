"""Leftovers: resources of objects that were dropped without ``close``, released later, when a wait is harmless.

[Note: finalizers] Python's collector runs at any allocation, in any thread, also in a thread that holds a lock, and on
each rank at a different time. So no finalizer of this package (``weakref.finalize``, ``__del__``, ``finally`` of a
generator) takes a lock, waits for a thread, or exchanges anything with another rank: it would wait for its own thread,
or for a rank that does not take part. A finalizer may close descriptors, append to a deque, and put into a
``SimpleQueue``.

Resources that need more (process groups of torch, whose destructors join threads; files of a monitor, which draws its
pictures last) are registered with a ``OpenResources`` when they are opened:

    the owner closes the resource  the resource ends at once
    the owner is collected         its number is appended to a deque, and nothing else happens
    the next engine is built       ``end_dropped``, in the thread that builds
    the process ends               ``end_all``, for resources opened with ``at_exit``

Cost: one entry of a dictionary for each open resource.
"""

import atexit
import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

__all__ = ["LEFTOVERS", "OpenResources"]


class OpenResources:
    """Registry of the open resources of one process, each with the function that ends it."""

    def __init__(self) -> None:
        self._ends: dict[int, Callable[[], None]] = {}
        self._at_exit: set[int] = set()
        self._dropped: deque[int] = deque()
        self._numbers = itertools.count()
        self._process = os.getpid()

    def keep(self, owner: object, end: Callable[[], None], at_exit: bool = False) -> Callable[[], None]:
        """Register ``end``, which ends a resource that ``owner`` opened.

        Args:
            owner: The object whose collection leaves the resource open. ``end`` must not refer to it.
            end: Called once, by the returned function, by ``end_dropped`` after ``owner`` was collected, or by
                ``end_all``.
            at_exit: Call ``end`` when the process ends, even if ``owner`` is still alive.

        Returns:
            A function that calls ``end`` now; a second call does nothing.
        """
        number = next(self._numbers)
        self._ends[number] = end
        if at_exit:
            self._at_exit.add(number)
        weakref.finalize(owner, self._dropped.append, number).atexit = False
        return partial(self._end, number)

    def end_dropped(self) -> None:
        """End the resources whose owners were collected."""
        while self._dropped:
            self._end(self._dropped.popleft())

    def end_all(self) -> None:
        """End everything that was registered with ``at_exit``; do nothing in a fork."""
        if self._process == os.getpid():
            for number in sorted(self._at_exit):
                self._end(number)

    def _end(self, number: int) -> None:
        self._at_exit.discard(number)
        end = self._ends.pop(number, None)
        if end is not None:
            end()


LEFTOVERS = OpenResources()
"""The registry of this process; torch's process groups, too, belong to the process and not to an engine."""
atexit.register(LEFTOVERS.end_all)
