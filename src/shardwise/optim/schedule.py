"""Schedules: the numbers of each optimizer group as a pure function of the optimizer steps that were applied.

With t the number of steps already applied (0 in the first step), w warm-up steps, T total steps, m the bottom ratio:

    constant ... wsd        lr times
        t < w:              (t + 1) / w
        else                p = (t - w) / (T - w), at most 1
            constant        1
            linear          1 - (1 - m) p
            cosine          m + (1 - m) (1 + cos πp) / 2         (arXiv:1608.03983, one cycle)
            polynomial      m + (1 - m) (1 - p)^power
            exponential     m^p
            wsd             1 - (1 - m) q,  q = share of the last ``decay_steps`` that is done

    warmup, warmup_linear   i = t - 1, w at least 2; lr = min + (max - min) g
        i < 0               g = 0
        i < w               ln(i + 1) / ln w, or i / w, or (1 - cos πi/w) / 2
        else                1, or (T - i) / (T - w), at least 0
    warmup_cosine           lr times 0; s + (1 - s) g; then m + (1 - m) (1 + cos πp) / 2 with p = (i - w + 1) / (T - w)

    one_cycle               place x in the cycle of a + b steps: up x / a, then down (a + b - x) / b; up to t = a + b
        lr                  min + (max - min) scale; after the cycle min / (1 + rate k), k = (t - a - b) / decay_steps
        momentum            max - (max - min) scale; after it max (1 + rate k); in the first step min
    range_test              min (1 + rate t / n), or min (1 + rate)^(t / n); whole intervals only with ``staircase``

A step that is skipped (fp16 overflow) changed no weight, so it does not count. The middle three and range_test are
DeepSpeed's curves to the last step; benchmarks/deepspeed/schedules.py compares them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.base.policy import Policy
from shardwise.optim.schedule_policy import (
    OneCyclePolicy,
    RangeTestPolicy,
    SchedulePolicy,
    WarmupCosinePolicy,
    WarmupPolicy,
)

Group = Mapping[str, Any]
"""Numbers of one group of an optimizer, by key."""


def rates(policy: Policy, groups: Sequence[Group], applied: int) -> list[dict[str, Any]]:
    """Return the numbers of each group after ``applied`` applied steps, with lr and momentum set by the schedule.

    Args:
        policy: the schedule.
        groups: numbers of each group before the schedule.
        applied: optimizer steps that were applied.
    """
    curve = _CURVES[type(policy)]
    return [
        {
            **{key: value for key, value in group.items() if key != "params"},
            **curve(policy, group, place, applied),
        }
        for place, group in enumerate(groups)
    ]


def factor(policy: Policy, group: Group, applied: int) -> float:
    """Return the first group's learning rate as a share of its top (of its start, in a range test).

    Learning rates of embedding tables are multiplied by this factor.

    Args:
        policy: the schedule.
        group: numbers of the first group before the schedule.
        applied: optimizer steps that were applied.
    """
    if isinstance(policy, SchedulePolicy):
        return _part(policy, applied)
    if isinstance(policy, WarmupCosinePolicy):
        return _cosine_part(policy, applied)
    assert isinstance(policy, WarmupPolicy | OneCyclePolicy | RangeTestPolicy), "torch's are no closed form"
    top = policy.min_lr if isinstance(policy, RangeTestPolicy) else policy.max_lr
    top = float(group["lr"]) if top is None else _of_group(top, 0)
    return float(_CURVES[type(policy)](policy, group, 0, applied)["lr"]) / top if top else 0.0


def is_constant(policy: Policy) -> bool:
    """Return True if every step uses the optimizer's own numbers."""
    return isinstance(policy, SchedulePolicy) and policy.type == "constant" and not policy.warmup_steps


def sets_rates(policy: Policy) -> bool:
    """Return True if learning rates come from the schedule and not from the optimizer."""
    has_top = isinstance(policy, WarmupPolicy) and policy.max_lr is not None
    return has_top or isinstance(policy, OneCyclePolicy | RangeTestPolicy)


def check_groups(policy: Policy, groups: Sequence[Group]) -> None:
    """Check that a schedule fits the groups of an optimizer.

    Raises:
        ConfigError: if a list has another length than ``groups``, or if the momentum of a group that has none is to be
            cycled.
    """
    for name in policy.__class__.model_fields:
        value = getattr(policy, name)
        if isinstance(value, list) and len(value) != len(groups):
            raise ConfigError(
                f"schedule.{name}: {len(value)} numbers for the optimizer's {len(groups)} groups (its own, then those "
                "of optimizer.groups); give one a group, or one for all"
            )
    if isinstance(policy, OneCyclePolicy) and policy.cycle_momentum:
        still = [i for i, group in enumerate(groups) if "betas" not in group and not group.get("momentum")]
        if still:
            raise ConfigError(
                f"schedule: one_cycle cycles the momentum, and group {still[0]} of the optimizer has neither betas nor "
                "a momentum above 0; give it one, or set schedule.cycle_momentum: false"
            )


def _of_group(value: Any, place: int) -> float:
    return float(value[place] if isinstance(value, list) else value)


# Parts of each group's own rate ------------------------------------------------------------------------------------


def _own(policy: SchedulePolicy, group: Group, place: int, applied: int) -> dict[str, Any]:
    return {"lr": float(group["lr"]) * _part(policy, applied)}


def _part(policy: SchedulePolicy, applied: int) -> float:
    if applied < policy.warmup_steps:
        return (applied + 1) / policy.warmup_steps
    if policy.type == "constant" or policy.total_steps is None:
        return 1.0
    bottom, total = policy.min_ratio, policy.total_steps
    progress = min((applied - policy.warmup_steps) / max(total - policy.warmup_steps, 1), 1.0)
    if policy.type == "exponential":
        return float(bottom**progress)
    if policy.type == "polynomial":
        return float(bottom + (1 - bottom) * (1 - progress) ** policy.power)
    if policy.type == "wsd":
        steps = policy.decay_steps or max(total // 10, 1)
        falls = min(max(applied - (total - steps), 0) / steps, 1.0)
    else:
        falls = progress if policy.type == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return 1 - (1 - bottom) * falls


# Warm-ups by the logarithm -----------------------------------------------------------------------------------------


def _risen(rise: str, since: int, steps: int) -> float:
    """Return the share of the warm-up that is done ``since`` steps after the second step."""
    if rise == "log":
        return math.log(since + 1) / math.log(steps)
    part = since / steps
    return (1 - math.cos(math.pi * part)) / 2 if rise == "cosine" else part


def _warmup(policy: WarmupPolicy, group: Group, place: int, applied: int) -> dict[str, Any]:
    since, steps = applied - 1, max(policy.warmup_steps, 2)
    low = _of_group(policy.min_lr, place)
    high = float(group["lr"]) if policy.max_lr is None else _of_group(policy.max_lr, place)
    if since < 0:
        return {"lr": low}
    if since < steps:
        part = _risen(policy.rise, since, steps)
    elif policy.type == "warmup" or policy.total_steps is None:
        part = 1.0
    else:
        part = max((policy.total_steps - since) / max(policy.total_steps - steps, 1), 0.0)
    return {"lr": low + (high - low) * part}


def _warmup_cosine(policy: WarmupCosinePolicy, group: Group, place: int, applied: int) -> dict[str, Any]:
    return {"lr": float(group["lr"]) * _cosine_part(policy, applied)}


def _cosine_part(policy: WarmupCosinePolicy, applied: int) -> float:
    since, steps = applied - 1, max(policy.warmup_steps, 2)
    if since < 0:
        return 0.0
    if since < steps:
        return policy.start_ratio + (1 - policy.start_ratio) * _risen(policy.rise, since, steps)
    assert policy.total_steps is not None, "resolved"
    progress = min((since - steps + 1) / max(policy.total_steps - steps, 1), 1.0)
    return policy.min_ratio + (1 - policy.min_ratio) * (1 + math.cos(math.pi * progress)) / 2


# One cycle ---------------------------------------------------------------------------------------------------------


def _one_cycle(policy: OneCyclePolicy, group: Group, place: int, applied: int) -> dict[str, Any]:
    fall_steps = policy.rise_steps if policy.fall_steps is None else policy.fall_steps
    after = applied - policy.rise_steps - fall_steps
    intervals = after / policy.decay_steps if after > 0 and policy.decay_steps else 0.0
    scale = 0.0 if after > 0 else _cycle_scale(policy, fall_steps, applied)
    low, high = _of_group(policy.min_lr, place), _of_group(policy.max_lr, place)
    changed: dict[str, Any] = {"lr": (low + (high - low) * scale) / (1 + policy.decay_lr_rate * intervals)}
    if not policy.cycle_momentum:
        return changed
    least, most = _of_group(policy.min_momentum, place), _of_group(policy.max_momentum, place)
    momentum = least if applied == 0 else most - (most - least) * scale
    momentum *= 1 + policy.decay_momentum_rate * intervals
    if "betas" in group:
        _, *others = group["betas"]
        changed["betas"] = (momentum, *(others if policy.second_beta is None else [policy.second_beta]))
    else:
        changed["momentum"] = momentum
    return changed


def _cycle_scale(policy: OneCyclePolicy, fall_steps: int, applied: int) -> float:
    """Return the height in the cycle, 0 to 1.

    Stairs are counted in whole numbers of steps, because a rounded share may fall just below a stair.
    """
    rise_steps = policy.rise_steps
    place = applied % (rise_steps + fall_steps)
    rises = place <= rise_steps
    stairs = policy.rise_stairs if rises or policy.fall_stairs is None else policy.fall_stairs
    done, steps = (place, rise_steps) if rises else (rise_steps + fall_steps - place, fall_steps)
    return (done * stairs // steps) / stairs if stairs else done / steps


# Range test --------------------------------------------------------------------------------------------------------


def _range_test(policy: RangeTestPolicy, group: Group, place: int, applied: int) -> dict[str, Any]:
    intervals = applied / policy.interval_steps
    if policy.staircase:
        intervals = applied // policy.interval_steps
    grown = 1 + policy.rate * intervals if policy.growth == "linear" else (1 + policy.rate) ** intervals
    return {"lr": _of_group(policy.min_lr, place) * grown}


_CURVES: Mapping[type[Policy], Callable[[Any, Group, int, int], dict[str, Any]]] = {
    SchedulePolicy: _own,
    WarmupPolicy: _warmup,
    WarmupCosinePolicy: _warmup_cosine,
    OneCyclePolicy: _one_cycle,
    RangeTestPolicy: _range_test,
}
