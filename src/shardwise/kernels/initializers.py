"""Initializers: the distributions that start weights are drawn from, for parameters and for rows of tables.

    Normal(0.02)    Uniform(-0.1, 0.1)    Constant(1.0)

They are plain data; ``models.initial`` draws parameters from them, ``kernels.tables.start_rows`` rows.
"""

import math
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Normal:
    """Normal distribution with mean ``mean`` and standard deviation ``std``."""

    std: float
    mean: float = 0.0


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution between ``low`` and ``high``."""

    low: float
    high: float


@dataclass(frozen=True)
class Constant:
    """Constant value of every element."""

    value: float


Initializer = Normal | Uniform | Constant


def of_torch(module: nn.Module, local: str) -> Initializer | None:
    """Return the distribution of the parameter ``local`` in torch's own ``reset_parameters`` of a common module.

    None for other modules.
    """
    if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        inputs = module.weight[0].numel()
        return of_linear(inputs) if inputs else Constant(0.0)
    if isinstance(module, nn.Embedding) and module.padding_idx is None:
        return Normal(1.0)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)):
        return Constant(1.0 if local == "weight" else 0.0)
    return None


def of_linear(inputs: int) -> Uniform:
    """Return the distribution of the weight and the bias of a linear layer with ``inputs`` inputs."""
    bound = 1 / math.sqrt(inputs)
    return Uniform(-bound, bound)
