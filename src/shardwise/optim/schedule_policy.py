"""What stands under ``schedule:``: one of five forms, told apart by ``type``.

    constant linear cosine polynomial exponential wsd    a part of each group's learning rate, over the steps
    warmup warmup_linear warmup_cosine                    the same with a rise by the logarithm; DeepSpeed's curves
    one_cycle                                             rates and momenta between two bounds; DeepSpeed's curve
    range_test                                            rates that grow until the training fails
    torch                                                 a scheduler of torch.optim.lr_scheduler, by its name

The curves are in schedule.py. A learning rate that stands here is one number for all groups of the optimizer or a list,
one a group: the optimizer's own, then ``optimizer.groups`` in their order.
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

from shardwise.plan.policy import Policy, nearest

PerGroup = NonNegativeFloat | Annotated[list[NonNegativeFloat], Field(min_length=1)]
"""One number for all groups, or one a group."""


class SchedulePolicy(Policy):
    """Keys under ``schedule:``; steps are optimizer steps that were applied, whatever the accumulation and the number
    of ranks."""

    type: Literal["constant", "linear", "cosine", "polynomial", "exponential", "wsd"] = "constant"
    """Shape after the warm-up; ``wsd`` (warm-up, stable, decay) stays at the top and falls linearly at the end. With
    other types (``warmup``, ``warmup_linear``, ``warmup_cosine``, ``one_cycle``, ``range_test``, ``torch``) the block
    has other keys."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises linearly from near 0 to its top."""
    total_steps: PositiveInt | None = None
    """Steps at whose end the bottom is reached; left out, ``train.steps``."""
    min_ratio: NonNegativeFloat = 0.0
    """Bottom of the learning rate, as a part of its top."""
    power: PositiveFloat = 1.0
    """Exponent of ``polynomial``."""
    decay_steps: PositiveInt | None = None
    """Steps of the fall of ``wsd``, at its end; left out, a tenth of ``total_steps``."""

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
    """A rise from ``min_lr`` to ``max_lr``, then ``warmup`` stays there and ``warmup_linear`` falls to 0. DeepSpeed's
    WarmupLR and WarmupDecayLR: both the first and the second step are at the bottom."""

    type: Literal["warmup", "warmup_linear"]
    """Shape after the warm-up."""
    min_lr: PerGroup = 0.0
    """Learning rate at the start, of all groups or a list of one a group."""
    max_lr: PerGroup | None = None
    """Learning rate at the top, of all groups or a list of one a group; left out, the optimizer's."""
    warmup_steps: PositiveInt = 1000
    """Steps of the rise; 1 counts as 2."""
    rise: Literal["log", "linear", "cosine"] = "log"
    """Shape of the rise: the logarithm of the step, the step, or half a cosine of it, which begins and ends flat."""
    total_steps: PositiveInt | None = None
    """Steps at whose end ``warmup_linear`` reaches 0; left out, ``train.steps``."""

    @model_validator(mode="after")
    def _check(self) -> "WarmupPolicy":
        if self.type == "warmup" and self.total_steps is not None:
            raise ValueError(
                "total_steps is for warmup_linear: warmup stays at the top; change the type or remove it"
            )
        return self


class WarmupCosinePolicy(Policy):
    """A rise to each group's own learning rate and a fall by half a cosine, both as parts of it. DeepSpeed's
    WarmupCosineLR: the first step is at 0, the second at ``start_ratio``."""

    type: Literal["warmup_cosine"]
    """Shape."""
    warmup_steps: PositiveInt = 1000
    """Steps of the rise; 1 counts as 2."""
    rise: Literal["log", "linear", "cosine"] = "log"
    """Shape of the rise: the logarithm of the step, the step, or half a cosine of it, which begins and ends flat."""
    start_ratio: NonNegativeFloat = 0.0
    """Start of the rise, as a part of the optimizer's learning rate."""
    min_ratio: NonNegativeFloat = 1e-4
    """Bottom, as a part of the optimizer's learning rate."""
    total_steps: PositiveInt | None = None
    """Steps at whose end the bottom is reached; left out, ``train.steps``."""


class OneCyclePolicy(Policy):
    """Learning rates rise and fall between two bounds, once, while momenta fall and rise; then both may decay
    (arXiv:1803.09820). DeepSpeed's OneCycle."""

    type: Literal["one_cycle"]
    """Shape."""
    min_lr: PerGroup
    """Learning rate at both ends of the cycle, of all groups or a list of one a group."""
    max_lr: PerGroup
    """Learning rate at the top of the cycle, of all groups or a list of one a group."""
    rise_steps: PositiveInt = 2000
    """Steps of the first half."""
    fall_steps: NonNegativeInt | None = None
    """Steps of the second half; left out, ``rise_steps``."""
    rise_stairs: NonNegativeInt = 0
    """Stairs that the first half is climbed in; 0: a little with each step."""
    fall_stairs: NonNegativeInt | None = None
    """Stairs of the second half; left out, ``rise_stairs``."""
    decay_steps: NonNegativeInt = 0
    """Steps after the cycle in which the decay counts one interval; 0: no decay."""
    decay_lr_rate: NonNegativeFloat = 0.0
    """After i intervals the learning rate is ``min_lr / (1 + rate i)``."""
    cycle_momentum: bool = True
    """Cycle the momentum of SGD and the first beta of Adam too."""
    min_momentum: PerGroup = 0.8
    """Momentum at the top of the learning rate (and in the very first step, as DeepSpeed has it), of all groups or a
    list."""
    max_momentum: PerGroup = 0.9
    """Momentum at both ends of the cycle, of all groups or a list."""
    decay_momentum_rate: NonNegativeFloat = 0.0
    """After i intervals the momentum is ``max_momentum (1 + rate i)``."""
    second_beta: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Adam's second beta while the momentum is cycled (DeepSpeed has 0.99 for all); left out, the optimizer's."""

    @model_validator(mode="after")
    def _check(self) -> "OneCyclePolicy":
        rates = (self.decay_lr_rate, self.decay_momentum_rate)
        if any(rates) and not self.decay_steps:
            raise ValueError(
                "a decay rate is given without decay_steps, the steps of one interval; give both"
            )
        return self


class RangeTestPolicy(Policy):
    """Learning rates that grow from ``min_lr`` without end (arXiv:1803.09820): train with it for a few hundred steps
    and read the highest rate that still trains off ``lr_range.png`` of the run folder."""

    type: Literal["range_test"]
    """Shape."""
    min_lr: PerGroup = 1e-3
    """Learning rate of the first step, of all groups or a list of one a group."""
    interval_steps: PositiveInt = 2000
    """Steps of one interval."""
    rate: PositiveFloat = 1.0
    """Growth in an interval, as a part."""
    growth: Literal["linear", "exponential"] = "linear"
    """After i intervals ``min_lr (1 + rate i)``, or ``min_lr (1 + rate)^i``, which sees each decade alike."""
    staircase: bool = False
    """Grow at the end of each interval instead of with each step."""


class TorchSchedulePolicy(Policy):
    """A scheduler of ``torch.optim.lr_scheduler`` that is made of numbers alone and steps after each applied step."""

    type: Literal["torch"]
    """Of torch."""
    scheduler: str
    """Its name there, as in ``CosineAnnealingLR``."""
    arguments: dict[str, Any] = {}
    """Its arguments, without the optimizer."""


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
"""Those that may have a last step."""


def lacks_end(policy: Policy) -> bool:
    """True where ``policy`` may end and does not say when."""
    return isinstance(policy, EndingPolicy) and policy.total_steps is None


def needs_end(policy: Policy) -> bool:
    """True where the curve of ``policy`` has no form without a last step."""
    return isinstance(policy, EndingPolicy) and policy.type not in ("constant", "warmup")


def ends_at(policy: Any, steps: int) -> Any:
    """``policy`` with its end at ``steps``, where it may have one."""
    may_end = isinstance(policy, EndingPolicy) and policy.type != "warmup"
    return policy.model_copy(update={"total_steps": steps}) if may_end else policy
