"""The code of kernels in a CPU process: pages of torch's libraries that the system reads when they are first used.

A pass on shapes runs no kernels, so a process that has foreseen a job is smaller than one that runs it, by 10 to 30 MB.
``load_kernels`` runs each kind of kernel once on a few numbers, so that the size of this process is that of a rank.

Cost: some milliseconds.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.precision.policy import DTYPES

_SIDE = 32


def load_kernels(kinds: Iterable[tuple[str, str]]) -> None:
    """Run kernels forward and backward on a few numbers, without drawing any.

    Args:
        kinds: Pairs of a kind of product (``product``, ``attention`` or ``convolution``) and its dtype, as fp32.
    """
    with torch.enable_grad():
        for kind, name in sorted(set(kinds)):
            _sum_of(kind, DTYPES.get(name, torch.float32)).sum().backward()
        _loss().backward()


def _sum_of(kind: str, dtype: torch.dtype) -> Tensor:
    if kind == "convolution":
        pictures = _ones(2, 4, _SIDE, _SIDE, dtype=dtype)
        found = F.relu(F.conv2d(pictures, _ones(8, 4, 3, 3, dtype=dtype), padding=1))
        found = F.batch_norm(found.float(), None, None, training=True)
        return F.max_pool2d(found, 2)
    if kind == "attention":
        heads = _ones(1, 2, _SIDE, 8, dtype=dtype)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return F.silu(_ones(_SIDE, _SIDE, dtype=dtype) @ _ones(_SIDE, _SIDE, dtype=dtype))


def _loss() -> Tensor:
    rows = F.embedding(torch.arange(4), _ones(4, _SIDE))
    rows = F.gelu(F.layer_norm(F.rms_norm(rows, (_SIDE,)), (_SIDE,)))
    return F.cross_entropy(rows, torch.zeros(4, dtype=torch.int64))


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype, requires_grad=True)
