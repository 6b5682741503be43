"""ModelSpec: a model as data, all that a Plan needs of it.

Ranks that hold a stage or a slice of the model still agree on every name, shape and dtype: a checkpoint's layout, a
whole tensor put together from its pieces and the start weights all speak of the whole model. So its description is
made once (describe.py reads it off a module, or it is written down), and nobody writes into it: where a tensor lies is
what functions of it and of the policies say.

Cost: one entry per tensor, no values.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch

from shardwise.parallel.pipeline.partition import partition
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.plan.errors import PlanError
from shardwise.plan.mesh import DENSE, EXPERT, StateAxes
from shardwise.plan.placement import Placement


class ParameterSpec(NamedTuple):
    """One parameter of the whole model."""

    name: str
    """Its first name."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool = True
    aliases: tuple[str, ...] = ()
    """Its further names, where it is tied."""


class BufferSpec(NamedTuple):
    """One buffer of the whole model."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_saved: bool
    """Whether a state dict holds it."""


class Blocks(NamedTuple):
    """The modules that are dealt to pipeline stages, and what stands around them."""

    names: tuple[str, ...]
    weights: tuple[int, ...]
    """Parameters of each, as one rank on "tp" holds them; what stands between two counts with the later one."""
    front: int
    """Parameters in front of the first."""
    back: int
    """Parameters behind the last."""
    positions: Mapping[str, int]
    """By every name of a parameter, a buffer or a collection of tables: the block that it lies in or, outside of them,
    the next one; ``len(names)`` behind them all."""
    classes: tuple[str, ...] = ()
    """Names of the blocks' classes; of a plain function of a list its own."""

    def starts(self, policy: PipelinePolicy, ranks: int) -> tuple[str, ...]:
        """Names of the blocks that begin each stage but the first, over ``ranks`` on "pp". Errors: PlanError."""
        stages = ranks * policy.virtual_stages
        return partition(
            policy.partition, self.names, self.weights, stages, self.front, self.back, self.classes
        )


class OnAxis(NamedTuple):
    """How one parameter lies on an axis that has several ranks."""

    placement: Placement
    gradient: Placement
    """Of its gradient, before reduction."""


class ExpertLayer(NamedTuple):
    """One mixture of experts."""

    experts: int
    top_k: int
    """Experts of a token."""
    width: int
    """Features of a token."""
    capacity: float | None = None
    """Of its router."""


@dataclass(frozen=True)
class ModelSpec:
    """See the module's docstring."""

    parameters: Mapping[str, ParameterSpec]
    """By first name."""
    buffers: Mapping[str, BufferSpec]
    canonical: Mapping[str, str]
    """Every name of a parameter, tied ones too, in order of registration, and its first."""
    order: tuple[str, ...]
    """Names as in the model's state dict."""
    units: tuple[str, ...] = ()
    """Names of the modules whose parameters move together, in order of registration; the root is left out."""
    blocks: Blocks | None = None
    """None where the model is not to be cut into stages."""
    slices: Mapping[str, Mapping[str, OnAxis]] = field(default_factory=dict)
    """By first name and axis: "tp", or, of a parameter of experts, "ep" and "etp"; empty where nothing is to be cut."""
    tables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """All names of each collection of embedding tables, by its first."""
    experts: Mapping[str, ExpertLayer] = field(default_factory=dict)
    """The mixtures of experts, by first name."""
    shared_buffers: frozenset[str] = frozenset()
    """Names of buffers that all ranks move alike; of any other nobody promises that."""

    @property
    def experts_of(self) -> dict[str, int]:
        """How many experts each mixture has, by its first name."""
        return {name: layer.experts for name, layer in self.experts.items()}

    def is_of_experts(self, name: str) -> bool:
        """Whether dim 0 of a parameter, by its first name, counts experts."""
        stacks = (f"{layer}.experts." if layer else "experts." for layer in self.experts)
        return "ep" in self.slices.get(name, ()) or any(map(name.startswith, stacks))

    def state_axes(self, name: str) -> StateAxes:
        """Over which the state of a parameter is copied and cut, by its first name."""
        return EXPERT if "ep" in self.slices.get(name, ()) else DENSE

    def stage_starts(self, policy: PipelinePolicy, ranks: int) -> tuple[str, ...]:
        """Names of the blocks that begin each stage but the first, over ``ranks`` on "pp".

        Errors: PlanError where the blocks cannot be dealt so.
        """
        if ranks == 1:
            return ()
        if self.blocks is None:
            raise PlanError(
                f"pipeline: mesh.pp is {ranks}, but the model's description names no blocks to deal"
            )
        return self.blocks.starts(policy, ranks)

    def stages(self, starts: Sequence[str]) -> dict[str, int]:
        """Stage of each parameter, buffer and collection of tables, by every name.

        Errors: PlanError where several stages use a collection.
        """
        if self.blocks is None or not starts:
            return dict.fromkeys((*self.canonical, *self.buffers, *chain(*self.tables.values())), 0)
        first = [self.blocks.names.index(name) for name in starts]
        of_place = [sum(begin <= i for begin in first) for i in range(len(self.blocks.names))]
        of_place.append(len(starts))
        stage_of = {name: of_place[place] for name, place in self.blocks.positions.items()}
        for collection, aliases in self.tables.items():
            if len({stage_of[name] for name in aliases}) > 1:
                raise PlanError(
                    f"tables: the collection {collection!r} is used by blocks of several pipeline stages; each stage "
                    "needs a collection of its own"
                )
        return stage_of

    def stage_of_tables(self, starts: Sequence[str]) -> dict[str, int]:
        """Stage of each collection of embedding tables, by its first name. Errors: as ``stages``'."""
        stage_of = self.stages(starts)
        return {first: stage_of[first] for first in self.tables}


def positions_by_order(names: Iterable[str], blocks: Sequence[str]) -> dict[str, int]:
    """``Blocks.positions`` of tensors that are given in the order in which the model uses them."""
    at = {name: i for i, name in enumerate(blocks)}
    found, following = {}, 0
    for name in names:
        around = name
        while around and around not in at:
            around = around.rpartition(".")[0]
        if around:
            following = at[around] + 1
        found[name] = at[around] if around else following
    return found
