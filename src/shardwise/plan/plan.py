"""Plan: a training step written down as data.

    Plan = Mesh + tensor registry + Units + one list of Actions per class of ranks

The engine runs it, the simulator prices it, the verifier proves it, the checkpoint stores by it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwise.plan.action import Action, Kind
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Placement, Shard
from shardwise.plan.registry import Registry
from shardwise.plan.unit import Bucket, Unit
from shardwise.plan.words import counted


@dataclass(frozen=True)
class Buffers:
    """The flat buffers of one bucket that live from step to step: dtype size and placement of each."""

    kind: str
    """``weight``, ``grad``, ``master`` or the name of a moment."""
    itemsize: int
    placement: Mapping[str, Placement]

    def elements(self, bucket: Bucket, mesh: Mesh) -> int:
        """Elements on one rank."""
        cut = any(isinstance(where, Shard) for where in self.placement.values())
        return bucket.shard_elements if cut else bucket.elements


@dataclass(frozen=True)
class Plan:
    """See the module's docstring."""

    mesh: Mesh
    registry: Registry
    units: tuple[Unit, ...]
    buffers: Mapping[tuple[int, int], tuple[Buffers, ...]]
    """Persistent buffers by (Unit, bucket)."""
    actions: Mapping[str, tuple[Action, ...]]
    """One list per class of ranks; ranks that differ on data-parallel axes alone are one class, "all"."""
    notes: tuple[str, ...] = field(default=())
    """What was found or chosen by itself, for people."""

    def bytes_per_rank(self, rank: int = 0) -> dict[str, int]:
        """Model-state bytes on ``rank`` by kind, padding included.

        Embedding tables take theirs from the registry. What dynamic ones take depends on the keys that come: they count
        as full, evenly spread and without their index, those without a limit as nothing.
        """
        total: dict[str, int] = {}
        for (unit, bucket), buffers in self.buffers.items():
            for buffer in buffers:
                size = buffer.elements(self.units[unit].buckets[bucket], self.mesh) * buffer.itemsize
                total[buffer.kind] = total.get(buffer.kind, 0) + size
        for info in self.registry.of_kind("table"):
            kind = "dynamic tables" if info.grows else "tables"
            total[kind] = total.get(kind, 0) + round(info.bytes_on(self.mesh, rank))
        return total

    def __str__(self) -> str:
        bytes_by_kind = self.bytes_per_rank()
        parameters = sum(unit.parameters for unit in self.units)
        lines = [f"Plan over {self.mesh}: {parameters:,} parameters in {counted(len(self.units), 'Unit')}"]
        lines += [f"  {'Unit':<28} {'parameters':>13}  placements on (dp_replicate, dp_shard)", ""][:1]
        for unit in self._merged():
            lines.append(f"  {unit[0]:<28} {unit[1]:>13,}  {unit[2]}")
        lines.append(
            "  bytes per rank: "
            + ", ".join(f"{kind} {_human(size)}" for kind, size in bytes_by_kind.items())
            + f"; together {_human(sum(bytes_by_kind.values()))}"
        )
        for name, actions in self.actions.items():
            lines.append(f"  step ({name} ranks): {_summary(actions)}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _merged(self) -> list[tuple[str, int, str]]:
        """Rows of the table; neighbouring Units with the same layout share one."""
        rows: list[tuple[str, int, str]] = []
        first = ""
        for unit in self.units:
            placements = "  ".join(
                " ".join(
                    f"{b.kind}={'/'.join(str(p) for p in b.placement.values())}"
                    for b in self.buffers[unit.index, i]
                )
                + ("" if bucket.key.trained else " (frozen)")
                for i, bucket in enumerate(unit.buckets)
            )
            if rows and rows[-1][1:] == (unit.parameters, placements):
                rows[-1] = (f"{first} .. {unit.title}", *rows[-1][1:])
            else:
                first = unit.title
                rows.append((unit.title, unit.parameters, placements))
        return rows


def merged(plans: Sequence[Plan]) -> Plan:
    """The Plans of several stages on one rank as one, its Units numbered through."""
    if len(plans) == 1:
        return plans[0]
    units: list[Unit] = []
    buffers: dict[tuple[int, int], tuple[Buffers, ...]] = {}
    for plan in plans:
        buffers |= {(unit + len(units), place): rows for (unit, place), rows in plan.buffers.items()}
        units += [replace(unit, index=len(units) + i) for i, unit in enumerate(plan.units)]
    notes = tuple(dict.fromkeys(note for plan in plans for note in plan.notes))
    return Plan(plans[0].mesh, plans[0].registry, tuple(units), buffers, {}, notes)


def _summary(actions: tuple[Action, ...]) -> str:
    counts: dict[Kind, int] = {}
    for action in actions:
        counts[action.kind] = counts.get(action.kind, 0) + 1
    return ", ".join(f"{count} {kind.value}" for kind, count in counts.items())


def _human(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
