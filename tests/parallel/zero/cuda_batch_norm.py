"""CUDA's kernels of synchronized batch norm, as formulas, so that a CPU runs the code that calls the kernels.

torch has the operations for CUDA alone. ``on_the_cpu`` registers them for CPU tensors of this process, and makes
``parallel/zero/batch_norm.py`` use them there. The formulas are those of the kernels, with the dtypes that the kernels
demand; a 16-bit dtype of the counts, which the kernels would take, is refused, because they cannot hold large counts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from shardwise.parallel.zero import batch_norm


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    assert x.numel(), "the kernel takes no empty input"
    wide = _rows(x)
    return wide.mean(0), (wide.var(0, unbiased=False) + eps).rsqrt()


def _gather_stats(
    like: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """One rank after another, as the kernel merges them."""
    kind = like.dtype if running_mean is None else running_mean.dtype
    assert counts.dtype == kind == means.dtype and kind in (torch.float32, torch.float64)
    mean, var, n = torch.zeros_like(means[0]), torch.zeros_like(means[0]), torch.zeros_like(counts[0])
    for m, s, count in zip(means, invstds, counts, strict=True):
        factor = 1 / (n + count)
        v = (1 / s).square() - eps
        var = var + v * count + (mean - m).square() * n * count * factor
        mean = n * factor * mean + count * factor * m
        n = n + count
    if running_mean is not None and running_var is not None:
        running_mean.mul_(1 - momentum).add_(mean * momentum)
        running_var.mul_(1 - momentum).add_(var / (n - 1) * momentum)
    return mean, (var / n + eps).rsqrt()


def _elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    _check(x, weight)
    y = (_rows(x) - mean) * invstd
    y = y if weight is None else y * weight
    return _back(y if bias is None else y + bias, x)


def _reduce(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    of_x: bool,
    of_w: bool,
    of_b: bool,
) -> tuple[Tensor, ...]:
    _check(x, weight)
    sum_dy, sum_dy_x = _rows(dy).sum(0), (_rows(dy) * (_rows(x) - mean)).sum(0)
    kind = mean.dtype if weight is None else weight.dtype
    return sum_dy, sum_dy_x, (sum_dy_x * invstd).to(kind), sum_dy.to(kind).clone()


def _backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_x: Tensor,
    counts: Tensor,
) -> Tensor:
    assert counts.dtype == torch.int32 and (weight is None or weight.dtype == mean.dtype)
    n = counts.sum()
    dx = _rows(dy) - sum_dy / n - (_rows(x) - mean) * invstd.square() * sum_dy_x / n
    return _back(dx * invstd * (1 if weight is None else weight), x)


def _rows(x: Tensor) -> Tensor:
    """[B, C, ...] as [B ..., C], in the dtype of the sums."""
    return x.movedim(1, -1).reshape(-1, x.shape[1]).to(torch.promote_types(x.dtype, torch.float32))


def _back(rows: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(rows.view(x.movedim(1, -1).shape).movedim(-1, 1))


def _check(x: Tensor, weight: Tensor | None) -> None:
    is_16_bits = x.dtype in (torch.bfloat16, torch.float16)
    assert weight is None or weight.dtype == x.dtype or (is_16_bits and weight.dtype == torch.float32)


KERNELS = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _gather_stats,
    "batch_norm_elemt": _elemt,
    "batch_norm_backward_reduce": _reduce,
    "batch_norm_backward_elemt": _backward_elemt,
}


@contextmanager
def on_the_cpu(*types: str) -> Iterator[None]:
    """Run the kernels' formulas on CPU tensors, for the device types that are named (cpu if none is)."""
    library = torch.library.Library("aten", "IMPL")
    for name, formula in KERNELS.items():
        library.impl(name, formula, "CPU")
    with patch.object(batch_norm, "FUSED", frozenset(types or ("cpu",))):
        yield
    library._destroy()
