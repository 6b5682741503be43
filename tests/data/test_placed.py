"""Samples by their place: a worker makes the whole next step ahead."""

import time
from collections.abc import Sequence

import torch

from shardwise.data import Loader
from shardwise.data.placed import PlacedDataset, PositionedSample


class Counted(PlacedDataset):
    """Counts its batches in memory that workers share."""

    def __init__(self) -> None:
        self.made = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return 64

    def batch(self, places: Sequence[PositionedSample], key: int) -> int:
        self.made += 1
        return int(self.made)

    def fingerprint(self) -> str:
        return ""


def test_a_worker_makes_the_whole_next_step_ahead() -> None:
    """It made three batches ahead, and steps of more waited for the others while nothing was computed."""
    data = Counted()
    loader = Loader(data, global_batch=8, micro_batch=1, workers=1)
    assert loader.step_batches() == [*range(1, 9)]
    deadline = time.monotonic() + 20
    while int(data.made) < 16 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert int(data.made) >= 16
    loader.close()
