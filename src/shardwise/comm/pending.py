"""A collective in flight, which every transport returns and the caller waits for."""

from collections.abc import Callable, Sequence
from typing import Any

from shardwise.comm.flights import Communicator


class PendingCollective:
    """A collective in flight; ``wait`` returns when its output may be used.

    On a device, the current stream waits and the host goes on: ``works`` run on ``communicator``.

    Args:
        finish: Function that waits for the other ranks.
        works: Work objects of torch.
        communicator: Communicator of the works.
        compute: Function that computes the output from what has come, such as a sum; it waits for nobody.
    """

    __slots__ = ("_finish", "communicator", "compute", "works")

    def __init__(
        self,
        finish: Callable[[], None] | None = None,
        works: Sequence[Any] = (),
        communicator: Communicator | None = None,
        compute: Callable[[], object] | None = None,
    ):
        self._finish = finish
        self.compute = compute
        self.works = works
        self.communicator = communicator

    def arrive(self) -> None:
        """Wait for the other ranks, without computing the output; a second call does nothing."""
        compute, self.compute = self.compute, None
        self.wait()
        self.compute = compute

    def wait(self) -> None:
        """Finish the collective; a second call does nothing."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self.works = ()
            finish()
        if self.compute is not None:
            compute, self.compute = self.compute, None
            compute()


DONE = PendingCollective()
