"""OptimizerPolicy and SchedulePolicy: what updates the masters, and with which learning rate."""

from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from shardwise.plan.policy import Policy


class GroupPolicy(Policy):
    """One entry of ``optimizer.groups``: parameters by name, and what differs for them."""

    match: str
    """Patterns of parameter names, separated by ``|``; ``*`` stands for anything. The first group that matches wins."""
    lr: NonNegativeFloat | None = None
    """Learning rate of the group; left out, the optimizer's."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of the group; left out, the optimizer's."""

    def matches(self, name: str) -> bool:
        """True where the parameter ``name`` belongs to the group."""
        return any(fnmatchcase(name, pattern.strip()) for pattern in self.match.split("|"))


class OptimizerPolicy(Policy):
    """Keys under ``optimizer:``."""

    type: Literal["adam", "adamw", "sgd"] = "adamw"
    """Adam (arXiv:1412.6980), AdamW (arXiv:1711.05101), or SGD with momentum."""
    lr: NonNegativeFloat = 1e-3
    """Learning rate at the top of the schedule."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of Adam's two moments."""
    eps: PositiveFloat = 1e-8
    """Adam's addend in the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled for AdamW, added to the gradient for Adam and SGD."""
    momentum: NonNegativeFloat = 0.0
    """SGD's momentum; Adam ignores none of its keys, so it must be 0 there."""
    nesterov: bool = False
    """Nesterov's form of SGD with momentum."""
    groups: list[GroupPolicy] = Field(default_factory=list)
    """Exceptions by parameter name."""

    def group_of(self, name: str) -> int:
        """Index of the options for the parameter ``name``: 0 the optimizer's own, i+1 the i-th entry of ``groups``."""
        return next((i + 1 for i, group in enumerate(self.groups) if group.matches(name)), 0)

    def options(self) -> list[dict[str, Any]]:
        """Keyword arguments of the torch optimizer per group."""
        own: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.type == "sgd":
            own |= {"momentum": self.momentum, "nesterov": self.nesterov}
        else:
            own |= {"betas": self.betas, "eps": self.eps}
        exceptions = [group.model_dump(exclude={"match"}, exclude_none=True) for group in self.groups]
        return [own, *({**own, **exception} for exception in exceptions)]


class SchedulePolicy(Policy):
    """Keys under ``schedule:``; steps are optimizer steps, whatever the accumulation and the number of ranks."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises linearly from near 0 to its top."""
    total_steps: PositiveInt | None = None
    """Steps at whose end ``linear`` and ``cosine`` reach the bottom; left out, ``train.steps``."""
    min_ratio: NonNegativeFloat = 0.0
    """Bottom of the learning rate, as a part of its top."""
