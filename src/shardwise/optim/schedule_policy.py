"""Policies of ``schedule:``: one of six forms, distinguished by ``type``.

    constant linear cosine polynomial exponential wsd    a share of each group's learning rate, over the steps
    warmup warmup_linear warmup_cosine                    the same with a logarithmic rise; DeepSpeed's curves
    one_cycle                                             rates and momenta between two bounds; DeepSpeed's curve
    range_test                                            rates that grow until the training fails
    torch                                                 a scheduler of torch.optim.lr_scheduler, by its name

The curves are in schedule.py. A learning rate in these policies is one number for all groups of the optimizer or a list
with one for each group: the optimizer's own, then ``optimizer.groups`` in their order.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)

from shardwise.base.policy import Policy, nearest

PerGroup = NonNegativeFloat | Annotated[list[NonNegativeFloat], Field(min_length=1)]
"""One number for all groups, or a list with one for each group."""


class SchedulePolicy(Policy):
    """Learning rate over the steps: keys under ``schedule:``.

    Steps are optimizer steps that were applied, whatever the accumulation and the number of ranks.
    """

    type: Literal["constant", "linear", "cosine", "polynomial", "exponential", "wsd"] = "constant"
    """Shape after the warm-up; ``wsd`` (warm-up, stable, decay) stays at the top and falls linearly at the end. With
    other types (``warmup``, ``warmup_linear``, ``warmup_cosine``, ``one_cycle``, ``range_test``, ``torch``) the block
    has other keys.
    """
    warmup_steps: NonNegativeInt = 0
    """Number of steps in which the learning rate rises linearly from near 0 to its top."""
    total_steps: PositiveInt | None = None
    """Number of steps after which the bottom is reached; left out, ``train.steps``."""
    min_ratio: NonNegativeFloat = 0.0
    """Bottom of the learning rate, as a share of its top."""
    power: PositiveFloat = 1.0
    """Exponent of ``polynomial``."""
    decay_steps: PositiveInt | None = None
    """Steps of the fall at the end of ``wsd``; left out, a tenth of ``total_steps``."""

    @model_validator(mode="after")
    def _check(self) -> "SchedulePolicy":
        if self.type != "polynomial" and self.power != 1.0:
            raise ValueError(f"power is for polynomial, and type is {self.type}; remove it")
        if self.type != "wsd" and self.decay_steps is not None:
            raise ValueError(f"decay_steps is for wsd, and type is {self.type}; remove it")
        if self.type == "exponential" and not self.min_ratio:
            raise ValueError(
                "exponential falls by equal factors and never reaches 0; give min_ratio, as in 0.01"
            )
        return self


class WarmupPolicy(Policy):
    """Rise from ``min_lr`` to ``max_lr``; then ``warmup`` stays there and ``warmup_linear`` falls to 0.

    DeepSpeed's WarmupLR and WarmupDecayLR: both the first and the second step are at the bottom.
    """

    type: Literal["warmup", "warmup_linear"]
    """Shape after the warm-up."""
    min_lr: PerGroup = 0.0
    """Learning rate at the start, of all groups or a list with one for each group."""
    max_lr: PerGroup | None = None
    """Learning rate at the top, of all groups or a list with one for each group; left out, the optimizer's."""
    warmup_steps: PositiveInt = 1000
    """Steps of the rise; 1 counts as 2."""
    rise: Literal["log", "linear", "cosine"] = "log"
    """Shape of the rise: the logarithm of the step, the step, or half a cosine of it, which begins and ends flat."""
    total_steps: PositiveInt | None = None
    """Number of steps after which ``warmup_linear`` reaches 0; left out, ``train.steps``."""

    @model_validator(mode="after")
    def _check(self) -> "WarmupPolicy":
        if self.type == "warmup" and self.total_steps is not None:
            raise ValueError(
                "total_steps is for warmup_linear: warmup stays at the top; change the type or remove it"
            )
        return self


class WarmupCosinePolicy(Policy):
    """Rise to each group's own learning rate and fall by half a cosine, both as shares of that rate.

    DeepSpeed's WarmupCosineLR: the first step is at 0, the second at ``start_ratio``.
    """

    type: Literal["warmup_cosine"]
    """Shape of the schedule."""
    warmup_steps: PositiveInt = 1000
    """Steps of the rise; 1 counts as 2."""
    rise: Literal["log", "linear", "cosine"] = "log"
    """Shape of the rise: the logarithm of the step, the step, or half a cosine of it, which begins and ends flat."""
    start_ratio: NonNegativeFloat = 0.0
    """Start of the rise, as a share of the optimizer's learning rate."""
    min_ratio: NonNegativeFloat = 1e-4
    """Bottom, as a share of the optimizer's learning rate."""
    total_steps: PositiveInt | None = None
    """Number of steps after which the bottom is reached; left out, ``train.steps``."""


class OneCyclePolicy(Policy):
    """One cycle of learning rates between two bounds, up and down, with momenta down and up; then both may decay.

    DeepSpeed's OneCycle (arXiv:1803.09820).
    """

    type: Literal["one_cycle"]
    """Shape of the schedule."""
    min_lr: PerGroup
    """Learning rate at both ends of the cycle, of all groups or a list with one for each group."""
    max_lr: PerGroup
    """Learning rate at the top of the cycle, of all groups or a list with one for each group."""
    rise_steps: PositiveInt = 2000
    """Number of steps of the first half of the cycle, in which the learning rate rises."""
    fall_steps: NonNegativeInt | None = None
    """Number of steps of the second half of the cycle; left out, ``rise_steps``."""
    rise_stairs: NonNegativeInt = 0
    """Number of stairs in the first half; 0: a change with each step."""
    fall_stairs: NonNegativeInt | None = None
    """Number of stairs in the second half; left out, ``rise_stairs``."""
    decay_steps: NonNegativeInt = 0
    """Steps of one interval of the decay after the cycle; 0: no decay."""
    decay_lr_rate: NonNegativeFloat = 0.0
    """Decay rate of the learning rate, which is ``min_lr / (1 + rate i)`` after i intervals."""
    cycle_momentum: bool = True
    """Cycle the momentum of SGD or the first beta of Adam too."""
    min_momentum: PerGroup = 0.8
    """Momentum at the top of the learning rate (and in the very first step, as in DeepSpeed), of all groups or a list.
    """
    max_momentum: PerGroup = 0.9
    """Momentum at both ends of the cycle, of all groups or a list."""
    decay_momentum_rate: NonNegativeFloat = 0.0
    """Decay rate of the momentum, which is ``max_momentum (1 + rate i)`` after i intervals."""
    second_beta: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Adam's second beta while the momentum is cycled (DeepSpeed uses 0.99 for all); left out, the optimizer's."""

    @model_validator(mode="after")
    def _check(self) -> "OneCyclePolicy":
        rates = (self.decay_lr_rate, self.decay_momentum_rate)
        if any(rates) and not self.decay_steps:
            raise ValueError(
                "a decay rate is given without decay_steps, the steps of one interval; give both"
            )
        return self


class RangeTestPolicy(Policy):
    """Learning rates that grow from ``min_lr`` without end (arXiv:1803.09820).

    Train with this schedule for a few hundred steps and read the highest rate that still trains off ``lr_range.png`` in
    the run folder.
    """

    type: Literal["range_test"]
    """Shape of the schedule."""
    min_lr: PerGroup = 1e-3
    """Learning rate of the first step, of all groups or a list with one for each group."""
    interval_steps: PositiveInt = 2000
    """Number of steps of one interval."""
    rate: PositiveFloat = 1.0
    """Growth in an interval, as a share."""
    growth: Literal["linear", "exponential"] = "linear"
    """Learning rate after i intervals: ``min_lr (1 + rate i)``, or ``min_lr (1 + rate)^i``, which spends as many steps
    on each decade.
    """
    staircase: bool = False
    """Grow at the end of each interval instead of with each step."""


class TorchSchedulePolicy(Policy):
    """Scheduler of ``torch.optim.lr_scheduler`` whose arguments are numbers and which steps after each applied step."""

    type: Literal["torch"]
    """A scheduler of torch."""
    scheduler: str
    """Name of the scheduler in torch, as in ``CosineAnnealingLR``."""
    arguments: dict[str, Any] = {}
    """Arguments of the scheduler, without the optimizer."""


_FORMS: dict[str, type[Policy]] = {
    word: form
    for form in (
        SchedulePolicy,
        WarmupPolicy,
        WarmupCosinePolicy,
        OneCyclePolicy,
        RangeTestPolicy,
        TorchSchedulePolicy,
    )
    for word in form.model_fields["type"].annotation.__args__  # type: ignore[union-attr]
}


_TAGS: dict[type[Policy], str] = {
    form: " or ".join(word for word, its in _FORMS.items() if its is form) for form in _FORMS.values()
}


def _type(given: Any) -> str:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return _TAGS[_FORMS.get(kind, SchedulePolicy) if isinstance(kind, str) else SchedulePolicy]


def _is_known(given: Any) -> Any:
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind not in _FORMS:
        raise ValueError(f"there is no type {kind!r}{nearest(kind, _FORMS)}")
    return given


AnySchedulePolicy = Annotated[
    Annotated[SchedulePolicy, Tag(_TAGS[SchedulePolicy])]
    | Annotated[WarmupPolicy, Tag(_TAGS[WarmupPolicy])]
    | Annotated[WarmupCosinePolicy, Tag(_TAGS[WarmupCosinePolicy])]
    | Annotated[OneCyclePolicy, Tag(_TAGS[OneCyclePolicy])]
    | Annotated[RangeTestPolicy, Tag(_TAGS[RangeTestPolicy])]
    | Annotated[TorchSchedulePolicy, Tag(_TAGS[TorchSchedulePolicy])],
    Discriminator(_type),
    BeforeValidator(_is_known),
]
"""The type of ``schedule:`` in a configuration."""

EndingPolicy = SchedulePolicy | WarmupPolicy | WarmupCosinePolicy
"""Policies that may have a last step."""


def lacks_end(policy: Policy) -> bool:
    """Return True if ``policy`` may end and has no number of total steps."""
    return isinstance(policy, EndingPolicy) and policy.total_steps is None


def needs_end(policy: Policy) -> bool:
    """Return True if the curve of ``policy`` has no form without a last step."""
    return isinstance(policy, EndingPolicy) and policy.type not in ("constant", "warmup")


def ends_at(policy: Any, steps: int) -> Any:
    """Return ``policy`` with its end at ``steps``, if the policy may have one."""
    may_end = isinstance(policy, EndingPolicy) and policy.type != "warmup"
    return policy.model_copy(update={"total_steps": steps}) if may_end else policy
