"""Followers: techniques that take part in every step, called at fixed points of it by a list.

    begin_backward     a microbatch's backward pass begins
    before_norm        every gradient of the step has arrived
    squares            Σ g² that a technique adds to the norm of all gradients
    numbers            numbers that NORM sums over the data-parallel ranks, in the one all-reduce of a step
    over_model         numbers made of these sums that NORM sums over the ranks that share a model
    settle             the sums, on the host; all ranks have the same, and may raise alike
    end_step           the list of the step has run, with or without an update
    after_step         the step is over and counted
    drop               the running step is discarded

``training_step.py`` and ``end.py`` name no technique. A run has a follower only for what it contains: without tables,
experts, tensor parallelism and monitors the list is empty, and a step passes through none of their files.

Cost: one call at each point for each follower.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.engine.parts.module_profile import ModuleProfile
from shardwise.engine.parts.rank_phases import RankPhases
from shardwise.engine.parts.sums import Number
from shardwise.engine.parts.tables import ModelTables
from shardwise.engine.parts.unit_norms import UnitSquares
from shardwise.observe.stragglers import SlowestRank
from shardwise.parallel.expert.loads import ExpertLoads
from shardwise.parallel.tensor.own_use import OwnUse
from shardwise.parallel.zero.bucket import BucketState
from shardwise.parallel.zero.scales import WeightScales
from shardwise.plan.action import Action
from shardwise.plan.trace import Trace, recorded
from shardwise.plan.walker import Walker


class BucketSquares(NamedTuple):
    """Σ g² of the gradients that a rank counts."""

    of_buckets: Mapping[BucketState, Sequence[Tensor]]
    """Σ g² of the counted ranges of each bucket."""
    beside: Tensor
    """Σ g² that followers add: of rows of embedding tables."""


class StepFollower:
    """A technique that follows the steps of an engine; each method does nothing unless the technique defines it."""

    name = ""
    """Name of the technique's numbers in NORM."""

    def begin_backward(self, microbatch: int, weight: Number) -> None:
        """Note that the backward pass of a microbatch, which counts ``weight``, begins."""

    def before_norm(self) -> None:
        """Check what ranks must have in common before NORM. Collective where the technique says so."""

    def squares(self) -> Tensor | None:
        """Return Σ g² of gradients beside the buckets that this rank counts, or None."""
        return None

    def numbers(self, squares: BucketSquares) -> Sequence[Number] | Tensor:
        """Return the numbers that NORM sums over the data-parallel ranks, as many on all ranks."""
        return ()

    def over_model(self, sums: Tensor) -> Sequence[Number] | Tensor:
        """Return the numbers that NORM sums over the ranks that share a model.

        Args:
            sums: ``numbers``, summed over the data-parallel ranks, on the device.
        """
        return sums

    def settle(self, sums: Sequence[float], over_model: Sequence[float] | None) -> None:
        """Take the sums of NORM, before any weight changes.

        Args:
            sums: ``numbers``, summed over the data-parallel ranks.
            over_model: ``over_model``, summed over the ranks that share a model; None if no ranks share one.
        """

    def results(self, weight: float, divisor: float) -> Mapping[str, Any]:
        """Return fields of ``StepResult`` that the technique fills.

        Args:
            weight: Summed weights of the step's microbatches.
            divisor: Number that turns summed gradients into means.
        """
        return {}

    def end_step(self, applied: bool) -> None:
        """Note that the step's list has run; ``applied`` is True if the weights were updated."""

    def after_step(self, step: int, trace: Trace) -> None:
        """Note that step number ``step`` is over."""

    def drop(self) -> None:
        """Drop everything of the running step."""


class TablesFollower(StepFollower):
    """Embedding tables: their row gradients join the norm, and their rows are counted over the ranks."""

    name = "tables"

    def __init__(self, tables: ModelTables):
        self._tables = tables

    def before_norm(self) -> None:
        """Compare the row gradients of ranks along "tp"."""
        self._tables.compare()

    def squares(self) -> Tensor:
        """Return Σ g² of the rows that this rank counts."""
        return self._tables.square_sum()

    def numbers(self, squares: BucketSquares) -> Sequence[Number]:
        """Return passes and rows of the tables."""
        return self._tables.numbers()

    def over_model(self, sums: Tensor) -> Tensor:
        """Return whether a pass is dropped, and whether a table or a disk refuses the step."""
        return self._tables.verdict(sums)

    def settle(self, sums: Sequence[float], over_model: Sequence[float] | None) -> None:
        """Drop passes without a backward pass; raise on all ranks if a table is too full or a disk has failed."""
        self._tables.settle(sums, over_model or (0.0, 0.0))

    def end_step(self, applied: bool) -> None:
        """Drop the row gradients of a skipped step."""
        if not applied:
            self._tables.drop()

    def after_step(self, step: int, trace: Trace) -> None:
        """Bound the keys of evicted rows that are kept for an export."""
        self._tables.gone.bound()

    def drop(self) -> None:
        """Drop the row gradients."""
        self._tables.drop()


class LoadsFollower(StepFollower):
    """Experts: the tokens of each expert over all ranks, by which routers move their biases."""

    name = "experts"

    def __init__(
        self, loads: ExpertLoads, device: torch.device, walker: Walker, cp: Group | None = None
    ) -> None:
        self._loads = loads
        self._device = device
        self._walker = walker
        self._cp = cp

    @property
    def trace(self) -> Trace:
        """The trace of the list that is running."""
        return self._walker.trace

    def begin_backward(self, microbatch: int, weight: Number) -> None:
        """Count the tokens of the microbatch."""
        if self._cp is not None and self._cp.size > 1:
            # Tokens of a rank without labels count if other parts of their sequences have labels.
            sum_of_all = torch.as_tensor(weight, dtype=torch.float64, device=self._device).reshape(1).clone()
            self._cp.all_reduce(sum_of_all, "weights of the tokens of experts", "control").wait()
            weight = sum_of_all[0]
        self._loads.count(microbatch, weight)

    def numbers(self, squares: BucketSquares) -> Tensor:
        """Return this rank's counts of all layers of the model."""
        return self._loads.numbers(self._device)

    def settle(self, sums: Sequence[float], over_model: Sequence[float] | None) -> None:
        """Store the counts of all ranks."""
        self._loads.settle(sums if over_model is None else over_model)

    @recorded
    def balance(self, action: Action) -> None:
        """Run BALANCE: let routers move by the loads of the step."""
        self._loads.balance()

    def end_step(self, applied: bool) -> None:
        """Drop this rank's own counts."""
        self._loads.forget()

    def drop(self) -> None:
        """Drop the counts."""
        self._loads.forget()


class ScalesFollower(StepFollower):
    """Weights that are gathered in fp8: their scales, which ranks agree on after each update."""

    name = "scales"

    def __init__(self, scales: WeightScales, walker: Walker):
        self._scales = scales
        self._walker = walker

    @property
    def trace(self) -> Trace:
        """The trace of the list that is running."""
        return self._walker.trace

    @recorded
    def scale(self, action: Action) -> None:
        """Run SCALE: agree on the scales of the updated weights."""
        self._scales.agree()


class EditsFollower(StepFollower):
    """Edits of weights beside their masters that no version counter shows, such as ``torch.from_dlpack(p.detach())``.

    A few elements of each parameter are compared with their masters, and NORM tells the host whether any differs. To
    compare all elements would take 9 % of an update. An edit that touches none of the compared elements is overwritten.
    """

    name = "edits"
    compared = 64
    """Number of elements of each parameter that are compared."""

    def __init__(self, buckets: Sequence[BucketState]):
        self._places = {bucket: bucket.weight.evenly_spaced(self.compared) for bucket in buckets}

    @classmethod
    def watching(cls, buckets: Iterable[BucketState]) -> tuple["EditsFollower", ...]:
        """Return a follower of the buckets whose masters overwrite edits; nothing if there are none."""
        found = [bucket for bucket in buckets if bucket.weight.master_overwrites]
        return (cls(found),) if found else ()

    def numbers(self, squares: BucketSquares) -> Sequence[Number] | Tensor:
        """Return the number of buckets with edits."""
        differ = [bucket.weight.differs_at(places) for bucket, places in self._places.items()]
        found = [each for each in differ if each is not None]
        return torch.stack(found).sum().view(1) if found else (0.0,)

    def over_model(self, sums: Tensor) -> Sequence[Number]:
        """Return nothing: each rank takes up its own part."""
        return ()

    def settle(self, sums: Sequence[float], over_model: Sequence[float] | None) -> None:
        """Copy edited parameters into their masters before the update."""
        if not sums[0]:
            return
        for bucket in self._places:
            bucket.take_up_edits(range(len(bucket.layout.slots)))


class UnitNormsFollower(StepFollower):
    """``monitor.unit_norms``: the norm of each Unit's gradient."""

    name = "units"

    def __init__(self, squares: UnitSquares):
        self._squares = squares
        self._sums: Sequence[float] = ()

    def numbers(self, squares: BucketSquares) -> Sequence[Number]:
        """Return Σ g² by Unit of the whole model."""
        return self._squares.add_up(*squares)

    def settle(self, sums: Sequence[float], over_model: Sequence[float] | None) -> None:
        """Keep the sums of all ranks for the result."""
        self._sums = sums if over_model is None else over_model

    def results(self, weight: float, divisor: float) -> Mapping[str, Any]:
        """Return the norms by Unit."""
        return {"unit_norms": self._squares.norms(self._sums, weight, divisor)}


class PhasesFollower(StepFollower):
    """``monitor.rank_seconds``: how long each rank took for the parts of a step."""

    name = "phases"

    def __init__(self, phases: RankPhases, tell: Callable[[SlowestRank, range], None]):
        self.phases = phases
        self._tell = tell

    def numbers(self, squares: BucketSquares) -> Sequence[Number]:
        """Return the rows of all ranks, with this rank's step before in its own."""
        return self.phases.numbers()

    def settle(self, sums: Sequence[float], over_model: Sequence[float] | None) -> None:
        """Add the rows of all ranks, and report a rank that has become slow."""
        slow = self.phases.settle(sums if over_model is None else over_model)
        if slow is not None:
            self._tell(slow, self.phases.ranks_of(slow.rank))

    def after_step(self, step: int, trace: Trace) -> None:
        """Measure the step that is over."""
        self.phases.end_step(trace)


class OwnUseFollower(StepFollower):
    """Tensor parallelism: slices may only be used by their owners, which the first step checks."""

    def __init__(self, own_use: OwnUse):
        self._own_use = own_use

    def begin_backward(self, microbatch: int, weight: Number) -> None:
        """Give the slices back, because the backward pass reads them."""
        self._own_use.end()

    def after_step(self, step: int, trace: Trace) -> None:
        """End the checks after the first step."""
        self._own_use.step_ended()

    def drop(self) -> None:
        """Give the slices back."""
        self._own_use.end()


class ProfileFollower(StepFollower):
    """``module_profile``: the costs of modules in one step."""

    def __init__(self, profile: ModuleProfile):
        self._profile = profile

    def after_step(self, step: int, trace: Trace) -> None:
        """Write the profile if the step was counted, and begin to count if the next step is to be."""
        self._profile.step_ended(step, trace)
