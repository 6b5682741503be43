"""Lesson 16: an embedding table that is larger than the memory it may take. The other rows lie on a disk.

Run:  python examples/16_tables_on_disk.py
      shardwise launch --ranks 2 examples/16_tables_on_disk.py

The table has 100,000 rows, of which 5,000 are in memory over all ranks. ``engine.prefetch`` reads the rows of the next
step while this step computes. The losses are those of a table that is in memory, to the bit.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import shardwise
from shardwise import EmbeddingCollection, Ragged, TablePolicy
from shardwise.models.initial import torch_rules

ROWS, IN_MEMORY, WIDTH, BATCH = 100_000, 5_000, 8, 512


class Clicks(nn.Module):
    """Is an item clicked?"""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        tiers = {"host_rows": IN_MEMORY, "disk": folder}
        self.tables = EmbeddingCollection([TablePolicy(name="item", rows=ROWS, width=WIDTH, tiers=tiers)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, keys: dict[str, Ragged], clicks: Tensor) -> Tensor:
        logits = self.head(self.tables(keys)["item"])[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, clicks)


def steps_of(rank: int, ranks: int, steps: int) -> Iterator[list[dict[str, object]]]:
    """Yield this rank's part of each step's batch: a few items come often, most of them rarely."""
    for step in range(steps):
        random = torch.Generator().manual_seed(step)
        item = (ROWS * torch.rand(BATCH, generator=random) ** 4).long()
        mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
        yield [{"keys": {"item": Ragged.of_ones(item[mine])}, "clicks": (item[mine] % 3 == 0).float()}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a local disk"
    )
    options = parser.parse_args()
    with torch.device("meta"):
        model = Clicks(options.disk)
    engine = shardwise.initialize(
        model, {"optimizer": {"type": "adam", "lr": 3e-3}}, initial=torch_rules(model)
    )
    rank, ranks = engine.world.rank, engine.world.size
    for batches in engine.prefetch(steps_of(rank, ranks, options.steps)):
        result = engine.train_step(batches)
        if rank == 0 and (result.step % 50 == 1 or result.step == options.steps):
            found = engine.take_tier_figures()
            assert found is not None, "the table has tiers"
            needed = found.hits + found.misses
            print(
                f"step {result.step:4}  loss {result.loss:.4f}  in memory: {found.hits} of {needed} rows needed"
            )
    engine.close()


if __name__ == "__main__":
    main()
