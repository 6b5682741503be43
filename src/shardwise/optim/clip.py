"""The global gradient norm over flat shards, and the factor that clips it.

    norm = sqrt(Σ over ranks Σ over owned elements g²)
    g ← g · min(1, max_norm / (norm + 1e-6))

Each rank sums the elements that it owns (or its share of those that every rank holds); one small all-reduce adds the
sums and also carries the finite check. Rows are summed in fp32 (fp64 for fp64), row sums in fp64, so the result does
not depend on the cut beyond the last digits.

Paper: Pascanu et al. 2013, arXiv:1211.5063.
Cost:  one read of the owned gradients.
"""

import math

import torch
from torch import Tensor

_ROW = 4096
_EPSILON = 1e-6


def square_sum(flat: Tensor) -> Tensor:
    """Return Σ g² of a flat tensor, as an fp64 scalar."""
    if flat.dtype == torch.float64:
        return flat.dot(flat)
    rows = flat.numel() // _ROW * _ROW
    rest = flat[rows:].double()
    if not rows:
        return rest.dot(rest)
    norms = torch.linalg.vector_norm(flat[:rows].view(-1, _ROW), dim=1, dtype=torch.float32).double()
    return norms.dot(norms) + rest.dot(rest) if len(rest) else norms.dot(norms)


def share(flat: Tensor, index: int, count: int) -> Tensor:
    """Return part ``index`` of ``count`` of a tensor that ``count`` ranks hold alike."""
    size = -(-flat.numel() // count)
    return flat[index * size : (index + 1) * size]


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return the factor that clips gradients of this norm, as torch.nn.utils.clip_grad_norm_ computes it."""
    if max_norm is None or not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + _EPSILON))


def mean_norm(squares: float, weight: float, divisor: float) -> float:
    """Return the norm of a mean gradient.

    Args:
        squares: Σ g² of the sum of gradients.
        weight: Summed weight of the step; if it is 0 nothing counts, and the norm is 0.
        divisor: Number that turns the sum into the mean.

    Returns:
        The norm; ``squares`` itself if it is infinite or NaN.
    """
    if not math.isfinite(squares) or weight == 0:
        return squares if weight else 0.0
    return math.sqrt(squares) / divisor
