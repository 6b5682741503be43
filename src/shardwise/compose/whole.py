"""Whole: what every rank must know of a model before it is cut.

Ranks that hold a stage or a slice of the model still agree on every name, shape and dtype: a checkpoint's layout, a
whole tensor put together from its pieces and the start weights all speak of the whole model.

Cost: one entry per tensor, no values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from shardwise.parallel.tensor.layout import ParameterPlacement
from shardwise.parallel.zero import layout
from shardwise.parallel.zero.modules import check_memory, holdings
from shardwise.plan.errors import PlanError
from shardwise.plan.lists import Strategy
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Partial, PerRank, Replicate
from shardwise.plan.registry import Registry, TensorInfo
from shardwise.precision.policy import PrecisionPolicy


class Entry(NamedTuple):
    """One parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    aliases: tuple[str, ...]


@dataclass(frozen=True)
class Whole:
    """The tensors of a model. ``canonical`` maps every name of a parameter, tied ones too, to its first."""

    parameters: Mapping[str, Entry]
    buffers: Mapping[str, tuple[tuple[int, ...], torch.dtype, bool]]
    """Shape, dtype, and whether a state dict holds it."""
    canonical: Mapping[str, str]
    order: tuple[str, ...]
    """Names as in the model's state dict."""
    places: dict[str, ParameterPlacement] = field(default_factory=dict)
    """On "tp", by name; empty where nothing is cut there."""
    owners: dict[str, str] = field(default_factory=dict)
    """The module in whose forward pass alone a parameter may be used, by each name of one that "tp" cuts or sums."""
    stages: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Pipeline stages that hold a tensor, by name; empty where there is one."""


def describe(model: nn.Module) -> Whole:
    """Errors: PlanError where the model has no parameters, complex ones, or two over one memory."""
    parameters: dict[str, Entry] = {}
    canonical: dict[str, str] = {}
    for holding in holdings(model):
        parameter = holding.parameter
        if parameter.is_complex():
            raise PlanError(
                f"model: parameter {holding.name!r} has dtype {parameter.dtype}; expected a real one. Hold its "
                "real and imaginary parts (torch.view_as_real) and put them together in forward"
            )
        parameters[holding.name] = Entry(
            holding.name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad, holding.aliases
        )
        canonical |= dict.fromkeys((holding.name, *holding.aliases), holding.name)
    if not parameters:
        raise PlanError(f"model: {type(model).__name__} has no parameters; there is nothing to train")
    check_memory(model)
    persistent = model.state_dict(keep_vars=True)
    buffers = {
        name: (tuple(buffer.shape), buffer.dtype, name in persistent)
        for name, buffer in model.named_buffers()
    }
    return Whole(parameters, buffers, canonical, tuple(persistent))


def register(
    whole: Whole,
    mesh: Mesh,
    strategy: Strategy,
    precision: PrecisionPolicy,
    moments: Sequence[str],
) -> Registry:
    """Every persistent tensor with its place on every axis."""
    registry = Registry(mesh)
    addends = dict.fromkeys(strategy.axes, Partial())
    for name, shape, dtype, trained, aliases in whole.parameters.values():
        dtypes = precision.dtypes(name, dtype)
        place = whole.places.get(name)
        cut = {} if place is None or isinstance(place.placement, Replicate) else {"tp": place.placement}
        rows = layout.buffers(strategy, dtypes, trained, moments)
        placed = {row.kind: {**row.placement, **cut} for row in rows}
        gradient = addends if place is None else {**addends, "tp": place.gradient}
        stages = whole.stages.get(name, (0,))
        registry.add(
            TensorInfo(
                name,
                shape,
                dtypes.compute,
                "parameter",
                placed["weight"],
                gradient,
                aliases=aliases,
                stages=stages,
            )
        )
        if not trained:
            continue
        master = {**dict(zip(layout.AXES, strategy.master, strict=True)), **cut}
        registry.add(
            TensorInfo(name, shape, dtypes.grad, "gradient", placed["grad"], gradient, stages=stages)
        )
        registry.add(TensorInfo(name, shape, dtypes.master, "master", master, stages=stages))
        for moment in moments:
            registry.add(
                TensorInfo(name, shape, dtypes.master, "moment", master, label=moment, stages=stages)
            )
    for name, (shape, dtype, _) in whole.buffers.items():
        # Statistics follow the batches of their rank, and nobody promises more of any other buffer.
        own = dict.fromkeys(strategy.axes, PerRank())
        registry.add(TensorInfo(name, shape, dtype, "buffer", own, stages=whole.stages.get(name, (0,))))
    return registry
