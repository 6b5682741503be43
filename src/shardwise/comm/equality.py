"""Exact test whether all ranks hold the same number, by sums only, so that the test can be part of any all-reduce.

A number x is sent as pairs (p, p²) for its 16-bit pieces p. By Cauchy and Schwarz, over n ranks

    n Σ p² = (Σ p)²        if and only if all ranks hold the same p

Both sums are whole numbers below n·2³², so that float64 holds them exactly up to 2²¹ ranks (two million), int64 up to
2³¹; the two sides are compared as Python's integers.

Cost: two numbers for every 16 bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_PIECE_BITS = 16
_MASK = (1 << _PIECE_BITS) - 1


def terms(number: int, bits: int = 64) -> list[int]:
    """Return the numbers to sum over the ranks for the lowest ``bits`` of ``number``."""
    pieces = [number >> shift & _MASK for shift in range(0, bits, _PIECE_BITS)]
    return [term for piece in pieces for term in (piece, piece * piece)]


def are_equal(ranks: int, sums: Sequence[float]) -> bool:
    """Return whether all ranks held the same number; the result is the same on each.

    Args:
        ranks: Number of ranks.
        sums: Sums over the ranks of their ``terms``.
    """
    totals = [int(total) for total in sums]
    return all(
        ranks * squares == total * total for total, squares in zip(totals[::2], totals[1::2], strict=True)
    )


def differ(ranks: int, sums: Tensor) -> Tensor:
    """Return 1 if the ranks held different numbers, else 0, as a tensor [] that the host has not read.

    Products beyond 63 bits, from 46,341 ranks on, wrap in the same way on both sides.

    Args:
        ranks: Number of ranks.
        sums: Sums over the ranks of their ``terms``, [2 n] on any device.
    """
    totals = sums.view(-1, 2).to(torch.int64)
    return (ranks * totals[:, 1] != totals[:, 0] * totals[:, 0]).any()
