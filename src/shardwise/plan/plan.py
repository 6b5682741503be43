"""Plan: a training step written down as data.

    Plan = Mesh + tensor registry + for each class of ranks: Units, their buffers, and one list of Actions

Ranks that differ on the data-parallel axes and on "tp" alone do the same: they are one class, "all"; with a pipeline
there is one for each place on "pp": "pp 0", "pp 1" ... So a Plan for 131,072 ranks is as small as one for 8.

The engine runs it, the simulator prices it, the verifier proves it, the checkpoint stores by it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from shardwise.plan.action import Action
from shardwise.plan.mesh import DENSE, EXPERT, Mesh, StateAxes
from shardwise.plan.placement import Placement, Shard, Tier
from shardwise.plan.registry import Registry
from shardwise.plan.state_form import StateForm, stored_elements
from shardwise.plan.unit import Bucket, Unit
from shardwise.plan.words import counted, grouped


@dataclass(frozen=True)
class Buffers:
    """The flat buffers of one bucket that live from step to step: dtype size and placement of each."""

    kind: str
    """``weight``, ``grad``, ``master``, ``next weight`` (of an update that counts one step late) or the name of a
    moment."""
    itemsize: int
    placement: Mapping[str, Placement]
    tier: Tier = "device"
    form: StateForm = "fp32"
    """Of a moment: with scales behind its elements, or without."""

    @property
    def row(self) -> str:
        """Row of the ledger (memory/ledger.py) that it stands under."""
        if self.tier != "device":
            return self.tier
        return {"weight": "weights", "grad": "gradients", "master": "master"}.get(self.kind, "moments")

    @property
    def is_moment(self) -> bool:
        """Whether it is one of the optimizer's."""
        return self.kind not in ("weight", "grad", "master", "next weight")

    def elements(self, bucket: Bucket, mesh: Mesh) -> int:
        """Elements on one rank."""
        cut = any(isinstance(where, Shard) for where in self.placement.values())
        return bucket.shard_elements if cut else bucket.elements

    def nbytes(self, bucket: Bucket, mesh: Mesh) -> int:
        """On one rank, scales included."""
        return stored_elements(self.form, self.elements(bucket, mesh)) * self.itemsize


@dataclass(frozen=True)
class RankClass:
    """What each rank of one class holds and does."""

    stages: tuple[int, ...]
    """The pipeline stages that live on it, ascending; (0,) without a pipeline."""
    units: tuple[Unit, ...]
    """Of all its stages, numbered through; collections of embedding tables behind all others."""
    unit_stages: tuple[int, ...]
    """The stage of each Unit."""
    buffers: Mapping[tuple[int, int], tuple[Buffers, ...]]
    """Persistent buffers by (Unit, bucket)."""
    windows: bool = False
    """Whether weights that no rank cuts are gathered before use and released after, too."""
    actions: tuple[Action, ...] = ()
    """One optimizer step."""

    def units_of(self, stage: int) -> tuple[Unit, ...]:
        """The Units of parameters of one stage, its root first."""
        return tuple(unit for unit in self._at(stage) if not unit.has_rows)

    def tables_of(self, stage: int) -> tuple[Unit, ...]:
        """The collections of embedding tables of one stage."""
        return tuple(unit for unit in self._at(stage) if unit.has_rows)

    def _at(self, stage: int) -> Iterator[Unit]:
        return (unit for unit, at in zip(self.units, self.unit_stages, strict=True) if at == stage)

    @property
    def tables(self) -> tuple[Unit, ...]:
        """The collections of embedding tables of all its stages."""
        return tuple(unit for unit in self.units if unit.has_rows)

    @property
    def trained(self) -> tuple[bool, ...]:
        """Of each Unit whether any parameter in it trains."""
        return tuple(any(bucket.key.trained for bucket in unit.buckets) for unit in self.units)

    def bytes_of_units(self, mesh: Mesh, axes: StateAxes | None = None) -> dict[str, int]:
        """Model-state bytes of the Units (of those with state on ``axes``) by row of the ledger, padding included."""
        total: dict[str, int] = {}
        for (unit, bucket), buffers in self.buffers.items():
            if axes is not None and self.units[unit].axes != axes:
                continue
            for buffer in buffers:
                size = buffer.nbytes(self.units[unit].buckets[bucket], mesh)
                total[buffer.row] = total.get(buffer.row, 0) + size
        return total


class RowExchange(NamedTuple):
    """What a layer of experts sends along "ep" where its router chooses evenly; routing alone knows what it does."""

    layer: str
    experts: int
    top_k: int
    """Experts of a token."""
    rows: float
    """That leave their rank, of one token."""
    row_bytes: int
    """All-to-all of a row: there and back, forward and backward."""
    crossing: float = 0.0
    """Rows of one token that leave their host, where they go in two levels."""
    in_blocks: bool = False
    """Whether they fill blocks of fixed size, whatever the router chooses."""


@dataclass(frozen=True)
class Plan:
    """See the module's docstring. ``units``, ``buffers`` and bytes are those of ``rank``."""

    mesh: Mesh
    registry: Registry
    classes: Mapping[str, RankClass]
    rank: int = 0
    """The rank that asks; of a Plan made for none, the first."""
    notes: tuple[str, ...] = field(default=())
    """What was found or chosen by itself, for people."""
    exchanges: tuple[RowExchange, ...] = ()
    """Of each mixture of experts of the model, where "ep" has several ranks."""
    tokens: int | None = None
    """Of one optimizer step, over all ranks; None where nobody knows before the batches come."""

    @property
    def own(self) -> RankClass:
        """What this rank holds and does."""
        return self.classes[class_of(self.mesh, self.rank)]

    @property
    def units(self) -> tuple[Unit, ...]:
        """The Units of this rank."""
        return self.own.units

    @property
    def buffers(self) -> Mapping[tuple[int, int], tuple[Buffers, ...]]:
        """The persistent buffers of this rank, by (Unit, bucket)."""
        return self.own.buffers

    @property
    def actions(self) -> Mapping[str, tuple[Action, ...]]:
        """One list per class of ranks."""
        return {name: each.actions for name, each in self.classes.items()}

    def bytes_per_rank(self, rank: int | None = None, axes: StateAxes | None = None) -> dict[str, int]:
        """Model-state bytes on ``rank`` (default: this one) by row of the ledger, padding included; those of state on
        ``axes``: of one of the mesh's two views.

        Embedding tables take theirs from the registry. What dynamic ones take depends on the keys that come: they count
        as full, evenly spread and without their index, those without a limit as nothing.
        """
        rank = self.rank if rank is None else rank
        total = self.classes[class_of(self.mesh, rank)].bytes_of_units(self.mesh, axes)
        for info in self.registry.of_kind("table") if axes in (None, DENSE) else ():
            row = "dynamic tables" if info.grows else "tables"
            total[row] = total.get(row, 0) + round(info.bytes_on(self.mesh, rank))
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
    """Name of the class that ``rank`` belongs to."""
    return "all" if mesh.pp == 1 else f"pp {mesh.index('pp', rank)}"


def _rows(ranks: RankClass) -> list[tuple[str, int, str]]:
    """Rows of the table; neighbouring Units with the same layout share one."""
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
    """What experts send, for people; neighbouring layers that send alike share a row."""
    rows: list[str] = []
    alike = groupby(plan.exchanges, key=lambda each: each[1:])
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


_TIER_OF: Mapping[str, Tier] = {
    "dynamic tables": "host",
    "host": "host",
    "activations": "host",
    "loaded": "host",
    "leaving": "host",
    "disk": "disk",
}
"""Of rows that do not lie on the device."""


def tier_of_row(row: str) -> Tier:
    """Where a row of the ledger, or of a step's timeline (simulate/timeline.py), lies."""
    return _TIER_OF.get(row, "device")


def bytes_by_tier(by_row: Mapping[str, int]) -> dict[Tier, int]:
    """What rows of the ledger come to on the device, and where there is any, in host memory beside it and on a disk."""
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
    """How often each Action occurs; (u): on a Unit."""
    counts: dict[str, int] = {}
    for action in actions:
        name = action.kind.value + "(u)" * (action.unit >= 0)
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _human(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
