"""The composition of a rank's memory at one moment: every byte with its row, its origin and its end.

The lists of the rank are walked once more (timeline.py), up to the moment, with the storages of each Unit's share of a
pass (storages.py). Storages and buffers that are alike, in all Units of one kind and all microbatches in flight, make
one entry:

    bytes of an entry    copies · (bytes of one)          the entries of a row add up to the row, to the byte
    until                the Action behind which the last copy is gone; None if it outlives the phase

Cost: a second walk of the lists, with one look at each origin of each Unit's share.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shardwise.compose.plan import PlanPolicies
from shardwise.plan.action import Action, Kind
from shardwise.plan.plan import Plan, class_of
from shardwise.simulate.passes import NOTHING, MeasuredPass
from shardwise.simulate.storages import StorageOrigin
from shardwise.simulate.timeline import HeldThen, MemoryPoint, RankWalk, RowsBesideSteps, near_tiers


class MemoryReason(NamedTuple):
    """Memory at one moment that has one origin."""

    rank_class: str
    """Name of the class of ranks."""
    row: str
    """Row of the ledger, or of a step's timeline."""
    unit: str
    """Title of the Unit; of several Units that are alike, those of the first and the last."""
    what: str
    """Name of the buffer or the operation."""
    line: str
    """``file:line`` of the source that allocated it; empty if it is not memory of a pass."""
    copies: int
    """Number of buffers or storages that are alike: Units, times microbatches in flight."""
    bytes: int
    """Bytes of all copies."""
    until: Action | None
    """Action behind which the last copy is gone; None if it outlives the phase."""

    def plain(self) -> dict[str, object]:
        """Return the entry as text and numbers for programs."""
        return {
            "class": self.rank_class,
            "row": self.row,
            "unit": self.unit,
            "what": self.what,
            "line": self.line or None,
            "copies": self.copies,
            "bytes": self.bytes,
            "until": None if self.until is None else str(self.until),
        }


def reasons(
    plan: Plan,
    policies: PlanPolicies,
    passed: Mapping[int, MeasuredPass],
    device_type: str,
    point: MemoryPoint,
    rank: int = 0,
    beside: RowsBesideSteps | None = None,
) -> tuple[MemoryReason, ...]:
    """Return the composition of ``point``, the largest entries first.

    Args:
        plan: The Plan.
        policies: Inputs of the Plan.
        passed: Measured pass of one microbatch, by stage.
        device_type: Type of the device, such as ``cpu``.
        point: A moment that ``step_memory`` returned for the same arguments; rows that were added to it later are
            entries of their own.
        rank: The rank.
        beside: Rows outside of the passes.
    """
    found: list[MemoryReason] = []

    def note(then: HeldThen) -> None:
        if not found:
            found.extend(_Composition(plan, passed, rank, then).entries())

    beside = beside or RowsBesideSteps()
    target = point.phase, point.place
    RankWalk(plan, policies, passed, rank, near_tiers(device_type), beside, target, note).phases()
    explained: dict[str, int] = {}
    for each in found:
        explained[each.row] = explained.get(each.row, 0) + each.bytes
    name = class_of(plan.mesh, rank)
    for row, size in point.rows.items():
        rest = size - explained.get(row, 0)
        if rest:
            found.append(MemoryReason(name, row, "", _WHAT.get(row, row), "", 1, rest, None))
    return tuple(sorted(found, key=lambda each: -each.bytes))


_WHAT = {
    "process": "torch and this program, before the model",
    "rings": "memory between ranks of one host",
    "save": "copy that is written behind training",
    "table rows": "rows of tables that a save is writing",
    "buffers": "the model's own buffers",
    "new moments": "moments that a load fills",
    "read": "block of a file that a load reads",
    "start weights": "part of a parameter that is drawn, or the model that was given",
    "loaded": "blocks of state on their way from and to a disk",
    "leaving": "gradients on their way to a disk",
    "received": "messages of the stages beside",
    "waiting": "small gradients of the running Unit",
    "holes": "memory that the allocator holds without tensors in it",
    "whole weights": "weights that a sample gathers once",
    "row gradients": "gradients of table rows of earlier microbatches",
    "rows at work": "keys, vectors, gradients and lines of table rows of a microbatch",
}


class _Composition:
    """The entries of one moment of a walk."""

    def __init__(self, plan: Plan, passed: Mapping[int, MeasuredPass], rank: int, then: HeldThen):
        self._plan = plan
        self._name = class_of(plan.mesh, rank)
        self._ranks = plan.classes[self._name]
        self._passed = passed
        self._rank = rank
        self._then = then
        self._place = then.point.place
        kinds = {unit: first for each in passed.values() for unit, first in each.kinds.items()}
        self._firsts = {unit.index: kinds.get(unit.name, unit.name) for unit in self._ranks.units}
        """First Unit of its kind, by index of each Unit."""

    def entries(self) -> Iterator[MemoryReason]:
        """Yield all entries, in no order."""
        yield from self._state()
        if self._then.point.phase in ("build", "save", "load") and self._then.share is None:
            yield from self._slots()
            return
        yield from self._gradients()
        yield from self._slots()
        yield from self._storages()

    def _title(self, first: str) -> str:
        """Return the titles of the first and the last Unit of a kind on this rank."""
        titles = [unit.title for unit in self._ranks.units if self._firsts[unit.index] == first]
        if not titles:
            return first
        return titles[0] if len(titles) == 1 else f"{titles[0]} .. {titles[-1]}"

    def _entry(
        self,
        row: str,
        unit: str,
        what: str,
        copies: int,
        size: int,
        until: Action | None = None,
        line: str = "",
    ) -> MemoryReason:
        return MemoryReason(self._name, row, unit, what, line, copies, size, until)

    # State ---------------------------------------------------------------------------------------------------------

    def _state(self) -> Iterator[MemoryReason]:
        """Yield buffers that live from step to step."""
        if self._then.point.phase == "build":
            return
        for info in self._plan.registry.of_kind("table"):
            for row, size in info.ledger_bytes(self._plan.mesh, self._rank).items():
                if size:
                    yield self._entry(row, "", f"rows of {info.name}", 1, size)
        alike: dict[tuple[str, str, int, str, int], int] = {}
        for (unit, place), rows in self._ranks.buffers.items():
            bucket = self._ranks.units[unit].buckets[place]
            for buffer in rows:
                if buffer.row == "gradients":
                    continue
                key = (
                    buffer.row,
                    self._firsts[unit],
                    place,
                    buffer.kind,
                    buffer.nbytes(bucket, self._plan.mesh),
                )
                alike[key] = alike.get(key, 0) + 1
        for (row_name, first, place, kind, size), copies in alike.items():
            if size:
                what = f"{kind} of {self._parameters(first, place)}"
                yield self._entry(row_name, self._title(first), what, copies, copies * size)

    def _parameters(self, first: str, place: int) -> str:
        """Return the names of the parameters of a bucket, in words."""
        unit = next(unit for unit in self._ranks.units if self._firsts[unit.index] == first)
        slots = unit.buckets[place].slots if place < len(unit.buckets) else ()
        if not slots:
            return "no parameter"
        more = f" and {len(slots) - 1} more" if len(slots) > 1 else ""
        return f"{slots[0].name}{more}"

    def _gradients(self) -> Iterator[MemoryReason]:
        """Yield gradient buffers, and what exchanges of gradients receive into."""
        alike: dict[tuple[str, str, int, int], list[int]] = {}
        for row, held in self._then.walked.gradient_bytes().items():
            for (unit, place), size in held.items():
                alike.setdefault((row, self._firsts[unit], place, size), []).append(unit)
        for (row, first, place, size), units in alike.items():
            what = f"grad of {self._parameters(first, place)}"
            until = self._last_of(units, (Kind.ARRIVE,) if row == "reducing" else (Kind.STEP, Kind.ARRIVE))
            yield self._entry(row, self._title(first), what, len(units), len(units) * size, until)

    def _last_of(self, units: list[int], kinds: tuple[Kind, ...]) -> Action | None:
        """Return the last Action of some Kinds and Units in the list of the step."""
        wanted = (each for each in reversed(self._ranks.actions) if each.kind in kinds and each.unit in units)
        return next(wanted, None)

    def _slots(self) -> Iterator[MemoryReason]:
        """Yield slots in which Units take turns."""
        for row, slots in self._then.walked.slots().items():
            alike: dict[tuple[int, tuple[str, ...]], int] = {}
            for size, owners in slots:
                firsts = tuple(sorted({self._firsts[unit] for unit, _ in owners}))
                alike[size, firsts] = alike.get((size, firsts), 0) + 1
            for (size, firsts), copies in alike.items():
                titles = ", ".join(self._title(first) for first in firsts)
                yield self._entry(row, titles, f"slot of {size:,} bytes", copies, copies * size)

    # Passes --------------------------------------------------------------------------------------------------------

    def _storages(self) -> Iterator[MemoryReason]:
        """Yield storages that forward passes keep, and those of the running Unit."""
        walked, share = self._then.walked, self._then.share
        if share is None:
            return
        own = self._ranks.unit_stages[self._action.unit]
        batch = 0 if self._then.point.phase == "sample" else self._passed[own].batch_bytes
        if batch:
            yield self._entry("kept", "", "batch", 1, batch)
        kept, at_work = walked.storages_then(share)
        if walked.blocks.coming_bytes:
            what = "part of a block's saved tensors on its way back"
            yield self._entry("kept", "", what, 1, walked.blocks.coming_bytes)
        ends = self._ends({**kept, **at_work})
        for origin, copies in kept.items():
            yield self._storage("kept", origin, copies, ends.get(origin))
        for origin, copies in at_work.items():
            until = ends.get(origin) if share.net.get(origin, 0) > 0 else self._action
            yield self._storage("at work", origin, copies, until)

    @property
    def _action(self) -> Action:
        action = self._then.point.action
        assert action is not None, "a pass runs"
        return action

    def _storage(self, row: str, origin: StorageOrigin, copies: int, until: Action | None) -> MemoryReason:
        what = origin.what.removeprefix("aten.")
        return self._entry(
            row, self._title(origin.unit), what, copies, copies * origin.nbytes, until, origin.line
        )

    def _ends(self, counts: Mapping[StorageOrigin, int]) -> dict[StorageOrigin, Action]:
        """Return the Action of the step behind which all copies of each origin are gone."""
        left = dict(counts)
        found: dict[StorageOrigin, Action] = {}
        if self._then.point.phase not in ("first step", "step"):
            return dict.fromkeys(left, self._action)
        for action in self._ranks.actions[self._place :]:
            if not left:
                break
            if action.unit < 0 or not action.kind.computes or self._ranks.units[action.unit].has_rows:
                continue
            passed = self._passed[self._ranks.unit_stages[action.unit]]
            share = passed.shares.get((action.kind, self._ranks.units[action.unit].name), NOTHING)
            for origin, change in share.net.items():
                if change < 0 and origin in left:
                    found[origin] = action
                    left[origin] += change
                    if left[origin] <= 0:
                        del left[origin]
        return found
