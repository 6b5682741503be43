"""ModelSpec: a model as data, with all that a Plan needs.

Ranks that hold a stage or a slice of the model still agree on every name, shape and dtype: a checkpoint's layout, a
whole tensor assembled from its pieces and the start weights all refer to the whole model. So its description is made
once (describe.py reads it from a module, or it is written by hand) and never changed. The position of a tensor is
computed from the description and the policies.

Cost: one entry per tensor, no values.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch

from shardwise.base.errors import PlanError
from shardwise.parallel.context.choice import AttentionLayer
from shardwise.parallel.pipeline.block_seconds import BlockSeconds
from shardwise.parallel.pipeline.partition import partition
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.plan.mesh import DENSE, EXPERT, StateAxes
from shardwise.plan.placement import Placement


class ParameterSpec(NamedTuple):
    """One parameter of the whole model."""

    name: str
    """First name of the parameter."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool = True
    aliases: tuple[str, ...] = ()
    """Further names of the parameter, if it is tied."""


class BufferSpec(NamedTuple):
    """One buffer of the whole model."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_saved: bool
    """True if a state dict contains the buffer."""


class StageBlocks(NamedTuple):
    """The modules that are distributed to pipeline stages, and the parameters around them."""

    names: tuple[str, ...]
    weights: tuple[int, ...]
    """Number of parameters of each block, as one rank on "tp" holds them; parameters between two blocks count with the
    later.
    """
    front: int
    """Number of parameters in front of the first block."""
    back: int
    """Number of parameters behind the last block."""
    positions: Mapping[str, int]
    """Number of the block that contains a parameter, buffer or collection of tables, by each of its names.

    Outside of blocks, the number of the next block; ``len(names)`` behind all of them.
    """
    classes: tuple[str, ...] = ()
    """Class names of the blocks; the function's own name for a plain function in a list."""
    seconds: BlockSeconds | None = None
    """Measured seconds of the blocks, if ``pipeline.partition`` is "measured" and an earlier run has measured them."""

    def starts(self, policy: PipelinePolicy, ranks: int) -> tuple[str, ...]:
        """Return the names of the blocks that begin each stage but the first, over ``ranks`` on "pp".

        Raises:
            PlanError: if the blocks cannot be distributed so.
        """
        stages = ranks * policy.stages_per_rank
        return partition(
            policy.partition,
            self.names,
            self.weights,
            stages,
            self.front,
            self.back,
            self.classes,
            seconds=self.seconds,
            folded=policy.folded,
        )


class AxisPlacement(NamedTuple):
    """Placement of one parameter on an axis with several ranks."""

    placement: Placement
    gradient: Placement
    """Placement of the gradient, before reduction."""


class ExpertLayer(NamedTuple):
    """Sizes of one mixture of experts."""

    experts: int
    top_k: int
    """Experts per token."""
    width: int
    """Features of a token."""
    capacity: float | None = None
    """Capacity of the router."""


class AttentionSpec(NamedTuple):
    """The attention layers of a model, as one rank along "tp" computes them."""

    layers: Mapping[str, AttentionLayer]
    """Sizes by name of the layer; empty if they are not known."""
    tokens: int
    """Longest sequence that the model takes, or a usual length if the model does not tell."""
    parts: int = 1
    """Equal parts into which a rank's tokens are cut along "tp"."""


@dataclass(frozen=True)
class ModelSpec:
    """Description of a whole model: its parameters, buffers, Units, blocks, slices and tables."""

    parameters: Mapping[str, ParameterSpec]
    """Parameters, by first name."""
    buffers: Mapping[str, BufferSpec]
    canonical: Mapping[str, str]
    """First name of each parameter, by every name (also of tied parameters), in order of registration."""
    order: tuple[str, ...]
    """Names in the order of the model's state dict."""
    units: tuple[str, ...] = ()
    """Names of the modules whose parameters move together, in order of registration, without the root."""
    blocks: StageBlocks | None = None
    """Blocks to distribute; None if the model is not cut into stages."""
    slices: Mapping[str, Mapping[str, AxisPlacement]] = field(default_factory=dict)
    """Placements by first name and axis: "tp", or, for a parameter of experts, "ep" and "etp"; empty if nothing is cut.
    """
    tables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """All names of each collection of embedding tables, by its first name."""
    experts: Mapping[str, ExpertLayer] = field(default_factory=dict)
    """Mixtures of experts, by first name."""
    shared_buffers: frozenset[str] = frozenset()
    """Names of buffers that all ranks update in the same way; other buffers may differ."""
    products: frozenset[str] = frozenset()
    """Names of the weights of linear layers and experts whose gradients may wait for W."""
    load_buffers: frozenset[str] = frozenset()
    """Names of the shared buffers that a step updates by the loads of experts."""
    attention: AttentionSpec | None = None
    """Attention layers, if "cp" has several ranks."""

    @property
    def experts_of(self) -> dict[str, int]:
        """Number of experts of each mixture, by first name."""
        return {name: layer.experts for name, layer in self.experts.items()}

    def is_of_experts(self, name: str) -> bool:
        """Return whether dim 0 of a parameter, given by its first name, counts experts."""
        stacks = (f"{layer}.experts." if layer else "experts." for layer in self.experts)
        return "ep" in self.slices.get(name, ()) or any(map(name.startswith, stacks))

    def state_axes(self, name: str) -> StateAxes:
        """Return the axes over which the state of a parameter, given by its first name, is copied and cut."""
        return EXPERT if "ep" in self.slices.get(name, ()) else DENSE

    def stage_starts(self, policy: PipelinePolicy, ranks: int) -> tuple[str, ...]:
        """Return the names of the blocks that begin each stage but the first, over ``ranks`` on "pp".

        Raises:
            PlanError: if the blocks cannot be distributed so.
        """
        if ranks == 1:
            return ()
        if self.blocks is None:
            raise PlanError(
                f"pipeline: mesh.pp is {ranks}, but the model's description names no blocks to deal"
            )
        return self.blocks.starts(policy, ranks)

    def stages(self, starts: Sequence[str]) -> dict[str, int]:
        """Return the stage of each parameter, buffer and collection of tables, by every name.

        Args:
            starts: Blocks that begin each stage but the first.

        Raises:
            PlanError: if several stages use a collection.
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
        """Return the stage of each collection of embedding tables, by its first name.

        Args:
            starts: Blocks that begin each stage but the first.

        Raises:
            PlanError: if several stages use a collection.
        """
        stage_of = self.stages(starts)
        return {first: stage_of[first] for first in self.tables}


def positions_by_order(names: Iterable[str], blocks: Sequence[str]) -> dict[str, int]:
    """Return ``StageBlocks.positions`` for tensors in the order in which the model uses them.

    Args:
        names: Names of the tensors.
        blocks: Names of the blocks.
    """
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
