"""A save reads rows in tiers a part at a time, when it writes them."""

import torch
from torch import Tensor

from shardwise.parallel.embedding.rows.tiered_snapshot import TieredSnapshot


def test_rows_are_read_in_parts() -> None:
    memory, sizes, ended = torch.zeros(4, 2, dtype=torch.int64), [], []

    def read(rows: Tensor) -> list[Tensor]:
        sizes.append(len(rows))
        memory[: len(rows)] = torch.stack([rows, rows * 10], 1)
        return [memory[: len(rows), :1], memory[: len(rows), 1:]]

    snapshot = TieredSnapshot(read, 4, [], [], lambda: ended.append(True))
    rows = torch.arange(10).flip(0)
    first, second = snapshot.read(rows)
    assert torch.equal(first[:, 0], rows) and torch.equal(second[:, 0], rows * 10)
    assert sizes == [4, 4, 2]
    first, second = snapshot.read(rows[:0])
    assert first.shape == (0, 1) and second.shape == (0, 1)
    snapshot.close()
    snapshot.wait()
    assert ended == [True]
