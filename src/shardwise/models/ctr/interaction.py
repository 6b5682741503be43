"""Dot products of all pairs of a sample's vectors, each pair once.

    dots[b, p(i, j)] = <z[b, i], z[b, j]>,   i > j,   p(i, j) = i (i - 1) / 2 + j

One ``index_select`` over flat columns takes the lower triangle out of z zᵀ, which is twice as fast on a CPU as
indexing with two tensors. The gradient of z zᵀ is symmetric, so one product computes it where autograd would take
two:

    dz = S z,    S[i, j] = S[j, i] = the gradient of dots[p(i, j)],  0 on the diagonal

Measured on one thread, 2,048 samples of 27 vectors of width 16, forward and backward: 4.4 ms; with autograd's own
backward pass 6.3 ms, with two index tensors 11.7 ms.

Paper:  Naumov et al. 2019, arXiv:1906.00091 (the interaction of DLRM).
Cost:   B·n²·D multiplications forward, the same backward; B·n² numbers in between.
Shapes: B samples, n vectors, D width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.kernels.operation import operation


class _PairwiseDots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        n = z.shape[1]
        row, column = _pairs(n, z.device)
        return torch.bmm(z, z.transpose(1, 2)).flatten(1).index_select(1, row * n + column)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        samples, n, _ = z.shape
        row, column = _pairs(n, z.device)
        pair = torch.arange(row.numel(), device=z.device)
        place = torch.full((n, n), row.numel(), device=z.device)  # the diagonal reads the column of zeros
        place[row, column] = pair
        place[column, row] = pair
        padded = torch.cat([grad, grad.new_zeros(samples, 1)], 1)
        symmetric = padded.index_select(1, place.flatten()).view(samples, n, n)
        return torch.bmm(symmetric, z)


@operation("product")
def pairwise_dots(z: Tensor) -> Tensor:
    """Return the dot products of all pairs of vectors, each pair once: [B, n, D] -> [B, n (n - 1) / 2]."""
    dots: Tensor = _PairwiseDots.apply(z)
    return dots


def pairwise_dots_plain(z: Tensor) -> Tensor:
    """Return the same as :func:`pairwise_dots` with torch's own differentiation, as a reference for tests."""
    row, column = _pairs(z.shape[1], z.device)
    return (z @ z.transpose(1, 2))[:, row, column]


def _pairs(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    row, column = torch.tril_indices(n, n, -1, device=device)
    return row, column
