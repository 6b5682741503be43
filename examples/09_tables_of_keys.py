"""Lesson 9: embedding tables in a model of your own. Rows of keys live on the ranks; the dense part is as before.

Run:  python examples/09_tables_of_keys.py
      shardwise launch --ranks 2 examples/09_tables_of_keys.py

``item`` and ``history`` read one table; users are keys of any 64 bits, whose rows come when they are first seen.
``shardwise train examples/dlrm.yaml --ranks 2`` has the built-in models, readers of click logs and the AUC.
"""

import argparse

import torch
from torch import Tensor, nn

import shardwise
from shardwise import DynamicPolicy, EmbeddingCollection, Ragged, RowOptimizerPolicy, TablePolicy
from shardwise.models.initial import torch_rules

ITEMS, GENRES, WIDTH = 200, 4, 8


class Taste(nn.Module):
    """Does a user, who liked the items of ``history``, like ``item``?"""

    def __init__(self) -> None:
        super().__init__()
        grows = DynamicPolicy(capacity=1000, eviction={"type": "lfu"})
        self.tables = EmbeddingCollection(
            [
                TablePolicy(
                    name="item",
                    rows=ITEMS,
                    width=WIDTH,
                    features=("item", "history"),
                    pooling={"history": "mean"},
                ),
                TablePolicy(name="user", dynamic=grows, width=WIDTH),
            ],
            RowOptimizerPolicy(type="adagrad", lr=0.5),
        )
        self.head = nn.Sequential(nn.Linear(2 * WIDTH + 1, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, keys: dict[str, Ragged], likes: Tensor) -> Tensor:
        found = self.tables(keys)  # {"item": [B, D], "history": [B, D], "user": [B, D]}
        match = (found["item"] * found["history"]).sum(1, keepdim=True)
        logits = self.head(torch.cat([match, found["item"], found["user"]], 1))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, likes)


def batch(step: int, rank: int, ranks: int, size: int = 512) -> dict[str, object]:
    """This rank's part of a batch: users like what shares its genre (item mod 4) with their history."""
    random = torch.Generator().manual_seed(step)
    user = (5000 * torch.rand(size, generator=random) ** 3).long() * 7_919_000_000_007  # some come often
    genre = torch.randint(0, GENRES, (size,), generator=random)
    item = torch.randint(0, ITEMS, (size,), generator=random)
    seen = torch.randint(0, ITEMS // GENRES, (size, 5), generator=random) * GENRES + genre[:, None]
    likes = (item % GENRES == genre).float()
    mine = slice(rank * size // ranks, (rank + 1) * size // ranks)
    keys = {
        "item": Ragged.of_ones(item[mine]),
        "user": Ragged.of_ones(user[mine]),
        "history": Ragged(seen[mine].flatten(), torch.arange(0, 5 * len(item[mine]) + 1, 5)),
    }
    return {"keys": keys, "likes": likes[mine]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    with torch.device("meta"):  # start weights and rows follow from the seed: the same on any number of ranks
        model = Taste()
    config = {"optimizer": {"type": "adam", "lr": 3e-3}, "zero": {"stage": 2}}
    engine = shardwise.initialize(model, config, initial=torch_rules(model))
    rank, ranks = engine.world.rank, engine.world.size
    for step in range(steps):
        result = engine.train_step([batch(step, rank, ranks)])
        if rank == 0 and (step % 50 == 0 or step == steps - 1):
            print(f"step {result.step:4}  loss {result.loss:.4f}")
    for name, tally in engine.table_tallies().items():
        if rank == 0:
            print(f"{name}: {tally.rows} rows in use, {tally.inserted} inserted, {tally.evicted} evicted")


if __name__ == "__main__":
    main()
