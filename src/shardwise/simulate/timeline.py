"""Memory of a rank at each moment of a step: its Plan's list, walked with the bytes of each Action.

    weights, master, moments     from the Plan, always there
    gathered, staging            slots: UNSHARD and B take one, RESHARD and ARRIVE release it; memory stays (slots.py)
    brought                      shards from another tier, from LOAD_WEIGHT to the end of their gather
    gradients                    from a Unit's first B to the step's end; gradients for a tier leave at ARRIVE
    loaded                       blocks that state passes through on its way from and to a disk, the most at once
    reducing                     on devices, what exchanges of gradients receive into, from REDUCE to ARRIVE
    leaving                      gradients that a disk has not stored yet, the most at once
    kept                         what F leaves for B, of all microbatches in flight     (passes.py)
    received                     in a pipeline, the results of RECV, until their backward pass is over
    row gradients                of rows of embedding tables, from earlier microbatches of a step
    rows at work                 keys, vectors, gradients and lines of rows in DELIVER, on CPU ranks
    holes                        on CPU ranks, what the heap keeps of these in pieces of less than 32 MiB
    waiting                      on a device, small gradients of the running Unit until one launch copies all of them
    at work                      temporary memory of the running Unit
    process                      memory from before the engine

The peak is the largest sum in a step that follows another, when all slots exist. With activations on the host, the
device holds those of the running block and of its neighbour, as ``tiers/activations.py`` keeps them; of tensors that
are alike on all ranks of "tp", each rank keeps a part on the host.
Gradients that CPU ranks keep between steps (``memory/gradient_memory.py``) are not counted: an eighth of all at most.

Cost: one look at each Action of a list, twice.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from shardwise.compose.lists import forward_actions_of
from shardwise.compose.plan import PlanPolicies
from shardwise.memory.direct_io import rounded_up
from shardwise.memory.slots import SlotPool
from shardwise.parallel.zero.cost import is_summed_in_ranges, widths_of
from shardwise.parallel.zero.waiting import most_waiting_bytes
from shardwise.plan.action import Action, Kind
from shardwise.plan.placement import Tier
from shardwise.plan.plan import BucketBuffers, Plan, RankClass, bytes_by_tier, class_of, tier_of_row
from shardwise.plan.strategy import Strategy
from shardwise.plan.unit import Bucket
from shardwise.simulate.passes import NOTHING, MeasuredPass, UnitPass
from shardwise.simulate.storages import StorageCounts, StorageOrigin, added, bytes_of_counts
from shardwise.simulate.touched import table_rows
from shardwise.tiers.scratch import SPARE_BYTES

_META = torch.device("meta")
_NEVER_SHARES = 1 << 60


Phase = Literal["build", "first step", "step", "evaluation", "save", "load", "sample"]
"""Part of a job in which a rank holds memory of its own kind."""
_WALKED: tuple[Phase, ...] = ("first step", "step", "evaluation", "sample")
"""Phases that walk a list."""


class MemoryPoint(NamedTuple):
    """Memory of a rank at one moment of a phase."""

    action: Action | None
    """Action at the moment; None: outside of any."""
    unit: str
    """Name of the Action's Unit."""
    rows: Mapping[str, int]
    """Bytes by row: the rows of the ledger, and those above."""
    phase: Phase = "step"
    place: int = -1
    """Place of the Action in the list of the phase; -1: outside of any."""

    def bytes_on(self, tiers: Collection[Tier]) -> int:
        """Return the bytes of the rows that lie on ``tiers``."""
        return sum(size for row, size in self.rows.items() if tier_of_row(row) in tiers)


class RowsBesideSteps(NamedTuple):
    """Bytes by row that a rank holds outside of its passes (engine/fit/beside_steps.py)."""

    always: Mapping[str, int] = {}
    """Rows that are there in every phase, such as ``process`` and ``rings``."""
    build: Mapping[str, int] = {}
    """Rows of the build when it holds most, the state that exists by then included; empty if unknown."""
    save: Mapping[str, int] = {}
    """Rows of a save beside the state."""
    load: Mapping[str, int] = {}
    """Rows of a load beside the state."""
    saves: bool = False
    """True if saves run behind training, whose copy then stays from the first save on."""


class StepMemory(NamedTuple):
    """Memory of a rank in each phase of a job."""

    points: Mapping[Phase, MemoryPoint]
    """Moment of each phase at which the device's memory is largest."""
    bytes_by_tier: Mapping[Tier, int]
    """Most bytes of each tier in the phases that count; CPU ranks have one memory, which counts as their device."""
    near: Collection[Tier]
    """Tiers in the memory in which the rank computes."""
    moved_bytes: int = 0
    """Most bytes of activations in host memory at once."""
    rank: int = 0
    """The rank; others of its class do the same."""
    gathered_bytes: int = 0
    """Bytes of activations that the rank receives from parts on other ranks of "tp"."""
    saves: bool = False
    """True if the configuration has saves at fixed steps; if not, saves and loads do not count for the peak."""

    @property
    def counted(self) -> tuple[MemoryPoint, ...]:
        """Moments of the phases that count for the peak."""
        return tuple(point for phase, point in self.points.items() if counts(phase, self.saves))

    @property
    def phases(self) -> dict[Phase, int]:
        """Bytes in the memory in which the rank computes, at the most of each phase."""
        return {phase: point.bytes_on(self.near) for phase, point in self.points.items()}

    @property
    def peak(self) -> MemoryPoint:
        """Moment at which the device's memory is largest, in the phases that count."""
        return max(self.counted, key=lambda point: point.bytes_on(self.near))

    @property
    def rows(self) -> dict[str, int]:
        """Most bytes of each row in any phase's largest moment."""
        found: dict[str, int] = {}
        for point in self.points.values():
            for row, size in point.rows.items():
                found[row] = max(found.get(row, 0), size)
        return found


def step_memory(
    plan: Plan,
    policies: PlanPolicies,
    passed: Mapping[int, MeasuredPass],
    device_type: str,
    rank: int = 0,
    beside: RowsBesideSteps | None = None,
) -> StepMemory:
    """Return the memory of each phase of a job on ``rank``.

    Args:
        plan: The Plan.
        policies: Inputs of the Plan.
        passed: Measured pass of one microbatch, by stage.
        device_type: Type of the device, such as ``cpu``.
        rank: The rank.
        beside: Rows outside of the passes; None: nothing is known of building, saving and loading.
    """
    beside = beside or RowsBesideSteps()
    near = near_tiers(device_type)
    held = RankWalk(plan, policies, passed, rank, near, beside)
    points = held.phases()
    points = {phase: point for phase, point in points.items() if point.rows}
    assert "step" in points, "a step computes"
    by_tier: dict[Tier, int] = {"device": 0}
    for point in (point for phase, point in points.items() if counts(phase, beside.saves)):
        rows = {row: size for row, size in point.rows.items() if size}
        if point.phase in ("first step", "step") and held.most_on_host:
            rows["activations"] = held.most_on_host
        found = bytes_by_tier(rows)
        if device_type == "cpu":
            found["device"] += found.pop("host", 0)
        by_tier = {
            tier: max(by_tier.get(tier, 0), found.get(tier, 0)) for tier in dict.fromkeys([*by_tier, *found])
        }
    return StepMemory(points, by_tier, near, held.most_on_host, rank, held.blocks.gathered, beside.saves)


def counts(phase: Phase, saves: bool) -> bool:
    """Return whether the memory of a phase counts for the peak of a job."""
    return saves or phase not in ("save", "load")


def near_tiers(device_type: str) -> list[Tier]:
    """Return the tiers in the memory in which a rank computes."""
    return ["device", "host"] if device_type == "cpu" else ["device"]


class _PassingRows(NamedTuple):
    """Bytes of table rows on their way in one microbatch; see ``touched.TableRows``."""

    passing_bytes: int = 0
    freed_bytes: int = 0


class HeldThen(NamedTuple):
    """The state of a walk at one moment; valid only until the walk goes on."""

    point: MemoryPoint
    walked: "RankWalk"
    share: UnitPass | None
    """The running share; None outside of passes."""


@dataclass
class _PhaseState:
    """The running phase of a walk, and the arguments of the walk that phases read."""

    rank: int
    policies: PlanPolicies
    beside: RowsBesideSteps
    target: tuple[Phase, int] | None
    """Phase and place of the moment whose composition is wanted."""
    note: Callable[["HeldThen"], object]
    """Called at that moment with the state of the walk."""
    near: Collection[Tier]
    """Tiers in the memory whose peak is computed."""
    phase: Phase = "first step"
    place: int = -1
    """Place of the running Action in the list of the phase."""
    passing: int = 0
    """Bytes that the running forward pass of an evaluation holds between Units."""
    passing_counts: StorageCounts = field(default_factory=dict)
    unborn: set[tuple[int, int]] = field(default_factory=set)
    """Owners of slots of gradients that the first gradient of the running share makes."""

    @property
    def is_forward(self) -> bool:
        """True in phases that run forward passes alone."""
        return self.phase in ("evaluation", "sample")


class RankWalk:
    """A walk of one rank's list that counts the bytes of each row and keeps the peak."""

    def __init__(
        self,
        plan: Plan,
        policies: PlanPolicies,
        passed: Mapping[int, MeasuredPass],
        rank: int,
        near: Collection[Tier],
        beside: RowsBesideSteps,
        target: tuple[Phase, int] | None = None,
        note: Callable[["HeldThen"], object] = lambda then: None,
    ):
        self._now = _PhaseState(rank, policies, beside, target, note, near)
        self.ranks: RankClass = plan.classes[class_of(plan.mesh, rank)]
        self.rows: dict[str, int] = {
            row: size for row, size in plan.bytes_per_rank(rank).items() if row != "gradients"
        }
        self.peak: MemoryPoint | None = None
        self.most_on_host = 0
        """Most bytes of activations on the host."""
        self._plan = plan
        self._passed = passed
        keeps = not policies.zero.reshard_after_forward and plan.mesh.pp > 1
        ahead = int(policies.zero.prefetch_bytes) if policies.zero.prefetch_bytes != "auto" else 0
        shares = policies.zero.reuse_buffers and not keeps
        self._slots = {
            "gathered": SlotPool(_META, ahead if shares else _NEVER_SHARES),
            "brought": SlotPool(_META, 0),
            "staging": SlotPool(_META, 0),
        }
        self._gradients: dict[tuple[int, int], int] = {}
        self._reducing: dict[int, int] = {}
        """Bytes of running sums beside the gradients, by Unit."""
        self._late: dict[tuple[int, int], int] = {}
        """Bytes of gradients of the step before, whose updates run beside this step."""
        self._limit = policies.offload.leaving
        self._leaving: deque[int] = deque()
        alike = {unit: size for each in passed.values() for unit, size in each.alike_bytes.items()}
        units = zip(self.ranks.units, self.ranks.strategies, strict=True)
        moving = {unit.name for unit, strategy in units if strategy.saved_tier != "device"}
        self.blocks = _KeptBlocks(moving, alike, plan.mesh.tp, target is not None)
        self._received: dict[tuple[int, int, bool], int] = {}
        """Bytes of received messages by (stage, microbatch, whether for the backward pass)."""
        self.rows |= self._staging_rows() | dict(beside.always)

    @cached_property
    def _is_alone(self) -> bool:
        """True if one microbatch makes a step."""
        return max((action.microbatch for action in self.ranks.actions), default=0) < 1

    @cached_property
    def _effects(self) -> Mapping[str, Callable[[Action], object]]:
        """Effects on the memory, by their names in the table of Kinds (plan/kinds.py)."""
        return {
            "forward": self._forward,
            "backward": self._backward,
            "weights": self._add_gradients,
            "receive": self._receive,
            "take brought": self._bring,
            "take gathered": self._unshard,
            "free gathered": lambda action: self._release("gathered", action.unit),
            "offload": self._offload,
            "recall": lambda action: self.blocks.reload(
                self.ranks.units[action.unit].name, action.microbatch
            ),
            "reduce": self._reduce,
            "arrive": self._arrive,
            "drop late gradients": self._drop_late,
        }

    # Reading the Plan ----------------------------------------------------------------------------------------------

    @property
    def _strategies(self) -> Sequence[Strategy]:
        return self.ranks.strategies

    def _buckets(self, unit: int) -> Sequence[tuple[int, Bucket, Mapping[str, BucketBuffers]]]:
        return [
            (place, bucket, {row.kind: row for row in self.ranks.buffers[unit, place]})
            for place, bucket in enumerate(self.ranks.units[unit].buckets)
        ]

    def _bytes(self, row: BucketBuffers, bucket: Bucket) -> int:
        return row.nbytes(bucket, self._plan.mesh)

    def _staging_rows(self) -> dict[str, int]:
        """Return the bytes of the most blocks between memory and a disk at once, and of the disk threads' spare."""
        blocks = [
            sum(rounded_up(self._bytes(row, bucket)) for row in rows.values() if row.tier == "disk")
            for unit in self.ranks.units
            for _, bucket, rows in self._buckets(unit.index)
        ]
        # A block of memory for a large Unit also serves small Units.
        blocks = [size for size in blocks if size]
        return {"loaded": min(self._limit, len(blocks)) * max(blocks) + SPARE_BYTES} if blocks else {}

    # Phases --------------------------------------------------------------------------------------------------------

    def phases(self) -> dict[Phase, MemoryPoint]:
        """Walk the lists of a job in the order of the phases, and return the largest moment of each phase."""
        always, build = self._now.beside.always, self._now.beside.build
        found: dict[Phase, MemoryPoint] = {"build": self._resting("build", {**always, **build}, alone=True)}
        for phase in _WALKED:  # the first step fills the slots
            self._now.phase, self.peak = phase, None
            if phase == "sample":
                if not any(each.sampled for each in self._passed.values()):
                    continue
                self._gather_all()
            if not self._now.is_forward:  # a forward pass brings nothing back
                self.blocks.gathered = 0
            if phase == "step" and self._now.beside.saves:
                self.rows["save"] = self._now.beside.save.get("save", 0)
            self.walk(self._evaluation if self._now.is_forward else self.ranks.actions)
            if self.peak is not None:
                found[phase] = self.peak
        self.rows.pop("whole weights", None)
        if self._now.beside.build:
            found["save"] = self._resting("save", self._now.beside.save)
            found["load"] = self._resting("load", self._now.beside.load)
        return found

    @property
    def _evaluation(self) -> Sequence[Action]:
        """Actions of an evaluation of one batch; more batches hold as much, because each pass leaves nothing behind."""
        view = replace(self._plan, rank=self._now.rank)
        return forward_actions_of(view, self._now.policies.pipeline, self._now.policies.zero, {}, 1)

    def _resting(self, phase: Phase, beside: Mapping[str, int], alone: bool = False) -> MemoryPoint:
        """Return the memory between two passes, with the rows ``beside`` it, or of these rows alone."""
        rows = dict(beside)
        if not alone:
            rows = {**self.rows, **self._slot_rows(), **beside}
            late = sum(self._late.values())
            rows |= {"gradients": late} if late else {}
        point = MemoryPoint(None, "", {row: size for row, size in rows.items() if size}, phase)
        if self._now.target == (phase, -1):
            self._now.note(HeldThen(point, self, None))
        return point

    def _slot_rows(self, unborn_bytes: int = 0) -> dict[str, int]:
        found = {row: pool.bytes for row, pool in self._slots.items()}
        found["staging"] -= unborn_bytes
        return found

    # Composition ---------------------------------------------------------------------------------------------------

    def slots(self) -> dict[str, list[tuple[int, list[tuple[int, int]]]]]:
        """Return the bytes of each slot with its owners, by row; owners are (Unit, bucket)."""
        found: dict[str, list[tuple[int, list[tuple[int, int]]]]] = {}
        for row, pool in self._slots.items():
            slots: Any = pool.owners_by_slot()
            found[row] = [slot for slot in slots if row != "staging" or not set(slot[1]) <= self._now.unborn]
        return found

    def gradient_bytes(self) -> dict[str, dict[tuple[int, int], int]]:
        """Return the bytes of gradients, by row and (Unit, bucket)."""
        total = dict(self._gradients)
        for key, size in self._late.items():
            total[key] = total.get(key, 0) + size
        reducing = {(unit, 0): size for unit, size in self._reducing.items()}
        return {"gradients": total, "reducing": reducing}

    def storages_then(self, share: UnitPass) -> tuple[StorageCounts, StorageCounts]:
        """Return the storages that passes keep and those at work when the running ``share`` holds most."""
        let_go = {origin: count for origin, count in share.rise.items() if count < 0}
        kept = self._now.passing_counts if self._now.is_forward else self.blocks.counts_here
        at_work = {origin: count for origin, count in share.rise.items() if count > 0}
        return added(kept, let_go), at_work

    # Walking -------------------------------------------------------------------------------------------------------

    def walk(self, actions: Sequence[Action]) -> None:
        """Walk the list of one phase."""
        ending: Action | None = None
        """The running last pass of a stage over a microbatch; the messages for it are released with it."""
        ends = (Kind.F,) if self._now.is_forward else (Kind.B, Kind.I)
        running: Action | None = None
        self.blocks.begin()
        for self._now.place, action in enumerate(actions):
            if action.unit < 0 and ending is not None:
                for is_gradient in (False, True):
                    self._received.pop((ending.stage, ending.microbatch, is_gradient), None)
                ending = None
            if action.unit < 0:
                if running is not None:
                    self._hand_over(running)
                running = action if action.kind.computes else None
            if action.kind in ends and action.unit < 0:
                ending = action
                self._now.passing, self._now.passing_counts = 0, {}
            if action.unit < 0 and action.kind.row.of != "message":
                continue
            if action.unit < 0 or not self.ranks.units[action.unit].has_rows:
                for effect in action.kind.row.memory:
                    self._effects[effect](action)
            elif action.kind is Kind.DELIVER:
                self._deliver(action)
        self._now.place = -1
        self._reducing.clear()
        self._received.clear()
        for unit, place in list(self._gradients):
            strategy = self._strategies[unit]
            if strategy.is_delayed and "host" in self._now.near:
                self._late[unit, place] = self._gradients.pop((unit, place))
            elif strategy.tier == "device":
                del self._gradients[unit, place]

    def _bring(self, action: Action) -> None:
        if self._strategies[action.unit].brings_shard:
            for place, bucket, _ in self._buckets(action.unit):
                self._take("brought", (action.unit, place), bucket, bucket.shard_elements)

    def _unshard(self, action: Action) -> None:
        if self._strategies[action.unit].has_windows:
            self._gather(action.unit)

    def _drop_late(self, action: Action) -> None:
        for place, _, _ in self._buckets(action.unit):
            self._late.pop((action.unit, place), None)

    def _receive(self, action: Action) -> None:
        passed, is_gradient = self._passed[action.stage], action.carries_gradient
        size = passed.answered_bytes if is_gradient else passed.received_bytes
        self._received[action.stage, action.microbatch, is_gradient] = size

    def _hand_over(self, action: Action) -> None:
        """Count the result of a pass that the next stage takes on the same rank, without a message."""
        is_gradient = action.kind is not Kind.F
        target = action.stage + (-1 if is_gradient else 1)
        if action.kind is not Kind.W and target in self.ranks.stages:
            passed = self._passed[target]
            size = passed.answered_bytes if is_gradient else passed.received_bytes
            self._received[target, action.microbatch, is_gradient] = size

    def _forward(self, action: Action) -> None:
        unit = action.unit
        for place, _, _ in self._buckets(
            unit
        ):  # the forward has waited for the update on another tier, which has read its gradient
            if self._strategies[unit].tier != "device" and action.microbatch <= 0:
                self._gradients.pop((unit, place), None)
        self._compute(action)

    def _backward(self, action: Action) -> None:
        if action.kind is Kind.I and action.unit in self.ranks.later_units:
            self._compute(action)
        else:
            self._add_gradients(action)

    def _add_gradients(self, action: Action) -> None:
        unit = action.unit
        coming: dict[tuple[int, int], int] = {}
        """Gradient buffers that the Unit's first gradient makes."""
        staged_bytes = self._slots["staging"].bytes
        for place, bucket, rows in self._buckets(unit):
            if "grad" not in rows:
                continue
            strategy = self._strategies[unit]
            is_in_ranges = self._is_alone and is_summed_in_ranges(bucket.key, strategy, self._plan.mesh)
            if strategy.cuts_grad or is_in_ranges:
                before = self._slots["staging"].bytes
                self._take("staging", (unit, place), bucket, bucket.elements)
                if self._slots["staging"].bytes > before:
                    self._now.unborn.add((unit, place))
            if not strategy.cuts_grad and (unit, place) not in self._gradients:
                coming[unit, place] = self._bytes(rows["grad"], bucket)
        self._compute(action, coming, self._slots["staging"].bytes - staged_bytes)

    def _compute(
        self,
        action: Action,
        coming: Mapping[tuple[int, int], int] = MappingProxyType({}),
        staged_bytes: int = 0,
    ) -> None:
        """Note the moment at which the share of a Unit holds most.

        Args:
            action: The pass of the Unit.
            coming: Gradient buffers that the Unit's first gradient makes.
            staged_bytes: Bytes of the slots that it makes, which are taken already.
        """
        unit = self.ranks.units[action.unit]
        if self._strategies[action.unit].has_windows and action.kind is not Kind.W:
            self._gather(action.unit)
            self._release("brought", action.unit)
        name, kind, passed = unit.name, action.kind, self._passed[self.ranks.unit_stages[action.unit]]
        evaluates = self._now.is_forward
        shares = passed.sampled if self._now.phase == "sample" else passed.evaluated
        share = shares.get(name, NOTHING) if evaluates else passed.of(kind, name)
        late, made = share.late, sum(coming.values()) + staged_bytes
        is_late = late is None or bytes_of_counts(late) + made > share.rise_bytes
        if is_late:  # the share holds most when its gradient buffers exist
            self._gradients |= coming
            self._now.unborn.clear()
            staged_bytes = 0
            if late is not None and made:
                share = share._replace(rise=late, rise_bytes=bytes_of_counts(late))
        let_go = share.let_go_bytes
        held = self.rows | {
            "gradients": sum(self._gradients.values()) + sum(self._late.values()),
            "reducing": sum(self._reducing.values()),
            "leaving": sum(self._leaving),
            **self._slot_rows(staged_bytes),
            "row gradients": self._row_gradient_bytes(action, action.microbatch),
            "holes": self._table_rows_of(action).freed_bytes,
            "kept": self._batch_bytes(passed)
            + (self._now.passing if evaluates else self.blocks.here)
            - let_go,
            "received": sum(self._received.values()),
            "waiting": self._waiting_bytes(action),
            "at work": share.rise_bytes + let_go,
        }
        rows = {row: size for row, size in held.items() if size}
        moment = MemoryPoint(action, unit.title, rows, self._now.phase, self._now.place)
        if self.peak is None or moment.bytes_on(self._now.near) > self.peak.bytes_on(self._now.near):
            self.peak = moment
        if self._now.target == (self._now.phase, self._now.place):
            self._now.note(HeldThen(moment, self, share))
        self._gradients |= coming
        self._now.unborn.clear()
        if evaluates:
            self._now.passing += share.net_bytes
            self._now.passing_counts = added(self._now.passing_counts, share.net)
        else:
            self.blocks.behind(kind, name, action.microbatch, share)

    def _batch_bytes(self, passed: MeasuredPass) -> int:
        return 0 if self._now.phase == "sample" else passed.batch_bytes

    def _gather_all(self) -> None:
        """Count the whole weights, which a sample gathers once, beside the slots."""
        whole = sum(
            bucket.elements * bucket.gathered_dtype.itemsize
            for unit, strategy in zip(self.ranks.units, self._strategies, strict=True)
            for bucket in unit.buckets
            if strategy.has_windows
        )
        if whole:
            self.rows["whole weights"] = whole

    def _deliver(self, action: Action) -> None:
        """Note the moment at which the gradients of table rows are exchanged and merged, on CPU ranks."""
        if "host" not in self._now.near:
            return
        earlier = max((each.microbatch for each in self.ranks.actions), default=0)
        found = self._table_rows_of(action)
        held = self.rows | {
            "gradients": sum(self._gradients.values()) + sum(self._late.values()),
            **self._slot_rows(),
            "row gradients": self._row_gradient_bytes(action, earlier),
            "rows at work": found.passing_bytes,
            "holes": max(found.freed_bytes - found.passing_bytes, 0),
            "kept": self._batch_bytes(self._passed[self.ranks.unit_stages[action.unit]]) + self.blocks.here,
        }
        rows = {row: size for row, size in held.items() if size}
        title = self.ranks.units[action.unit].title
        moment = MemoryPoint(action, title, rows, self._now.phase, self._now.place)
        if self.peak is None or moment.bytes_on(self._now.near) > self.peak.bytes_on(self._now.near):
            self.peak = moment
        if self._now.target == (self._now.phase, self._now.place):
            self._now.note(HeldThen(moment, self, None))

    def _table_rows_of(self, action: Action) -> "_PassingRows":
        """Return the bytes of table rows on their way in one microbatch of the stage of an Action, on CPU ranks."""
        lookups = self._passed[self.ranks.unit_stages[action.unit]].lookups
        if not lookups or "host" not in self._now.near or self._now.phase == "sample":
            return _PassingRows()
        ranks = self._plan.mesh.size("dp")
        rows = [table_rows(groups, ranks) for groups in lookups.values()]
        return _PassingRows(
            int(sum(each.passing_bytes for each in rows)), int(sum(each.freed_bytes for each in rows))
        )

    def _row_gradient_bytes(self, action: Action, earlier: int) -> int:
        """Return the bytes of the gradients of table rows that ``earlier`` microbatches of the step have left."""
        lookups = self._passed[self.ranks.unit_stages[action.unit]].lookups
        if not lookups or self._now.is_forward:
            return 0
        ranks = self._plan.mesh.size("dp")
        rows = [table_rows(groups, ranks) for groups in lookups.values()]
        return int(max(earlier, 0) * sum(each.read_bytes + each.keys_bytes for each in rows))

    def _waiting_bytes(self, action: Action) -> int:
        in_w = action.kind is Kind.I and action.unit in self.ranks.later_units
        if action.kind is Kind.F or in_w or "host" in self._now.near:
            return 0
        trained = [bucket for _, bucket, rows in self._buckets(action.unit) if "grad" in rows]
        return sum(
            most_waiting_bytes(slot.elements * bucket.key.dtype.itemsize for slot in bucket.slots)
            for bucket in trained
        )

    def _offload(self, action: Action) -> None:
        self.blocks.offload(self.ranks.units[action.unit].name)
        self.most_on_host = max(self.most_on_host, self.blocks.on_host)

    def _reduce(self, action: Action) -> None:
        strategy = self._strategies[action.unit]
        if strategy.cuts_master and "host" not in self._now.near:
            self._reducing[action.unit] = sum(
                strategy.exchange.held_bytes(bucket.elements, widths_of(bucket.key, strategy))
                for _, bucket, rows in self._buckets(action.unit)
                if "grad" in rows
            )

    def _arrive(self, action: Action) -> None:
        unit, strategy = action.unit, self._strategies[action.unit]
        self._reducing.pop(unit, None)
        for place, bucket, rows in self._buckets(unit):
            if "grad" not in rows:
                continue
            row = rows["grad"]
            self._release("staging", unit)
            if strategy.grad_tier == "device":
                self._gradients[unit, place] = self._bytes(row, bucket)
                continue
            self._gradients.pop((unit, place), None)
            if strategy.grad_tier == "disk":
                self._leaving.append(self._bytes(row, bucket))
                while len(self._leaving) > self._limit:
                    self._leaving.popleft()

    # Slots ---------------------------------------------------------------------------------------------------------

    def _gather(self, unit: int) -> None:
        for place, bucket, _ in self._buckets(unit):
            self._take("gathered", (unit, place), bucket, bucket.elements)

    def _take(self, row: str, owner: tuple[int, int], bucket: Bucket, elements: int) -> None:
        pool = self._slots[row]
        holder = pool.holder_in_the_way(owner)
        if holder == owner:
            return
        if holder is not None:
            pool.release(holder)  # releases its slot, as in UnitWindows.need
        dtype = bucket.gathered_dtype if row == "gathered" else bucket.key.dtype
        pool.acquire(owner, elements, dtype, apart=self.ranks.unit_stages[owner[0]])

    def _release(self, row: str, unit: int) -> None:
        pool = self._slots[row]
        for place, _, _ in self._buckets(unit):
            if pool.holder_in_the_way((unit, place)) == (unit, place):
                pool.release((unit, place))


class _KeptBlocks:
    """Activations of the passes in flight: bytes on the device and on the host.

    ``alike`` contains the bytes of each block that are alike on ``ranks`` ranks, of which each rank keeps a part on the
    host.
    """

    def __init__(self, moved: set[str], alike: Mapping[str, int], ranks: int, records: bool = False):
        self._moved = moved
        self._records = records
        self.counts: dict[StorageOrigin, int] = {}
        """Storages on the device that are kept, if they are recorded; those of blocks that move are left out."""
        self._counts_here: dict[tuple[str, int], StorageCounts] = {}
        self._parts = {unit: -(-size // ranks) for unit, size in alike.items()}
        """Bytes of a rank's part, by block."""
        self._others = {unit: size - self._parts[unit] for unit, size in alike.items()}
        """Bytes of the parts of other ranks, by block."""
        self._here: dict[tuple[str, int], int] = {}
        """Bytes of blocks that move, by (name, microbatch), in the order of their passes."""
        self._there: dict[tuple[str, int], int] = {}
        """Bytes of blocks on the host, counted as they were on the device."""
        self._coming = 0
        """Bytes of a part that is being brought back ahead."""
        self._rest = 0
        self.gathered = 0
        """Bytes received from other ranks since this was set to 0."""

    @property
    def on_host(self) -> int:
        """Bytes on the host."""
        return sum(max(size - self._others.get(unit, 0), 0) for (unit, _), size in self._there.items())

    @property
    def here(self) -> int:
        """Bytes on the device, including a part that is brought back ahead."""
        return self._rest + sum(self._here.values()) + self._coming

    def begin(self) -> None:
        """Begin a list of passes; no microbatch is in flight, and only what a block has saved elsewhere is left."""
        self._rest, self.counts = 0, {}

    def offload(self, unit: str) -> None:
        """Release the device memory of what a Unit has saved."""
        for key in [each for each in self._here if each[0] == unit]:
            self._there[key] = self._here.pop(key)

    def reload(self, unit: str, microbatch: int) -> None:
        """Bring back what a Unit has saved, and a part of what the block before it has saved."""
        key = unit, microbatch
        if key in self._there:
            self._here[key] = self._there.pop(key)
            self.gathered += self._others.get(unit, 0)
        left = [name for name, i in self._there if i == microbatch]
        self._coming = sum(self._parts.get(name, 0) for name in left[-1:])

    @property
    def counts_here(self) -> StorageCounts:
        """Storages on the device that are kept, those of blocks that move included, if they are recorded."""
        total: StorageCounts = self.counts
        for key in self._here:
            total = added(total, self._counts_here.get(key, {}))
        return total

    @property
    def coming_bytes(self) -> int:
        """Bytes of a part that is being brought back ahead."""
        return self._coming

    def behind(self, kind: Kind, unit: str, microbatch: int, share: UnitPass) -> None:
        """Record the end of a Unit's part of a pass."""
        key, net_bytes = (unit, microbatch), share.net_bytes
        if self._records:
            if unit in self._moved and kind is Kind.F:
                self._counts_here[key] = share.net
            else:
                back = self._counts_here.pop(key, {}) if unit in self._moved else {}
                self.counts = added(added(self.counts, back), share.net)
        if unit not in self._moved:
            self._rest += net_bytes
        elif kind is Kind.F:
            self._here[key] = net_bytes
        else:
            self._rest += net_bytes + self._here.pop(key, 0)
