"""A schedule as an object that steps, for loops written around ``scheduler.step()``.

The engine needs none: it computes what a schedule says from the steps that were applied. This one does the same on
whatever has ``param_groups``, and writes there, as torch's schedulers do.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from shardwise.optim import schedule
from shardwise.optim.schedule_policy import TorchSchedulePolicy
from shardwise.optim.torch_schedule import TorchSchedule
from shardwise.plan.policy import Policy


class HasGroups(Protocol):
    """An optimizer, or what stands for one."""

    param_groups: list[dict[str, Any]]


class Scheduler:
    """Writes the numbers of the next step into ``optimizer.param_groups``: when it is made, and in each ``step``.

    What the groups hold when it is made is what parts are taken of. ``applied``: steps that were applied before.
    Errors: ConfigError where the groups do not fit the schedule.
    """

    def __init__(self, optimizer: HasGroups, policy: Policy, applied: int = 0) -> None:
        self.optimizer = optimizer
        self.policy = policy
        self.applied = applied
        self._base = [
            {key: _kept(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        schedule.check_groups(policy, self._base)
        self._torch = TorchSchedule(policy, self._base) if isinstance(policy, TorchSchedulePolicy) else None
        self._write()

    def step(self, applied: int | None = None) -> None:
        """One more step was applied, or ``applied`` in all."""
        self.applied = self.applied + 1 if applied is None else applied
        self._write()

    def numbers(self) -> list[dict[str, Any]]:
        """What each group works with in the next step."""
        if self._torch is not None:
            return self._torch.rates(self.applied)
        return schedule.rates(self.policy, self._base, self.applied)

    def get_lr(self) -> list[float]:
        """Learning rates of the next step, one a group."""
        return [float(group["lr"]) for group in self.numbers()]

    def get_last_lr(self) -> list[float]:
        """Those that stand in the groups now."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        """Its place, as JSON."""
        return {"applied": self.applied}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on at a place. What stands in the groups comes from the optimizer's own checkpoint."""
        self.applied = int(state["applied"])

    def _write(self) -> None:
        for group, numbers in zip(self.optimizer.param_groups, self.numbers(), strict=True):
            for key in ("lr", "betas", "momentum"):
                if key not in numbers:
                    continue
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(numbers[key])
                else:
                    group[key] = numbers[key]


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
