"""DeepSpeed's loader, in its order of the data, and the iterator that begins again.

Each data-parallel rank takes every N-th sample of one shuffle, which torch's DistributedSampler draws from seed 0. It
is never told an epoch, so every pass has the same order: that is how such scripts run, and what they are compared by.
Call ``loader.data_sampler.set_epoch(i)`` for a new order each time, or take ``engine.loader`` of our own, whose order
does not depend on the number of ranks.
"""

import math
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

_WORKERS = 2
"""Processes that read, as many as DeepSpeed starts for one device: what a transform draws follows from them."""


class RepeatingLoader:
    """Goes through ``loader`` again and again."""

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
    """This rank's batches. ``iter()`` begins a pass; ``next()`` goes on with it."""

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
        """``replica``: (this rank's place among the data-parallel ranks, how many they are)."""
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
            # A daemon, such as a worker of a pool, may have no processes of its own.
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
