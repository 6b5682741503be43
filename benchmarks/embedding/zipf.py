"""Keys of a power initializer, and the start rows that all contenders share."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.kernels import philox
from shardwise.kernels.initializers import Uniform
from shardwise.kernels.tables.start_rows import start_rows

EXPONENT = 1.05
BOUND = 0.05
"""Start weights are uniform in ± this."""
_PRIME = 2_654_435_761
_CHUNK = 1 << 18


def zipf(count: int, vocabulary: int, seed: int, exponent: float = EXPONENT) -> Tensor:
    """Keys below ``vocabulary`` by the inverse of the law's continuous form, spread over the table: int64 [count]."""
    return spread(ranks(count, vocabulary, seed, exponent), vocabulary)


def ranks(count: int, vocabulary: int, seed: int, exponent: float = EXPONENT) -> Tensor:
    """Places in the order of frequency, 0 the most frequent: int64 [count]."""
    share = 1 - exponent
    u = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    place = ((vocabulary**share - 1) * u + 1) ** (1 / share)
    return (place.long() - 1).clamp_(0, vocabulary - 1)


def spread(places: Tensor, vocabulary: int) -> Tensor:
    """Frequent keys are not neighbours in the table; one to one, for the multiplier is a prime above all tables."""
    return places * _PRIME % vocabulary


def fill(weights: Tensor, table: str, keys: Tensor | None = None) -> Tensor:
    """The rows that an ``EmbeddingCollection`` of seed 0 begins with, into [R, >= D]; ``keys``: of other rows."""
    key = philox.key_of(0, f"table {table}")
    rows = torch.arange(len(weights)) if keys is None else keys
    for start in range(0, len(rows), _CHUNK):
        part = rows[start : start + _CHUNK]
        weights[start : start + len(part)] = start_rows(key, part, weights.shape[1], Uniform(-BOUND, BOUND))
    return weights
