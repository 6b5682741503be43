"""The recipe of the optimizers: the update rule of each parameter, and the optimizer of each bucket.

optimizer group     an entry of ``optimizer.groups`` in the configuration, or a group of a user's optimizer; Muon has
                    each twice: for matrices, and for the rest
update rule         of a group: the state that is kept for every element, and the tensors that an update looks at
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn, optim

from shardwise.base.errors import ConfigError, UsageError
from shardwise.compose.spec import ModelSpec
from shardwise.config.run import RunConfig
from shardwise.kernels.philox import key_of
from shardwise.optim.average import EMA, EmaPolicy
from shardwise.optim.classes import Make, from_policy, from_torch, makes_state_late, needs_of, update_rules
from shardwise.optim.coded_moments import refused
from shardwise.optim.flat import FlatOptimizer
from shardwise.optim.groups import OptimizerGroups
from shardwise.optim.policy import OptimizerPolicy
from shardwise.optim.rounding import RoundedPart, StochasticRounding
from shardwise.parallel.zero.bucket import BucketState
from shardwise.parallel.zero.modules import repeated_blocks
from shardwise.plan.lists import is_inside
from shardwise.plan.placement import ContiguousRun, Tier
from shardwise.plan.registry import TensorInfo, UpdateRule
from shardwise.plan.slices import TensorSlices
from shardwise.plan.state_form import StateForm

GivenOptimizer = optim.Optimizer | Callable[[Iterable[nn.Parameter]], optim.Optimizer] | None


class OptimizerRecipe(NamedTuple):
    """The optimizers of a model: how they are made, and their update rules by optimizer group."""

    make: Make
    updates: tuple[UpdateRule, ...]
    """Update rules by optimizer group."""
    groups: OptimizerGroups
    """The source of the numbers of optimizer groups, step by step."""
    policy: OptimizerPolicy
    given: Mapping[str, int] | None = None
    """Optimizer group by name of the parameter, if the user's optimizer sets the groups."""
    decay: float | None = None
    """Decay of the average of the weights; None without an average."""

    def optimizer_of(self, bucket: BucketState, slices: TensorSlices, form: StateForm) -> FlatOptimizer:
        """Return the optimizer of one bucket, with moments in the given form."""
        with bucket.opened(changes=True):
            assert bucket.weight.master is not None, "a trained bucket has a master"
            group, rounding = bucket.layout.key.optimizer_group, _rounding(bucket, slices)
            state, into = bucket.state, None
            if state is not None:
                _check_moves(self.make([torch.zeros(1)], group), state.tier, bucket.what)
                into = state.tensors
            made = FlatOptimizer(bucket.weight.master, self.make, group, form, rounding, into, self.decay)
            if state is not None:
                state.followers.append(lambda tensors: made.state.point(tensors[state.master], tensors))
        return made

    def group_of(self, model: nn.Module, spec: ModelSpec) -> Callable[[str], int]:
        """Return a function from a parameter's first name to its optimizer group.

        Raises:
            ConfigError: if Muon would update no parameter.
        """
        if self.given is not None:
            return self.given.__getitem__
        by_name = groups_by_name(self.policy, model, spec)
        return by_name.__getitem__


def _check_moves(optimizer: optim.Optimizer, tier: Tier, what: str) -> None:
    """Check that an optimizer's state can lie on another tier.

    Raises:
        ConfigError: if the state cannot move.
    """
    why = ""
    if needs_of(optimizer) != "elements":
        why = "looks at whole tensors, which are not in memory together"
    elif makes_state_late(optimizer):
        why = "makes state in its first step, which no tier has room for"
    if why:
        raise ConfigError(
            f"offload.optimizer: {tier}: the optimizer of {what} {why}; use one that treats each element alone (adamw, "
            "say), or keep its state on the device"
        )


def _rounding(bucket: BucketState, slices: TensorSlices) -> StochasticRounding:
    """Return the random numbers for the rounding of moments, for the elements that this rank owns."""
    rounded = []
    for slot, start, stop, local in bucket.layout.overlaps(*bucket.owned_range):
        info = slices.registry.get("parameter", slot.name)

        def runs(
            first: int, last: int, info: TensorInfo = info, start: int = start
        ) -> Iterator[ContiguousRun]:
            for run in slices.runs(info, start + first, start + last):
                yield run._replace(local=run.local - start)

        rounded.append(RoundedPart(local, local + stop - start, key_of(0, f"moments of {slot.name}"), runs))
    return StochasticRounding(rounded)


def check_form(form: StateForm, make: Make, updates: Sequence[UpdateRule]) -> None:
    """Check that the moments of all optimizer groups can have a form.

    Raises:
        ConfigError: if the moments of a group cannot.
    """
    for group, rule in enumerate(updates) if form != "fp32" else ():
        optimizer = make([torch.zeros(1)], group)
        why = refused(form, rule.moments)
        if rule.needs != "elements":
            why = "looks at whole tensors"
        elif makes_state_late(optimizer):
            why = "makes state in its first step"
        if why:
            raise ConfigError(
                f"offload.state: {form}: the optimizer ({type(optimizer).__name__}) {why}; use adam, adamw, sgd with "
                "momentum or lion, or leave offload.state out"
            )


def groups_by_name(policy: OptimizerPolicy, model: nn.Module, spec: ModelSpec) -> dict[str, int]:
    """Return the optimizer group of each parameter of ``model`` by its first name.

    Raises:
        ConfigError: if the type is for matrices and the model has none that it would update.
    """
    blocks = (repeated_blocks(model) or spec.units) if policy.type == "muon" else ()
    lookups = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    found = {}
    for name, entry in spec.parameters.items():
        names = (name, *entry.aliases)
        inside = all(any(is_inside(each, block) for block in blocks) for each in names)
        is_hidden = inside and lookups.isdisjoint(names) if len(entry.shape) == 2 else None
        found[name] = policy.rule_of(name, is_hidden)
    if policy.type == "muon" and not any(
        found[name] <= len(policy.groups) for name, entry in spec.parameters.items() if entry.trained
    ):
        raise ConfigError(
            "optimizer: muon updates the matrices of repeated blocks, and this model has none that train; name them: "
            "optimizer.groups: [{match: PATTERN, matrices: true}], or use type: adamw"
        )
    return found


def recipe_of(
    model: nn.Module, settings: RunConfig, given: GivenOptimizer = None, elementwise: bool = False
) -> OptimizerRecipe:
    """Return the recipe of the optimizers from the configuration or from the user's optimizer.

    Args:
        model: The model, before it is cut.
        settings: The resolved configuration.
        given: A torch optimizer, or a function from parameters to one; None takes the configuration's.
        elementwise: True if the user's optimizer treats each element by itself.

    Raises:
        ConfigError: if the configuration does not fit the model or the argument.
        UsageError: if parameters that train are not in the user's optimizer.
    """
    if callable(given) and not isinstance(given, optim.Optimizer):
        given = given(model.parameters())
    policy = settings.optimizer
    decay = None if settings.ema is None else settings.ema.decay
    if given is None:
        groups = OptimizerGroups(policy, settings.schedule)
        make = from_policy(policy)
        updates = update_rules(make, len(policy.rules()))
        check_form(settings.offload.state, make, updates)
        return OptimizerRecipe(make, _with_average(updates, settings.ema), groups, policy, decay=decay)
    if "optimizer" in settings.model_fields_set:
        raise ConfigError(
            "optimizer: given in the configuration and as an argument of initialize(); keep one"
        )
    group_of = {id(p): i for i, group in enumerate(given.param_groups) for p in group["params"]}
    by_name: dict[str, int] = {}
    missing = []
    for name, parameter in model.named_parameters():
        if id(parameter) in group_of:
            by_name[name] = group_of[id(parameter)]
        elif parameter.requires_grad:
            missing.append(name)
    if missing:
        raise UsageError(
            f"optimizer: {len(missing)} trained parameters are not in it: {', '.join(missing[:5])}; give it all of "
            "them, or set requires_grad = False on those that shall not train"
        )
    groups = OptimizerGroups(policy, settings.schedule, given)
    make = from_torch(given, elementwise)
    updates = update_rules(make, len(given.param_groups))
    check_form(settings.offload.state, make, updates)
    return OptimizerRecipe(make, _with_average(updates, settings.ema), groups, policy, by_name, decay)


def _with_average(updates: Sequence[UpdateRule], policy: EmaPolicy | None) -> tuple[UpdateRule, ...]:
    """Return the rules with the average of the weights added to the state of every element."""
    if policy is None:
        return tuple(updates)
    return tuple(rule._replace(moments=(*rule.moments, EMA)) for rule in updates)
