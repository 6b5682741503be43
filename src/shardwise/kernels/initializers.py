"""Initializers: the distributions that start weights are drawn from, of parameters as of rows of tables.

    Normal(0.02)    Uniform(-0.1, 0.1)    Constant(1.0)

They are plain data; ``models.initial`` draws parameters from them, ``kernels.tables.start_rows`` rows.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Normal:
    """About ``mean``, with standard deviation ``std``."""

    std: float
    mean: float = 0.0


@dataclass(frozen=True)
class Uniform:
    """Between ``low`` and ``high``."""

    low: float
    high: float


@dataclass(frozen=True)
class Constant:
    """Every element the same."""

    value: float


Initializer = Normal | Uniform | Constant
