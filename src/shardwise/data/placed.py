"""Datasets that make a batch from places: what is drawn for a sample depends on its position alone.

    batch(places, key)      samples at positions of the endless line (sampler.py), drawn by (key, position)

so augmentation and masking are the same on any number of ranks and workers, and after a resume. Worker processes make
whole batches ahead of their use, or without workers a thread of this process; an error in a worker comes back as the
one sentence that it is. Where there is an accelerator, batches of workers lie in pinned memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from shardwise.data.workers import PendingBlocks, from_workers
from shardwise.plan.errors import DataError


class SampleAt(NamedTuple):
    """A sample of a dataset at a position of the endless line (``sampler.py``)."""

    position: int
    sample: int


class PlacedDataset(ABC):
    """A dataset with random access whose batches are made from places."""

    is_cheap: ClassVar[bool] = False
    """Read where it is used, for no worker process is worth its start."""

    @abstractmethod
    def __len__(self) -> int:
        """Samples."""

    @abstractmethod
    def batch(self, places: Sequence[SampleAt], key: int) -> Any:
        """The samples at these places, at least one; what is drawn follows from ``key`` and each position."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Names the samples: equal on every rank that reads the same ones."""


def draws_at(key: int, position: int) -> np.random.Generator:
    """Random numbers of one position: the same wherever and whenever it is read. Cost: about 15 µs."""
    return np.random.Generator(np.random.Philox(key=np.array([key, position], dtype=np.uint64)))


class _ByPlaces(Dataset[Any]):
    """A block of places is the index of its batch."""

    def __init__(self, data: PlacedDataset, key: int) -> None:
        self._data, self._key = data, key

    def __getitem__(self, places: Sequence[SampleAt]) -> Any:
        try:
            return self._data.batch(places, self._key)
        except (
            DataError
        ) as error:  # raised in a worker, it would arrive with the worker's traceback around it
            return error


def placed_batches(
    data: PlacedDataset, blocks: Iterable[list[SampleAt]], key: int, workers: int, ahead: int
) -> Iterator[Any]:
    """One batch per block of places, in order. Errors: DataError as the dataset raised it.

    ``ahead``: batches that each worker makes before they are asked for.
    """
    if not workers:
        for block in blocks:
            yield data.batch(block, key)
        return
    given = PendingBlocks(blocks)
    sampler: Any = given  # any iterable serves
    loader: DataLoader[Any] = DataLoader(
        _ByPlaces(data, key),
        batch_size=None,
        sampler=sampler,
        num_workers=workers,
        prefetch_factor=ahead,
        collate_fn=_as_is,
        pin_memory=torch.accelerator.is_available(),
        # The loader draws its workers' seed when it is iterated; from a generator of its own, not from the model's.
        generator=torch.Generator().manual_seed(key),
    )
    for batch in from_workers(loader, given):
        if isinstance(batch, DataError):
            raise batch
        yield batch


def _as_is(batch: Any) -> Any:
    return batch
