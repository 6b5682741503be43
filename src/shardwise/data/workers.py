"""Worker processes of a DataLoader: an error that names a worker that was killed, its signal and its samples.

torch says "DataLoader worker (pid 7) is killed by signal" if its handler runs first, and otherwise raises the error of
the broken pipe ("ConnectionResetError: [Errno 104]"), which names no worker.

Cost: nothing until something fails.
"""

import contextlib
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from shardwise.base.errors import DataError

FAULTS = (RuntimeError, OSError, EOFError)
"""Exceptions that torch raises when a worker has ended."""
_END_S = 2.0
"""Seconds after which the end of a process is visible at the latest, counted from the break of its pipe."""
_SHOWN = 8


class PendingBlocks:
    """Blocks of samples for a DataLoader, with those whose batches have not come back yet."""

    def __init__(self, blocks: Iterable[Sequence[Any]]):
        self._blocks = blocks
        self.waiting: deque[tuple[int, Sequence[Any]]] = deque()
        """Number and samples of each block whose batch has not come back."""

    def __iter__(self) -> Iterator[Sequence[Any]]:
        """Yield each block once, and remember it until its batch has come back."""
        for number, block in enumerate(self._blocks):
            self.waiting.append((number, block))
            yield block

    def of(self, worker: int, workers: int) -> str:
        """Return a phrase with the first samples that a worker has not delivered; workers take the blocks in turns."""
        for number, block in self.waiting:
            if number % workers == worker:
                samples = [str(getattr(each, "sample", each)) for each in block]
                more = " ..." if len(samples) > _SHOWN else ""
                return (
                    f" while it read the batch of samples {', '.join(samples[:_SHOWN])}{more} or a later one"
                )
        return ""


def from_workers(loader: DataLoader[Any], blocks: PendingBlocks) -> Iterator[Any]:
    """Yield the batches of a DataLoader with worker processes over ``blocks``.

    Raises:
        DataError: if a worker has ended.
    """
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except FAULTS as error:
            found = worker_error(error, batches, blocks)
            if found is None:
                raise
            raise found from error
        if blocks.waiting:
            blocks.waiting.popleft()
        yield batch


def worker_error(error: Exception, batches: Any, blocks: PendingBlocks | None = None) -> DataError | None:
    """Return the error to raise if a worker process of a DataLoader's iterator has ended; None if all are alive."""
    workers = getattr(batches, "_workers", [])
    is_torn = isinstance(error, OSError | EOFError) or "DataLoader worker" in str(error)
    until_s = time.monotonic() + _END_S * (is_torn and bool(workers))
    while True:
        # torch's signal handler may raise RuntimeError in any of these lines when a worker ends.
        with contextlib.suppress(RuntimeError):
            for number, worker in enumerate(workers):
                if worker.exitcode:
                    samples = "" if blocks is None else blocks.of(number, len(workers))
                    who = f"worker {number} of {len(workers)} (process {worker.pid})"
                    return DataError(f"data: {who} {_ended(worker.exitcode)}{samples}. ({error})")
            if time.monotonic() >= until_s:
                return None
            time.sleep(0.02)


def _ended(code: int) -> str:
    """Return a phrase that describes how a process ended."""
    if code > 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", as the system does when memory runs out (fewer workers take less)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
