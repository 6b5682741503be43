"""Loader: the microbatches of one rank, step by step, and the position that a checkpoint keeps.

    loader = Loader(dataset, global_batch=64, micro_batch=8, dp_index=rank, dp_size=ranks, seed=0)
    for step in range(steps):
        engine.train_step(loader.step_batches(step))        # global_batch / (micro_batch · dp_size) batches
    loader.state()                                          # JSON, equal on every rank

The position is what has been returned, never what has been read ahead. A caller that fetches steps ahead of their use
(``lend``) returns them as soon as another caller asks. The position counts samples, so a state loads on any number of
ranks, with any micro batch, and after a change of the global batch.
Text, and a ``PlacedDataset`` without workers, is read ahead by one thread, one step deep. A user's dataset is read by
its worker processes, or not ahead at all: it may draw random numbers or hold files that a second thread would disturb.
A ``BatchedDataset`` is read by ``workers`` threads, ``steps_ahead`` steps before they are requested. With ``epochs``
it ends: ranks that have run out of samples get empty batches (batched.py). For a device these threads copy the batches
to pinned memory too, so that the thread that launches a step does not (memory/pinned.py).
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from shardwise.base.errors import ConfigError, DataError
from shardwise.data.adopt import Collate, MapStyleData, adopt
from shardwise.data.batched import CPU, STEPS_AHEAD, BatchedDataset, BatchedFeed, Watch, bytes_read
from shardwise.data.feed import Feed, MapFeed, StepMicrobatches, StreamFeed
from shardwise.data.sampler import BatchShare
from shardwise.memory.pinned import pin_batch

_STEPS_AHEAD = 1


class LoaderPosition:
    """Position of a loader in its data, which outlives the loader."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.step = 0
        self.samples = 0
        self.cursor = feed.start()

    def state(self) -> dict[str, Any]:
        """Return the position as JSON, equal on every rank."""
        return {
            "step": self.step,
            "samples": self.samples,
            "cursor": dict(self.cursor),
            "data": self.feed.identity(),
        }


class Loader:
    """Loader of the microbatches of one data-parallel rank.

    Args:
        data: a Dataset, an IterableDataset, a DataLoader, a ``PlacedDataset`` or a ``BatchedDataset``.
        global_batch: samples of one optimizer step over all ranks.
        micro_batch: samples of one microbatch.
        dp_index: data-parallel rank.
        dp_size: number of data-parallel ranks.
        seed: seed of the order of samples and of the random numbers that samples draw.
        shuffle: True reads each epoch in an order drawn from (seed, epoch).
        collate_fn: joins samples to a batch; None takes torch's, or that of a DataLoader.
        workers: processes (threads for a ``BatchedDataset``) that read ahead.
        epochs: number of epochs after which a ``BatchedDataset`` ends; None is without end.
        steps_ahead: steps that the threads of a ``BatchedDataset`` read ahead.
        watch: called by the threads of a ``BatchedDataset`` after each read.
        device: the device to which batches go. Unless it is a CPU, threads that read ahead copy the batches to pinned
            memory, which the device reads after the engine's call has returned. A write into such a batch then is an
            error of the next call or of the step.

    Raises:
        ConfigError: if batch sizes do not fit, or if ``epochs`` is given for another kind of dataset.
        DataError: if the data is empty, too small, or of an unknown kind.
    """

    def __init__(
        self,
        data: Any,
        *,
        global_batch: int,
        micro_batch: int,
        dp_index: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        collate_fn: Collate | None = None,
        workers: int = 0,
        epochs: int | None = None,
        steps_ahead: int = STEPS_AHEAD,
        watch: Watch | None = None,
        device: torch.device = CPU,
    ) -> None:
        self._device = device
        self.share = BatchShare(global_batch, micro_batch, dp_index, dp_size)
        self._feed: Feed
        self._reads_ahead = False
        self._end: int | None = None
        self._size: int | None = None
        if isinstance(data, BatchedDataset):
            threads = max(workers, 1)
            self._size = len(data)
            self._feed = BatchedFeed(
                data,
                self.share,
                seed,
                shuffle=shuffle,
                epochs=epochs,
                threads=threads,
                steps_ahead=steps_ahead,
                watch=watch,
                device=device,
            )
            self._end = self._feed.end
        elif epochs is not None:
            raise ConfigError(
                f"epochs is {epochs}, but {type(data).__name__} is read sample by sample, epoch after epoch without "
                "end; count steps instead, or bring a BatchedDataset"
            )
        elif isinstance(adopted := adopt(data, collate_fn, workers, shuffle), MapStyleData):
            self._feed = MapFeed(adopted, self.share, seed)
            self._size = adopted.size
            self._reads_ahead = adopted.is_ours and not adopted.worker_options
        else:
            self._feed = StreamFeed(adopted, self.share, seed)
        self.place = LoaderPosition(self._feed)
        """Position behind the steps that have been returned."""
        self._open: Iterator[StepMicrobatches] | None = None
        self._take_back: Callable[[], None] | None = None

    @property
    def step(self) -> int:
        """Step that ``step_batches`` returns next."""
        return self.place.step

    @property
    def samples(self) -> int:
        """Number of samples returned so far, over all ranks."""
        return self.place.samples

    @property
    def size(self) -> int | None:
        """Number of samples of one pass over the data; None for a stream."""
        return self._size

    @property
    def epoch(self) -> int:
        """Number of passes over the data that are done."""
        if self._size is not None:
            return int(self.place.cursor["position"]) // self._size
        return int(self.place.cursor.get("epoch", 0))

    @property
    def steps_left(self) -> int | None:
        """Number of steps until the last epoch ends; None if epochs follow one another without end."""
        if self._end is None:
            return None
        return -(-max(self._end - self.place.cursor["position"], 0) // self.share.global_batch)

    def set_accumulation(self, microbatches: int) -> None:
        """Set the number of microbatches of each following step; the position stays."""
        self.close()
        blocks = self.share.micro_batch * self.share.dp_size
        share = replace(self.share, global_batch=microbatches * blocks)
        self._feed.deal(share)
        self.share = share

    def step_batches(self, step: int | None = None) -> list[Any]:
        """Return this rank's microbatches of a step.

        Args:
            step: the step; None is the next one. Another step needs random access. Steps count from the last loaded
                state, with the present global batch.
        """
        self._end_loan()
        if step is not None and step != self.place.step:
            self.place.cursor = self._feed.advance(self.place.cursor, step - self.place.step)
            self.place.samples += (step - self.place.step) * self.share.global_batch
            self.place.step = step
            self._forget()
        fetched = self.fetch()
        self.count(fetched)
        return fetched.batches

    @property
    def reads_apart(self) -> bool:
        """True if threads read the data, so that any thread may request the next step."""
        return self._reads_ahead or isinstance(self._feed, BatchedFeed)

    @property
    def steps_ahead(self) -> int:
        """Number of steps that threads read before they are requested; 0 if no thread reads ahead."""
        if isinstance(self._feed, BatchedFeed):
            return self._feed.steps_ahead
        return _STEPS_AHEAD if self._reads_ahead else 0

    @property
    def ahead_bytes(self) -> int:
        """Bytes of the batches that threads have read and that were not requested yet."""
        return int(getattr(self._open, "ahead_bytes", 0))

    def fetch(self) -> StepMicrobatches:
        """Return the next step without counting it, for callers that fetch several before the first is used.

        A step counts when ``count`` is called. ``close`` discards the steps that were not counted: they are read again.
        A caller that fetches more than one step must call ``lend`` first.
        """
        if self._open is None:
            steps = self._feed.steps(self.place.cursor)
            self._open = _ReadAhead(steps, self._device) if self._reads_ahead else steps
        try:
            return next(self._open)
        except BaseException:
            self._forget()  # a later call starts anew at the same position
            raise

    def count(self, fetched: StepMicrobatches) -> None:
        """Move the position behind ``fetched``, the oldest step that was not counted."""
        self.place.step += 1
        self.place.samples += self.share.global_batch
        self.place.cursor = fetched.after

    def lend(self, take_back: Callable[[], None]) -> None:
        """Let the caller fetch ahead until ``close``.

        If another caller requests steps, or moves the position, ``take_back`` is called first; no fetch may follow it.
        """
        self.close()
        self._take_back = take_back

    def _end_loan(self) -> None:
        """End a loan, so that steps that were fetched and not counted are read again."""
        if self._take_back is not None:
            self.close()

    def __iter__(self) -> Iterator[Any]:
        """Yield microbatches, for a user's own loop; a step counts once its last microbatch is yielded.

        The iteration is endless. With ``epochs`` it ends after the same number of microbatches on every rank, and the
        last ones may be empty.
        """
        while self.steps_left != 0:
            self._end_loan()
            fetched = self.fetch()
            try:
                yield from fetched.batches[:-1]
            except GeneratorExit:
                self._forget()  # left in the middle of a step: it is read again
                raise
            self.count(fetched)
            yield fetched.batches[-1]

    def state(self) -> dict[str, Any]:
        """Return the position as JSON, equal on every rank."""
        return self.place.state()

    def load_state(self, state: dict[str, Any], *, strict: bool = True) -> None:
        """Continue at a saved position.

        Args:
            state: result of ``state``.
            strict: True requires the data with which the position was saved.

        Raises:
            DataError: if the data is of another kind, or differs and ``strict`` is True.
        """
        given, here = state["data"], self._feed.identity()
        if given["kind"] != here["kind"]:
            raise DataError(
                f"the saved position is of a {given['kind']} dataset, the data now is a {here['kind']} dataset; bring "
                "the same data, or start without the saved position"
            )
        if strict and given != here:
            differing = ", ".join(
                f"{key} {given.get(key)} then, {here[key]} now" for key in here if given.get(key) != here[key]
            )
            raise DataError(
                f"the data is not what the position was saved with ({differing}), so the run cannot resume exactly; "
                "bring the same data, or start without the saved position"
            )
        self.close()
        self.place.step, self.place.samples = int(state["step"]), int(state["samples"])
        self.place.cursor = {key: int(value) for key, value in state["cursor"].items()}

    def close(self) -> None:
        """End the reading ahead; the next call of ``step_batches`` starts it again."""
        if self._take_back is not None:
            self._take_back()  # if it fails, the next request calls it once more
            self._take_back = None
        self._forget()

    def _forget(self) -> None:
        opened, self._open = self._open, None
        if opened is not None and hasattr(opened, "close"):
            opened.close()


class _ReadAhead:
    """Steps of an iterator, read by one thread before they are requested.

    This is an object instead of a generator because ``close`` waits for the thread, which the garbage collector must
    not do. [Note: finalizers] An object that is dropped unclosed ends with its pool, whose thread then ends by itself.
    """

    def __init__(self, steps: Iterator[StepMicrobatches], device: torch.device) -> None:
        self._steps, self._device = steps, device
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shardwise-data")
        self._waiting = deque(self._pool.submit(self._read) for _ in range(_STEPS_AHEAD))

    def _read(self) -> StepMicrobatches:
        step = next(self._steps)
        return step._replace(batches=[pin_batch(batch, self._device) for batch in step.batches])

    def __iter__(self) -> Iterator[StepMicrobatches]:
        return self

    def __next__(self) -> StepMicrobatches:
        try:
            current = self._waiting.popleft().result()
            self._waiting.append(self._pool.submit(self._read))
        except BaseException:
            self.close()
            raise
        return current

    @property
    def ahead_bytes(self) -> int:
        """Bytes of the batches that have been read and were not requested yet."""
        return bytes_read(self._waiting)

    def close(self) -> None:
        """End the thread after the current read."""
        self._pool.shutdown(wait=True, cancel_futures=True)
