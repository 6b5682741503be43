"""Closed forms for the owners of rows and columns, from (placement, key, ranks). Pure.

    data_parallel   every rank has the table                    Replicate
    table           one rank, the owner, has the table          OnRank
    row             rank r has the keys of buckets b = r mod N  ByHash
    column          rank r has columns [r·D/N, (r+1)·D/N)       Shard(1)

A key belongs to one of 1,024 logical buckets, on any number of ranks: rows of a static table in turn, the keys of a
dynamic one by a 64-bit mix. Buckets go to ranks in turn. So neighbouring ids, which are often the frequent ones, go to
different ranks; and a checkpoint by buckets suits every number of ranks.

    static    key = q·1024 + b   is on rank b mod N, in row q·n + b div N,    n: buckets of that rank
    dynamic   the index of the rank gives the row

Source: the logical buckets that move between ranks are those of TorchRec's proposal for its hashed collections.
Shapes: keys [n]; N ranks; D width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.kernels.tables.keys import bucket, in_turn
from shardwise.parallel.embedding.policy import PlacementName

BUCKETS = 1024
"""Number of logical buckets of every table."""


def static_bucket(keys: Tensor) -> Tensor:
    """Return the bucket of each row of a static table."""
    return keys % BUCKETS


def dynamic_bucket(keys: Tensor) -> Tensor:
    """Return the bucket of each key of a dynamic table."""
    return bucket(keys, BUCKETS)


def buckets_of(index: int, ranks: int) -> range:
    """Return the buckets of rank ``index``."""
    return range(index, BUCKETS, ranks)


def writer_of(buckets: Tensor, ranks: int) -> Tensor:
    """Return the rank that writes each bucket into a checkpoint; a rank writes neighbouring buckets."""
    return torch.div(buckets * ranks, BUCKETS, rounding_mode="floor")


def static_row(keys: Tensor, ranks: int) -> Tensor:
    """Return the row in which its owner holds each key of a static table that is placed by row."""
    if ranks == 1:
        return keys
    return in_turn(keys, BUCKETS, ranks).rows


def static_owner(keys: Tensor, ranks: int) -> Tensor:
    """Return the rank that holds each key of a static table that is placed by row."""
    return in_turn(keys, BUCKETS, ranks).owners


def static_keys(rows: int, index: int, ranks: int) -> Tensor:
    """Return the keys that rank ``index`` holds of a static table of ``rows`` rows, in the order of its rows."""
    if ranks == 1:
        return torch.arange(rows)
    cycles = torch.arange(-(-rows // BUCKETS))[:, None] * BUCKETS
    keys = (cycles + torch.arange(index, BUCKETS, ranks)).view(-1)
    return keys[keys < rows]


def static_keys_at(rows: Tensor, index: int, ranks: int) -> Tensor:
    """Return the key of each row that rank ``index`` holds of a static table that is placed by row."""
    held = len(buckets_of(index, ranks))
    return rows // held * BUCKETS + rows % held * ranks + index


def columns_of(width: int, index: int, ranks: int) -> range:
    """Return the columns of rank ``index``; the ranks' numbers of columns differ by at most one."""
    return range(index * width // ranks, (index + 1) * width // ranks)


@dataclass(frozen=True)
class TablePlacement:
    """The placement of one table on a group of ranks."""

    placement: PlacementName
    """Kind of the placement."""
    owner: int = 0
    """Index of the rank that has the table, for placement ``table`` only."""
    exchange: str = "rows"
    """Form of exchanged vectors: ``rows`` or ``pooled``."""

    def holds(self, index: int) -> bool:
        """Return True if rank ``index`` has any part of the table."""
        return self.placement != "table" or index == self.owner

    def rows_on(self, rows: int, index: int, ranks: int) -> int:
        """Return the number of rows of a static table, whole or cut by column, that rank ``index`` holds."""
        if self.placement == "table":
            return rows if index == self.owner else 0
        if self.placement != "row" or ranks == 1:
            return rows
        cycles, rest = divmod(rows, BUCKETS)
        return cycles * len(buckets_of(index, ranks)) + len(range(index, rest, ranks))

    def columns_on(self, width: int, index: int, ranks: int) -> range:
        """Return the columns that rank ``index`` holds."""
        return columns_of(width, index, ranks) if self.placement == "column" else range(width)
