"""Describe: read a ModelSpec from a module, without changing the module.

Cost: names and shapes; if a pipeline cuts the model, one pass without numbers (parallel/pipeline/uses.py).
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.base.errors import PlanError
from shardwise.base.names import chosen_by, matching
from shardwise.compose.spec import (
    AttentionSpec,
    AxisPlacement,
    BufferSpec,
    ExpertLayer,
    ModelSpec,
    ParameterSpec,
    StageBlocks,
)
from shardwise.kernels.deferred import DefersProducts, is_plain_linear
from shardwise.models.layers import Attention
from shardwise.parallel.context.choice import AttentionLayer
from shardwise.parallel.context.foreign import layer_of, takes_interface
from shardwise.parallel.embedding.collection import collections_of
from shardwise.parallel.expert.apply import mixtures
from shardwise.parallel.expert.experts import dropouts_in
from shardwise.parallel.expert.stacks import ExpertStack, find_stacks, refuse_own_balance, refuse_unknown
from shardwise.parallel.pipeline.block_seconds import read_seconds
from shardwise.parallel.pipeline.blocks import blocks_around, find_blocks, positions, weigh
from shardwise.parallel.pipeline.layers import Layers, class_name
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.parallel.pipeline.uses import ModuleUses, order_of_use
from shardwise.parallel.tensor.apply import table_of
from shardwise.parallel.tensor.layout import StyleTable, owners, places
from shardwise.parallel.tensor.policy import TensorPolicy
from shardwise.parallel.zero.modules import check_callable, check_memory, holdings, unit_names
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import AxisCut, Shard, local_shape
from shardwise.precision.resolve import shared_buffers_of

_USUAL_TOKENS = 4096
"""Tokens of a sequence, by which methods of context parallelism are compared if a model does not give its longest."""


class DescribedModel(NamedTuple):
    """A model's description, and other findings that cutting the module needs again."""

    spec: ModelSpec
    table: StyleTable | None
    """Table of how modules are cut along "tp"; None if none is cut."""
    cuts_sequence: bool
    owners: Mapping[str, str]
    """Module whose forward pass alone may use a parameter, by each name of a parameter that "tp" cuts or sums."""
    uses: ModuleUses | None
    """Order in which the model uses its parts, if it was observed."""
    stacks: Mapping[str, ExpertStack]
    """Modules of experts whose state lies on other ranks than the rest; each is a Unit."""


def describe(model: nn.Module, zero: ZeroPolicy | None = None, stacks: Collection[str] = ()) -> ModelSpec:
    """Return the tensors of ``model`` and, if ``zero`` is given, its Units.

    Args:
        model: The model.
        zero: Keys under ``zero:``; None: without Units.
        stacks: Names of modules of experts, which become Units.

    Raises:
        PlanError: if the model has no parameters, complex parameters, or two over one memory, or a Unit cannot be
            called.
        ConfigError: if patterns of ``zero`` match nothing.
    """
    parameters: dict[str, ParameterSpec] = {}
    first: dict[str, str] = {}
    for holding in holdings(model):
        parameter = holding.parameter
        if parameter.is_complex():
            raise PlanError(
                f"model: parameter {holding.name!r} has dtype {parameter.dtype}; expected a real one. Hold its "
                "real and imaginary parts (torch.view_as_real) and put them together in forward"
            )
        parameters[holding.name] = ParameterSpec(
            holding.name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad, holding.aliases
        )
        first |= dict.fromkeys((holding.name, *holding.aliases), holding.name)
    if not parameters:
        raise PlanError(f"model: {type(model).__name__} has no parameters; there is nothing to train")
    check_memory(model)
    canonical = {name: first[name] for name, _ in model.named_parameters(remove_duplicate=False)}
    persistent = model.state_dict(keep_vars=True)
    buffers = {
        name: BufferSpec(tuple(buffer.shape), buffer.dtype, name in persistent)
        for name, buffer in model.named_buffers()
    }
    units = () if zero is None else _units(model, zero, stacks)
    layers = mixtures(model, by_first_name=True)
    return ModelSpec(
        parameters,
        buffers,
        canonical,
        tuple(persistent),
        units,
        tables=_tables(model),
        experts={
            name: ExpertLayer(len(layer.router.weight), policy.top_k, layer.width, policy.capacity)
            for name, layer in layers.items()
            for policy in [layer.router.policy]
        },
        shared_buffers=frozenset(shared_buffers_of(model)),
        products=frozenset(_products(model, parameters)),
        load_buffers=frozenset(
            name
            for layer, mixture in layers.items()
            for name, _ in mixture.router.named_buffers(f"{layer}.router" if layer else "router")
        ),
    )


def _products(model: nn.Module, parameters: Mapping[str, ParameterSpec]) -> Iterator[str]:
    """Yield the weights of layers that can compute the gradient of the weight apart from that of the input.

    A tied weight is left out, because the gradients of its uses come from several layers.
    """
    for name, module in model.named_modules():
        names: Sequence[str] = ()
        if isinstance(module, DefersProducts):
            names = module.product_weights
        elif is_plain_linear(module):
            names = ("weight",)
        for key in names:
            full = f"{name}.{key}" if name else key
            if full in parameters and parameters[full].trained and not parameters[full].aliases:
                yield full


def describe_cut(
    model: nn.Module,
    mesh: Mesh,
    zero: ZeroPolicy,
    tensor: TensorPolicy,
    pipeline: PipelinePolicy,
    call: Callable[[nn.Module], Any] | None = None,
    device: torch.device | None = None,
) -> DescribedModel:
    """Return everything that a Plan on ``mesh`` needs.

    Args:
        model: The model.
        mesh: The mesh.
        zero: Keys under ``zero:``.
        tensor: Keys under ``tensor:``.
        pipeline: Keys under ``pipeline:``.
        call: Function that calls the model, which shows the order in which the model uses its parts.
        device: Device on which ``call`` computes.

    Raises:
        PlanError: if the model cannot be described or cut so.
        ConfigError: if patterns of ``zero`` match nothing.
    """
    if mesh.tp > 1 and isinstance(model, Layers) and model.has_specs:
        raise PlanError(
            f"tensor: mesh.tp is {mesh.tp}, but the model is a list with layers that are not built yet (LayerSpec), "
            "whose matrices cannot be cut; give built modules in the list, or set mesh.tp: 1"
        )
    refuse_own_balance(model, mesh.pp)
    stacks = _stacks(model, mesh)
    spec = describe(model, zero, stacks)
    table, cuts_sequence, uses = None, False, None
    slices: dict[str, Mapping[str, AxisPlacement]] = {}
    alone: Mapping[str, str] = {}
    if mesh.tp > 1:
        table = table_of(model, tensor.table, has_stacks=bool(stacks))
        if tensor.gather_logits:
            table = replace(table, causal_loss=False)
        table = replace(table, rows=_rows_around_mixtures(model, table.rows))
        cuts_sequence = table.sequence and tensor.sequence_parallel
        placed = places(model, table, mesh.tp, cuts_sequence)
        alone = owners(model, table, placed)
        slices = {
            name: {"tp": AxisPlacement(placed[name].placement, placed[name].gradient)}
            for name in spec.parameters
        }
    spec = replace(spec, slices={**slices, **_slices_of_experts(spec, stacks)})
    if mesh.cp > 1:
        spec = replace(spec, attention=_attention(model, mesh.tp, cuts_sequence))
    if mesh.pp > 1:
        uses = None if isinstance(model, Layers) else order_of_use(model, call, device)
        spec = replace(spec, blocks=blocks_of(model, pipeline, uses, _cut_sizes(model, spec, mesh)))
    return DescribedModel(spec, table, cuts_sequence, alone, uses, stacks)


def _attention(model: nn.Module, tp: int, cuts_sequence: bool) -> AttentionSpec:
    """Return the attention layers of a whole model, as one rank along "tp" computes them."""
    is_foreign = takes_interface(model)
    layers: dict[str, AttentionLayer] = {}
    for name, module in model.named_modules():
        if is_foreign and hasattr(module, "is_causal"):
            found = layer_of(module)
        elif not is_foreign and isinstance(module, Attention):
            heads, kv_heads, _ = module.head_counts
            found = AttentionLayer(heads, kv_heads, module.head_size, module.window)
        else:
            continue
        if found is not None:
            layers[name] = found._replace(
                heads=max(found.heads // tp, 1), kv_heads=max(found.kv_heads // tp, 1)
            )
    own, config = getattr(model, "policy", None), getattr(model, "config", None)
    tokens = getattr(own, "context", None) or getattr(config, "max_position_embeddings", None)
    return AttentionSpec(layers, tokens or _USUAL_TOKENS, tp if cuts_sequence else 1)


def _slices_of_experts(
    spec: ModelSpec, stacks: Mapping[str, ExpertStack]
) -> dict[str, Mapping[str, AxisPlacement]]:
    """Return the placements of the experts' parameters on the axes "ep" and "etp", by the name of the parameter."""
    return {
        spec.canonical[f"{module}.{leaf}"]: {
            "ep": AxisPlacement(Shard(0), Shard(0)),
            "etp": AxisPlacement(stacked.placement, stacked.gradient),
        }
        for module, stack in stacks.items()
        for leaf, stacked in stack.parameters.items()
    }


def _cut_sizes(model: nn.Module, spec: ModelSpec, mesh: Mesh) -> dict[int, int]:
    """Return the number of elements of each cut parameter on one rank, by the ``id`` of the parameter."""
    sizes = {}
    for name, places_ in spec.slices.items():
        parameter = model.get_parameter(name)
        cuts = [AxisCut(place.placement, 0, mesh.size(axis)) for axis, place in places_.items()]
        sizes[id(parameter)] = math.prod(local_shape(parameter.shape, cuts))
    return sizes


def _rows_around_mixtures(model: nn.Module, rows: Mapping[str, str]) -> dict[str, str]:
    """Return a table's ``rows`` without the entries for modules inside mixtures of experts.

    Each rank routes its own tokens there, so parameters that all ranks hold alike get addends of gradients.
    """
    layers = mixtures(model)
    inside = {name for layer in layers for name, _ in model.get_submodule(layer).named_modules(prefix=layer)}
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, str] = {}
    for pattern, words in rows.items():
        names = matching(modules, pattern)
        if inside.isdisjoint(names):
            found[pattern] = words
        else:
            found |= {name: words for name in names if name not in inside}
    return found | dict.fromkeys(layers, "partial")


def _stacks(model: nn.Module, mesh: Mesh) -> Mapping[str, ExpertStack]:
    """Return the modules of experts whose state lies on other ranks than the rest.

    Raises PlanError if a module of experts drops inside itself, because its mask would depend on the mesh.
    """
    found = find_stacks(model)
    refuse_unknown(model, found, mesh.ep, mesh.etp)
    if mesh.ep * mesh.etp * mesh.cp * mesh.tp == 1:
        return {}
    for name in (*found.stacks, *mixtures(model)):
        if dropping := next(dropouts_in(model.get_submodule(name)), ""):
            raise PlanError(
                f"experts: {name or 'the model'} drops inside itself: {dropping}. A mask would be drawn by rows, which "
                "come in another order on every mesh; set that share to 0, and drop behind the layer"
            )
    return found.stacks


def blocks_of(
    model: nn.Module, policy: PipelinePolicy, uses: ModuleUses | None, sizes: dict[int, int] | None = None
) -> StageBlocks:
    """Return the blocks that are distributed to stages.

    Args:
        model: The model.
        policy: Keys under ``pipeline:``.
        uses: Order in which the model uses its parts, if known.
        sizes: Elements of the parameters that are not whole, by ``id``.

    Raises:
        PlanError: if there are no blocks, if ``pipeline.partition`` names modules that do not exist, or if the file
            ``pipeline.seconds`` holds the seconds of other blocks.
        ConfigError: if that file cannot be read.
    """
    how = policy.partition
    names = find_blocks(model, uses, sizes) if isinstance(how, str) else how
    blocks = blocks_around(model, names)
    weights, front, back = weigh(model, blocks, uses, sizes)
    classes = tuple(class_name(model.get_submodule(name)) for name in blocks)
    seconds = None if policy.seconds is None else read_seconds(policy.seconds, blocks)
    return StageBlocks(blocks, tuple(weights), front, back, positions(model, blocks, uses), classes, seconds)


def _tables(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the names of the collections of embedding tables, by first name."""
    first = {id(each): name for name, each in collections_of(model).items()}
    found: dict[str, list[str]] = {name: [] for name in first.values()}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in first:
            found[first[id(module)]].append(name)
    return {name: tuple(names) for name, names in found.items()}


def _units(model: nn.Module, zero: ZeroPolicy, stacks: Collection[str]) -> tuple[str, ...]:
    """Return the names of the Units that the user, the model or its repeated blocks determine."""
    if zero.external_parameters:
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        chosen_by(zero.external_parameters, names, "zero.external_parameters", "parameter")
    own = getattr(model, "unit_patterns", None)
    wanted = set(unit_names(model, own() if zero.units == "auto" and own is not None else zero.units))
    wanted |= set(stacks)
    units = tuple(name for name, _ in model.named_modules(remove_duplicate=False) if name in wanted)
    check_callable(model, units)
    return units
