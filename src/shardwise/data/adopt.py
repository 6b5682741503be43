"""Conversion of a user's data to one of two kinds, ``MapStyleData`` or ``IterableData``.

    brought                                           seen as
    PlacedDataset (placed.py): pictures, masked text  Mapped: the dataset makes whole batches
    Dataset, list: has ``len`` and ``[i]``            Mapped: our sampler gives the order
    DataLoader over such, in order or shuffled        Mapped: its dataset, collate_fn, workers and shuffling are kept;
                                                      batches are cut anew, by micro batch, in our order
    IterableDataset, any object that can be iterated  Stream of samples
    any other DataLoader (own sampler, own batches,   Stream of microbatches, as it yields them
    an IterableDataset inside)

A stream has no random access, so every rank reads all of it, keeps its share and drops the rest; its position is a
number of items, reached again by reading them once more.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from shardwise.base.errors import ConfigError, DataError
from shardwise.data.draws import GeneratorContext
from shardwise.data.placed import PlacedDataset, PositionedSample, placed_batches
from shardwise.data.sampler import key_of
from shardwise.data.windows import TokenWindows
from shardwise.data.workers import PendingBlocks, from_workers

Collate = Callable[[list[Any]], Any]

_AHEAD = 2
"""Batches that each worker reads ahead beside those that are requested at once."""


class _PlacedSample(NamedTuple):
    position: int
    content: Any


@dataclass
class _PlacedReader(Dataset[Any]):
    """Dataset that reads one place; picklable for worker processes."""

    dataset: Any
    key: int
    draws: bool

    def __getitem__(self, place: PositionedSample) -> _PlacedSample:
        if not self.draws:
            return _PlacedSample(place.position, self.dataset[place.sample])
        with GeneratorContext(key_of("sample", self.key, place.position)):
            return _PlacedSample(place.position, self.dataset[place.sample])


@dataclass
class _Collator:
    """Function that joins the samples of one microbatch."""

    collate: Collate
    key: int
    draws: bool

    def __call__(self, placed: list[_PlacedSample]) -> Any:
        samples = [each.content for each in placed]
        if not self.draws:
            return self.collate(samples)
        with GeneratorContext(key_of("collate", self.key, placed[0].position)):
            return self.collate(samples)


@dataclass(frozen=True)
class MapStyleData:
    """Dataset with random access."""

    dataset: Any
    collate: Collate
    """Function that joins samples to a batch."""
    shuffle: bool
    """True if each epoch has an order drawn from (seed, epoch)."""
    worker_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the DataLoader that runs workers; empty: samples are read in this process."""

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.dataset)

    @property
    def is_text(self) -> bool:
        """True for our own windows, which draw nothing and may be read by a thread."""
        return isinstance(self.dataset, TokenWindows) and self.collate is default_collate

    @property
    def is_ours(self) -> bool:
        """True if the dataset draws nothing from the generators of this process and has a fingerprint."""
        return self.is_text or isinstance(self.dataset, PlacedDataset)

    def batches(self, blocks: Iterable[list[PositionedSample]], key: int, together: int = 1) -> Iterable[Any]:
        """Yield one batch for each block of places, in order; worker processes read ahead if there are any.

        Args:
            blocks: places of each batch.
            key: seed of the random numbers.
            together: batches that are requested at once. At least as many are read ahead: with fewer, the caller would
                wait for the last ones while nothing is computed.
        """
        workers = self.worker_options.get("num_workers", 0)
        ahead = _AHEAD + -(-together // workers) if workers else 0
        if isinstance(self.dataset, PlacedDataset):
            return placed_batches(self.dataset, blocks, key, workers, ahead)
        reader = _PlacedReader(self.dataset, key, draws=not self.is_text)
        collator = _Collator(self.collate, key, draws=not self.is_text)
        if not self.worker_options:
            return (collator([reader[place] for place in block]) for block in blocks)
        # The loader draws its workers' seed when it is iterated; without this generator it would shift the model's.
        generator = torch.Generator().manual_seed(key)
        given = PendingBlocks(blocks)
        sampler: Any = given  # any iterable of lists serves; the stub asks for lists of int
        options = {
            **self.worker_options,
            "prefetch_factor": self.worker_options.get("prefetch_factor") or ahead,
        }
        loader: DataLoader[Any] = DataLoader(
            reader, batch_sampler=sampler, collate_fn=collator, generator=generator, **options
        )
        return from_workers(loader, given)


@dataclass(frozen=True)
class IterableData:
    """Items that can only be read in order."""

    source: Iterable[Any]
    holds_batches: bool
    """True if an item is a batch, False if it is a sample."""
    collate: Collate
    """Function that joins samples to a batch."""
    batch_size: int | None = None
    """Samples per item, if the user's DataLoader has a batch size."""
    workers: int = 0
    """Number of processes that read the stream."""


def adopt(
    data: Any, collate_fn: Collate | None = None, workers: int = 0, shuffle: bool = True
) -> MapStyleData | IterableData:
    """Convert the user's data to ``MapStyleData`` or ``IterableData``.

    Args:
        data: the user's data.
        collate_fn: joins samples to a batch; None takes torch's, or that of a DataLoader.
        workers: processes that read ahead; 0 keeps those of a DataLoader.
        shuffle: True shuffles a dataset; a DataLoader keeps its own setting.

    Raises:
        DataError: if the data is empty, or of a kind that cannot be read again.
        ConfigError: if several workers would each read a whole stream.
    """
    if isinstance(data, DataLoader):
        return _adopt_loader(data, collate_fn, workers)
    collate = collate_fn or default_collate
    if isinstance(data, PlacedDataset):
        return MapStyleData(
            data, collate, shuffle, {"num_workers": workers} if workers and not data.is_cheap else {}
        )
    if (
        hasattr(data, "__len__")
        and hasattr(data, "__getitem__")
        and not isinstance(data, IterableDataset | dict)
    ):
        if len(data) == 0:
            raise DataError(f"{type(data).__name__} is empty; give a dataset that holds samples")
        return MapStyleData(data, collate, shuffle, {"num_workers": workers} if workers else {})
    if isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__next__")):
        if workers > 1:
            raise ConfigError(
                f"data.workers is {workers}, but {type(data).__name__} is a stream, which each worker would read "
                "whole; set it to 0 or 1, or bring a DataLoader over an IterableDataset that splits itself among "
                "its workers"
            )
        if workers:
            return IterableData(
                DataLoader(data, None, num_workers=1, collate_fn=_as_is), False, collate, None, 1
            )
        return IterableData(data, False, collate)
    raise DataError(
        f"data is a {type(data).__name__}; expected a Dataset with __len__ and __getitem__, an IterableDataset or a "
        "DataLoader"
        + (" (an iterator cannot be read again: bring what makes it)" if hasattr(data, "__next__") else "")
    )


def _as_is(item: Any) -> Any:
    return item


def _adopt_loader(
    loader: DataLoader[Any], collate_fn: Collate | None, workers: int
) -> MapStyleData | IterableData:
    shuffle = _shuffle_of(loader)
    if shuffle is None:
        return IterableData(loader, True, default_collate, loader.batch_size, loader.num_workers)
    dataset: Any = loader.dataset
    if len(dataset) == 0:
        raise DataError("the DataLoader's dataset is empty; give one that holds samples")
    workers = workers or loader.num_workers
    options: dict[str, Any] = {}
    if workers:
        options = {
            "num_workers": workers,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "timeout": loader.timeout,
            "pin_memory": loader.pin_memory,
        }
    return MapStyleData(dataset, collate_fn or loader.collate_fn, shuffle, options)


def _shuffle_of(loader: DataLoader[Any]) -> bool | None:
    """Return whether a DataLoader shuffles, or None if its order or its batches are its own."""
    if isinstance(loader.dataset, IterableDataset) or type(loader.batch_sampler) is not BatchSampler:
        return None
    dataset: Any = loader.dataset
    sampler = loader.sampler
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(dataset):
        return True
    if type(sampler) is DistributedSampler:
        return bool(sampler.shuffle)
    return None
