"""Stacks: modules that hold all experts of a layer in a few tensors, and the placement of these on ranks. Pure.

    y = Σ_j weights_j · expert_{index_j}(x)             experts(hidden [N, D], index [N, k], weights [N, k]) -> [N, D]
    expert_e(x) = down_e act(up_e x + b_e) + c_e

Dim 0 of each tensor counts experts and is cut along "ep"; the hidden features F are cut along "etp":

    of                    tensors                           form             along "etp"
    ours, Mixtral,        gate_up     [E, 2F, D]            gate, then up    Shard(1), two blocks
    Qwen, DeepSeek ...    down        [E, D, F]                              Shard(2)
    transposed            gate_up     [E, D, 2F]            gate, then up    Shard(2), two blocks
    (Aria, GPT-OSS)       down        [E, F, D]                              Shard(1)
    interleaved           gate_up     ... 2F ...            pairs gate, up   one block of F pairs
    without a gate        up          [E, F, D]                              Shard(1)
    with biases           b           [E, 2F]               as gate_up's     Shard(1), as gate_up's
                          c           [E, D]                                 Replicate: one rank adds it, so its
                                                                             gradient is Partial

A class of ours describes itself by a method ``expert_stack() -> Stack``. Classes of transformers 5 are recognized by
flags that their decorator ``use_experts_implementation`` sets, and their shapes must agree. Any other use of stacks in
a module (a norm that all experts share, experts that are the identity) is refused by name.

Cost:   reads names and shapes.
Shapes: N tokens, D width, E experts, F hidden features of an expert, k experts of a token.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from shardwise.base.errors import PlanError
from shardwise.plan.placement import Partial, Placement, Replicate, Shard, ShardBlock

_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")
"""Attributes that transformers' decorator sets on a module of experts."""
_OWN_BALANCE = "load_balancing_loss_func"
"""Name of the function that computes the balance loss of transformers' models."""
_ALIKE = {"Step3p7Experts": (True, False, False, False, True)}
"""Flags of classes of transformers that compute the same and are not decorated."""


class StackPlacement(NamedTuple):
    """Placement of one tensor of a stack on "etp"; on "ep" each tensor is cut in dim 0."""

    placement: Placement
    gradient: Placement
    """Placement of the gradient before reduction."""


@dataclass(frozen=True)
class ExpertStack:
    """One module of stacked experts."""

    experts: int
    """Number of experts, E."""
    hidden: int
    """Number of hidden features, F; 0 if the features of an expert cannot be cut."""
    parameters: Mapping[str, StackPlacement]
    """Placement of each parameter, by name in the module."""


class FoundStacks(NamedTuple):
    """Modules of experts in a model, by module name."""

    stacks: Mapping[str, ExpertStack]
    refused: Mapping[str, str]
    """Modules that no mesh can cut, with the reason and the remedy."""


def find_stacks(model: nn.Module) -> FoundStacks:
    """Return all modules of experts in ``model``."""
    stacks: dict[str, ExpertStack] = {}
    refused: dict[str, str] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{around}.") for around in (*stacks, *refused)):
            continue
        own: Callable[[], ExpertStack] | None = getattr(module, "expert_stack", None)
        if own is not None:
            stacks[name] = own()
        elif flags_of(module) is not None:
            found = _their_stack(module)
            if isinstance(found, ExpertStack):
                stacks[name] = found
            else:
                refused[name] = found
        elif _is_named_experts(name, module):
            refused[name] = _what_it_is(module)
    return FoundStacks(stacks, refused)


def refuse_unknown(model: nn.Module, found: FoundStacks, ep: int, etp: int) -> None:
    """Check that the mesh can cut the experts of ``model``.

    Args:
        model: the model.
        found: the stacks of the model.
        ep: number of ranks over which experts are spread.
        etp: number of ranks over which the features of an expert are cut.

    Raises:
        PlanError: if the mesh cuts experts and ``model`` has none, or some that cannot be cut so.
    """
    if ep == 1 and etp == 1:
        return
    mesh = " and ".join(f"mesh.{axis} is {size}" for axis, size in (("ep", ep), ("etp", etp)) if size > 1)
    for name, why in found.refused.items():
        raise PlanError(f"experts: {mesh}, but {name} {why}, or set mesh.ep and mesh.etp to 1")
    if not found.stacks:
        raise PlanError(
            f"experts: {mesh}, but {type(model).__name__} has no experts: no shardwise.MixtureOfExperts, and no module "
            "of transformers 5 with stacked experts"
        )
    for name, stack in found.stacks.items():
        for axis, ranks, number, what in (
            ("ep", ep, stack.experts, "experts"),
            ("etp", etp, stack.hidden, "hidden features of an expert"),
        ):
            if ranks > 1 and not number:
                raise PlanError(
                    f"experts: mesh.{axis} is {ranks}, but the {what} of {name} ({_class_of(model, name)}) cannot be "
                    f"cut; set mesh.{axis}: 1"
                )
            if number % ranks:
                fitting = [n for n in range(1, number + 1) if number % n == 0]
                best = min(fitting, key=lambda n: (abs(n - ranks), n))
                raise PlanError(
                    f"experts: {name}: {number} {what} do not divide over mesh.{axis}={ranks}; the nearest "
                    f"mesh.{axis} that works is {best}"
                )


def refuse_own_balance(model: nn.Module, stages: int) -> None:
    """Check that ``model`` does not compute a balance loss from router logits of several stages.

    Raises:
        PlanError: if a model of transformers adds such a loss and its layers lie on several stages.
    """
    for name, module in model.named_modules() if stages > 1 else ():
        asked = getattr(getattr(module, "config", None), "output_router_logits", False)
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if asked and code is not None and _OWN_BALANCE in code.co_names:
            raise PlanError(
                f"pipeline: {name or 'the model'} is a {type(module).__name__} that adds a balance loss of its own, "
                f"made of the router logits of all layers, and each of mesh.pp's {stages} stages has those of its own "
                "layers alone; set model.config.output_router_logits = False, or mesh.pp: 1"
            )


def gated_stack(experts: int, hidden: int, gate_up: str = "gate_up", down: str = "down") -> ExpertStack:
    """Return the stack of experts ``gate_up [E, 2F, D]``, gate first, and ``down [E, D, F]``.

    Args:
        experts: number of experts, E.
        hidden: hidden features of an expert, F.
        gate_up: name of the first parameter.
        down: name of the second parameter.
    """
    return ExpertStack(experts, hidden, {gate_up: _cut(1, _halves(hidden)), down: _cut(2)})


# Classes of transformers -------------------------------------------------------------------------------------------


def flags_of(module: Any) -> tuple[bool, ...] | None:
    """Return the flags of a class of transformers, None for other classes.

    The flags are: has a gate, has biases, has a norm behind, is transposed, has gate before up.
    """
    if not type(module).__module__.startswith("transformers.") and not hasattr(module, _FLAGS[-1]):
        return None
    if all(isinstance(getattr(module, flag, None), bool) for flag in _FLAGS):
        return tuple(getattr(module, flag) for flag in _FLAGS)
    return _ALIKE.get(type(module).__name__)


def _their_stack(module: Any) -> ExpertStack | str:
    """Return the stack of a module of transformers, or the reason why it cannot be cut."""
    flags = flags_of(module)
    assert flags is not None, "asked before"
    has_gate, has_bias, has_norm, is_transposed, is_concatenated = flags
    up, down = "gate_up_proj" if has_gate else "up_proj", "down_proj"
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    names = {up, down} | ({f"{up}_bias", f"{down}_bias"} if has_bias else set())
    if has_norm or set(shapes) != names:
        beside = sorted(set(shapes) - names) or sorted(names - set(shapes))
        return _refusal(
            module, f"{', '.join(beside)} beside stacks of its own" if beside else "a norm behind experts"
        )
    if len(shapes[up]) != 3 or len(shapes[down]) != 3:
        return _refusal(module, f"{up} {list(shapes[up])} and {down} {list(shapes[down])}")
    dims_up, dims_down = ((2, 1), (1, 2)) if is_transposed else ((1, 2), (2, 1))  # (features, width)
    experts, hidden, width = shapes[down][0], shapes[down][dims_down[0]], shapes[down][dims_down[1]]
    inner = 2 * hidden if has_gate else hidden
    wanted = {up: [experts, 0, 0], down: list(shapes[down])}
    wanted[up][dims_up[0]], wanted[up][dims_up[1]] = inner, width
    if has_bias:
        wanted |= {f"{up}_bias": [experts, inner], f"{down}_bias": [experts, width]}
    for name, shape in wanted.items():
        if list(shapes[name]) != shape:
            return _refusal(module, f"{name} {list(shapes[name])} where {shape} was expected")
    blocks = () if not has_gate else _halves(hidden) if is_concatenated else (ShardBlock(inner, hidden),)
    parameters = {up: _cut(dims_up[0], blocks), down: _cut(dims_down[0])}
    if has_bias:
        parameters |= {f"{up}_bias": _cut(1, blocks), f"{down}_bias": StackPlacement(Replicate(), Partial())}
    return ExpertStack(experts, hidden, parameters)


def _halves(hidden: int) -> tuple[ShardBlock, ...]:
    return (ShardBlock(hidden, hidden), ShardBlock(hidden, hidden))


def _cut(dim: int, blocks: tuple[ShardBlock, ...] = ()) -> StackPlacement:
    return StackPlacement(Shard(dim, blocks), Shard(dim, blocks))


# Others ------------------------------------------------------------------------------------------------------------


def _is_named_experts(name: str, module: nn.Module) -> bool:
    """Return whether a module is named as experts, is no shared dense expert and has parameters."""
    leaf, kind = name.rpartition(".")[2], type(module).__name__
    if "shared" in leaf.lower() or "Shared" in kind or next(module.parameters(), None) is None:
        return False
    if any(hasattr(inner, "expert_stack") or flags_of(inner) is not None for inner in module.modules()):
        return False  # a layer around a stack
    return leaf == "experts" or kind.endswith("Experts")


def _what_it_is(module: nn.Module) -> str:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        of = type(next(iter(module.children()))).__name__
        return _refusal(module, f"{len(module)} modules {of}, one per expert")
    return _refusal(module, "a forward and tensors of its own form")


def _refusal(module: nn.Module, what: str) -> str:
    return (
        f"is a {type(module).__name__} with {what}. A mesh cuts tensors that hold all experts, one behind the other in "
        "dim 0, as in shardwise.MixtureOfExperts (its argument expert=... stacks a module of any kind) and in "
        "transformers' classes with gate_up_proj and down_proj; use one of these"
    )


def _class_of(model: nn.Module, name: str) -> str:
    return type(model.get_submodule(name)).__name__
