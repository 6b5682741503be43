"""An exponential moving average of the weights, kept beside the masters like a moment of the optimizer.

    first update       a = w                       as torch.optim.swa_utils.AveragedModel
    every later one    a = a + (1 - decay) (w - a)

The average has the masters' dtype, cut and tier, so it is sharded as they are, moves with them, and is saved and loaded
on any layout as a moment is. It is part of STEP: each bucket's average follows its update.

Paper: Polyak and Juditsky 1992; of exponential weights Tarvainen and Valpola 2017, arXiv:1703.01780.
Cost:  one number for each trained element, in the masters' dtype; one pass over both in each update.
"""

from typing import Annotated

from pydantic import Field

from shardwise.base.policy import Policy

EMA = "ema"
"""Name of the average among the moments, in the registry, the Plan and a checkpoint."""


class EmaPolicy(Policy):
    """Moving average of the weights: keys under ``ema:``."""

    decay: Annotated[float, Field(ge=0, lt=1)]
    """Share of the average that an update keeps: 0.999 averages over about 1,000 steps."""
    evaluate: bool = True
    """Use the average in place of the weights in ``engine.evaluate`` and in the evaluations of ``shardwise train``."""
