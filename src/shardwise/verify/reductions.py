"""Run the reductions of gradients on numbered elements, with ranks that are pretended, and check every sum.

A gradient travels from autograd to the optimizer through sums over the data-parallel ranks, over the ranks along other
axes that hold the same parameter, and over stages that are tied. Here the engine's own buckets do this in one process.
Each element of a gradient is a number of its own, and a pretended group sums as if its ranks held

    g, and together with the others  f·g        f differs by axis: 3 and 5 on the data-parallel axes, n + 10 for n ranks

Then an element of the owned range must be its number times the f of every axis on which the registry has addends. A
missing, doubled or averaged sum, one over another group, and a range of another rank each give another number. The
ranges that the ranks count in the gradient norm must cover each element once.

Cost: the elements of one rank's gradients, in fp64; larger buckets than ``MOST_ELEMENTS`` are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Group
from shardwise.comm.flights import DONE, PendingCollective
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.transports import NoTransport
from shardwise.engine.parts.shared import SharedGradients
from shardwise.memory.gradient_memory import GradientMemory
from shardwise.memory.ledger import Ledger
from shardwise.memory.slots import SlotPool
from shardwise.parallel.zero.bucket import BucketState
from shardwise.parallel.zero.context import BucketContext
from shardwise.plan.exchange import GradientExchange
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import OnRank, Replicate
from shardwise.plan.plan import Plan, class_of
from shardwise.plan.slices import TensorSlices
from shardwise.plan.strategy import Strategy
from shardwise.plan.unit import Bucket
from shardwise.precision.policy import BucketDtypes
from shardwise.simulate.placements import PlacementProblem

MOST_ELEMENTS = 1 << 22
"""Elements of the largest bucket that is checked."""
MOST_RANKS = 64
"""Ranks of the largest job whose counts in the norm are added up."""
_MICROBATCHES = 2


def reduction_problems(plan: Plan) -> tuple[int, list[PlacementProblem], list[str]]:
    """Return the number of gradients that were reduced, what is wrong with their sums, and what was left out.

    Args:
        plan: The Plan of the job.
    """
    problems: dict[str, PlacementProblem] = {}
    checked: set[str] = set()
    left_out: list[str] = []
    for rank in _checked_ranks(plan.mesh):
        buckets = []
        for stage, layout, strategy in _layouts(plan, rank):
            if layout.elements > MOST_ELEMENTS or any(isinstance(e, OnRank) for e in strategy.master):
                left_out.append(layout.slots[0].name)
                continue
            buckets.append((stage, _bucket(plan.mesh, rank, layout, strategy)))
        slices = TensorSlices(plan.registry, plan.mesh, rank)
        shared = SharedGradients(buckets, slices, lambda kin, rank=rank: _groups(kin, rank))  # type: ignore[misc]
        for _, bucket in buckets:
            _reduce(bucket)
        shared.sum()
        for stage, bucket in buckets:
            for name, wanted, found in _differences(plan.mesh, slices, stage, bucket, buckets):
                module = name.rpartition(".")[0]
                problems.setdefault(name, PlacementProblem(name, module, "", wanted, found))
            checked.update(slot.name for slot in bucket.layout.slots)
    return len(checked), [*problems.values(), *_miscounted(plan)], left_out


def _checked_ranks(mesh: Mesh) -> list[int]:
    """Return the first and the last data-parallel rank of each index on "pp"."""
    first = mesh.ranks("pp", 0)
    return sorted({*first, *(mesh.ranks("dp", rank)[-1] for rank in first)})


class _FactorTransport(NoTransport):
    """Sums as if the ranks' tensors together were ``factor`` times this rank's.

    Args:
        factor: The factor.
        index: Index of this rank in the group.
    """

    def __init__(self, factor: float, index: int) -> None:
        self._factor, self._index = factor, index

    def reduce_scatter(
        self, shard_out: Tensor, full: Tensor, timeout_s: float, what: str, accumulate: bool = False
    ) -> PendingCollective:
        """Write this rank's range of the pretended sum."""
        start = self._index * shard_out.numel()
        total = full.flatten()[start : start + shard_out.numel()] * self._factor
        shard_out.copy_(shard_out + total if accumulate else total)
        return DONE

    def all_reduce(self, tensor: Tensor, timeout_s: float, what: str) -> None:
        """Multiply by the factor."""
        tensor.mul_(self._factor)


def _factor(mesh: Mesh, axis: str) -> float:
    """Return the factor of the sum over one elementary data-parallel axis."""
    if mesh.size(axis) == 1:
        return 1.0
    return 3.0 if axis == "dp_replicate" else 5.0


def _factor_of(ranks: int) -> float:
    """Return the factor of a sum over ranks that share a parameter."""
    return ranks + 10.0 if ranks > 1 else 1.0


def _group(name: str, ranks: Sequence[int], rank: int, factor: float) -> Group:
    index = list(ranks).index(rank) if rank in ranks else 0
    transport = _FactorTransport(factor, index) if len(ranks) > 1 else None
    return Group(name, tuple(ranks), index, transport, StepClock(0.0), Traffic())


def _groups(kin: Sequence[tuple[int, ...]], rank: int) -> Mapping[tuple[int, ...], Group]:
    return {ranks: _group("shared", ranks, rank, _factor_of(len(ranks))) for ranks in kin}


def _layouts(plan: Plan, rank: int) -> Iterator[tuple[int, Bucket, Strategy]]:
    """Yield (stage, bucket, strategy) of the trained buckets of a rank."""
    own = plan.classes[class_of(plan.mesh, rank)]
    for stage in own.stages:
        for unit in own.units_of(stage):
            for layout in unit.buckets:
                if layout.key.trained:
                    yield stage, layout, own.strategies[unit.index]


def _bucket(mesh: Mesh, rank: int, layout: Bucket, strategy: Strategy) -> BucketState:
    """Return a bucket on pretended groups, whose state lies on the CPU."""
    here = replace(
        strategy,
        tier="device",
        weight_tier="device",
        grad_tier="device",
        is_delayed=False,
        waits_at_end=False,
        leaves_each=False,
        exchange=GradientExchange(),
    )
    device = torch.device("cpu")

    def group_over(axes: Sequence[str]) -> Group:
        factor = 1.0
        for axis in axes:
            factor *= _factor(mesh, axis)
        name = mesh.name_of(axes)
        return _group(name, mesh.ranks(name, rank), rank, factor)

    weights, shards, gradients = SlotPool(device), SlotPool(device), SlotPool(device)
    around = BucketContext.of(
        here, group_over, weights, shards, gradients, GradientMemory(device), Ledger(), device
    )
    parameters = [nn.Parameter(torch.zeros(slot.shape, dtype=torch.float64)) for slot in layout.slots]
    dtypes = BucketDtypes(*[torch.float64] * len(BucketDtypes._fields))
    return BucketState(layout, dtypes, parameters, "the bucket", around)


def _numbers(start: int, count: int) -> Tensor:
    return torch.arange(start, start + count, dtype=torch.float64) + 1


def _reduce(bucket: BucketState) -> None:
    """Let gradients of two microbatches arrive, and reduce them."""
    gradient = bucket.gradient
    gradient.reduces_alone = False
    for microbatch in range(_MICROBATCHES):
        for index, (parameter, slot) in enumerate(zip(bucket.parameters, bucket.layout.slots, strict=True)):
            number = _numbers(slot.offset, slot.elements) * (microbatch + 1)
            parameter.grad = number.view(slot.shape)
            gradient.accumulate(index, parameter)
        if gradient._around.strategy.cuts_grad or microbatch == _MICROBATCHES - 1:
            gradient.reduce()
    gradient.finish_reduce()


def _differences(
    mesh: Mesh,
    slices: TensorSlices,
    stage: int,
    bucket: BucketState,
    buckets: Sequence[tuple[int, BucketState]],
) -> Iterator[tuple[str, str, str]]:
    """Yield (parameter, what was expected, what was found) of every wrong sum."""
    for slot, start, stop, local in bucket.layout.overlaps(*bucket.owned_range):
        info = slices.registry.get("parameter", slot.name)
        over_data = _factor(mesh, info.axes[0]) * _factor(mesh, info.axes[1])
        tied = 1.0
        if len(info.stages) > 1:
            tied = _factor_of(len(slices.mesh.stage_ranks(slices.rank, info.stages)))
            tied *= sum(each.layout.key.tie == bucket.layout.key.tie for _, each in buckets)
        for run in slices.runs(info, start, stop):
            first = local + run.local - start
            numbers = _numbers(slot.offset + run.local, run.elements)
            over_model = _factor_of(_addends(slices, slot.name, run.replicas))
            factor = sum(range(1, _MICROBATCHES + 1)) * over_data * over_model * tied
            found = bucket.gradient.owned[first : first + run.elements] / numbers
            if not bool((found == factor).all()):
                seen = sorted({round(float(each), 3) for each in found.unique()[:3]})
                yield (
                    slot.name,
                    f"a sum of {factor:g} for {_words(mesh, info.axes)}",
                    "sums of " + ", ".join(f"{each:g}" for each in seen),
                )
                break


def _addends(slices: TensorSlices, name: str, replicas: Sequence[int]) -> int:
    """Return the number of ranks whose gradients of a run are addends of one sum."""
    parameter, gradient = slices.registry.get("parameter", name), slices.registry.get("gradient", name)
    count = 1
    for axis, held in zip(slices.mesh.model_axes(parameter.axes), replicas, strict=True):
        is_copy = isinstance(parameter.on(axis), Replicate)
        if held > 1 and not (is_copy and isinstance(gradient.gradient_on(axis), Replicate)):
            count *= held
    return count


def _words(mesh: Mesh, axes: Sequence[str]) -> str:
    held = [f"{axis} x {_factor(mesh, axis):g}" for axis in axes if mesh.size(axis) > 1]
    return ", ".join([*held, f"{_MICROBATCHES} microbatches x 3, shared ranks n + 10"])


@dataclass(eq=False)
class _CountedBucket:
    """A bucket of which only the elements are known."""

    layout: Bucket
    owned_range: tuple[int, int]
    owned_elements: int
    copies: int
    """Data-parallel ranks that own the same range."""

    @property
    def gradient(self) -> "_CountedBucket":
        """The gradient, of which only the owned elements are known."""
        return self

    @property
    def owned(self) -> Tensor:
        """The owned elements, without numbers."""
        return torch.empty(self.owned_elements, device="meta")


def _miscounted(plan: Plan) -> Iterator[PlacementProblem]:
    """Yield the parameters whose elements the ranks do not count once each in the norm of the gradients."""
    mesh = plan.mesh
    if mesh.world_size > MOST_RANKS:
        return
    counted: dict[str, float] = {}
    for rank in range(mesh.world_size):
        stubs: list[tuple[int, Any]] = []
        for stage, layout, strategy in _layouts(plan, rank):
            shard = mesh.name_of((strategy.axes[1],))
            ranges = (mesh.index(shard, rank), mesh.size(shard)) if strategy.cuts_master else (0, 1)
            copies = mesh.size(mesh.name_of(strategy.axes)) // ranges[1]
            stub = _CountedBucket(layout, ranges, layout.elements // ranges[1], copies)
            stubs.append((stage, stub))
        slices = TensorSlices(plan.registry, mesh, rank)
        shared = SharedGradients(stubs, slices, lambda kin: {})
        for _, stub in stubs:
            for first, last in shared.counted(stub):
                for slot, start, stop, local in stub.layout.overlaps(*stub.owned_range):
                    for run in slices.runs(plan.registry.get("parameter", slot.name), start, stop):
                        place = local + run.local - start
                        inside = min(last, place + run.elements) - max(first, place)
                        counted[slot.name] = counted.get(slot.name, 0.0) + max(inside, 0) / stub.copies
    for info in plan.registry.of_kind("gradient"):
        found = counted.get(info.name)
        if found is not None and found != info.elements:
            yield PlacementProblem(
                info.name,
                info.name.rpartition(".")[0],
                "",
                f"{info.elements} elements counted in the gradient norm",
                f"{found:g} elements",
            )
