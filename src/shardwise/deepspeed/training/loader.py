"""DeepSpeed's data loader, with DeepSpeed's order of samples, and an iterator that starts over at the end.

Each data-parallel rank reads every N-th sample of one shuffle, which torch's DistributedSampler draws from seed 0.
The epoch is never set, so every pass has the same order, as in DeepSpeed. Call ``loader.data_sampler.set_epoch(i)``
for a new order in each pass, or use Shardwise's own ``engine.loader``, whose order does not depend on the number of
ranks.
"""

import math
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

_WORKERS = 2
"""The default number of worker processes, equal to DeepSpeed's for one device: random transforms depend on this number.
"""


class RepeatingLoader:
    """An iterator over ``loader`` that starts over when the loader ends."""

    def __init__(self, loader: Any):
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class DeepSpeedDataLoader:
    """A loader of this rank's batches: ``iter()`` starts a pass, and ``next()`` returns the next batch of the pass."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        replica: tuple[int, int],
        collate_fn: Callable[[Any], Any] | None = None,
        sampler: Any = None,
        workers: int | None = None,
        drop_last: bool = False,
        shuffle: bool = True,
    ):
        """Make the loader of one rank.

        Args:
            dataset: A torch Dataset or IterableDataset.
            batch_size: Samples per batch on this rank.
            replica: (index of this rank among the data-parallel ranks, number of data-parallel ranks).
            collate_fn: The function that makes a batch from samples; None: torch's.
            sampler: A sampler that replaces the DistributedSampler.
            workers: Worker processes; None: DeepSpeed's default.
            drop_last: True to drop a last batch that is not full.
            shuffle: True to shuffle the samples.
        """
        place, count = replica
        self.dataset = dataset
        self.batch_size = batch_size
        if sampler is None and not isinstance(dataset, IterableDataset):
            sampler = DistributedSampler(dataset, num_replicas=count, rank=place, shuffle=shuffle)
        self.data_sampler = sampler
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=collate_fn,
            # A daemon, such as a worker of a pool, may not start processes of its own.
            num_workers=0
            if multiprocessing.current_process().daemon
            else _WORKERS
            if workers is None
            else workers,
            pin_memory=torch.accelerator.is_available(),
            drop_last=drop_last,
        )
        self._pass: Iterator[Any] | None = None

    def __len__(self) -> int:
        if self.data_sampler is None:
            return len(self.loader)
        samples = len(self.data_sampler)
        return samples // self.batch_size if self.loader.drop_last else math.ceil(samples / self.batch_size)

    def __iter__(self) -> "DeepSpeedDataLoader":
        self._pass = iter(self.loader)
        return self

    def __next__(self) -> Any:
        if self._pass is None:
            iter(self)
        assert self._pass is not None, "iter() begins a pass"
        return next(self._pass)
