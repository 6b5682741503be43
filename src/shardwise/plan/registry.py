"""The tensor registry: every persistent tensor, once, with its placement on every axis.

The registry of a pass on shapes also has the inputs and outputs of modules and their gradients (verify/static.py): the
name is that of the module, the label is ``input`` or ``output``, and the shape is that of one microbatch of all ranks.

All parts of the package read the placement of a tensor in the registry: bytes per rank (plan), how to assemble a global
tensor (verify), which slices to write and read (checkpoint), which gradients still need a reduction. No attribute is
set on a tensor and no module-level table exists.

Cost: one entry per tensor, nothing per rank.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from shardwise.base.errors import PlanError
from shardwise.plan.mesh import DENSE, Mesh, StateAxes
from shardwise.plan.placement import FLAT, AxisCut, Placement, Replicate, Shard, shape_on
from shardwise.plan.unit import Unit

TensorKind = Literal[
    "parameter", "gradient", "master", "moment", "buffer", "table", "activation", "activation gradient"
]
"""Kinds of tensors. An activation is an input or an output of a module, in any one microbatch."""
Needs = Literal["elements", "norm", "matrix", "loads"]
"""Inputs of a tensor's update: each element by itself, also the norm of the whole tensor, or the whole matrix."""


class UpdateRule(NamedTuple):
    """The way in which an optimizer updates the parameters of one group."""

    moments: tuple[str, ...] = ()
    """Names of the values that the optimizer keeps for every element."""
    needs: Needs = "elements"
    wire: torch.dtype | None = None
    """Dtype in which directions of whole matrices travel, if updates need those."""


class TierSizes(NamedTuple):
    """Sizes of the tiers of one embedding table on a rank that holds any part of it."""

    rows: int
    """Rows in memory."""
    beside_bytes: int = 0
    """Bytes of memory beside the rows: indexes and buffers."""
    disk_bytes: int = 0
    """Most bytes on disk."""


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape and placements of one persistent tensor."""

    name: str
    """Fully qualified name in the user's model."""
    shape: tuple[int, ...]
    """Global shape, uncut and unpadded."""
    dtype: torch.dtype
    kind: TensorKind
    placement: Mapping[str, Placement] = field(default_factory=dict)
    """Placement per axis; an axis that is not named is Replicate.

    Tables lie on "dp", both data-parallel axes as one.
    """
    grad_placement: Mapping[str, Placement] = field(default_factory=dict)
    """Placement of a parameter's gradient per axis, before reduction."""
    axes: StateAxes = DENSE
    """Axes over which the state is copied and cut.

    They determine which axes may cut the tensor into slices (``Mesh.model_axes``).
    """
    label: str = ""
    """Name of a moment (``exp_avg``, ``exp_avg_sq``, ``momentum_buffer`` ...) or of a state of a table's rows; of an
    activation, ``input`` or ``output``."""
    aliases: tuple[str, ...] = ()
    """Further names of the same tensor (tied parameters)."""
    stages: tuple[int, ...] = (0,)
    """Pipeline stages that hold the tensor: several if it is tied across stages. The first stage is its owner."""
    needs: Needs = "elements"
    """Inputs of the update, for a master, or for a buffer that a step updates."""
    wire: torch.dtype | None = None
    """Dtype in which the direction of a master travels, if its update needs the whole matrix."""
    grows: bool = False
    """True if rows are added with their keys (a dynamic table).

    Dim 0 of the shape is then the most rows; 0: no limit.
    """
    tiers: TierSizes | None = None
    """Sizes of a table's tiers on a rank that holds any part of it; None if all rows are in memory. Only the entry of
    the weights has bytes beside the rows."""

    @property
    def ledger_row(self) -> str:
        """Row of the ledger to which a table's bytes belong."""
        if self.tiers is not None:
            return "table cache"
        return "dynamic tables" if self.grows else "tables"

    @property
    def elements(self) -> int:
        """Elements of the global tensor."""
        return math.prod(self.shape)

    def bytes_on(self, mesh: Mesh, rank: int) -> float:
        """Return the bytes of one rank's piece, flat padding left out.

        A table that grows counts its most rows, spread evenly, and a table with tiers its rows in memory.
        """
        if mesh.index("pp", rank) not in mesh.places.of_each(self.stages):
            return 0.0
        cuts = [
            AxisCut(where, mesh.index(axis, rank), mesh.size(axis)) for axis, where in self.placement.items()
        ]
        shape = shape_on(self.shape, cuts)
        elements: float = math.prod(shape)
        if self.tiers is not None and shape[0] and (self.grows or shape[0] > self.tiers.rows):
            elements *= self.tiers.rows / shape[0]
        flat = [
            axis for axis, where in self.placement.items() if isinstance(where, Shard) and where.dim == FLAT
        ]
        return elements * self.dtype.itemsize / math.prod(mesh.size(axis) for axis in flat)

    def ledger_bytes(self, mesh: Mesh, rank: int) -> dict[str, int]:
        """Return the bytes of a table's piece on one rank by row of the ledger."""
        found = {self.ledger_row: round(self.bytes_on(mesh, rank))}
        if self.tiers is not None and found[self.ledger_row] and not self.label:
            found["table indexes"] = self.tiers.beside_bytes
            found["tables on disk"] = self.tiers.disk_bytes
        return found

    def on(self, axis: str) -> Placement:
        """Return the placement on one axis."""
        return self.placement.get(axis, Replicate())

    def gradient_on(self, axis: str) -> Placement:
        """Return the placement of the gradient on one axis, before reduction."""
        return self.grad_placement.get(axis, Replicate())


class Registry:
    """Tensors by (kind, label, name), placed on ``mesh``.

    The registry refuses a second registration of a tensor. It also refuses a trained tensor whose gradient has no
    placement on an axis with several ranks: there the gradient would be summed never, or twice.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._tensors: dict[tuple[str, str, str], TensorInfo] = {}

    def add(self, info: TensorInfo) -> None:
        """Register one tensor.

        Raises:
            PlanError: if the tensor is registered already, or its gradient lacks a placement.
        """
        key = (info.kind, info.label, info.name)
        if key in self._tensors:
            raise PlanError(f"registry: {info.kind} {info.name!r} is registered twice")
        if info.kind == "gradient":
            self._check_gradient(info)
        self._tensors[key] = info

    def _check_gradient(self, info: TensorInfo) -> None:
        unsaid = [
            axis
            for axis in self.mesh.stage_axes(info.axes)
            if self.mesh.size(axis) > 1 and axis not in info.grad_placement
        ]
        if unsaid:
            raise PlanError(
                f"registry: {info.name!r} is trained, and nobody said how its gradient lies on the axis {unsaid[0]!r} "
                f"of {self.mesh.size(unsaid[0])} ranks before it is reduced (grad_placement): Partial where every rank "
                "holds an addend, Replicate where all hold the sum, Shard where each holds that of its own slice"
            )

    def get(self, kind: TensorKind, name: str, label: str = "") -> TensorInfo:
        """Return the tensor of that kind and name.

        Raises:
            PlanError: if there is none.
        """
        try:
            return self._tensors[kind, label, name]
        except KeyError:
            raise PlanError(f"registry: there is no {kind} {label} {name!r}") from None

    def find(self, kind: TensorKind, name: str, label: str = "") -> TensorInfo | None:
        """Return the tensor of that kind and name; None if there is none."""
        return self._tensors.get((kind, label, name))

    def __iter__(self) -> Iterator[TensorInfo]:
        return iter(self._tensors.values())

    def __len__(self) -> int:
        return len(self._tensors)

    def of_kind(self, kind: TensorKind) -> list[TensorInfo]:
        """Return all tensors of one kind, in order of registration."""
        return [info for info in self if info.kind == kind]

    def needs(self, what: Needs, stages: Collection[int] | None = None) -> list[TensorInfo]:
        """Return the tensors whose update needs ``what``, in order of registration.

        Args:
            what: An input of updates.
            stages: Only tensors that one of these pipeline stages holds; None: all.
        """
        found = [info for info in self._tensors.values() if info.needs == what]
        return [info for info in found if stages is None or not set(stages).isdisjoint(info.stages)]

    def needs_of(self, unit: Unit) -> set[Needs]:
        """Return what the updates of a Unit's parameters need."""
        names = [slot.name for bucket in unit.buckets if bucket.key.trained for slot in bucket.slots]
        return {self.get("master", name).needs for name in names}

    def cut_axes(self, info: TensorInfo) -> tuple[str, ...]:
        """Return the axes on which the tensor is not replicated."""
        return tuple(axis for axis, where in info.placement.items() if not isinstance(where, Replicate))
