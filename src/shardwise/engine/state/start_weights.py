"""Start weights: the source of the first value of every element.

    init_from          a folder or file of weights, read in ranges; a checkpoint is loaded after the engine is built
                       (saving.py), over the values of the next two sources
    initial rules      drawn, for a model on ``meta``: from the caller, or the model's own ``initial_rules()``
    the model itself   rank 0's weights and buffers, on all ranks; in a model made in pieces (sharded_init.py) each
                       parameter is dealt out after the engine is built

The first two make any elements of any whole parameter, so that a rank requests the elements that it owns and no rank
ever holds a whole model.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.base.errors import UsageError
from shardwise.checkpoint.steps import steps_at
from shardwise.comm.collectives import Group
from shardwise.compose.spec import ModelSpec, ParameterSpec
from shardwise.config.run import RunConfig
from shardwise.engine.state.differences import StepDifferences
from shardwise.kernels.initializers import Initializer
from shardwise.models.gpt import Gpt
from shardwise.models.initial import draw
from shardwise.models.source import WeightSource, open_weights
from shardwise.parallel.pipeline.layers import Layers
from shardwise.parallel.zero.bucket import Fill
from shardwise.parallel.zero.modules import NamedParameter
from shardwise.plan.slices import TensorSlices
from shardwise.plan.unit import ParameterSlot


class StartWeights(NamedTuple):
    """The source of any elements of the parameters ``names``; all other parameters keep the model's own values."""

    fill: Fill | None = None
    """Returns elements of a whole parameter; None if the model holds all values already."""
    names: Collection[str] = ()
    notes: tuple[str, ...] = ()
    """Lines about the weights for the user."""
    later: frozenset[str] = frozenset()
    """Names of ``names`` whose values are written after all stages are built."""

    def of_pieces(self, slices: TensorSlices) -> "StartWeights":
        """Return the start weights for elements of this rank's slices; padding starts at zero."""
        fill = self.fill
        if fill is None:
            return self

        def fill_piece(slot: ParameterSlot, start: int, stop: int, dtype: torch.dtype) -> Tensor:
            info = slices.registry.get("parameter", slot.name)
            out = torch.zeros(stop - start, dtype=dtype)
            for run in slices.runs(info, start, stop):
                part = fill(slot, run.full, run.full + run.elements, dtype)
                if run.elements == stop - start:
                    return part
                out[run.local - start : run.local - start + run.elements] = part
            return out

        return self._replace(fill=fill_piece)

    def or_later(self, names: Collection[str]) -> "StartWeights":
        """Return the start weights with the values of ``names`` written after the engine is built (sharded_init.py)."""
        if not names:
            return self
        fill, later = self.fill, frozenset(names)

        def fill_others(slot: ParameterSlot, start: int, stop: int, dtype: torch.dtype) -> Tensor:
            if slot.name in later or fill is None:
                return torch.zeros((), dtype=dtype).expand(stop - start)
            return fill(slot, start, stop, dtype)

        return self._replace(fill=fill_others, names=frozenset(self.names) | later, later=later)

    def or_own(self, holdings: Mapping[str, NamedParameter]) -> Fill:
        """Return a function for elements of any parameter; values that are not made anew are read from the model."""

        def read(slot: ParameterSlot, start: int, stop: int, dtype: torch.dtype) -> Tensor:
            if self.fill is not None and slot.name in self.names:
                return self.fill(slot, start, stop, dtype)
            return holdings[slot.name].parameter.detach().reshape(-1)[start:stop]

        return read


def start_weights(
    model: nn.Module, settings: RunConfig, initial: Mapping[str, Initializer] | None, spec: ModelSpec
) -> StartWeights:
    """Return the source of the model's start weights.

    Args:
        model: The model.
        settings: The resolved configuration.
        initial: Rules to draw parameters by name; None takes the model's own.
        spec: The model as data.

    Raises:
        UsageError: if parameters are on meta and have no source of values.
    """
    wanted = settings.init_from
    if wanted is None or steps_at(Path(wanted.path)) is not None:
        return _drawn(model, settings.train.seed, initial, ())
    source = open_weights(wanted.path, model.policy if isinstance(model, Gpt) else None, wanted.missing)
    found = StepDifferences(wanted.missing, wanted.unexpected)
    found.check_patterns({*spec.order, *spec.canonical}, source.names(), wanted.path)
    entries = [entry for entry in spec.parameters.values() if not _is_left(source, entry, found)]
    buffers = _buffers_in(source, spec, found)
    source.check(
        {entry.name: entry.shape for entry in entries} | buffers,
        {entry.name: entry.dtype for entry in entries} | {name: spec.buffers[name][1] for name in buffers},
    )
    read = frozenset(entry.name for entry in entries)
    _read_buffers(source, model, buffers)
    others = _drawn(model, settings.train.seed, initial, read)

    def fill(slot: ParameterSlot, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        if slot.name in read or others.fill is None:
            return source.read(slot.name, start, stop).to(dtype)
        return others.fill(slot, start, stop, dtype)

    return StartWeights(fill, read | set(others.names), tuple(found.lines()))


def _is_left(source: WeightSource, entry: ParameterSpec, found: StepDifferences) -> bool:
    """Return whether the source lacks a parameter, or has it in another shape, and is allowed to."""
    if entry.name not in source.names():
        how = "is not there"
    elif source.shape(entry.name) != entry.shape:
        how = f"is {source.shape(entry.name)} there and {entry.shape} in this model"
    else:
        return False
    return found.lacks("weight", entry.name, how, *entry.aliases)


def _buffers_in(source: WeightSource, spec: ModelSpec, found: StepDifferences) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the saved buffers (statistics and the like) to read from the source.

    Buffers that are allowed to have another shape in the source, and have one, are left out.
    """
    names, shapes = set(source.names()), {}
    for name, (shape, _, is_saved) in spec.buffers.items():
        if not is_saved or name not in names:
            continue
        how = f"is {source.shape(name)} there and {shape} in this model"
        if source.shape(name) == shape or not found.lacks("buffer", name, how):
            shapes[name] = shape
    return shapes


def _read_buffers(source: WeightSource, model: nn.Module, names: Collection[str]) -> None:
    for name, buffer in model.named_buffers():
        if name in names and not buffer.is_meta:
            with torch.no_grad():
                buffer.copy_(source.read(name, 0, buffer.numel()).view(buffer.shape))


def _drawn(
    model: nn.Module, seed: int, initial: Mapping[str, Initializer] | None, known: Collection[str]
) -> StartWeights:
    """Return start weights that draw, by rules, the parameters whose values are not ``known``.

    Raises:
        UsageError: if parameters are on meta and have no rule.
    """
    if isinstance(model, Layers) and initial is None:
        return StartWeights()  # a LayerSpec's layer comes with its start weights
    on_meta = [name for name, each in model.named_parameters() if each.is_meta and name not in known]
    if not on_meta and initial is None:
        return StartWeights()
    own = getattr(model, "initial_rules", None)
    rules = dict(initial or (own() if own is not None else {}))
    without = [name for name in on_meta if name not in rules]
    if without:
        raise UsageError(
            f"model: {len(without)} parameters are on meta and nobody says how they start: {', '.join(without[:5])}; "
            "give initialize(..., initial={name: rule}) (shardwise.models.initial), init_from, or an initialised model"
        )
    return StartWeights(
        lambda slot, start, stop, dtype: draw(rules[slot.name], seed, slot.name, start, stop, dtype), rules
    )


def take_rank_0(model: nn.Module, device: torch.device, world: Group, made_anew: Collection[str]) -> None:
    """Overwrite the model's weights and buffers with rank 0's, except those that are ``made_anew``. Collective."""
    if world.size == 1:
        return
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_meta or name in made_anew:
                continue
            whole = tensor.detach().to(device).contiguous()
            world.broadcast(whole.view(-1), 0, name).wait()
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)
