"""Loader: the microbatches of one rank, step by step, and the position that a checkpoint keeps.

    loader = Loader(dataset, global_batch=64, micro_batch=8, dp_index=rank, dp_size=ranks, seed=0)
    for step in range(steps):
        engine.train_step(loader.step_batches(step))        # global_batch / (micro_batch · dp_size) batches
    loader.state()                                          # JSON, equal on every rank

The position is what has been handed out, never what has been read ahead; whoever fetches steps ahead of their use
(``lend``) gives them back as soon as anybody else asks. It counts samples, so a state loads on any
number of ranks, with any micro batch, and after a change of the global batch.
Text, and a ``PlacedDataset`` without workers, is read ahead by one thread, one step deep; a user's dataset by its
worker processes, or not at all: it may draw random numbers or hold files that a second thread would disturb. A
``BatchedDataset`` is read by ``workers`` threads, ``steps_ahead`` steps before they are asked for, and with ``epochs``
it ends: ranks that have run out of samples get empty batches (batched.py).
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from shardwise.data.adopt import Collate, Mapped, adopt
from shardwise.data.batched import STEPS_AHEAD, BatchedDataset, BatchedFeed, Watch
from shardwise.data.feed import Feed, Fetched, MapFeed, StreamFeed
from shardwise.data.sampler import Share
from shardwise.plan.errors import ConfigError, DataError

_STEPS_AHEAD = 1


class Position:
    """The position of a loader in its data, which outlives the loader."""

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
    """Hands one data-parallel rank its microbatches."""

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
    ) -> None:
        self.share = Share(global_batch, micro_batch, dp_index, dp_size)
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
            )
            self._end = self._feed.end
        elif epochs is not None:
            raise ConfigError(
                f"epochs is {epochs}, but {type(data).__name__} is read sample by sample, epoch after epoch without "
                "end; count steps instead, or bring a BatchedDataset"
            )
        elif isinstance(adopted := adopt(data, collate_fn, workers, shuffle), Mapped):
            self._feed = MapFeed(adopted, self.share, seed)
            self._size = adopted.size
            self._reads_ahead = adopted.is_ours and not adopted.worker_options
        else:
            self._feed = StreamFeed(adopted, self.share, seed)
        self.place = Position(self._feed)
        """What has been handed out."""
        self._open: Iterator[Fetched] | None = None
        self._take_back: Callable[[], None] | None = None

    @property
    def step(self) -> int:
        """The step that ``step_batches`` gives next."""
        return self.place.step

    @property
    def samples(self) -> int:
        """Samples handed out so far, over all ranks."""
        return self.place.samples

    @property
    def size(self) -> int | None:
        """Samples of one pass over the data; None where it is a stream."""
        return self._size

    @property
    def epoch(self) -> int:
        """Passes over the data that are done."""
        if self._size is not None:
            return int(self.place.cursor["position"]) // self._size
        return int(self.place.cursor.get("epoch", 0))

    @property
    def steps_left(self) -> int | None:
        """Steps until the last epoch ends; None where epochs follow one another without end."""
        if self._end is None:
            return None
        return -(-max(self._end - self.place.cursor["position"], 0) // self.share.global_batch)

    def set_accumulation(self, microbatches: int) -> None:
        """From the next step on, as many microbatches make one; the position stays."""
        self.close()
        blocks = self.share.micro_batch * self.share.dp_size
        share = replace(self.share, global_batch=microbatches * blocks)
        self._feed.deal(share)
        self.share = share

    def step_batches(self, step: int | None = None) -> list[Any]:
        """This rank's microbatches of a step: the next one, or with random access any.

        Another step than the next counts from the last loaded state, by the present global batch.
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
        """Whether threads read the data anyway, so that any thread may ask for the next step."""
        return self._reads_ahead or isinstance(self._feed, BatchedFeed)

    def fetch(self) -> Fetched:
        """The next step, for one who takes several before the first is used: each counts when ``count`` is told.

        ``close`` forgets those that were not counted: they are read again. Who fetches more than one says so first:
        ``lend``.
        """
        if self._open is None:
            steps = self._feed.steps(self.place.cursor)
            self._open = _ReadAhead(steps) if self._reads_ahead else steps
        try:
            return next(self._open)
        except BaseException:
            self._forget()  # a later call starts anew at the same position
            raise

    def count(self, fetched: Fetched) -> None:
        """This step, the oldest that was not counted, is handed out."""
        self.place.step += 1
        self.place.samples += self.share.global_batch
        self.place.cursor = fetched.after

    def lend(self, take_back: Callable[[], None]) -> None:
        """To one who will fetch ahead, until ``close``. Whoever asks for steps in another way, or moves the position,
        has ``take_back`` called first; after it there may be no fetch."""
        self.close()
        self._take_back = take_back

    def _end_loan(self) -> None:
        """What was fetched and not counted is read again."""
        if self._take_back is not None:
            self.close()

    def __iter__(self) -> Iterator[Any]:
        """Microbatches, for a loop of the user's; a step counts once its last one is handed out.

        Without end, or with ``epochs`` as many on every rank: the last of them may be empty.
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
        """The position as JSON, equal on every rank."""
        return self.place.state()

    def load_state(self, state: dict[str, Any], *, strict: bool = True) -> None:
        """Go on where a state was saved; with ``strict`` only over the data that it was saved with."""
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
        """End what reads ahead; the next call of ``step_batches`` starts it again."""
        if self._take_back is not None:
            self._take_back()  # once more by the next to ask, if it fails
            self._take_back = None
        self._forget()

    def _forget(self) -> None:
        opened, self._open = self._open, None
        if opened is not None and hasattr(opened, "close"):
            opened.close()


class _ReadAhead:
    """The same steps, read by one thread before they are asked for.

    An object and no generator: ``close`` waits for the thread, which the collector must not. [Note: finalizers] One
    that is dropped unclosed ends with its pool, whose thread then leaves by itself.
    """

    def __init__(self, steps: Iterator[Fetched]) -> None:
        self._steps = steps
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shardwise-data")
        self._waiting = deque(self._pool.submit(next, steps) for _ in range(_STEPS_AHEAD))

    def __iter__(self) -> Iterator[Fetched]:
        return self

    def __next__(self) -> Fetched:
        try:
            current = self._waiting.popleft().result()
            self._waiting.append(self._pool.submit(next, self._steps))
        except BaseException:
            self.close()
            raise
        return current

    def close(self) -> None:
        """End the thread, after the read in hand."""
        self._pool.shutdown(wait=True, cancel_futures=True)
