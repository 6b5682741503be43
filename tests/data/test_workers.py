"""A worker of a loader that is killed is named, with its signal and what it was reading."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardwise.base.errors import DataError
from shardwise.data.loader import Loader


class Killed(Dataset[Tensor]):
    """Sample 11 takes all memory."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, sample: int) -> Tensor:
        if sample == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([sample])


class KilledStream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for sample in range(32):
            yield Killed()[sample]


def read(data: Any, workers: int) -> None:
    loader = Loader(data, global_batch=4, micro_batch=4, shuffle=False, workers=workers)
    for step in range(8):
        loader.step_batches(step)


def test_a_killed_worker_is_named_with_its_signal_and_samples() -> None:
    with pytest.raises(
        DataError,
        match=r"worker 0 of 2 \(process \d+\) was ended by SIGKILL.*samples (0, 1, 2, 3|8, 9, 10, 11) or",
    ):
        read(Killed(), 2)


def test_a_killed_worker_of_a_stream_is_named() -> None:
    with pytest.raises(DataError, match=r"worker 0 of 1 \(process \d+\) was ended by SIGKILL"):
        read(DataLoader(KilledStream(), batch_size=4, num_workers=1), 0)


class Wrong(Killed):
    def __getitem__(self, sample: int) -> Tensor:
        raise RuntimeError(f"no sample {sample}")


def test_an_error_of_the_dataset_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="no sample 0"):
        read(Wrong(), 1)
