"""The Units of a model: which modules' parameters move together.

``auto`` takes the repeated blocks, that is the children of the outermost ModuleList or Sequential that holds at least
two modules of one class with parameters. ``zero.units`` names Units by patterns. Parameters outside every Unit belong
to the root, whose window is the whole forward pass.

A parameter that several modules hold (tied weights) is one slot with several names. Two Parameter objects over the same
memory are not tied: torch updates one after the other, and the engine, which gives each its own memory, would separate
them. Such parameters are refused.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.base.errors import PlanError
from shardwise.base.names import chosen_by
from shardwise.plan.unit import Unit


class NamedParameter(NamedTuple):
    """One parameter: its first name, its other names, and the Parameter object."""

    name: str
    aliases: tuple[str, ...]
    parameter: nn.Parameter


def unit_names(model: nn.Module, units: Sequence[str] | str) -> list[str]:
    """Return the names of the modules that become Units, without the root.

    Args:
        model: The model.
        units: "auto", or patterns of module names.

    Returns:
        Module names in the order of the model.

    Raises:
        ConfigError: If a pattern matches no module.
    """
    if isinstance(units, str):
        return repeated_blocks(model)
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    return chosen_by(units, names, "zero.units", "module")


def check_callable(model: nn.Module, units: Sequence[str]) -> None:
    """Check that every Unit with parameters has a forward pass, whose hooks gather its weights.

    Args:
        model: The model.
        units: Names of the Units.

    Raises:
        PlanError: If a Unit is a ModuleList or ModuleDict that holds parameters outside of other Units.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        if name not in units or not isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        inside = [unit for unit in units if unit.startswith(f"{name}.")]
        for inner, _ in module.named_parameters():
            if not any(f"{name}.{inner}".startswith(f"{unit}.") for unit in inside):
                raise PlanError(
                    f"Unit {name!r} is a {type(module).__name__}, which has no forward pass of its own; "
                    f"name its children instead: zero.units: ['{name}.*']"
                )


def held(
    model: nn.Module, units: Sequence[Unit], canonical: Mapping[str, str], what: str
) -> dict[str, NamedParameter]:
    """Return the parameters of a stage, keyed by their first names in the whole model.

    Args:
        model: The module of the stage.
        units: The Units that the Plan has for the stage.
        canonical: First name in the whole model of each tied name in the stage.
        what: Name of the stage in errors.

    Returns:
        The parameters.

    Raises:
        PlanError: If names, shapes or ``requires_grad`` differ from the Plan's.
    """
    found: dict[str, NamedParameter] = {}
    for holding in holdings(model):
        name = canonical.get(holding.name, holding.name)
        if name in found:
            raise PlanError(
                f"{what}: {found[name].name!r} and {holding.name!r} were one tied parameter, and are two here"
            )
        found[name] = holding
    planned = {
        slot.name: (slot, bucket.key) for unit in units for bucket in unit.buckets for slot in bucket.slots
    }
    for name in sorted({*found} ^ {*planned}):
        which = "which the Plan has not" if name in found else "which is not there"
        raise PlanError(
            f"{what}: the Plan was made of the model's description, and the module that was cut for it differs: "
            f"parameter {name!r}, {which}. Is it made, renamed or tied between the two?"
        )
    for name, (slot, key) in planned.items():
        parameter = found[name].parameter
        if tuple(parameter.shape) != slot.shape or parameter.requires_grad != key.trained:
            raise PlanError(
                f"{what}: parameter {name!r} is {list(parameter.shape)}, requires_grad {parameter.requires_grad}, but "
                f"{list(slot.shape)}, {key.trained} in the Plan"
            )
    return found


def holdings(model: nn.Module) -> list[NamedParameter]:
    """Return every parameter of the model once, with all its names."""
    by_identity: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    return [NamedParameter(found[0], tuple(found[1:]), parameters[key]) for key, found in by_identity.items()]


def check_memory(model: nn.Module) -> None:
    """Check that no parameter shares elements with another tensor of the model.

    Args:
        model: The model.

    Raises:
        PlanError: If a parameter overlaps another parameter or buffer in memory.
    """
    named = list(model.named_parameters()) + list(model.named_buffers())
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in named:
        if tensor.layout is torch.strided and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
    for sharing in by_storage.values():
        for (first, one), (second, other) in combinations(sharing, 2):
            is_trained = isinstance(one, nn.Parameter) or isinstance(other, nn.Parameter)
            if is_trained and _overlap(one, other):
                raise PlanError(
                    f"model: {first} and {second} are two tensors over one memory (as p.data = q.data makes them), "
                    "which would come apart at the first step. To tie two weights let both modules hold one "
                    "Parameter (head.weight = embedding.weight); to part them copy one (p.data = p.data.clone())"
                )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors of one storage have an element in common."""
    spans = []
    for tensor in (one, other):
        start = tensor.storage_offset() * tensor.element_size()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((start, start + (last + 1) * tensor.element_size()))
    if spans[0][1] <= spans[1][0] or spans[1][1] <= spans[0][0]:
        return False
    if one.element_size() != other.element_size() or (one.is_contiguous() and other.is_contiguous()):
        return True
    first = min(one.storage_offset(), other.storage_offset())
    places = torch.arange(int(max(stop for _, stop in spans)) // one.element_size() - int(first))
    ones, others = (
        places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - first).flatten()
        for tensor in (one, other)
    )
    return bool(torch.isin(others, ones).any())


def check_renormalized(model: nn.Module, ranks: int) -> None:
    """Check that no forward pass edits weights differently on different ranks (``max_norm`` of embeddings).

    Args:
        model: The model.
        ranks: Number of ranks that hold copies of the weights.

    Raises:
        PlanError: If there are several ranks and an embedding has ``max_norm``.
    """
    if ranks == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise PlanError(
                f"model: {name or type(module).__name__} has max_norm {module.max_norm}, so that its forward "
                f"pass edits the rows of its weight that the batch names: on each of the {ranks} ranks others, and the "
                "copies would come apart. Set max_norm to None and clip the rows in forward "
                "(torch.renorm(embedding(ids), 2, 0, max_norm)), or train on one rank"
            )


def repeated_blocks(model: nn.Module) -> list[str]:
    """Return the names of the children of the outermost containers of repeated modules."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name == block or name.startswith(block + ".") for block in found)
        if inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = [
            (child_name, child)
            for child_name, child in module.named_children()
            if _has_parameters(child) and not isinstance(child, nn.ModuleList | nn.ModuleDict)
        ]
        classes = [type(child) for _, child in children]
        repeated = {cls for cls in classes if classes.count(cls) >= 2}
        # A Sequential of plain layers is one network, not a row of blocks: blocks have children of their own.
        found += [
            f"{name}.{child_name}" if name else child_name
            for child_name, child in children
            if type(child) in repeated and any(_has_parameters(inner) for inner in child.children())
        ]
    return found


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
