"""OptimizerPolicy: the optimizer of the masters, with exceptions by parameter name."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from shardwise.base.policy import Policy
from shardwise.optim.muon import COEFFICIENTS


class GroupPolicy(Policy):
    """Entry of ``optimizer.groups``: parameters by name, with the options that differ for them."""

    match: str
    """Patterns of parameter names, separated by ``|``; ``*`` stands for anything. The first group that matches wins."""
    lr: NonNegativeFloat | None = None
    """Learning rate of the group; left out, the optimizer's."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of the group; left out, the optimizer's."""
    trust: bool | None = None
    """LAMB and LARS: false makes steps without the trust ratio, as is usual for biases and norms; left out, true."""
    matrices: bool | None = None
    """Muon: true updates the group's parameters of two dims with Muon, false with AdamW; left out, Muon updates those
    inside repeated blocks that are no embeddings.
    """

    def matches(self, name: str) -> bool:
        """Return True if the parameter ``name`` belongs to the group."""
        return any(fnmatchcase(name, pattern.strip()) for pattern in self.match.split("|"))


_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
READS: Mapping[str, Mapping[str, Any]] = {
    "adam": {**_ADAM, "amsgrad": False, "correct": "moments"},
    "adamw": {**_ADAM, "amsgrad": False, "correct": "moments"},
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
    "lamb": {**_ADAM, "eps": 1e-6, "trust_bounds": (0.01, 10.0), "correct": "moments"},
    "lars": {"momentum": 0.9, "weight_decay": 0.0, "trust_coefficient": 1e-3},
    "muon": {
        "momentum": 0.95,
        "nesterov": True,
        "weight_decay": 0.0,
        "ns_steps": 5,
        "ns_coefficients": COEFFICIENTS,
        "ns_dtype": "bf16",
        "adjust_lr_fn": "match_rms_adamw",
        "rest_lr": None,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
    },
}
"""Keys that each type reads beside ``lr``, with the value of a key that is left out."""

_OF_GROUPS = {"trust": ("lamb", "lars"), "matrices": ("muon",)}
"""Keys that only groups have, and the types that read them."""
_OF_MATRICES = (
    "momentum",
    "nesterov",
    "ns_steps",
    "ns_coefficients",
    "ns_dtype",
    "adjust_lr_fn",
    "weight_decay",
)

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerPolicy(Policy):
    """Optimizer of the masters: keys under ``optimizer:``.

    A key that the type does not read is refused; a key that is left out takes the type's own value.
    """

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
        "lamb",
        "lars",
        "muon",
    ] = "adamw"
    """Adam (arXiv:1412.6980), AdamW (arXiv:1711.05101), SGD with momentum, another elementwise class of torch, Lion
    (arXiv:2302.06675); LAMB (arXiv:1904.00962) and LARS (arXiv:1708.03888), whose steps are in proportion to each
    tensor's norm; Muon for the matrices of repeated blocks, with AdamW for the rest."""
    lr: NonNegativeFloat = 1e-3
    """Learning rate at the top of the schedule."""
    betas: tuple[Decay, Decay] | None = None
    """Decay rates of the two moments of Adam and its relatives: [0.9, 0.999]. Lion: rates of the direction and of the
    stored momentum: [0.9, 0.99]. Muon: rates of AdamW for the rest.
    """
    eps: PositiveFloat | None = None
    """Addend in the denominator: 1e-8; 1e-10 for Adagrad, 1e-6 for Adadelta and LAMB."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay: decoupled for AdamW, Lion and Muon, added to LAMB's direction, and to the gradient for the others:
    0. Rprop has none.
    """
    momentum: NonNegativeFloat | None = None
    """Momentum factor of SGD and RMSprop: 0; of LARS: 0.9; of Muon: 0.95."""
    nesterov: bool | None = None
    """Nesterov's form of the momentum: false for SGD, true for Muon."""
    dampening: NonNegativeFloat | None = None
    """SGD: 1 minus the share of a gradient that enters the momentum: 0."""
    amsgrad: bool | None = None
    """True divides by the largest second moment so far, for Adam and AdamW (arXiv:1904.09237): false."""
    alpha: NonNegativeFloat | None = None
    """RMSprop's decay of the squares: 0.99; exponent with which ASGD's step falls: 0.75."""
    centered: bool | None = None
    """True makes RMSprop divide by the deviation from a mean gradient: false."""
    lr_decay: NonNegativeFloat | None = None
    """Adagrad's own decay of the learning rate per step: 0."""
    initial_accumulator_value: NonNegativeFloat | None = None
    """Start value of Adagrad's sum of squares: 0."""
    rho: Annotated[float, Field(ge=0, le=1)] | None = None
    """Adadelta's decay of its two averages: 0.9."""
    momentum_decay: NonNegativeFloat | None = None
    """NAdam's decay of the momentum: 0.004."""
    decoupled_weight_decay: bool | None = None
    """True decays weights as AdamW does, for NAdam and RAdam: false."""
    lambd: NonNegativeFloat | None = None
    """ASGD's decay of the weights: 1e-4."""
    t0: PositiveFloat | None = None
    """Number of steps after which ASGD begins to average: 1e6."""
    etas: tuple[PositiveFloat, PositiveFloat] | None = None
    """Rprop's factors of a step whose gradient changes its sign and of one whose gradient keeps it: [0.5, 1.2]."""
    step_sizes: tuple[PositiveFloat, PositiveFloat] | None = None
    """Rprop's smallest and largest step: [1e-6, 50]."""
    trust_bounds: tuple[NonNegativeFloat, PositiveFloat] | None = None
    """LAMB's smallest and largest ratio of a weight's norm to its direction's: [0.01, 10]."""
    correct: Literal["moments", "step", "none"] | None = None
    """Place at which Adam, AdamW and LAMB correct the bias of young moments: ``moments`` is the paper, ``none``
    corrects nothing, ``step`` (LAMB only) is DeepSpeed's kernel; left out, ``moments``.
    """
    trust_coefficient: PositiveFloat | None = None
    """LARS's step as a share of the weight's norm, at lr 1: 0.001."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] | None = None
    """Number of Muon's rounds of Newton-Schulz: 5."""
    ns_coefficients: tuple[float, float, float] | None = None
    """Coefficients of Muon's polynomial a x + b x³ + c x⁵: [3.4445, -4.775, 2.0315]."""
    ns_dtype: Literal["bf16", "fp32", "fp64"] | None = None
    """Dtype in which Muon computes Newton-Schulz, and in which matrices travel to their owners and back: bf16."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    """Muon's lr by shape: ``original`` times √max(1, rows/columns), ``match_rms_adamw`` times 0.2 √max(rows, columns),
    so that one lr and weight decay serve matrices and the rest; left out, ``match_rms_adamw``.
    """
    rest_lr: NonNegativeFloat | None = None
    """Learning rate of AdamW for the parameters that Muon does not update; left out, ``lr``."""
    groups: list[GroupPolicy] = Field(default_factory=list)
    """Groups of parameters with other options, by parameter name."""

    @model_validator(mode="after")
    def _every_key_is_read(self) -> Self:
        reads = READS[self.type]
        given = [key for key in type(self).model_fields if key not in ("type", "lr", "groups")]
        unread = [key for key in given if getattr(self, key) is not None and key not in reads]
        for place, group in enumerate(self.groups):
            if group.weight_decay is not None and "weight_decay" not in reads:
                unread.append(f"groups.{place}.weight_decay")
            for key, types in _OF_GROUPS.items():
                if getattr(group, key) is not None and self.type not in types:
                    unread.append(f"groups.{place}.{key}")
        if unread:
            readers = [name for name, keys in READS.items() if unread[0] in keys]
            raise ValueError(
                f"{self.type} does not read {', '.join(unread)}; it reads lr, {', '.join(reads)}. "
                + (f"{unread[0]} belongs to {', '.join(readers)}" if readers else "Leave it out")
            )
        if self.type in ("adam", "adamw") and (
            self.correct == "step" or (self.correct == "none" and self.amsgrad)
        ):
            raise ValueError(
                f"correct: {self.correct} of {self.type}{' with amsgrad' if self.amsgrad else ''} is not a rule here; "
                "set correct: moments, or correct: none without amsgrad"
            )
        if self.nesterov and self.type == "sgd" and (not self.momentum or self.dampening):
            raise ValueError("nesterov needs a momentum above 0 and no dampening")
        return self

    def group_of(self, name: str) -> int:
        """Return the group of the parameter ``name``: 0 is the optimizer's own, i+1 the i-th entry of ``groups``."""
        return next((i + 1 for i, group in enumerate(self.groups) if group.matches(name)), 0)

    def rule_of(self, name: str, is_hidden: bool | None) -> int:
        """Return the index into ``rules`` for the parameter ``name``.

        Args:
            name: name of the parameter.
            is_hidden: True for a hidden matrix, False for another parameter of two dims, None for other numbers of
                dims.
        """
        group = self.group_of(name)
        if self.type != "muon":
            return group
        chosen = self.groups[group - 1].matrices if group else None
        is_matrix = is_hidden is not None and (is_hidden if chosen is None else chosen)
        return group if is_matrix else group + 1 + len(self.groups)

    def rules(self) -> list[tuple[str, dict[str, Any]]]:
        """Return (type, keyword arguments) of each optimizer group.

        Index 0 is the optimizer's own group, i+1 the i-th entry of ``groups``. For Muon as many rules of AdamW follow,
        for parameters that Muon does not update.
        """
        own: dict[str, Any] = {"lr": self.lr}
        for key, default in READS[self.type].items():
            given = getattr(self, key)
            own[key] = default if given is None else given
        exceptions = [
            group.model_dump(exclude={"match", "matrices"}, exclude_none=True) for group in self.groups
        ]
        merged = [own, *({**own, **exception} for exception in exceptions)]
        if self.type in ("adam", "adamw"):
            return [_of_adam(self.type, options) for options in merged]
        if self.type != "muon":
            return [(self.type, options) for options in merged]
        rest = [
            {**own, "lr": self.lr if self.rest_lr is None else self.rest_lr, **exception}
            for exception in ({}, *exceptions)
        ]
        matrices = [{key: each[key] for key in ("lr", *_OF_MATRICES)} for each in merged]
        others = [{key: each[key] for key in ("lr", "betas", "eps", "weight_decay")} for each in rest]
        return [*(("muon", each) for each in matrices), *(("adamw", each) for each in others)]

    def options(self) -> list[dict[str, Any]]:
        """Return the keyword arguments of each optimizer group, as in ``rules``."""
        return [options for _, options in self.rules()]


def _of_adam(kind: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return torch's rule, or the rule without bias correction, with its keyword arguments."""
    if options["correct"] == "moments":
        return kind, {key: value for key, value in options.items() if key != "correct"}
    return f"uncorrected_{kind}", {
        key: value for key, value in options.items() if key not in ("correct", "amsgrad")
    }
