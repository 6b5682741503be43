"""Plan: a training step written down as data.

    Plan = Mesh + tensor registry + for each class of ranks: Units, their buffers, and one list of Actions

Ranks that differ only on the data-parallel axes and on "tp" do the same and form one class, "all". With a pipeline
there is one class for each index on "pp": "pp 0", "pp 1" ... A Plan for 131,072 ranks is therefore as small as a Plan
for 8.

The engine runs the Plan, the simulator prices it, the verifier proves it, and checkpoints store tensors by it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from shardwise.base.words import counted, grouped
from shardwise.plan.action import Action
from shardwise.plan.lists import skipped_updates
from shardwise.plan.mesh import DENSE, EXPERT, Mesh, StateAxes
from shardwise.plan.placement import Placement, Shard, Tier
from shardwise.plan.registry import Registry
from shardwise.plan.state_form import StateForm, stored_elements
from shardwise.plan.strategy import Strategy
from shardwise.plan.unit import Bucket, Unit


@dataclass(frozen=True)
class BucketBuffers:
    """The flat buffers of one bucket that live from step to step: element size and placement of each."""

    kind: str
    """Name of a moment, or ``weight``, ``grad``, ``master`` or ``next weight``.

    The next weight is that of an update that takes effect one step late.
    """
    itemsize: int
    placement: Mapping[str, Placement]
    tier: Tier = "device"
    form: StateForm = "fp32"
    """Form of a moment: with scales behind its elements, or without."""

    @property
    def row(self) -> str:
        """Row of the ledger (memory/ledger.py) in which the buffer is counted."""
        if self.tier != "device":
            return self.tier
        return {"weight": "weights", "grad": "gradients", "master": "master"}.get(self.kind, "moments")

    @property
    def is_moment(self) -> bool:
        """True if the buffer is a moment of the optimizer."""
        return self.kind not in ("weight", "grad", "master", "next weight")

    def elements(self, bucket: Bucket, mesh: Mesh) -> int:
        """Return the elements on one rank."""
        cut = any(isinstance(where, Shard) for where in self.placement.values())
        return bucket.shard_elements if cut else bucket.elements

    def nbytes(self, bucket: Bucket, mesh: Mesh) -> int:
        """Return the bytes on one rank, including scales."""
        return stored_elements(self.form, self.elements(bucket, mesh)) * self.itemsize


@dataclass(frozen=True)
class RankClass:
    """State and Actions of each rank of one class."""

    stages: tuple[int, ...]
    """Pipeline stages on the rank, ascending; (0,) without a pipeline."""
    units: tuple[Unit, ...]
    """Units of all the rank's stages, numbered consecutively; collections of embedding tables behind all others."""
    unit_stages: tuple[int, ...]
    """Stage of each Unit."""
    strategies: tuple[Strategy, ...]
    """Placements, tiers and times of the moves of each Unit's state."""
    buffers: Mapping[tuple[int, int], tuple[BucketBuffers, ...]]
    """Persistent buffers by (Unit, bucket)."""
    under_way: int = 0
    """Units of a stage whose reductions may run while a pass goes on."""
    actions: tuple[Action, ...] = ()
    """Actions of one optimizer step."""
    later_units: frozenset[int] = frozenset()
    """Units with weights whose gradients wait for W, if the schedule has W. All gradients of these Units are reduced
    behind W, those of other Units behind I."""
    turning_stages: frozenset[int] = frozenset()
    """Stages of which every forward pass is followed at once by its own backward pass. What their last block saves
    stays on the device."""

    @property
    def skipped(self) -> tuple[Action, ...]:
        """Actions behind NORM of a step that is skipped."""
        return tuple(skipped_updates(self.actions))

    def units_of(self, stage: int) -> tuple[Unit, ...]:
        """Return the Units of parameters of one stage, its root first."""
        return tuple(unit for unit in self._at(stage) if not unit.has_rows)

    def tables_of(self, stage: int) -> tuple[Unit, ...]:
        """Return the collections of embedding tables of one stage."""
        return tuple(unit for unit in self._at(stage) if unit.has_rows)

    def _at(self, stage: int) -> Iterator[Unit]:
        return (unit for unit, at in zip(self.units, self.unit_stages, strict=True) if at == stage)

    @property
    def tables(self) -> tuple[Unit, ...]:
        """Collections of embedding tables of all stages."""
        return tuple(unit for unit in self.units if unit.has_rows)

    @property
    def trained(self) -> tuple[bool, ...]:
        """True for each Unit in which any parameter trains."""
        return tuple(any(bucket.key.trained for bucket in unit.buckets) for unit in self.units)

    @property
    def updates_fp8(self) -> bool:
        """True if a step updates weights that are gathered in fp8, whose scales then follow."""
        keys = (bucket.key for unit in self.units for bucket in unit.buckets)
        return any(key.trained and key.gather_dtype is not None for key in keys)

    def bytes_of_units(self, mesh: Mesh, axes: StateAxes | None = None) -> dict[str, int]:
        """Return the model-state bytes of the Units by row of the ledger, padding included.

        Args:
            mesh: The mesh.
            axes: Count only Units with state on these axes; None: all Units.
        """
        total: dict[str, int] = {}
        for (unit, bucket), buffers in self.buffers.items():
            if axes is not None and self.units[unit].axes != axes:
                continue
            for buffer in buffers:
                size = buffer.nbytes(self.units[unit].buckets[bucket], mesh)
                total[buffer.row] = total.get(buffer.row, 0) + size
        return total


class RowExchange(NamedTuple):
    """Rows that a layer of experts sends along "ep" if its router chooses evenly.

    The real numbers depend on the routing.
    """

    layer: str
    experts: int
    top_k: int
    """Experts per token."""
    rows: float
    """Rows of one token that leave their rank."""
    row_bytes: int
    """All-to-all bytes of one row: there and back, forward and backward."""
    crossing: float = 0.0
    """Rows of one token that leave their host, if the exchange has two levels."""
    in_blocks: bool = False
    """True if the rows fill blocks of fixed size, whatever the router chooses."""


class AttentionExchange(NamedTuple):
    """The exchange of one attention layer between the ranks along "cp", for one sequence of one document."""

    layer: str
    method: str
    tokens: int
    """Tokens of the sequence."""
    forward: int
    """Elements that this rank sends in a forward pass; a block that is computed again sends them again."""
    backward: int
    """Elements that this rank sends in a backward pass."""


@dataclass(frozen=True)
class Plan:
    """A training step as data. ``units``, ``buffers`` and bytes are those of ``rank``."""

    mesh: Mesh
    registry: Registry
    classes: Mapping[str, RankClass]
    rank: int = 0
    """The rank whose view this is; 0 in a Plan that was made for no rank."""
    notes: tuple[str, ...] = field(default=())
    """Findings and automatic choices of the planner, for people."""
    exchanges: tuple[RowExchange | AttentionExchange, ...] = ()
    """Exchanges of each mixture of experts of the model, if "ep" has several ranks, and of each attention layer, if
    "cp" has."""
    tokens: int | None = None
    """Tokens of one optimizer step over all ranks; None if unknown before the batches arrive."""
    experts: Mapping[str, int] = field(default_factory=dict)
    """Number of experts of each mixture of the model, whose loads NORM sums."""
    monitored: int = 0
    """Numbers that monitors add to those that NORM sums: squares of single Units (``monitor.unit_norms``), seconds of
    all ranks by phase (``monitor.rank_seconds``), and the sums of ``guard``."""

    @property
    def own(self) -> RankClass:
        """State and Actions of this rank."""
        return self.classes[class_of(self.mesh, self.rank)]

    @property
    def units(self) -> tuple[Unit, ...]:
        """Units of this rank."""
        return self.own.units

    @property
    def buffers(self) -> Mapping[tuple[int, int], tuple[BucketBuffers, ...]]:
        """Persistent buffers of this rank, by (Unit, bucket)."""
        return self.own.buffers

    @property
    def actions(self) -> Mapping[str, tuple[Action, ...]]:
        """The list of Actions of each class of ranks."""
        return {name: each.actions for name, each in self.classes.items()}

    def bytes_per_rank(self, rank: int | None = None, axes: StateAxes | None = None) -> dict[str, int]:
        """Return the model-state bytes on one rank by row of the ledger, padding included.

        Embedding tables are counted from the registry. The size of dynamic tables depends on the keys: they count as
        full, evenly spread and without their index, and tables without a limit count as nothing.

        Args:
            rank: The rank; None: this rank.
            axes: Count only state on these axes, of one of the mesh's two views; None: all state.
        """
        rank = self.rank if rank is None else rank
        total = self.classes[class_of(self.mesh, rank)].bytes_of_units(self.mesh, axes)
        for info in self.registry.of_kind("table") if axes in (None, DENSE) else ():
            for row, size in info.ledger_bytes(self.mesh, rank).items():
                total[row] = total.get(row, 0) + size
        return total

    def __str__(self) -> str:
        parameters = sum(info.elements for info in self.registry.of_kind("parameter"))
        units = sum(len(each.units) for each in self.classes.values())
        lines = [f"Plan over {self.mesh}: {parameters:,} parameters in {counted(units, 'Unit')}"]
        for first in self.mesh.ranks("pp", self.rank):
            name = class_of(self.mesh, first)
            each = self.classes[name]
            if len(self.classes) > 1:
                lines.append(f" {name}: stages {', '.join(map(str, each.stages))}")
            lines += [f"  {title:<28} {size:>13,}  {where}" for title, size, where in _rows(each)]
            lines.append(f"  bytes per rank: {_held(self.bytes_per_rank(first))}")
            of_experts = self.bytes_per_rank(first, EXPERT)
            if of_experts:
                views = (
                    ("of experts", EXPERT, of_experts),
                    ("of the rest", DENSE, self.bytes_per_rank(first, DENSE)),
                )
                lines += [
                    f"    {what}, over {self.mesh.view(axes)}: {_held(held)}" for what, axes, held in views
                ]
            lines.append(f"  step ({name} ranks): {_summary(each.actions)}")
        lines += [f"  {row}" for row in _exchange_rows(self)]
        lines += [f"  note: {note}" for note in grouped(self.notes)]
        return "\n".join(lines)


def class_of(mesh: Mesh, rank: int) -> str:
    """Return the name of the class that ``rank`` belongs to."""
    return "all" if mesh.pp == 1 else f"pp {mesh.index('pp', rank)}"


def _rows(ranks: RankClass) -> list[tuple[str, int, str]]:
    """Return the rows of the printed table; neighbouring Units with the same layout share a row."""
    rows: list[tuple[str, int, str]] = []
    first = ""
    for unit in ranks.units:
        placements = "  ".join(
            " ".join(
                f"{b.kind}{'' if b.form == 'fp32' else f':{b.form}'}={'/'.join(map(str, b.placement.values()))}"
                for b in ranks.buffers[unit.index, i]
            )
            + ("" if bucket.key.trained else " (frozen)")
            for i, bucket in enumerate(unit.buckets)
        )
        if unit.has_rows:
            placements = "embedding tables"
        if rows and rows[-1][1:] == (unit.parameters, placements):
            rows[-1] = (f"{first} .. {unit.title}", *rows[-1][1:])
        else:
            first = unit.title
            rows.append((unit.title, unit.parameters, placements))
    return rows


def _exchange_rows(plan: Plan) -> list[str]:
    """Return lines on the exchanges inside passes; neighbouring layers that send the same share a line."""
    attention = [each for each in plan.exchanges if isinstance(each, AttentionExchange)]
    rows = _attention_rows(plan, attention)
    experts = [each for each in plan.exchanges if isinstance(each, RowExchange)]
    alike = groupby(experts, key=lambda each: each[1:])
    for _, (first, *more) in ((key, list(layers)) for key, layers in alike):
        crossing = f"{first.crossing:.3g} their host, " if first.crossing else ""
        where = f"{first.layer} .. {more[-1].layer}, each" if more else first.layer
        said = (
            f"experts of {where}: {first.top_k} of {first.experts} over ep={plan.mesh.ep}; "
            f"{'in blocks' if first.in_blocks else 'chosen evenly'}, "
            f"{first.rows:.3g} rows a token leave their rank, {crossing}"
            f"{_human(first.rows * first.row_bytes)} of all-to-all"
        )
        if plan.tokens is not None:
            sent = first.rows * plan.tokens
            said += f"; of {plan.tokens:,} tokens a step {sent:,.0f} rows, {_human(sent * first.row_bytes)}"
        rows.append(said)
    return rows


def _attention_rows(plan: Plan, exchanges: Sequence[AttentionExchange]) -> list[str]:
    """Return lines on the exchanges of attention layers; neighbouring layers that send the same share a line."""
    rows = []
    for _, layers in groupby(exchanges, key=lambda each: each[1:]):
        first, *more = layers
        where = f"{first.layer} .. {more[-1].layer}, each" if more else first.layer
        rows.append(
            f"attention of {where}: {first.method} over cp={plan.mesh.cp}; this rank sends {first.forward:,} elements "
            f"forward and {first.backward:,} backward for a sequence of {first.tokens:,} tokens"
        )
    return rows


_TIER_OF: Mapping[str, Tier] = {
    "dynamic tables": "host",
    "table cache": "host",
    "table indexes": "host",
    "tables on disk": "disk",
    "host": "host",
    "activations": "host",
    "loaded": "host",
    "leaving": "host",
    "save": "host",
    "read": "host",
    "rings": "host",
    "batches ahead": "host",
    "start weights": "host",
    "disk": "disk",
}
"""Tiers of the rows that do not lie on the device."""


def tier_of_row(row: str) -> Tier:
    """Return the tier of a row of the ledger, or of a step's timeline (simulate/timeline.py)."""
    return _TIER_OF.get(row, "device")


def bytes_by_tier(by_row: Mapping[str, int]) -> dict[Tier, int]:
    """Return the bytes of ledger rows by tier: the device always, host memory and disk if they hold any."""
    found: dict[Tier, int] = {"device": 0}
    for row, size in by_row.items():
        tier = tier_of_row(row)
        found[tier] = found.get(tier, 0) + size
    return {tier: size for tier, size in found.items() if size or tier == "device"}


def _held(by_row: Mapping[str, int]) -> str:
    rows = ", ".join(f"{row} {_human(size)}" for row, size in by_row.items())
    tiers = bytes_by_tier(by_row)
    said = f"{rows}; together {_human(tiers['device'])}"
    said += f", and {_human(tiers['host'])} in host memory" if "host" in tiers else ""
    return said + (f", and {_human(tiers['disk'])} on a disk" if "disk" in tiers else "")


def _summary(actions: tuple[Action, ...]) -> str:
    """Return how often each Action occurs; (u) marks an Action on a Unit."""
    counts: dict[str, int] = {}
    for action in actions:
        name = action.kind.name + "(u)" * (action.unit >= 0)
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _human(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
