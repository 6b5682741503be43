"""Datasets that read many samples at once, and the feed that yields them.

A sample of a click log is a few hundred bytes; read one by one, Python costs more than training. Such a dataset returns
``batch(samples)`` for any samples in any order, and reader threads call it ahead of time: a step's batches depend on
its position only, so neither the number nor the speed of the threads changes the batches.

    positions of step s     s·G ... s·G + G, cut into blocks and dealt to ranks as in sampler.py
    ``epochs`` given        positions end at epochs · n: the last blocks are shorter, or empty on ranks that have run
                            out of samples, and later steps are empty; a batch of no samples has its full structure

Shapes: n samples in the dataset, G global batch.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardwise.base.errors import DataError
from shardwise.base.pytree import tensors_in
from shardwise.data.feed import Cursor, StepMicrobatches
from shardwise.data.sampler import BatchShare, Sampler
from shardwise.memory.pinned import pin_batch

STEPS_AHEAD = 2
CPU = torch.device("cpu")

Watch = Callable[[int, float, float], None]
"""Callback of a reader thread after a read: position of the step, start and end by ``time.perf_counter``."""


class BatchedDataset(ABC):
    """Dataset with random access that reads a whole batch in one call, from several threads at a time."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def batch(self, samples: npt.NDArray[np.int64]) -> Any:
        """Return a batch of these samples in this order; there may be none."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a digest of the samples, equal on every rank that reads the same ones."""


class BatchedFeed:
    """Steps of a batched dataset in the sampler's order, read ahead by threads.

    Args:
        data: the dataset.
        share: share of this rank in a step.
        seed: seed of the order.
        shuffle: False keeps the order of the dataset.
        epochs: number of epochs after which the positions end; None is without end.
        threads: number of reader threads.
        steps_ahead: steps that are read before they are requested.
        watch: called by the threads after each read.
        device: the device to which batches go; the threads copy them to pinned memory unless it is a CPU.

    Raises:
        DataError: if the dataset is smaller than a global batch and has more than one epoch.
    """

    def __init__(
        self,
        data: BatchedDataset,
        share: BatchShare,
        seed: int,
        *,
        shuffle: bool = True,
        epochs: int | None = None,
        threads: int = 1,
        steps_ahead: int = STEPS_AHEAD,
        watch: Watch | None = None,
        device: torch.device = CPU,
    ) -> None:
        self._device = device
        self._data, self._threads, self._ahead, self._is_once = data, threads, steps_ahead, epochs == 1
        self.deal(share)
        self._watch = watch
        self._sampler = Sampler(len(data), seed, shuffle)
        self.end = None if epochs is None else epochs * len(data)
        """Position behind the last sample; None if epochs follow one another without end."""

    def start(self) -> Cursor:
        """Return the cursor of the first step."""
        return {"position": 0}

    def advance(self, cursor: Cursor, steps: int) -> Cursor:
        """Return the cursor ``steps`` steps after ``cursor``."""
        return {"position": cursor["position"] + steps * self._share.global_batch}

    def deal(self, share: BatchShare) -> None:
        """Set the share of this rank in the steps that are read from now on.

        Raises:
            DataError: if the dataset is smaller than a global batch and has more than one epoch.
        """
        if len(self._data) < share.global_batch and not self._is_once:
            raise DataError(
                f"the training data holds {len(self._data)} samples; give more data or a smaller batch.global_size, "
                f"which is {share.global_batch}: one step must not see a sample twice"
            )
        self._share = share

    def identity(self) -> dict[str, Any]:
        """Return kind, size and content of the dataset."""
        return {"kind": "batched", "samples": len(self._data), "content": self._data.fingerprint()}

    @property
    def steps_ahead(self) -> int:
        """Number of steps that are read before they are requested."""
        return self._ahead

    def ask(self, pool: ThreadPoolExecutor, position: int) -> list[Future[Any]]:
        """Begin to read the blocks of the step at ``position`` and return their futures."""
        return [pool.submit(self._read, position, block) for block in self._share.blocks()]

    def _read(self, position: int, block: range) -> Any:
        start, stop = position + block.start, position + block.stop
        if self.end is not None:
            start, stop = min(start, self.end), min(stop, self.end)
        began = time.perf_counter()
        batch = pin_batch(self._data.batch(self._sampler.at(start, stop)), self._device)
        if self._watch is not None:
            self._watch(position, began, time.perf_counter())
        return batch

    def steps(self, cursor: Cursor) -> Iterator[StepMicrobatches]:
        """Return an iterator over the steps from ``cursor`` on, which reads ahead."""
        return _FeedSteps(self, cursor, self._threads, self._ahead)


class _FeedSteps:
    """Steps of a feed from ``cursor`` on, each read by the threads of a pool ``ahead`` steps early.

    This is an object instead of a generator because ``close`` waits for the threads, which the garbage collector must
    not do. [Note: finalizers]
    """

    def __init__(self, reader: BatchedFeed, cursor: Cursor, threads: int, ahead: int) -> None:
        self._reader, self._cursor, self._ahead = reader, cursor, ahead
        self._asked = cursor["position"]
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shardwise-data")
        self._waiting: deque[list[Future[Any]]] = deque()

    def __iter__(self) -> Iterator[StepMicrobatches]:
        return self

    def __next__(self) -> StepMicrobatches:
        try:
            while len(self._waiting) <= self._ahead:
                self._waiting.append(self._reader.ask(self._pool, self._asked))
                self._asked = self._reader.advance({"position": self._asked}, 1)["position"]
            self._cursor = self._reader.advance(self._cursor, 1)
            return StepMicrobatches([future.result() for future in self._waiting.popleft()], self._cursor)
        except BaseException:
            self.close()
            raise

    @property
    def ahead_bytes(self) -> int:
        """Bytes of the batches that have been read and were not requested yet."""
        return bytes_read(future for step in self._waiting for future in step)

    def close(self) -> None:
        """End the threads after their current reads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def bytes_read(reads: Iterable[Future[Any]]) -> int:
    """Return the bytes of the tensors that reads have returned so far; reads that failed or still run count nothing."""
    over = [read for read in reads if read.done() and not read.cancelled() and read.exception() is None]
    return sum(tensor.nbytes for read in over for tensor in tensors_in(read.result()))


def evaluation_blocks(
    data: BatchedDataset, dp_index: int, dp_size: int, micro_batch: int, samples: int | None
) -> Iterator[tuple[Any, int]]:
    """Yield this rank's batches of one evaluation with their sizes; each rank has as many, the last perhaps empty.

    Args:
        data: the dataset.
        dp_index: data-parallel rank.
        dp_size: number of data-parallel ranks.
        micro_batch: samples of one batch.
        samples: largest number of samples, evenly spread; None takes all.
    """
    size = min(samples or len(data), len(data))
    chosen = np.arange(size, dtype=np.int64) * len(data) // max(size, 1)
    rounds = -(-size // (micro_batch * dp_size))
    for k in range(dp_index, rounds * dp_size, dp_size):
        block = chosen[k * micro_batch : (k + 1) * micro_batch]
        yield data.batch(block), block.size
