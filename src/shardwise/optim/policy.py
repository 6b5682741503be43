"""OptimizerPolicy: what updates the masters."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

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


_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
READS: Mapping[str, Mapping[str, Any]] = {
    "adam": {**_ADAM, "amsgrad": False},
    "adamw": {**_ADAM, "amsgrad": False},
    "sgd": {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    "rmsprop": {"alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False},
    "adagrad": {"lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
    "adadelta": {"rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
    "adamax": _ADAM,
    "nadam": {**_ADAM, "momentum_decay": 4e-3, "decoupled_weight_decay": False},
    "radam": {**_ADAM, "decoupled_weight_decay": False},
    "asgd": {"lambd": 1e-4, "alpha": 0.75, "t0": 1e6, "weight_decay": 0.0},
    "rprop": {"etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)},
    "lion": {"betas": (0.9, 0.99), "weight_decay": 0.0},
}
"""What each type reads beside ``lr``, and what it takes where the key is left out."""

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerPolicy(Policy):
    """Keys under ``optimizer:``. A key that the type does not read is refused; left out, a key is the type's own."""

    type: Literal[
        "adam",
        "adamw",
        "sgd",
        "rmsprop",
        "adagrad",
        "adadelta",
        "adamax",
        "nadam",
        "radam",
        "asgd",
        "rprop",
        "lion",
    ] = "adamw"
    """Adam (arXiv:1412.6980), AdamW (arXiv:1711.05101), SGD with momentum, another elementwise class of torch, or
    Lion (arXiv:2302.06675)."""
    lr: NonNegativeFloat = 1e-3
    """Learning rate at the top of the schedule."""
    betas: tuple[Decay, Decay] | None = None
    """Decay of the two moments of Adam and its kin: [0.9, 0.999]. Lion's: of what it steps by, of what it keeps:
    [0.9, 0.99]."""
    eps: PositiveFloat | None = None
    """Addend in the denominator: 1e-8; 1e-10 for Adagrad, 1e-6 for Adadelta."""
    weight_decay: NonNegativeFloat | None = None
    """Decoupled for AdamW and Lion, added to the gradient for the others: 0. Rprop has none."""
    momentum: NonNegativeFloat | None = None
    """Of SGD and RMSprop: 0."""
    nesterov: bool | None = None
    """Nesterov's form of SGD with momentum: false."""
    dampening: NonNegativeFloat | None = None
    """SGD: 1 minus the part of a gradient that enters the momentum: 0."""
    amsgrad: bool | None = None
    """Adam and AdamW divide by the largest second moment so far (arXiv:1904.09237): false."""
    alpha: NonNegativeFloat | None = None
    """RMSprop's decay of the squares: 0.99; ASGD's power by which its step falls: 0.75."""
    centered: bool | None = None
    """RMSprop divides by the deviation from a mean gradient: false."""
    lr_decay: NonNegativeFloat | None = None
    """Adagrad's own decay of the learning rate per step: 0."""
    initial_accumulator_value: NonNegativeFloat | None = None
    """Start of Adagrad's sum of squares: 0."""
    rho: Annotated[float, Field(ge=0, le=1)] | None = None
    """Adadelta's decay of its two averages: 0.9."""
    momentum_decay: NonNegativeFloat | None = None
    """NAdam's decay of the momentum: 0.004."""
    decoupled_weight_decay: bool | None = None
    """NAdam and RAdam decay weights as AdamW does: false."""
    lambd: NonNegativeFloat | None = None
    """ASGD's decay of the weights: 1e-4."""
    t0: PositiveFloat | None = None
    """Steps after which ASGD begins to average: 1e6."""
    etas: tuple[PositiveFloat, PositiveFloat] | None = None
    """Rprop's factors of a step that turns and of one that goes on: [0.5, 1.2]."""
    step_sizes: tuple[PositiveFloat, PositiveFloat] | None = None
    """Rprop's smallest and largest step: [1e-6, 50]."""
    groups: list[GroupPolicy] = Field(default_factory=list)
    """Exceptions by parameter name."""

    @model_validator(mode="after")
    def _every_key_is_read(self) -> Self:
        reads = READS[self.type]
        given = [key for key in type(self).model_fields if key not in ("type", "lr", "groups")]
        unread = [key for key in given if getattr(self, key) is not None and key not in reads]
        unread += [
            f"groups.{place}.weight_decay"
            for place, group in enumerate(self.groups)
            if group.weight_decay is not None and "weight_decay" not in reads
        ]
        if unread:
            readers = [name for name, keys in READS.items() if unread[0] in keys]
            raise ValueError(
                f"{self.type} does not read {', '.join(unread)}; it reads lr, {', '.join(reads)}. "
                + (f"{unread[0]} belongs to {', '.join(readers)}" if readers else "Leave it out")
            )
        if self.nesterov and (not self.momentum or self.dampening):
            raise ValueError("nesterov needs a momentum above 0 and no dampening")
        return self

    def group_of(self, name: str) -> int:
        """Index of the options for the parameter ``name``: 0 the optimizer's own, i+1 the i-th entry of ``groups``."""
        return next((i + 1 for i, group in enumerate(self.groups) if group.matches(name)), 0)

    def options(self) -> list[dict[str, Any]]:
        """Keyword arguments of the optimizer per group."""
        own: dict[str, Any] = {"lr": self.lr}
        for key, default in READS[self.type].items():
            given = getattr(self, key)
            own[key] = default if given is None else given
        exceptions = [group.model_dump(exclude={"match"}, exclude_none=True) for group in self.groups]
        return [own, *({**own, **exception} for exception in exceptions)]
