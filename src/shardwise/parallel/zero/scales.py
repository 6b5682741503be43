"""The scales of the weights that are gathered in fp8, of all Units of a rank, agreed in one exchange after a step.

    each rank    m = max |w| of its shard, for each weight           one vector of all weights of the rank
    exchange     M = max over the ranks that hold pieces of w         along dp_shard, then along tp
    scale        largest number of e4m3 / M                           of the whole weight, as torchao computes it

Each rank casts its shard with the scale and sends one byte an element. The gathered numbers are those that a cast of
the whole weight would give.

Cost: one look at each shard, and 4 bytes a weight to each rank, once for each change of the weights.
Shapes: S weights of the rank.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.precision.fp8 import Float8Products, largest_over


class ScaledWeight(Protocol):
    """The weight of a bucket that is gathered in fp8."""

    @property
    def changes(self) -> int:
        """Number of changes of the weight's values so far."""
        ...

    def shard_pieces(self) -> list[Tensor | None]:
        """Return this rank's part of each parameter; None for a parameter of which the rank has no part."""
        ...

    def numbers_of(self, place: int) -> tuple[Tensor, Tensor]:
        """Return the numbers in fp8 of parameter number ``place``, and their scale."""
        ...


class WeightScales:
    """The scales of all weights of a rank that are gathered in fp8.

    Args:
        groups: The ranks that hold pieces of one weight: along dp_shard, and along tp.
        products: torchao's casts and scales.
        device: Device of the weights.
    """

    def __init__(self, groups: Sequence[Group], products: Float8Products, device: torch.device):
        self._groups = groups
        self._products = products
        self._weights: list[ScaledWeight] = []
        self._count = 0
        self._scales: Tensor | None = None
        """Scales [S]; None if weights have changed since."""
        self._none = torch.zeros((), device=device)

    def add(self, weight: ScaledWeight, count: int) -> "BucketScales":
        """Register the weight of a bucket of ``count`` parameters, and return its scales."""
        own = slice(self._count, self._count + count)
        self._weights.append(weight)
        self._count = own.stop
        return BucketScales(self, own)

    def forget(self) -> None:
        """Drop the scales, because weights have changed."""
        self._scales = None

    def agree(self) -> Tensor:
        """Return the scales [S], agreed anew if weights have changed since the last call. Collective then."""
        if self._scales is None:
            with torch.no_grad(), torch.inference_mode(False):
                whole = largest_over(self._largest(), self._groups, "the scales of weights in fp8")
                self._scales = self._products.scale_of(whole, self._products.number_format)
        return self._scales

    def numbers(self, piece: Tensor, scale: Tensor) -> Tensor:
        """Return a piece of a weight in fp8."""
        numbers: Tensor = self._products.cast(piece, self._products.roles.WEIGHT, scale)._data
        return numbers

    def _largest(self) -> Tensor:
        """Return the largest absolute value of this rank's part of each weight [S]; 0 where the rank has no part."""
        pieces = [piece for weight in self._weights for piece in weight.shard_pieces()]
        if not pieces:
            return self._none.new_zeros(0)
        norms = iter(torch._foreach_norm([piece for piece in pieces if piece is not None], math.inf))
        return torch.stack([self._none if piece is None else next(norms).float() for piece in pieces])


class BucketScales:
    """The scales of one bucket.

    Args:
        of_rank: The scales of all weights of the rank.
        own: The bucket's range of them.
    """

    def __init__(self, of_rank: WeightScales, own: slice) -> None:
        self._of_rank = of_rank
        self._own = own
        self.changes = 0
        """Number of changes of the weight's values so far."""

    def agree(self) -> Tensor:
        """Return the scale of each parameter of the bucket. Collective if weights of the rank have changed."""
        return self._of_rank.agree()[self._own]

    def forget(self) -> None:
        """Drop the scales, because the weight has changed."""
        self.changes += 1
        self._of_rank.forget()

    def numbers(self, piece: Tensor, scale: Tensor) -> Tensor:
        """Return a piece of a weight in fp8."""
        return self._of_rank.numbers(piece, scale)


class GatheredWeight:
    """One parameter of a bucket that is gathered in fp8, for the products of its layer.

    Args:
        weight: The weight of the bucket.
        place: Index of the parameter in the bucket.
    """

    def __init__(self, weight: ScaledWeight, place: int) -> None:
        self._weight = weight
        self._place = place

    @property
    def changes(self) -> int:
        """Number of changes of the weight's values so far."""
        return self._weight.changes

    def current(self) -> tuple[Tensor, Tensor]:
        """Return the numbers in e4m3 and their scale, which must be in memory now."""
        return self._weight.numbers_of(self._place)
