"""Optimizers of rows, and rows for them."""

import torch
from torch import Tensor

from shardwise.kernels.tables.row_rules import (
    Adagrad,
    Adam,
    Ftrl,
    Momentum,
    RowOptimizer,
    RowwiseAdagrad,
    Sgd,
)

ROWS, WIDTH = 50, 19


ALL: list[RowOptimizer] = [
    Sgd(),
    Sgd(weight_decay=0.1),
    Momentum(0.8),
    Momentum(0.9, nesterov=True, weight_decay=0.01),
    Adagrad(initial=0.1),
    Adagrad(weight_decay=0.01),
    RowwiseAdagrad(initial=0.1),
    RowwiseAdagrad(weight_decay=0.01),
    Adam(),
    Adam(0.8, 0.99, weight_decay=0.1),
    Adam(exact=True),
    Ftrl(),
    Ftrl(l1=0.3, l2=0.1, beta=0.5, initial=0.2),
]


def slab_of(optimizer: RowOptimizer, weights: Tensor) -> Tensor:
    rows, width = weights.shape
    state = torch.tensor([optimizer.start(width)], dtype=weights.dtype).expand(rows, -1)
    assert state.shape[1] == optimizer.columns(width)
    return torch.cat([weights, state], 1).contiguous()


def batch(dtype: torch.dtype, rows: int = ROWS, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    touched = torch.randperm(rows)[: 3 * rows // 5]
    return touched, torch.randn(len(touched), width, dtype=dtype)
