"""Learning-rate schedules, as a pure function of the optimizer steps that were applied.

With t the number of steps already applied, w warm-up steps, T total steps, m the bottom ratio:

    t < w:    (t + 1) / w
    else      p = (t - w) / (T - w), at most 1
              constant  1
              linear    1 - (1 - m) p
              cosine    m + (1 - m) (1 + cos πp) / 2         (arXiv:1608.03983, one cycle)

A step that is skipped (fp16 overflow) changed no weight, so it does not count.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.optim.policy import SchedulePolicy


def factor(policy: SchedulePolicy, step: int) -> float:
    """What the learning rate is multiplied by when ``step`` steps are applied."""
    if step < policy.warmup_steps:
        return (step + 1) / policy.warmup_steps
    if policy.type == "constant" or policy.total_steps is None:
        return 1.0
    progress = min((step - policy.warmup_steps) / max(policy.total_steps - policy.warmup_steps, 1), 1.0)
    falls = progress if policy.type == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return 1 - (1 - policy.min_ratio) * falls


def rates(policy: SchedulePolicy, groups: Sequence[Mapping[str, Any]], step: int) -> list[dict[str, Any]]:
    """What each group of an optimizer works with when ``step`` steps are applied: its numbers, lr by the schedule."""
    part = factor(policy, step)
    return [
        {**{key: value for key, value in group.items() if key != "params"}, "lr": float(group["lr"]) * part}
        for group in groups
    ]
