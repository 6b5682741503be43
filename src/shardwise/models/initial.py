"""How a parameter starts, as data: the same bits for the same element on every mesh.

A rule names a distribution; ``draw`` gives any elements of one parameter, keyed by (seed, its name, element):

    weight[i] = rule(random(key_of(seed, name), i))         drawn in fp64, cast to the dtype

so every rank draws what it keeps, nothing is broadcast, and no rank holds the model. A model that comes on the meta
device brings its rules itself (``Gpt.initial_rules``), or gets torch's own defaults (``torch_rules``), or a table of
patterns (``match_rules``).

Cost: memory of the result and 2 MiB beside it.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from shardwise.kernels import philox
from shardwise.kernels.initializers import Constant, Initializer, Normal, of_torch
from shardwise.plan.errors import PlanError
from shardwise.plan.policy import nearest

_CHUNK_ELEMENTS = 1 << 18


def draw(rule: Initializer, seed: int, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Elements [start, stop) of the flattened global parameter ``name``, on the CPU: [stop - start]."""
    if isinstance(rule, Constant):
        return torch.full((stop - start,), rule.value, dtype=dtype, device="cpu")
    key = philox.key_of(seed, name)
    out = torch.empty(stop - start, dtype=dtype, device="cpu")
    for begin in range(start, stop, _CHUNK_ELEMENTS):
        end = min(begin + _CHUNK_ELEMENTS, stop)
        if isinstance(rule, Normal):
            chunk = philox.normal(key, begin, end).mul_(rule.std).add_(rule.mean)
        else:
            chunk = philox.uniform(key, begin, end).mul_(rule.high - rule.low).add_(rule.low)
        out[begin - start : end - start] = chunk
    return out


@torch.no_grad()
def draw_all(model: nn.Module, rules: Mapping[str, Initializer], seed: int) -> None:
    """Fill every parameter of a model that is not on the meta device."""
    for name, parameter in model.named_parameters():
        elements = draw(rules[name], seed, name, 0, parameter.numel(), parameter.dtype)
        parameter.copy_(elements.view(parameter.shape))


def match_rules(names: Iterable[str], table: Mapping[str, Initializer]) -> dict[str, Initializer]:
    """The rule of the first pattern of ``table`` (shell style) that a parameter's name matches."""
    found = {}
    for name in names:
        rule = next((rule for pattern, rule in table.items() if fnmatchcase(name, pattern)), None)
        if rule is None:
            raise PlanError(f"start weights: no pattern matches parameter {name!r}{nearest(name, table)}")
        found[name] = rule
    return found


def torch_rules(model: nn.Module) -> dict[str, Initializer]:
    """The distributions of torch's own ``reset_parameters`` for the parameters of torch's common modules.

    A module inside that has ``initial_rules()`` says itself how it starts. A parameter of any other module has no known
    start: the error names it.
    """
    rules: dict[str, Initializer] = {}
    unknown = []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        own = getattr(module, "initial_rules", None)
        if own is not None and module is not model:
            rules |= {names[id(module.get_parameter(local))]: rule for local, rule in own().items()}
    for module in model.modules():
        for local, parameter in module.named_parameters(recurse=False):
            name = names[id(parameter)]
            rule = of_torch(module, local)
            if rule is not None:
                rules.setdefault(name, rule)
            elif name not in rules:
                unknown.append(f"{name} of {type(module).__name__}")
    if unknown:
        raise PlanError(
            f"start weights: {len(unknown)} parameters belong to modules whose start is not known "
            f"({', '.join(unknown[:3])}); give the model an initial_rules() method that returns "
            "{parameter name: Normal | Uniform | Constant}, or pass it initialised"
        )
    return rules
