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
from functools import cached_property
from typing import NamedTuple

import torch

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
from shardwise.simulate.passes import MeasuredPass
from shardwise.tiers.scratch import SPARE_BYTES

_META = torch.device("meta")
_NEVER_SHARES = 1 << 60


class MemoryPoint(NamedTuple):
    """Memory of a rank at one moment of a step."""

    action: Action | None
    """Action at the moment; None: before any."""
    unit: str
    """Name of the Action's Unit."""
    rows: Mapping[str, int]
    """Bytes by row: the rows of the ledger, and those above."""

    def bytes_on(self, tiers: Collection[Tier]) -> int:
        """Return the bytes of the rows that lie on ``tiers``."""
        return sum(size for row, size in self.rows.items() if tier_of_row(row) in tiers)


class StepMemory(NamedTuple):
    """Memory of a step on one rank."""

    peak: MemoryPoint
    """Moment at which the device's memory is largest."""
    bytes_by_tier: Mapping[Tier, int]
    """Most bytes of each tier; CPU ranks have one memory, which counts as their device."""
    moved_bytes: int = 0
    """Most bytes of activations in host memory at once."""
    rank: int = 0
    """The rank; others of its class do the same."""
    gathered_bytes: int = 0
    """Bytes of activations that the rank receives from parts on other ranks of "tp"."""


def step_memory(
    plan: Plan,
    policies: PlanPolicies,
    passed: Mapping[int, MeasuredPass],
    device_type: str,
    rank: int = 0,
    process_bytes: int = 0,
) -> StepMemory:
    """Return the memory of a step on ``rank``.

    Args:
        plan: The Plan.
        policies: Inputs of the Plan.
        passed: Measured pass of one microbatch, by stage.
        device_type: Type of the device, such as ``cpu``.
        rank: The rank.
        process_bytes: Bytes in the device's memory besides the engine.
    """
    held = _WalkedStep(plan, policies, passed, rank, _near(device_type))
    held.rows["process"] = process_bytes
    ranks = plan.classes[class_of(plan.mesh, rank)]
    for _ in range(2):  # the first step fills the slots
        held.peak, held.blocks.gathered = None, 0
        held.walk(ranks.actions)
    assert held.peak is not None, "a step computes"
    rows = {**held.peak.rows, "activations": held.most_on_host}
    by_tier = bytes_by_tier({row: size for row, size in rows.items() if size})
    if device_type == "cpu":
        by_tier["device"] += by_tier.pop("host", 0)
    return StepMemory(held.peak, by_tier, held.most_on_host, rank, held.blocks.gathered)


def _near(device_type: str) -> list[Tier]:
    """Return the tiers in the memory in which a rank computes."""
    return ["device", "host"] if device_type == "cpu" else ["device"]


class _WalkedStep:
    """A walk of one rank's list that counts the bytes of each row and keeps the peak."""

    def __init__(
        self,
        plan: Plan,
        policies: PlanPolicies,
        passed: Mapping[int, MeasuredPass],
        rank: int,
        near: Collection[Tier],
    ):
        self.ranks: RankClass = plan.classes[class_of(plan.mesh, rank)]
        self.rows: dict[str, int] = {
            row: size for row, size in plan.bytes_per_rank(rank).items() if row != "gradients"
        }
        self.peak: MemoryPoint | None = None
        self.most_on_host = 0
        """Most bytes of activations on the host."""
        self._near = near
        """Tiers in the memory whose peak is computed."""
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
        self.blocks = _KeptBlocks(moving, alike, plan.mesh.tp)
        self._received: dict[tuple[int, int, bool], int] = {}
        """Bytes of received messages by (stage, microbatch, whether for the backward pass)."""
        self.rows |= self._staging_rows()

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

    # Walking -------------------------------------------------------------------------------------------------------

    def walk(self, actions: Sequence[Action]) -> None:
        """Walk one step."""
        ending: Action | None = None
        """The running backward pass of a stage; the messages for it are released with it."""
        for action in actions:
            if action.unit < 0 and ending is not None:
                for is_gradient in (False, True):
                    self._received.pop((ending.stage, ending.microbatch, is_gradient), None)
                ending = None
            if action.kind is Kind.B and action.unit < 0:
                ending = action
            if action.unit < 0 and action.kind.row.of != "message":
                continue
            if action.unit < 0 or not self.ranks.units[action.unit].has_rows:
                for effect in action.kind.row.memory:
                    self._effects[effect](action)
        self._reducing.clear()
        for unit, place in list(self._gradients):
            strategy = self._strategies[unit]
            if strategy.is_delayed and "host" in self._near:
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

    def _forward(self, action: Action) -> None:
        unit = action.unit
        for place, _, _ in self._buckets(
            unit
        ):  # the forward has waited for the update on another tier, which has read its gradient
            if self._strategies[unit].tier != "device" and action.microbatch <= 0:
                self._gradients.pop((unit, place), None)
        self._compute(action)

    def _backward(self, action: Action) -> None:
        unit = action.unit
        for place, bucket, rows in self._buckets(unit):
            if "grad" not in rows:
                continue
            strategy = self._strategies[unit]
            is_in_ranges = self._is_alone and is_summed_in_ranges(bucket.key, strategy, self._plan.mesh)
            if strategy.cuts_grad or is_in_ranges:
                self._take("staging", (unit, place), bucket, bucket.elements)
            if not strategy.cuts_grad:
                self._gradients[unit, place] = self._bytes(rows["grad"], bucket)
        self._compute(action)

    def _compute(self, action: Action) -> None:
        unit = self.ranks.units[action.unit]
        if self._strategies[action.unit].has_windows:
            self._gather(action.unit)
            self._release("brought", action.unit)
        name, kind, passed = unit.name, action.kind, self._passed[self.ranks.unit_stages[action.unit]]
        share = passed.of(kind, name)
        here = self.blocks.here
        held = self.rows | {
            "gradients": sum(self._gradients.values()) + sum(self._late.values()),
            "reducing": sum(self._reducing.values()),
            "leaving": sum(self._leaving),
            **{row: pool.bytes for row, pool in self._slots.items()},
            "kept": passed.batch_bytes + here,
            "received": sum(self._received.values()),
            "waiting": self._waiting_bytes(action),
            "at work": share.rise_bytes,
        }
        moment = MemoryPoint(action, unit.title, {row: size for row, size in held.items() if size})
        if self.peak is None or moment.bytes_on(self._near) > self.peak.bytes_on(self._near):
            self.peak = moment
        self.blocks.behind(kind, name, action.microbatch, share.net_bytes)

    def _waiting_bytes(self, action: Action) -> int:
        if action.kind is not Kind.B or "host" in self._near:
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
        if strategy.cuts_master and "host" not in self._near:
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
        dtype = bucket.key.gathered_dtype if row == "gathered" else bucket.key.dtype
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

    def __init__(self, moved: set[str], alike: Mapping[str, int], ranks: int):
        self._moved = moved
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

    def behind(self, kind: Kind, unit: str, microbatch: int, net_bytes: int) -> None:
        """Record the end of a Unit's part of a pass."""
        key = unit, microbatch
        if unit not in self._moved:
            self._rest += net_bytes
        elif kind is Kind.F:
            self._here[key] = net_bytes
        else:
            self._rest += net_bytes + self._here.pop(key, 0)
