"""The optimizer classes: construction on flat tensors, and the state that they keep.

    from_policy    the configuration's words -> torch's class, or one of ours, with its numbers
    from_torch     a user's optimizer -> its class again, with the options of its groups
    make_state     makes the state that the first step would make

[Note: state at build]
torch makes a parameter's state in its first step, when memory is tightest and nothing has accounted for the state. Here
the same code of torch makes the state when the optimizer is built, so that the moments stand in the ledger before
anything runs; the numbers are those of a first step. A checkpoint still has no state of a parameter that was never
stepped.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, optim

from shardwise.base.errors import ConfigError, UsageError
from shardwise.optim.lamb import Lamb
from shardwise.optim.lars import Lars
from shardwise.optim.lion import Lion
from shardwise.optim.muon import Muon, dtype_of
from shardwise.optim.named_rules import NamedRules
from shardwise.optim.policy import OptimizerPolicy
from shardwise.optim.two_pass import TwoPass
from shardwise.optim.uncorrected_adam import UncorrectedAdam, UncorrectedAdamW
from shardwise.plan.registry import Needs, UpdateRule

Make = Callable[[list[Tensor], int], optim.Optimizer]
"""Function from (flat tensors, optimizer group) to an optimizer on them."""

_CLASSES: Mapping[str, type[optim.Optimizer]] = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "sgd": optim.SGD,
    "rmsprop": optim.RMSprop,
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "asgd": optim.ASGD,
    "rprop": optim.Rprop,
    "lion": Lion,
    "lamb": Lamb,
    "lars": Lars,
    "muon": Muon,
    "uncorrected_adam": UncorrectedAdam,
    "uncorrected_adamw": UncorrectedAdamW,
}
"""Class of each type of a rule (``OptimizerPolicy.rules``)."""
_FUSED = ("adam", "adamw", "sgd")
"""Types that torch has as one kernel on every device."""


def from_policy(policy: OptimizerPolicy) -> Make:
    """Return the function that makes the policy's optimizers, fused if torch has a fused kernel.

    Raises:
        ConfigError: if a class refuses its numbers.
    """
    return _from_rules(policy.rules())


def _from_rules(rules: Sequence[tuple[str, dict[str, Any]]]) -> Make:
    def make(tensors: list[Tensor], group: int) -> optim.Optimizer:
        kind, options = rules[group]
        fused = {"fused": True} if kind in _FUSED else {}
        return _CLASSES[kind](tensors, **fused, **options)  # type: ignore[arg-type]

    for group, (kind, _) in enumerate(rules):
        try:
            make([torch.zeros(1)], group)
        except ValueError as error:
            raise ConfigError(f"optimizer: {kind}: {error}") from None
    return make


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a group that the class of its rule takes."""
    if group["type"] not in _CLASSES:
        raise UsageError(f"optimizer: there is no rule {group['type']!r}; known: {', '.join(_CLASSES)}")
    known = inspect.signature(_CLASSES[group["type"]]).parameters
    return {key: value for key, value in group.items() if key in known and key not in ("params", "type")}


def from_torch(optimizer: optim.Optimizer, elementwise: bool = False) -> Make:
    """Return a function that rebuilds a user's optimizer from its class and the options of its groups.

    Args:
        optimizer: the user's optimizer, before its first step.
        elementwise: True declares that an unknown class treats each element by itself.

    Raises:
        UsageError: if the class is not known to be elementwise, because its numbers would silently change on flat
            pieces, or if the optimizer has stepped already.
    """
    if isinstance(optimizer, NamedRules):
        return _from_rules([(group["type"], _numbers(group)) for group in optimizer.param_groups])
    cls = type(optimizer)
    known = {*_CLASSES.values(), optim.Muon}
    if not elementwise and cls not in known:
        names = ", ".join(sorted(each.__name__ for each in {*known} - {Muon}))
        raise UsageError(
            f"optimizer: {cls.__name__} is not known to treat each element alone; on flat shards an optimizer that "
            f"needs whole tensors (Adafactor, LBFGS, Shampoo) would give wrong numbers. Known: {names}. "
            "If yours is elementwise, say so: initialize(..., elementwise=True)"
        )
    # Adagrad makes its state in the constructor, at step 0, so state by itself is no sign of a step.
    if any(not isinstance(state, dict) or state.get("step", 1) for state in optimizer.state.values()):
        raise UsageError("optimizer: it has stepped already; hand it to initialize() before its first step")
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    ours: type[optim.Optimizer] = Muon if cls is optim.Muon else cls  # torch's own takes no flat pieces
    known_arguments = inspect.signature(ours).parameters

    def make(tensors: list[Tensor], group: int) -> optim.Optimizer:
        # As arguments too: some have no default, and Adagrad reads its first accumulator from the argument only.
        arguments: dict[str, Any] = {k: v for k, v in options[group].items() if k in known_arguments}
        return ours([{"params": tensors, **options[group]}], **arguments)

    return make


def make_state(optimizer: optim.Optimizer) -> None:
    """Make the state that the first step would make. [Note: state at build].

    Some state is left to that step: that of a user's class without ``_init_group``, and SGD's momentum with dampening,
    which begins with the whole first gradient.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, optim.SGD):
            for leaf in group["params"] if group["momentum"] and not group["dampening"] else ():
                # -0 instead of 0: the sum with the first gradient then has its bits, also where that is -0.
                optimizer.state[leaf]["momentum_buffer"] = torch.full_like(leaf, -0.0)
            continue
        make = getattr(optimizer, "_init_group", None)
        if make is None:
            continue
        for leaf in group["params"]:
            leaf.grad = torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand_as(leaf)
        make(group, *([] for _ in list(inspect.signature(make).parameters)[1:]))
        for leaf in group["params"]:
            leaf.grad = None


def update_rules(make: Make, groups: int = 1) -> tuple[UpdateRule, ...]:
    """Return the moments that optimizers made by ``make`` keep from build on, and what they look at, by group."""
    found = []
    for group in range(groups):
        probe = torch.zeros(1)
        optimizer = make([probe], group)
        make_state(optimizer)
        needs = needs_of(optimizer)
        wire = dtype_of(optimizer.param_groups[0]) if needs == "matrix" else None
        found.append(UpdateRule(labels_of(optimizer.state.get(probe, {})), needs, wire))
    return tuple(found)


def labels_of(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels of the moments in the state of a leaf."""
    return tuple(label for label, value in state.items() if isinstance(value, Tensor) and value.dim() == 1)


def needs_of(optimizer: optim.Optimizer) -> Needs:
    """Return what an optimizer's update of an element depends on."""
    return optimizer.needs if isinstance(optimizer, TwoPass) else "elements"


def makes_state_late(optimizer: optim.Optimizer) -> bool:
    """Return whether some of an optimizer's state only appears in the first step. [Note: state at build]."""
    group = optimizer.param_groups[0]
    if isinstance(optimizer, optim.SGD):
        return bool(group["momentum"] and group["dampening"])
    return not hasattr(optimizer, "_init_group")
