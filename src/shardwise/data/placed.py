"""Datasets that make a batch from positions: the random numbers of a sample depend on its position only.

    batch(places, key)      samples at positions of the endless line (sampler.py), drawn by (key, position)

So augmentation and masking are the same on any number of ranks and workers, and after a resume. Worker processes make
whole batches ahead of their use, or without workers a thread of this process does; an error in a worker is raised
without the worker's traceback. If there is an accelerator, batches of workers lie in pinned memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from shardwise.base.errors import DataError
from shardwise.data.workers import PendingBlocks, from_workers


class PositionedSample(NamedTuple):
    """A sample of a dataset at a position of the endless line (``sampler.py``)."""

    position: int
    sample: int


class PlacedDataset(ABC):
    """Dataset with random access whose batches are made from positions and samples."""

    is_cheap: ClassVar[bool] = False
    """True if reading is so fast that no worker process is worth its start."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def batch(self, places: Sequence[PositionedSample], key: int) -> Any:
        """Return a batch of the samples at these places, at least one.

        Random numbers depend on ``key`` and each position.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a digest of the samples, equal on every rank that reads the same ones."""


def draws_at(key: int, position: int) -> np.random.Generator:
    """Return a generator of random numbers for one position, the same in every process. Cost: about 15 µs."""
    return np.random.Generator(np.random.Philox(key=np.array([key, position], dtype=np.uint64)))


class _PositionDataset(Dataset[Any]):
    """Dataset whose index is a block of places and whose item is their batch."""

    def __init__(self, data: PlacedDataset, key: int) -> None:
        self._data, self._key = data, key

    def __getitem__(self, places: Sequence[PositionedSample]) -> Any:
        try:
            return self._data.batch(places, self._key)
        except (
            DataError
        ) as error:  # returned, because torch adds the worker's traceback to an error that is raised
            return error


def placed_batches(
    data: PlacedDataset, blocks: Iterable[list[PositionedSample]], key: int, workers: int, ahead: int
) -> Iterator[Any]:
    """Yield one batch for each block of places, in order.

    Args:
        data: the dataset.
        blocks: places of each batch.
        key: seed of the random numbers.
        workers: number of worker processes; 0 reads in this process.
        ahead: batches that each worker makes before they are requested.

    Raises:
        DataError: as the dataset raised it.
    """
    if not workers:
        for block in blocks:
            yield data.batch(block, key)
        return
    given = PendingBlocks(blocks)
    sampler: Any = given  # any iterable serves
    loader: DataLoader[Any] = DataLoader(
        _PositionDataset(data, key),
        batch_size=None,
        sampler=sampler,
        num_workers=workers,
        prefetch_factor=ahead,
        collate_fn=_as_is,
        pin_memory=torch.accelerator.is_available(),
        # The loader draws its workers' seed when it is iterated; without this generator it would shift the model's.
        generator=torch.Generator().manual_seed(key),
    )
    for batch in from_workers(loader, given):
        if isinstance(batch, DataError):
            raise batch
        yield batch


def _as_is(batch: Any) -> Any:
    return batch
