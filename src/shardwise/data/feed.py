"""Feeds: from adopted data to the microbatches of one rank, step by step.

A feed is opened at a cursor, a small JSON dictionary that is the same on every rank, and yields for each step this
rank's microbatches and the cursor behind the step. Data that has been read ahead lies behind the last yielded cursor,
so it is neither lost nor counted.

    MapFeed      cursor {"position": p}             any cursor is reached at once
    StreamFeed   cursor {"epoch": e, "items": k}    reached by reading k items of epoch e again
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from torch.utils.data import DataLoader

from shardwise.base.errors import ConfigError, DataError, UsageError
from shardwise.base.ragged import samples_in
from shardwise.data.adopt import IterableData, MapStyleData
from shardwise.data.draws import GeneratorContext
from shardwise.data.placed import PositionedSample
from shardwise.data.sampler import BatchShare, Sampler, key_of
from shardwise.data.workers import FAULTS, worker_error

Cursor = dict[str, int]


class StepMicrobatches(NamedTuple):
    """Microbatches of one step of one rank, and the cursor behind the step."""

    batches: list[Any]
    after: Cursor


class Feed(Protocol):
    """Interface of a feed, as ``Loader`` uses it."""

    def start(self) -> Cursor:
        """Return the cursor of the first step."""
        ...

    def advance(self, cursor: Cursor, steps: int) -> Cursor:
        """Return the cursor ``steps`` steps after ``cursor``."""
        ...

    def steps(self, cursor: Cursor) -> Iterator[StepMicrobatches]:
        """Yield the steps from ``cursor`` on."""
        ...

    def deal(self, share: BatchShare) -> None:
        """Set the share of this rank in the steps that follow."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return what identifies the data, as JSON."""
        ...


class MapFeed:
    """Steps of a dataset with random access, in the sampler's order.

    Args:
        data: the dataset.
        share: share of this rank in a step.
        seed: seed of the order and of the random numbers that samples draw.

    Raises:
        DataError: if the dataset is smaller than a global batch.
    """

    def __init__(self, data: MapStyleData, share: BatchShare, seed: int) -> None:
        self._data, self._seed = data, seed
        self.deal(share)
        self._sampler = Sampler(data.size, seed, data.shuffle)

    def start(self) -> Cursor:
        """Return the cursor of the first step."""
        return {"position": 0}

    def advance(self, cursor: Cursor, steps: int) -> Cursor:
        """Return the cursor ``steps`` steps after ``cursor``."""
        return {"position": cursor["position"] + steps * self._share.global_batch}

    def deal(self, share: BatchShare) -> None:
        """Set the share of this rank in the steps that follow.

        Raises:
            DataError: if the dataset is smaller than a global batch.
        """
        data = self._data
        if data.size < share.global_batch:
            hint = ""
            if data.is_text:
                hint = (
                    f" (windows of context {data.dataset.context}); give more text, a smaller model.context"
                )
            raise DataError(
                f"the training data holds {data.size} samples{hint or '; give more data'} or a smaller "
                f"batch.global_size, which is {share.global_batch}: one step must not see a sample twice"
            )
        self._share = share

    def identity(self) -> dict[str, Any]:
        """Return kind, size and content of the dataset; the content of a user's dataset is None."""
        content = self._data.dataset.fingerprint() if self._data.is_ours else None
        return {"kind": "map", "samples": self._data.size, "content": content}

    def _blocks(self, position: int) -> Iterator[list[PositionedSample]]:
        """Yield this rank's microbatches as positions and samples, from a position on, without end."""
        while True:
            order = self._sampler.at(position, position + self._share.global_batch)
            for block in self._share.blocks():
                yield [PositionedSample(position + offset, int(order[offset])) for offset in block]
            position += self._share.global_batch

    def steps(self, cursor: Cursor) -> Iterator[StepMicrobatches]:
        """Yield the steps from ``cursor`` on, without end."""
        together = self._share.accumulation
        batches = iter(self._data.batches(self._blocks(cursor["position"]), self._seed, together))
        while True:
            cursor = self.advance(cursor, 1)
            yield StepMicrobatches([next(batches) for _ in range(together)], cursor)


class _StreamItem(NamedTuple):
    value: Any
    after: Cursor


class StreamFeed:
    """Steps of a stream: every rank reads all items and keeps its own blocks.

    Args:
        data: the stream.
        share: share of this rank in a step.
        seed: seed of the random numbers that the stream draws.

    Raises:
        ConfigError: if the batch size of the user's DataLoader is not the micro batch.
    """

    def __init__(self, data: IterableData, share: BatchShare, seed: int) -> None:
        if data.batch_size is not None and data.batch_size != share.micro_batch:
            raise ConfigError(
                f"the DataLoader's batch_size is {data.batch_size}, but the micro batch is {share.micro_batch}; its "
                "batches are used as they come, so set batch.micro_size to the DataLoader's batch_size"
            )
        self._data, self._share, self._seed = data, share, seed
        self._items_per_block = 1 if data.holds_batches else share.micro_batch

    def start(self) -> Cursor:
        """Return the cursor of the first step."""
        return {"epoch": 0, "items": 0}

    def advance(self, cursor: Cursor, steps: int) -> Cursor:
        """Raise UsageError, because a stream is read in order."""
        raise UsageError(
            f"a stream is read in order and cannot jump by {steps} steps; ask for the next step, or load a saved state"
        )

    def deal(self, share: BatchShare) -> None:
        """Set the share of this rank in the steps that follow."""
        self._share = share

    def identity(self) -> dict[str, Any]:
        """Return the kind of the data and its number of workers."""
        return {"kind": "stream", "workers": self._data.workers}

    def steps(self, cursor: Cursor) -> Iterator[StepMicrobatches]:
        """Yield the steps from ``cursor`` on, without end.

        Raises:
            DataError: if an epoch of the stream is empty, shorter than a step, or shorter than at the saved position.
        """
        items = self._items(cursor)
        blocks = self._share.accumulation * self._share.dp_size
        while True:
            batches = []
            for block in range(blocks):
                held = [next(items) for _ in range(self._items_per_block)]
                if self._share.owner(block) == self._share.dp_index:
                    batches.append(self._batch(held))
                cursor = held[-1].after
            yield StepMicrobatches(batches, cursor)

    def _batch(self, held: list[_StreamItem]) -> Any:
        if self._data.holds_batches:
            return held[0].value
        with GeneratorContext(key_of("collate", self._seed, *held[0].after.values())):
            return self._data.collate([item.value for item in held])

    def _items(self, cursor: Cursor) -> Iterator[_StreamItem]:
        """Yield the items behind the cursor, epoch after epoch."""
        epoch, skip = cursor["epoch"], cursor["items"]
        needed = self._share.global_batch // (self._share.micro_batch if self._data.holds_batches else 1)
        while True:
            count = whole = 0
            for item in read_stream(self._data.source, self._seed, epoch):
                count += 1
                if self._is_cut_short(item):
                    continue
                whole += 1
                if count > skip:
                    yield _StreamItem(item, {"epoch": epoch, "items": count})
            self._refuse_short(epoch, count, whole, skip, needed)
            epoch, skip = epoch + 1, 0

    def _is_cut_short(self, item: Any) -> bool:
        """Return whether an item is the incomplete last batch of a DataLoader without drop_last.

        Such a batch is left out, so that all samples have the same weight.
        """
        if not self._data.holds_batches or self._data.batch_size is None:
            return False
        size = samples_in(item)
        return size is not None and size < self._data.batch_size

    def _refuse_short(self, epoch: int, count: int, whole: int, skip: int, needed: int) -> None:
        what = "whole batches" if self._data.holds_batches else "samples"
        if count == 0 and epoch:
            raise DataError(
                f"the stream gave nothing when it was read again for epoch {epoch}; it must start anew on every iter()"
            )
        if count < skip:
            raise DataError(
                f"the stream ended after {count} items, but {skip} had been read from it when the state was saved; "
                "bring the same data, or start without the saved state"
            )
        if whole < needed:
            raise DataError(
                f"the stream holds {whole} {what}, fewer than the {needed} of one step (batch.global_size "
                f"{self._share.global_batch}); give more data or a smaller batch.global_size"
            )


def read_stream(source: Iterable[Any], seed: int, epoch: int) -> Iterator[Any]:
    """Yield the items of one pass over a stream, with separate random generators.

    The items are the same on every rank and in every replay.
    """
    draws = GeneratorContext(key_of("stream", seed, epoch))
    with draws:
        _set_epoch(source, epoch)
        items = iter(source)
    while True:
        with draws:
            try:
                item = next(items)
            except StopIteration:
                return
            except FAULTS as error:
                found = worker_error(error, items)
                if found is None:
                    raise
                raise found from error
        yield item


def _set_epoch(source: Any, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` of the stream, or of the parts of a DataLoader, if they have this method."""
    told = [source]
    if isinstance(source, DataLoader):
        told = [source.dataset, source.sampler, source.batch_sampler]
    for each in told:
        set_epoch = getattr(each, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
