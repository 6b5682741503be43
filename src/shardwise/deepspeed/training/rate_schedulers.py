"""``deepspeed.runtime.lr_schedules``: scheduler objects for scripts, based on the curves of optim/schedule.py.

    scheduler = WarmupLR(optimizer, warmup_max_lr=1e-3, warmup_num_steps=100)
    scheduler.step()                              engine.step() calls it after each step that was applied

Each scheduler stores a policy and a step count, and writes lr (OneCycle also the first beta) into the optimizer's
``param_groups``, which the engine reads before every step.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from torch import optim

from shardwise.base.errors import ConfigError
from shardwise.base.policy import Policy
from shardwise.optim.schedule import check_groups, rates
from shardwise.optim.schedule_policy import (
    OneCyclePolicy,
    RangeTestPolicy,
    TorchSchedulePolicy,
    WarmupCosinePolicy,
    WarmupPolicy,
)

PerGroup = float | Sequence[float] | None

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
"""The scheduler names of DeepSpeed under ``scheduler.type``; other names are torch's."""


class RateScheduler:
    """A scheduler that applies the rates of ``policy`` to ``optimizer``.

    ``last_batch_iteration`` is the number of applied steps minus one.
    """

    def __init__(self, optimizer: optim.Optimizer, policy: Policy, last_batch_iteration: int = -1):
        self.optimizer = optimizer
        self.policy = policy
        self.last_batch_iteration = last_batch_iteration
        self._own = [
            {key: _kept(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        check_groups(policy, self._own)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", _kept(group["lr"]))  # as torch's schedulers do
        if last_batch_iteration == -1:
            self._write()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Count one more applied step, or set the count, and write the rates of the next step.

        Args:
            last_batch_iteration: The number of applied steps minus one; None: one step more than before.
        """
        after = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = after
        self._write()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group for the next step."""
        return [float(each["lr"]) for each in self._rates()]

    get_last_lr = get_lr

    def get_mom(self) -> list[Any]:
        """Return the betas or the momentum of each parameter group for the next step."""
        return [each.get("betas", each.get("momentum")) for each in self._rates()]

    def state_dict(self) -> dict[str, int]:
        """Return the step count."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, int]) -> None:
        """Restore a step count and write the rates of the next step."""
        self.last_batch_iteration = int(sd["last_batch_iteration"])
        self._write()

    def _rates(self) -> list[dict[str, Any]]:
        return rates(self.policy, self._own, self.last_batch_iteration + 1)

    def _write(self) -> None:
        for group, now in zip(self.optimizer.param_groups, self._rates(), strict=True):
            for key in ("lr", "betas", "momentum"):
                if key not in now:
                    continue
                if hasattr(group[key], "fill_"):  # compiled optimizers store the rate as a tensor
                    group[key].fill_(now[key])
                else:
                    group[key] = now[key]

    def _by_group(self, value: Any) -> list[Any]:
        """Return ``value`` per group: a list's items, one number for all groups, or each group's own rate for None."""
        if isinstance(value, (list, tuple)):
            return list(value)
        return [float(own["lr"]) if value is None else value for own in self._own]


def _kept(value: Any) -> Any:
    """Return a copy of a tensor, which ``step`` writes in place; return any other value as it is."""
    return value.clone() if hasattr(value, "fill_") else value


def _policy(form: type[Policy], **keys: Any) -> Any:
    """Build a policy from ``keys``.

    Raises:
        ConfigError: if a key is wrong; the error names the first one.
    """
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in keys.items()}
    try:
        return form.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"scheduler: {where}: {first['msg']} (given {first['input']!r:.100})") from None


class LRRangeTest(RateScheduler):
    """A schedule whose rates grow without end, to find the highest rate that trains."""

    def __init__(
        self,
        optimizer: optim.Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ):
        policy = _policy(
            RangeTestPolicy,
            type="range_test",
            min_lr=lr_range_test_min_lr,
            interval_steps=lr_range_test_step_size,
            rate=lr_range_test_step_rate,
            staircase=lr_range_test_staircase,
        )
        super().__init__(optimizer, policy, last_batch_iteration)


class _RateBounds:
    """The lowest and highest rate of each group, under DeepSpeed's names."""

    policy: Any
    _by_group: Any

    @property
    def min_lrs(self) -> list[float]:
        """The lowest rate of each group."""
        return list(self._by_group(self.policy.min_lr))

    @property
    def max_lrs(self) -> list[float]:
        """The highest rate of each group."""
        return list(self._by_group(self.policy.max_lr))


class OneCycle(_RateBounds, RateScheduler):
    """A schedule whose rates rise and fall once while momenta fall and rise; the second beta is 0.99.

    A group without betas keeps its momentum.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ):
        decays = bool(decay_step_size)
        policy = _policy(
            OneCyclePolicy,
            type="one_cycle",
            min_lr=cycle_min_lr,
            max_lr=cycle_max_lr,
            rise_steps=cycle_first_step_size,
            fall_steps=cycle_second_step_size,
            rise_stairs=cycle_first_stair_count,
            fall_stairs=cycle_second_stair_count,
            decay_steps=decay_step_size,
            decay_lr_rate=decay_lr_rate if decays else 0.0,
            cycle_momentum=cycle_momentum and all("betas" in group for group in optimizer.param_groups),
            min_momentum=cycle_min_mom,
            max_momentum=cycle_max_mom,
            decay_momentum_rate=decay_mom_rate if decays else 0.0,
            second_beta=0.99,
        )
        super().__init__(optimizer, policy, last_batch_iteration)

    @property
    def step_ratio(self) -> float:
        """The first half of the cycle as a fraction of the whole cycle."""
        rise, fall = self.policy.rise_steps, self.policy.fall_steps
        return float(rise / (rise + (rise if fall is None else fall)))

    def get_mom(self) -> list[Any]:
        """Return the betas or the momentum of each parameter group for the next step.

        Before the first step, the result is the highest value of the curve, as in DeepSpeed, although the groups have
        the lowest value then, also as in DeepSpeed.
        """
        found = super().get_mom()
        if self.last_batch_iteration >= 0 or not self.policy.cycle_momentum:
            return found
        tops = self._by_group(self.policy.max_momentum)
        return [
            (top, *now[1:]) if isinstance(now, (list, tuple)) else top
            for top, now in zip(tops, found, strict=True)
        ]


class _WarmupNumbers:
    """The properties of the rise at the start, under DeepSpeed's names."""

    policy: Any

    @property
    def warmup_num_steps(self) -> int:
        """The number of steps of the rise, at least 2."""
        return max(2, int(self.policy.warmup_steps))

    @property
    def warmup_type(self) -> str:
        """The shape of the rise: ``log`` or ``linear``."""
        return str(self.policy.rise)


def _steps_of_rise(given: int | None) -> int:
    """Return ``given``; raise ConfigError for None, which the policy would replace by its default."""
    if given is None:
        raise ConfigError("scheduler: warmup_num_steps is None; give a number of steps, or leave it out")
    return given


def _warmup(
    form: str, low: PerGroup, top: PerGroup, steps: int, rise: str, total_steps: int | None = None
) -> Any:
    return _policy(
        WarmupPolicy,
        type=form,
        min_lr=low,
        max_lr=top,
        warmup_steps=_steps_of_rise(steps),
        rise=rise,
        total_steps=total_steps,
    )


class WarmupLR(_RateBounds, _WarmupNumbers, RateScheduler):
    """A schedule that rises to the highest rate and keeps that rate; None stands for each group's own rate."""

    def __init__(
        self,
        optimizer: optim.Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        policy = _warmup("warmup", warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)
        super().__init__(optimizer, policy, last_batch_iteration)


class WarmupDecayLR(_RateBounds, _WarmupNumbers, RateScheduler):
    """A schedule that rises to the highest rate and then falls linearly to 0 at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        rise = (warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)
        policy = _warmup("warmup_linear", *rise, total_steps=total_num_steps)
        super().__init__(optimizer, policy, last_batch_iteration)


class WarmupCosineLR(_WarmupNumbers, RateScheduler):
    """A schedule that rises to each group's own rate and then falls to a fraction of it along half a cosine."""

    def __init__(
        self,
        optimizer: optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        policy = _policy(
            WarmupCosinePolicy,
            type="warmup_cosine",
            warmup_steps=_steps_of_rise(warmup_num_steps),
            rise=warmup_type,
            start_ratio=warmup_min_ratio,
            min_ratio=cos_min_ratio,
            total_steps=total_num_steps,
        )
        super().__init__(optimizer, policy, last_batch_iteration)

    def get_lr_ratio(self) -> float:
        """Return the rate of the next step as a fraction of each group's own rate."""
        return float(rates(self.policy, [{"lr": 1.0}], self.last_batch_iteration + 1)[0]["lr"])


_BY_TYPE: dict[str, type[RateScheduler]] = {
    "range_test": LRRangeTest,
    "one_cycle": OneCycle,
    "warmup": WarmupLR,
    "warmup_linear": WarmupDecayLR,
    "warmup_cosine": WarmupCosineLR,
}


def scheduler_of(policy: Any, optimizer: optim.Optimizer) -> Any:
    """Return the scheduler of a ``schedule:`` block of the configuration: a class of this module, or torch's.

    Args:
        policy: The policy of the block.
        optimizer: The optimizer whose rates the scheduler sets.

    Raises:
        ConfigError: if torch's scheduler refuses its arguments.
    """
    if isinstance(policy, TorchSchedulePolicy):
        try:
            return getattr(optim.lr_scheduler, policy.scheduler)(optimizer, **policy.arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"scheduler.params: {policy.scheduler} of torch refuses them: {error}"
            ) from None
    cls = _BY_TYPE[policy.type]
    made = cls.__new__(cls)
    RateScheduler.__init__(made, optimizer, policy)
    return made


_ARGUMENTS = {
    "lr_range_test_min_lr": 0.001,
    "lr_range_test_step_rate": 1.0,
    "lr_range_test_step_size": 1000,
    "cycle_first_step_size": 1000,
    "cycle_second_step_size": -1,
    "cycle_first_stair_count": -1,
    "cycle_second_stair_count": -1,
    "decay_step_size": 1000,
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "decay_lr_rate": 0.0,
    "cycle_min_mom": 0.8,
    "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0,
    "warmup_min_lr": 0.0,
    "warmup_max_lr": 0.001,
    "warmup_num_steps": 1000,
    "warmup_min_ratio": 0.01,
    "cos_min_ratio": 0.01,
    "total_num_steps": 1000,
}


def add_tuning_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add ``--lr_schedule TYPE`` and an argument for each of the schedulers' numbers to ``parser``, and return it."""
    group = parser.add_argument_group("Convergence Tuning", "learning rate and momentum over the steps")
    group.add_argument("--lr_schedule", type=str, default=None, help=", ".join(VALID_LR_SCHEDULES))
    group.add_argument("--lr_range_test_staircase", action="store_true")
    group.add_argument("--cycle_momentum", action="store_true")
    group.add_argument("--warmup_type", type=str, default="log")
    for name, default in _ARGUMENTS.items():
        group.add_argument(f"--{name}", type=type(default), default=default)
    return parser
