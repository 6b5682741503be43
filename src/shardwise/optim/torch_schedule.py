"""A scheduler of torch as a function of the applied steps: the scheduler steps on separate groups, which are then read.

torch's schedulers are state machines, so step t costs t steps the first time (microseconds each) and one after that; a
checkpoint needs none of their state, because it contains the number of applied steps.
"""

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from shardwise.base.errors import ConfigError
from shardwise.base.policy import nearest
from shardwise.optim.schedule import Group
from shardwise.optim.schedule_policy import TorchSchedulePolicy

_KNOWN = sorted(
    name
    for name, thing in vars(lr_scheduler).items()
    if inspect.isclass(thing)
    and issubclass(thing, lr_scheduler.LRScheduler)
    and not name.startswith("_")
    and name not in ("LRScheduler", "ReduceLROnPlateau")
)


class TorchSchedule:
    """Scheduler of torch as a function of the applied steps.

    Args:
        policy: name and arguments of the scheduler.
        groups: numbers of the optimizer's groups before the schedule.

    Raises:
        ConfigError: if torch has no such scheduler or refuses its arguments.
    """

    def __init__(self, policy: TorchSchedulePolicy, groups: Sequence[Group]) -> None:
        self._policy = policy
        self._groups = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        if policy.scheduler not in _KNOWN:
            why = ""
            if policy.scheduler == "ReduceLROnPlateau":
                why = ", which looks at a loss: make it in your loop, on the optimizer that initialize() is given"
            raise ConfigError(
                f"schedule.scheduler: {policy.scheduler!r} is none of torch's that step by themselves"
                + (why or nearest(policy.scheduler, _KNOWN))
            )
        self._restart()

    def rates(self, applied: int) -> list[dict[str, Any]]:
        """Return the numbers of the groups after ``applied`` applied steps."""
        if applied < self._stepped:
            self._restart()
        while self._stepped < applied:
            self._stepped += 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that no optimizer stepped before
                self._scheduler.step()
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]

    def factor(self, applied: int) -> float:
        """Return the first group's rate as a share of its ``max_lr``, or of its initial rate."""
        first = self.rates(applied)[0]
        top = float(first.get("max_lr", first["initial_lr"]))
        return float(first["lr"]) / top if top else 0.0

    def _restart(self) -> None:
        self._stepped = 0
        # Each group gets a parameter of its own, which nothing steps: torch rejects one that is in two groups.
        made = [{"params": [nn.Parameter(torch.zeros(()))], **group} for group in self._groups]
        self._optimizer = optim.Optimizer(made, dict(self._groups[0]))
        make = getattr(lr_scheduler, self._policy.scheduler)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._scheduler = make(self._optimizer, **self._policy.arguments)
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"schedule.arguments: {self._policy.scheduler} refuses them: {error}; give what its page in torch's "
                "documentation names, numbers alone"
            ) from None
