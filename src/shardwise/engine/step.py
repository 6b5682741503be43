"""The optimizer step: the end of a rank's list.

    SUM      every gradient has arrived where its master lies (REDUCE, started in the backward pass), and what
             model-parallel ranks hold in common is summed                    (engine/shared.py)
    NORM     one small all-reduce carries: summed weights and losses, Σ g², the used parameters, the order of the Units,
             a hash of the collectives so far                                 (ranks that differ in it stop here),
             one of learning rates and their like, of the batches in the first step; what went to which expert;
             which passes through tables had a backward pass, and the rows of those tables;
             a second one over the ranks that share a model, who also compare the losses that they report;
             then all ranks decide alike: scale, clip, or skip
    DIRECT   of each Unit whose updates look beyond their own element: moments and directions; then
    TRUST    the norms of whole tensors                                      (engine/whole_norms.py)
    DEAL     whole matrices to their owners, and back                        (engine/whole_matrices.py)
    ADOPT    of each Unit, where updates count one step late: its weights become those of the update before; also where
             this step is skipped
    STEP     of each Unit: update masters and moments, round into the weights; on another tier than the device, with
             LOAD and STORE, on a thread of its own                          (memory/tier.py)
    UNSHARD  what is kept whole but updated in pieces                         (stages 1 and 2)

Gradients are sums over ranks and microbatches; they are scaled once, by the global weight of the batch:

    g = Σ w_i ∇loss_i / Σ w_i        w_i: tokens or samples of microbatch i (1 where none was given)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.comm.equality import are_equal, differ, terms
from shardwise.engine.parts import Parts, Trained
from shardwise.engine.sums import Number, read, summed
from shardwise.engine.unit_norms import mean_norm
from shardwise.engine.whole_matrices import WholeMatrices
from shardwise.engine.whole_norms import WholeNorms
from shardwise.memory.streams import reached, to_be_written, to_host
from shardwise.memory.tier import TierState
from shardwise.optim.clip import share, square_sum
from shardwise.optim.flat import Factor, FlatOptimizer
from shardwise.optim.two_pass import Whole
from shardwise.parallel.zero.bucket import BucketState
from shardwise.plan.action import Action
from shardwise.plan.errors import CommError

_BITS = 32
"""Of the hashes that ranks compare."""
_COMPARED = ("sequence", "order", "rates")
"""What data-parallel ranks must have in common."""


class StepResult(NamedTuple):
    """What one optimizer step did; equal on all ranks."""

    step: int
    """Optimizer steps done, this one included."""
    loss: float
    """Mean loss of the global batch, weighted as the gradients are."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    """Learning rate that this step used (of the first parameter group)."""
    weight: float
    """Summed weights of the microbatches: tokens, samples, or their number."""
    skipped: bool
    """True where the weights stayed as they were: an overflow of fp16, ``precision.nonfinite: skip``, or a step in
    which nothing counted (weight 0, loss NaN)."""
    divergences: tuple[str, ...] = ()
    """What this rank did otherwise than the Plan had it, and had not done in the step before: a Unit that its data
    skipped, another order, a second use. What every step does (a block that is never used, the further forward pass of
    a GAN) is told in the first one and when it changes; all of a step stands in ``engine.trace.divergences``."""
    skipped_steps: int = 0
    """Steps skipped since the run began, this one included."""
    unit_norms: Mapping[str, float] = {}
    """With ``monitor.unit_norms`` the norm of each Unit's gradient before clipping, by the Unit's name in the printed
    Plan, and under ``(tables)`` that of all rows of embedding tables. Their squares sum to that of ``grad_norm``."""

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


class Local(NamedTuple):
    """What this rank brings to the end of a step."""

    weight: Number
    """Σ w_i of its microbatches."""
    loss: Number
    """Σ w_i loss_i."""
    flags: float
    rates: int
    """A 32-bit mark of the numbers that its optimizer groups work with (``optim.groups.mark_of``)."""
    batches: int | None
    """In a process's first step the fingerprint of its batches (0: none); later None."""
    draws: bool = False
    """Whether passes have drawn from random generators of torch, Python or numpy."""
    guesses: Sequence[float] = (0.0,) * 5
    """Sums over microbatches whose weights are guessed (``engine.weighing.Guesses``)."""


class Totals(NamedTuple):
    """What the one small all-reduce brings."""

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
    """Whether the ranks that share a model were given the same batches."""
    loss_spread: float = 0.0
    """Standard deviation of the mean loss over the ranks of one model that report it."""
    experts: Sequence[float] = ()
    """What went to which expert (parallel/expert/loads.py)."""
    draws: bool = False
    """Whether passes on the ranks of this model have drawn from random generators."""
    guesses: Sequence[float] = (0.0,) * 5
    """Sums over all ranks' microbatches whose weights are guessed."""
    units: Sequence[float] = ()
    """Σ g² by Unit of the whole model, where they are asked for (engine/unit_norms.py)."""


def finish_reductions(trained: Sequence[Trained]) -> None:
    """What REDUCE began in the backward pass is over; a second call does nothing."""
    for bucket, _ in trained:
        bucket.gradient.finish_reduce()


def _squares_of(parts: Parts, bucket: BucketState) -> list[Tensor]:
    """Σ g² of what this rank counts of a bucket."""
    ranges = parts.shared.counted(bucket)
    # Each of the ranks that hold the same sums a part.
    return [square_sum(share(bucket.gradient.owned[start:stop], *bucket.copy)) for start, stop in ranges]


def exchange(
    parts: Parts, local: Local, known: Mapping[BucketState, Sequence[Tensor]] = MappingProxyType({})
) -> Totals:
    """Sum over the data-parallel ranks, then over those that share a model. ``known``: squares of gradients that have
    left."""
    trained, dp = parts.trained, parts.dp
    finish_reductions(trained)
    parts.tables.compare()
    squares = of_tables = parts.tables.square_sum()
    of_buckets: dict[BucketState, Sequence[Tensor]] = {}
    used: list[Number] = []
    for bucket, _ in trained:
        # Of what left before anybody knew that nothing would be added they are not known.
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
        "experts": parts.passes.loads.numbers(parts.device),
        "units": parts.unit_squares.add_up(of_buckets, of_tables),
        "tables": parts.tables.numbers(),
    }
    total = summed(dp, own, "the gradient norm", parts.device)
    model, clock = parts.groups["model"], parts.walker.trace.clock
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
    dp.clock.check_intact()  # else what was read may be what an ended communicator left behind
    if faults[0]:
        divergences = parts.walker.trace.divergences[-3:]
        raise CommError(
            f"rank {dp.ranks[dp.index]}, step {dp.clock.step}: the ranks did not run the same collectives in the "
            "same order, so weights and gradients were mixed up; the weights of the step before are intact. At stage 3 "
            "data may make a rank skip Units, but not run them in another order than other ranks. Departures from the "
            f"Plan here: {divergences or 'none'}"
        )
    parts.tables.settle(found["tables"], above.get("tables", (0.0, 0.0)))
    squared, weight, loss, flags = above.get("sums", found["sums"])
    totals = Totals(
        squares=squared,
        weight=weight,
        loss=loss,
        flags=int(flags),
        used=[count > 0 for count in found["used"]],
        orders_agree=faults[1] == 0,
        rates_agree=faults[2] == 0,
        batches=tuple(map(int, found["batches"])),
        experts=above.get("experts", found["experts"]),
        guesses=above.get("guesses", found["guesses"]),
        units=above.get("units", found["units"]),
    )
    if not above:
        return totals
    reports, mean_sum, mean_squares, draws = above["losses"]
    return totals._replace(
        rates_agree=totals.rates_agree and are_equal(model.size, above["rates"]),
        batches_agree=are_equal(model.size, above["batches"]),
        loss_spread=math.sqrt(max(mean_squares / reports - (mean_sum / reports) ** 2, 0.0)),
        draws=draws > 0,
    )


def _over_model(parts: Parts, local: Local, total: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What differs between the ranks that share a model: each holds some of the gradients, the last stage's the loss.

    ``total``: what ``summed`` found over the data-parallel ranks.
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
        "experts": total["experts"],
        "units": total["units"],
        "tables": parts.tables.verdict(total["tables"]),
    }
    return summed(parts.groups["model"], own, "the gradient norm over the model", parts.device)


def gradient_norm(totals: Totals, divisor: float) -> float:
    """Norm of the mean gradient, NaN or infinite where gradients are; their sums are divided by ``divisor``."""
    return mean_norm(totals.squares, totals.weight, divisor)


class Update(NamedTuple):
    """What all ranks decided: how STEP changes the masters."""

    divisor: float
    """Of the summed gradients: the global weight, over the clip factor."""
    rates: Sequence[Mapping[str, Any]]
    """By optimizer group."""
    tables_factor: float = 1.0
    """The schedule's, of embedding tables."""
    steps: int = 0
    """Updates before this one."""


class StepEnd:
    """What SUM, NORM, DIRECT, TRUST, DEAL and STEP do."""

    def __init__(self, parts: Parts):
        self._parts = parts
        states = [state for hooks in parts.hooks for state in hooks.states]
        unit_of = {bucket: unit for unit, state in enumerate(states) for bucket in state.buckets}
        self._units: dict[int, list[tuple[Trained, int]]] = {}
        """Trained buckets by Unit of the rank's list, each with the place of its first parameter among all."""
        place = 0
        for trained in parts.trained:
            self._units.setdefault(unit_of[trained.bucket], []).append((trained, place))
            place += len(trained.bucket.parameters)
        self._norms = WholeNorms(
            parts.trained, parts.shared, parts.registry, parts.groups["world"], parts.device
        )
        self._matrices = WholeMatrices(parts.trained, parts.slices, parts.stage_peers, parts.device)
        self.local: Local | None = None
        """What this rank brings to NORM."""
        self.totals: Totals | None = None
        """What NORM found."""
        self.update: Update | None = None
        """What STEP does with it."""
        self._squares: dict[BucketState, list[Tensor]] = {}
        """Of gradients that have left the device."""
        for hooks in parts.hooks:
            hooks.windows.on_reduced = self.let_go

    def sum(self, action: Action) -> None:
        """SUM: what model-parallel ranks hold in common."""
        finish_reductions(self._parts.trained)
        self._parts.shared.sum()

    def norm(self, action: Action) -> None:
        """[step 10] NORM: what all ranks must know of each other to decide alike."""
        assert self.local is not None, "the engine says what its rank brings"
        self.totals = exchange(self._parts, self.local, self._squares)

    def let_go(self, bucket: BucketState, last: bool) -> None:
        """A gradient goes where its master lies. ``last``: nothing more comes to it in this step."""
        # Where data went round the Unit nobody has waited: its last update still reads what is written here.
        bucket.weight.finish_update()
        if bucket.state is not None:
            bucket.state.finish_update()
        self._squares.pop(bucket, None)
        if last:
            bucket.gradient.finish_reduce()
            self._squares[bucket] = _squares_of(self._parts, bucket)
        bucket.gradient.leave()

    def direct(self, action: Action) -> None:
        """DIRECT: the first half of the updates of one Unit that look at whole tensors."""
        for (bucket, optimizer), place in self._units[action.unit]:
            if optimizer.needs != "elements":
                optimizer.direct(bucket.gradient.owned, *self._told(bucket, place))

    def trust(self, action: Action) -> None:
        """TRUST: the norms of whole tensors."""
        self._norms.trust()

    def deal(self, action: Action) -> None:
        """DEAL: whole matrices to their owners, and back."""
        self._matrices.deal()

    def step(self, action: Action) -> None:
        """[step 11] STEP: update one Unit where its masters lie."""
        assert self.update is not None, "NORM comes before STEP"
        if action.unit not in self._units:
            self._parts.program.tables.step(action, self.update.tables_factor, self.update.divisor)
            return
        for (bucket, optimizer), place in self._units[action.unit]:
            if bucket.state is not None:
                self._step_beside(bucket, optimizer, place)
                continue
            bucket.weight.finish_update()  # of the last step, where this rank's data went round the Unit
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
        """The thread of the tiers does it, with what is known now."""
        state = bucket.state
        assert state is not None, "what lies on the device is updated there and then"
        assert self.update is not None, "NORM comes before STEP"
        told, steps = self._told(bucket, place), self.update.steps
        grad = state.gradient if bucket.gradient.has_left else to_host(bucket.gradient.owned)

        def begin(rounded: Tensor | None) -> "Future[None]":
            write = None if rounded is None else to_be_written(rounded)
            # What is written over may still be on its way into the weight that has adopted it.
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

    def adopt(self, action: Action) -> None:
        """ADOPT: a Unit's weights become those of the update before."""
        for (bucket, _), _ in self._units[action.unit]:
            bucket.weight.adopt()

    def load(self, action: Action) -> None:
        """LOAD: begin to bring a Unit's masters and moments from a disk."""
        for state in self._states(action):
            state.tiers.all_down()
            state.tiers.begin(partial(state.load, state.updated))

    def store(self, action: Action) -> None:
        """STORE: begin to write them, as soon as they are updated."""
        for state in self._states(action):
            state.tiers.begin(state.store)

    def _states(self, action: Action) -> list[TierState]:
        return [bucket.state for (bucket, _), _ in self._units[action.unit] if bucket.state is not None]

    def _told(
        self, bucket: BucketState, place: int
    ) -> tuple[float, Sequence[Mapping[str, Any]], list[tuple[int, int]]]:
        """What an update of a bucket is told; its first parameter has that place among all."""
        assert self.totals is not None and self.update is not None, "NORM comes before STEP"
        used = self.totals.used[place : place + len(bucket.parameters)]
        return self.update.divisor, self.update.rates, unused_ranges(bucket, used)

    def _factors(self, bucket: BucketState, optimizer: FlatOptimizer) -> Iterator[Factor]:
        for slot, start, stop, local in bucket.layout.overlaps(*bucket.owned_range):
            whole = (
                self._norms.of(slot.name)
                if optimizer.needs == "norm"
                else Whole(self._parts.registry.get("master", slot.name).shape)
            )
            yield Factor(local, local + stop - start, optimizer.factor(whole))

    def forget(self) -> None:
        """Between two steps."""
        self._norms.forget()
        self._squares.clear()
        self.local = self.totals = self.update = None


def unused_ranges(bucket: BucketState, used: Sequence[bool]) -> list[tuple[int, int]]:
    """Owned ranges of the parameters that no rank used, in elements of the master."""
    if all(used):
        return []
    names = {slot.name for slot, is_used in zip(bucket.layout.slots, used, strict=True) if not is_used}
    return [
        (local, local + stop - start)
        for slot, start, stop, local in bucket.layout.overlaps(*bucket.owned_range)
        if slot.name in names
    ]
