"""The initial values of parameters as data: the same bits for the same element on every mesh.

A rule names a distribution; ``draw`` returns any elements of one parameter, keyed by (seed, its name, element):

    weight[i] = rule(random(key_of(seed, name), i))         drawn in fp64, cast to the dtype

Every rank draws the elements that it keeps, so nothing is broadcast, and no rank holds the whole model. A model on
the meta device provides its own rules (``Gpt.initial_rules``), or gets torch's defaults (``torch_rules``), or a table
of patterns (``match_rules``).

Cost: memory of the result and 2 MiB beside it.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from shardwise.base.errors import PlanError
from shardwise.base.policy import nearest
from shardwise.kernels import philox
from shardwise.kernels.initializers import Constant, Initializer, Normal, of_torch

_CHUNK_ELEMENTS = 1 << 18


def draw(rule: Initializer, seed: int, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Draw elements [start, stop) of the flattened global parameter ``name`` on the CPU: [stop - start].

    Args:
        rule: The distribution.
        seed: The seed of the run.
        name: The parameter's fully qualified name.
        start: The first element.
        stop: The element after the last one.
        dtype: The dtype of the result.
    """
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
    """Draw every parameter of a model that is not on the meta device."""
    for name, parameter in model.named_parameters():
        elements = draw(rules[name], seed, name, 0, parameter.numel(), parameter.dtype)
        parameter.copy_(elements.view(parameter.shape))


def match_rules(names: Iterable[str], table: Mapping[str, Initializer]) -> dict[str, Initializer]:
    """Return the rule of the first shell pattern of ``table`` that matches each parameter's name.

    Raises:
        PlanError: if no pattern matches a name.
    """
    found = {}
    for name in names:
        rule = next((rule for pattern, rule in table.items() if fnmatchcase(name, pattern)), None)
        if rule is None:
            raise PlanError(f"start weights: no pattern matches parameter {name!r}{nearest(name, table)}")
        found[name] = rule
    return found


def torch_rules(model: nn.Module) -> dict[str, Initializer]:
    """Return the rules of torch's own ``reset_parameters`` for the parameters of torch's common modules.

    A submodule with ``initial_rules()`` provides its own rules.

    Raises:
        PlanError: if the initial rule of a parameter is not known; the error names the parameter.
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
