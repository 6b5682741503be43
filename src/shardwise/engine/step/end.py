"""The optimizer step: the end of a rank's list.

    SUM      wait until every gradient lies with its master (REDUCE, started in the backward pass), and sum the
             gradients that model-parallel ranks hold in common               (engine/parts/shared.py)
    NORM     one small all-reduce carries: summed weights and losses, Σ g², the used parameters, the order of the Units,
             a hash of the collectives so far                                 (the step fails if it differs),
             hashes of learning rates and the like, and of the first step's batches; the numbers of techniques that
             follow the step (engine/parts/followers.py);
             a second all-reduce runs over the ranks that share a model, which also compare their losses;
             then all ranks decide alike: scale, clip, or skip
    DIRECTION  of each Unit whose optimizer looks at whole tensors: moments and directions; then
    TRUST_RATIO  the norms of whole tensors                                      (engine/step/whole_norms.py)
    ALL_TO_ALL  whole matrices to their owners, and back                        (engine/step/whole_matrices.py)
    SWAP_WEIGHT  of each Unit, if updates count one step late: its weights become those of the update before; also if
    this
             step is skipped
    STEP     of each Unit: update masters and moments, round into the weights; on another tier than the device, with
             LOAD and STORE, on a thread of its own                          (tiers/tier.py)
    UNSHARD  gather weights that are kept whole but updated in pieces         (stages 1 and 2)

Gradients are sums over ranks and microbatches; they are scaled once, by the global weight of the batch:

    g = Σ w_i ∇loss_i / Σ w_i        w_i: tokens or samples of microbatch i (1 if none was given)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.base.errors import CommError
from shardwise.comm.equality import are_equal, differ, terms
from shardwise.engine.parts.followers import BucketSquares
from shardwise.engine.parts.parts import EngineParts, TrainedBucket
from shardwise.engine.parts.sums import Number, read, summed
from shardwise.engine.step.whole_matrices import WholeMatrices
from shardwise.engine.step.whole_norms import WholeNorms
from shardwise.memory.streams import reached, to_be_written, to_host
from shardwise.optim.clip import mean_norm, share, square_sum
from shardwise.optim.flat import DirectionFactor, FlatOptimizer
from shardwise.optim.two_pass import WholeTensor
from shardwise.parallel.zero.bucket import BucketState
from shardwise.plan.action import Action
from shardwise.plan.trace import Trace, recorded
from shardwise.tiers.tier import TierState

_BITS = 32
"""Bits of the hashes that ranks compare."""
_COMPARED = ("sequence", "order", "rates")
"""Names of the numbers in which all data-parallel ranks must agree."""


class StepResult(NamedTuple):
    """The outcome of one optimizer step; equal on all ranks."""

    step: int
    """Optimizer steps done, this step included."""
    loss: float
    """Mean loss of the global batch, weighted as the gradients are."""
    grad_norm: float
    """Global norm of the gradients before clipping."""
    lr: float
    """Learning rate that this step used (of the first parameter group)."""
    weight: float
    """Summed weights of the microbatches: tokens, samples, or their number."""
    skipped: bool
    """True if the weights stayed as they were: after an overflow of fp16, under ``precision.nonfinite: skip``, or in a
    step in which nothing counted (weight 0, loss NaN).
    """
    divergences: tuple[str, ...] = ()
    """Departures of this rank from the Plan that the step before did not have: a Unit that the data skipped, another
    order, a second use. A departure that every step has (a block that is never used, the further forward pass of a GAN)
    is reported in the first step and when it changes. ``engine.trace.divergences`` has all departures of a step.
    """
    skipped_steps: int = 0
    """Steps skipped since the run began, this step included."""
    unit_norms: Mapping[str, float] = {}
    """Norm of each Unit's gradient before clipping, by the Unit's name in the printed Plan; empty without
    ``monitor.unit_norms``. The key ``(tables)`` has the norm of all rows of embedding tables. The squares of all norms
    sum to the square of ``grad_norm``.
    """

    def __str__(self) -> str:
        """Return the step in one line, as a run prints it."""
        said = [
            f"step {self.step}",
            f"loss {self.loss:.4f}",
            f"grad norm {self.grad_norm:.4g}",
            f"lr {self.lr:.3g}",
        ]
        if self.skipped:
            said.append(f"skipped ({self.skipped_steps} so far)")
        return "  ".join([*said, *self.divergences])


class LocalTotals(NamedTuple):
    """The numbers that this rank contributes at the end of a step."""

    weight: Number
    """Σ w_i of this rank's microbatches."""
    loss: Number
    """Σ w_i loss_i."""
    flags: float
    """1.0 if this rank has requested a stop of the run, else 0.0."""
    rates: int
    """32-bit mark of the numbers that this rank's optimizer groups work with (``optim.groups.mark_of``)."""
    batches: int | None
    """Fingerprint of this rank's batches in a process's first step (0: no batches); None in later steps."""
    draws: bool = False
    """True if passes have drawn from random generators of torch, Python or numpy."""
    guesses: Sequence[float] = (0.0,) * 5
    """Sums over microbatches whose weights are guessed (``engine.weighing.WeightGuesses``)."""


class StepTotals(NamedTuple):
    """The numbers of a step over all ranks, as the small all-reduces return them."""

    weight: float
    loss: float
    squares: float
    used: list[bool]
    orders_agree: bool
    flags: int
    rates_agree: bool = True
    batches: tuple[int, ...] = ()
    """Fingerprints of the first step's batches, by data-parallel rank."""
    batches_agree: bool = True
    """True if the ranks that share a model were given the same batches."""
    loss_spread: float = 0.0
    """Standard deviation of the mean loss over the ranks of one model that compute the loss."""
    draws: bool = False
    """True if passes on the ranks of this model have drawn from random generators."""
    guesses: Sequence[float] = (0.0,) * 5
    """Sums over all ranks' microbatches whose weights are guessed."""


def finish_reductions(trained: Sequence[TrainedBucket]) -> None:
    """Wait for the reductions that REDUCE began in the backward pass; a second call does nothing."""
    for bucket, _ in trained:
        bucket.gradient.finish_reduce()


def _squares_of(parts: EngineParts, bucket: BucketState) -> list[Tensor]:
    """Return Σ g² of each range of a bucket that this rank counts."""
    ranges = parts.shared.counted(bucket)
    # Ranks that hold copies of the same elements each sum one part, or the elements would count several times.
    return [square_sum(share(bucket.gradient.owned[start:stop], *bucket.copy)) for start, stop in ranges]


def exchange(
    parts: EngineParts,
    local: LocalTotals,
    known: Mapping[BucketState, Sequence[Tensor]] = MappingProxyType({}),
) -> StepTotals:
    """Sum the numbers of a step over the data-parallel ranks, then over the ranks that share a model.

    Args:
        parts: The running parts of the engine.
        local: The numbers that this rank contributes.
        known: Σ g² of the gradients that have left the device, by bucket.

    Returns:
        The sums over all ranks, and whether the ranks agree.

    Raises:
        CommError: if the ranks did not run the same collectives in the same order.
    """
    finish_reductions(parts.trained)
    dp, model, clock = parts.dp, parts.groups["model"], parts.walker.trace.clock
    total = summed(dp, _own_numbers(parts, local, known), "the gradient norm", parts.device)
    if model.size == 1:
        mark = clock.mark()
        (found,) = read(total)
        faults: Sequence[float] = [not are_equal(dp.size, found[name]) for name in _COMPARED]
        above: dict[str, list[float]] = {}
    else:
        over_model = _over_model(parts, local, total)
        mark = clock.mark()
        found, above = read(total, over_model)
        faults = above["faults"]
    clock.anchor(mark)
    parts.walker.trace.waits.settle()
    dp.clock.check_intact()  # without this, the numbers may be leftovers of a communicator that has ended
    if faults[0]:
        divergences = parts.walker.trace.divergences[-3:]
        raise CommError(
            f"rank {dp.ranks[dp.index]}, step {dp.clock.step}: the ranks did not run the same collectives in the "
            "same order, so weights and gradients were mixed up; the weights of the step before are intact. At stage 3 "
            "data may make a rank skip Units, but not run them in another order than other ranks. Departures from the "
            f"Plan here: {divergences or 'none'}"
        )
    for follower in parts.followers:
        if follower.name:
            follower.settle(found[follower.name], above.get(follower.name))
    return _totals(found, above, faults, model.size)


def _own_numbers(
    parts: EngineParts, local: LocalTotals, known: Mapping[BucketState, Sequence[Tensor]]
) -> dict[str, Sequence[Number] | Tensor]:
    """Return the numbers of this rank that are summed over the data-parallel ranks, by name. See ``exchange``."""
    dp = parts.dp
    beside = torch.zeros((), dtype=torch.float64)
    for follower in parts.followers:
        follower.before_norm()
        more = follower.squares()
        beside = beside if more is None else beside + more
    squares = beside
    of_buckets: dict[BucketState, Sequence[Tensor]] = {}
    used: list[Number] = []
    for bucket, _ in parts.trained:
        # The squares are unknown if a gradient left the device before it was certain that nothing would be added.
        is_known = bucket.gradient.has_left and bucket in known
        of_buckets[bucket] = known[bucket] if is_known else _squares_of(parts, bucket)
        for part in of_buckets[bucket]:
            squares = squares + part
        used += (each if isinstance(each, Tensor) else float(each) for each in bucket.gradient.used)
    seats = [0.0] * (0 if local.batches is None else dp.size)
    if seats:
        seats[dp.index] = float(local.batches or 0)
    own: dict[str, Sequence[Number] | Tensor] = {
        "sums": (squares, local.weight, local.loss, local.flags),
        "order": terms(sum(hooks.order.hash for hooks in parts.hooks), _BITS),
        "sequence": terms(dp.traffic.sequence, _BITS),
        "rates": terms(local.rates, _BITS),
        "guesses": local.guesses,
        "batches": seats,
        "used": used,
    }
    all_squares = BucketSquares(of_buckets, beside)
    return own | {each.name: each.numbers(all_squares) for each in parts.followers if each.name}


def _totals(
    found: Mapping[str, list[float]], above: Mapping[str, list[float]], faults: Sequence[float], sharers: int
) -> StepTotals:
    """Return the totals of a step.

    Args:
        found: Sums over the data-parallel ranks, by name.
        above: Sums over the ranks that share a model, by name; empty if no ranks share one.
        faults: For each name of ``_COMPARED``: other than 0 if ranks differ.
        sharers: Ranks that share a model.
    """
    squared, weight, loss, flags = above.get("sums", found["sums"])
    totals = StepTotals(
        squares=squared,
        weight=weight,
        loss=loss,
        flags=int(flags),
        used=[count > 0 for count in found["used"]],
        orders_agree=faults[1] == 0,
        rates_agree=faults[2] == 0,
        batches=tuple(map(int, found["batches"])),
        guesses=above.get("guesses", found["guesses"]),
    )
    if not above:
        return totals
    reports, mean_sum, mean_squares, draws = above["losses"]
    return totals._replace(
        rates_agree=totals.rates_agree and are_equal(sharers, above["rates"]),
        batches_agree=are_equal(sharers, above["batches"]),
        loss_spread=math.sqrt(max(mean_squares / reports - (mean_sum / reports) ** 2, 0.0)),
        draws=draws > 0,
    )


def _over_model(parts: EngineParts, local: LocalTotals, total: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sum the numbers that differ between the ranks that share a model.

    Each of these ranks holds a part of the gradients, and the last stage the loss.

    Args:
        parts: The running parts of the engine.
        local: The numbers that this rank contributes.
        total: The sums over the data-parallel ranks, as ``summed`` returned them.
    """
    brings_loss, knows = parts.brings_loss, parts.has_last_stage
    squares, weight, loss, flags = total["sums"].unbind()
    mean = torch.where(weight == 0, 0.0, loss / weight) if knows else torch.zeros_like(loss)
    own: dict[str, Sequence[Number] | Tensor] = {
        "sums": (squares, weight * brings_loss, loss * brings_loss, flags),
        "faults": torch.stack([differ(parts.dp.size, total[name]) for name in _COMPARED]),
        "losses": (float(knows), mean, mean * mean, float(local.draws)),
        "rates": terms(local.rates, _BITS),
        "batches": terms(local.batches or 0),
        "guesses": total["guesses"] * brings_loss,
    }
    own |= {each.name: each.over_model(total[each.name]) for each in parts.followers if each.name}
    return summed(parts.groups["model"], own, "the gradient norm over the model", parts.device)


def gradient_norm(totals: StepTotals, divisor: float) -> float:
    """Return the norm of the mean gradient, whose sums are divided by ``divisor``; NaN or infinite if a gradient is."""
    return mean_norm(totals.squares, totals.weight, divisor)


class UpdateDecision(NamedTuple):
    """The decision of all ranks about how STEP changes the masters."""

    divisor: float
    """Number by which summed gradients are divided: the global weight over the clip factor."""
    rates: Sequence[Mapping[str, Any]]
    """Learning rate, betas and the like by optimizer group."""
    tables_factor: float = 1.0
    """Factor of the schedule for the learning rates of embedding tables."""
    steps: int = 0
    """Number of updates before this update."""


class StepEndHandlers:
    """The handlers of the Actions that end a step, from SUM to STORE (see the module's docstring)."""

    def __init__(self, parts: EngineParts):
        self._parts = parts
        states = [state for hooks in parts.hooks for state in hooks.states]
        unit_of = {bucket: unit for unit, state in enumerate(states) for bucket in state.buckets}
        self._units: dict[int, list[tuple[TrainedBucket, int]]] = {}
        """Trained buckets by Unit of the rank's list, each with the index of its first parameter among all."""
        place = 0
        for trained in parts.trained:
            self._units.setdefault(unit_of[trained.bucket], []).append((trained, place))
            place += len(trained.bucket.parameters)
        self._norms = WholeNorms(
            parts.trained, parts.shared, parts.registry, parts.groups["world"], parts.device
        )
        self._waits_at_end = any(state.strategy.waits_at_end for state in states)
        self._has_norms = bool(parts.registry.needs("norm"))
        self._matrices = WholeMatrices(parts.trained, parts.slices, parts.stage_peers, parts.device)
        self.local: LocalTotals | None = None
        """Numbers that this rank contributes to NORM."""
        self.totals: StepTotals | None = None
        """Numbers over all ranks, which NORM has found."""
        self.update: UpdateDecision | None = None
        """Factors and rates that STEP applies."""
        self._squares: dict[BucketState, list[Tensor]] = {}
        """Σ g² of gradients that have left the device."""
        for hooks in parts.hooks:
            hooks.windows.on_reduced = self.let_go

    @property
    def trace(self) -> Trace:
        """The trace of the list that is running."""
        return self._parts.walker.trace

    @recorded
    def sum(self, action: Action) -> None:
        """Run SUM: add up the gradients that model-parallel ranks hold in common."""
        finish_reductions(self._parts.trained)
        self._parts.shared.sum()

    @recorded
    def norm(self, action: Action) -> None:
        """[step 10] Run NORM: exchange the numbers from which all ranks decide alike."""
        assert self.local is not None, "the engine says what its rank brings"
        self.totals = exchange(self._parts, self.local, self._squares)

    def let_go(self, bucket: BucketState, last: bool) -> None:
        """Move a bucket's gradient to the tier of its master.

        Args:
            bucket: The bucket whose gradient has been reduced.
            last: True if nothing more is added to the gradient in this step.
        """
        # If the data skipped the Unit, nothing has waited for its last update, which still reads the memory that is
        # overwritten below.
        bucket.weight.finish_update()
        if bucket.state is not None:
            bucket.state.finish_update()
        self._squares.pop(bucket, None)
        if last:
            bucket.gradient.finish_reduce()
            self._squares[bucket] = _squares_of(self._parts, bucket)
        bucket.gradient.leave()

    @recorded
    def direction(self, action: Action) -> None:
        """Run DIRECTION: the first half of one Unit's updates, for optimizers that look at whole tensors."""
        for (bucket, optimizer), place in self._units[action.unit]:
            if optimizer.needs != "elements":
                optimizer.direct(bucket.gradient.owned, *self._told(bucket, place))

    @recorded
    def trust_ratio(self, action: Action) -> None:
        """Run TRUST_RATIO: compute the norms of whole tensors."""
        self._norms.trust_ratio()

    @recorded
    def all_to_all(self, action: Action) -> None:
        """Run ALL_TO_ALL: send whole matrices to their owners, and the updates back."""
        self._matrices.all_to_all()

    @recorded
    def step(self, action: Action) -> None:
        """[step 11] Run STEP: update one Unit on the tier where its masters lie."""
        assert self.update is not None, "NORM comes before STEP"
        if action.unit not in self._units:
            self._parts.program.tables.step(action, self.update.tables_factor, self.update.divisor)
            return
        for (bucket, optimizer), place in self._units[action.unit]:
            if bucket.state is not None:
                self._step_beside(bucket, optimizer, place)
                continue
            bucket.weight.finish_update()  # the last step's, if this rank's data skipped the Unit
            is_rounded = False
            if optimizer.needs == "elements":
                told = self._told(bucket, place)
                is_rounded = optimizer.step(
                    bucket.gradient.owned, *told, bucket.weight.rounded, self.update.steps
                )
            else:
                optimizer.apply(self._factors(bucket, optimizer), self.update.steps)
            bucket.weight.copy_from_master(is_rounded)

    def _step_beside(self, bucket: BucketState, optimizer: FlatOptimizer, place: int) -> None:
        """Begin the update of a bucket on the thread of the tiers, with the numbers known now."""
        state = bucket.state
        assert state is not None, "what lies on the device is updated there and then"
        assert self.update is not None, "NORM comes before STEP"
        told, steps = self._told(bucket, place), self.update.steps
        grad = state.gradient if bucket.gradient.has_left else to_host(bucket.gradient.owned)

        def begin(rounded: Tensor | None) -> "Future[None]":
            write = None if rounded is None else to_be_written(rounded)
            # The buffer may still be the source of a copy into the weight that adopted it; wait for that copy first.
            is_free = reached(self._parts.device) if state.next is not None else None

            def step_into(weight: Tensor) -> None:
                if not optimizer.step(grad(), *told, weight, steps):
                    weight.copy_(state.tensors[state.master])

            def update() -> None:
                state.arrive()
                if is_free is not None:
                    is_free()
                if write is not None:
                    write(step_into)
                    return
                if state.master != "weight":
                    step_into(state.tensors["weight"])
                else:
                    optimizer.step(grad(), *told, steps=steps)
                state.begin_write("weight")

            return state.tiers.begin(update)

        bucket.weight.begin_update(begin)

    @recorded
    def swap_weight(self, action: Action) -> None:
        """Run SWAP_WEIGHT: let a Unit's weights become the result of the previous step's update."""
        for (bucket, _), _ in self._units[action.unit]:
            bucket.weight.swap()

    @recorded
    def load(self, action: Action) -> None:
        """Run LOAD: begin to bring a Unit's masters and moments from a disk."""
        for state in self._states(action):
            state.tiers.all_down()
            state.tiers.begin(partial(state.load, state.updated))

    @recorded
    def store(self, action: Action) -> None:
        """Run STORE: begin to write a Unit's masters and moments to a disk after their update."""
        for state in self._states(action):
            state.tiers.begin(state.store)

    @recorded
    def wait(self, action: Action) -> None:
        """Run WAIT: wait until a Unit's update on another tier has reached its weights."""
        for (bucket, _), _ in self._units[action.unit]:
            bucket.weight.finish_update()

    def _states(self, action: Action) -> list[TierState]:
        return [bucket.state for (bucket, _), _ in self._units[action.unit] if bucket.state is not None]

    def _told(
        self, bucket: BucketState, place: int
    ) -> tuple[float, Sequence[Mapping[str, Any]], list[tuple[int, int]]]:
        """Return (divisor, rates by group, unused ranges) for the update of a bucket.

        ``place`` is the index of the bucket's first parameter among all.
        """
        assert self.totals is not None and self.update is not None, "NORM comes before STEP"
        used = self.totals.used[place : place + len(bucket.parameters)]
        return self.update.divisor, self.update.rates, unused_ranges(bucket, used)

    def _factors(self, bucket: BucketState, optimizer: FlatOptimizer) -> Iterator[DirectionFactor]:
        for slot, start, stop, local in bucket.layout.overlaps(*bucket.owned_range):
            whole = (
                self._norms.of(slot.name)
                if optimizer.needs == "norm"
                else WholeTensor(self._parts.registry.get("master", slot.name).shape)
            )
            yield DirectionFactor(local, local + stop - start, optimizer.factor(whole))

    def check_waits(self) -> None:
        """Record a divergence for updates that the step should have waited for, but no WAIT of the list did."""
        for hooks in self._parts.hooks:
            for state in hooks.states if self._waits_at_end else ():
                if any(bucket.weight.is_updating for bucket in state.buckets):
                    self._parts.walker.diverge(
                        f"no WAIT of the list has ended the update of {state.unit.title}"
                    )

    def forget(self) -> None:
        """Drop the numbers of the step that has ended."""
        if self._has_norms:
            self._norms.forget()
        self._squares.clear()
        self.local = self.totals = self.update = None


def unused_ranges(bucket: BucketState, used: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the owned ranges of the parameters that no rank used, in elements of the master."""
    if all(used):
        return []
    names = {slot.name for slot, is_used in zip(bucket.layout.slots, used, strict=True) if not is_used}
    return [
        (local, local + stop - start)
        for slot, start, stop, local in bucket.layout.overlaps(*bucket.owned_range)
        if slot.name in names
    ]
