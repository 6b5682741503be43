"""DiskFaults: an error of the disk below one store, kept until all ranks can raise it together.

A rank whose disk fails must not raise at once: the other ranks would wait for it in the next exchange. It goes on with
zeros in the place of the rows, and the next numbers that all ranks exchange say that the step cannot be used:

    pass that learns    the numbers of NORM            the step is dropped on all ranks before any weight changes
    other passes        a sum of one number            right after the vectors were exchanged
    STEP                needs no disk, because its rows were brought into memory before NORM; if compaction fails after
                        it, no row is lost, and the NORM of the next step says so
    save, load          a sum of one number            before the first file of a save is made; after the rows of a load

Only a context of ``deferred`` keeps errors, and only its caller can tell the other ranks. Elsewhere errors are raised
where they occur.

Cost: nothing without an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.base.errors import TierError


class DiskFaults:
    """The first error of the disk below one store that the other ranks have not been told yet."""

    def __init__(self) -> None:
        self._error: TierError | None = None
        self._for_next: TierError | None = None
        """Error behind the NORM of a step, for that of the next one."""
        self._depth = 0
        """Number of contexts of ``deferred`` that are open."""

    @property
    def is_pending(self) -> bool:
        """True if an error has been kept and not been taken."""
        return self._error is not None

    def take(self) -> TierError | None:
        """Return the error that was kept, and forget it; None if there is none."""
        error, self._error = self._error, None
        return error

    def note(self, error: TierError) -> None:
        """Keep an error, unless there is an earlier one."""
        self._error = self._error or error

    def note_for_next(self, error: TierError) -> None:
        """Keep an error that does not concern the running step until ``begin_numbers``."""
        self._for_next = error

    def begin_numbers(self) -> None:
        """Take up the error that was kept for the next step, before its numbers are exchanged."""
        error, self._for_next = self._for_next, None
        if error is not None:
            self.note(error)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let ``kept`` keep errors in the context. The caller tells all ranks afterwards."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep an error of the disk that the context raises, inside of ``deferred``; elsewhere raise it."""
        try:
            yield
        except TierError as error:
            if not self._depth:
                raise
            self.note(error)
