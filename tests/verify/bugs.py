"""Seeded bugs: one list, to which the first step's check, ``verify``, its static part and ``guard`` are held.

A bug is planted by a context manager that runs in every rank process and replaces a function of the package (or makes a
user's model branch on its rank), or by a key of the configuration. ``kind`` and ``tensors`` say which tensor is wrong
first, in causal order; ``shows`` says which figures of facts.py it moves. What ``verify`` says of each is in
verdicts.py.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardwise.comm.flights import DONE
from shardwise.comm.operators import ExchangeSite
from shardwise.comm.peers import PointToPoint
from shardwise.compose import module_steps
from shardwise.engine.construction import build
from shardwise.engine.parts.accumulation import Accumulation
from shardwise.engine.parts.shared import SharedGradients
from shardwise.engine.step import end as step_end
from shardwise.engine.step import training_step
from shardwise.engine.step.pipeline import _PipelineTraining
from shardwise.kernels import deferred, viewed_attention
from shardwise.kernels.attention_view import PackedDocuments
from shardwise.kernels.deferred import ProductQueue
from shardwise.kernels.dropout import EqualPart
from shardwise.models import dropout
from shardwise.models.dropout import KeyedDropout
from shardwise.models.layers import Attention
from shardwise.optim.flat import FlatOptimizer
from shardwise.parallel.context import attention as context_attention
from shardwise.parallel.context import region as context_region
from shardwise.parallel.context.region import ContextRegion
from shardwise.parallel.expert import router as expert_router
from shardwise.parallel.expert.dispatch import RoundRoutes, RowRoutes
from shardwise.parallel.pipeline.executor import ScheduleExecutor
from shardwise.parallel.tensor import layers
from shardwise.parallel.tensor.layers import RowLinear
from shardwise.parallel.zero.gradient import Gradient, GradientState
from shardwise.parallel.zero.weight import Weight
from shardwise.parallel.zero.windows import UnitWindows
from shardwise.plan.placement import Replicate
from tests.verify.cases import BRANCH, Case

Patch = AbstractContextManager[Any]


class Bug(NamedTuple):
    """A mistake, where it shows, and what is to be named."""

    name: str
    case: Case
    plant: Callable[[int], Patch]
    """Called with the rank; the context in which the rank runs from before the engine is built."""
    kind: str
    """Kind of the first wrong tensor: start weight, activation, loss, gradient, norm, moment, master, weight, or copy,
    which differs between the ranks that hold it. In fp64 a weight is its own master, so that either name fits."""
    tensors: str = "*"
    """Patterns, ``|`` between them, of the names that may be named first: of a parameter, or of a module for an
    activation."""
    shows: tuple[str, ...] = ("gradient",)
    """Kinds of figures that move by at least 10^4 times the noise."""
    found_by: frozenset[str] = frozenset()
    """Which of check, static and guard have to find it; ``verify`` has to find every bug."""
    keys: tuple[tuple[str, Any], ...] = ()
    """Keys of the configuration that are the bug."""
    in_one_process: bool = False
    """True if the engine on one rank makes the same mistake, so that only an independent reference shows it."""

    def may_name(self, name: str) -> bool:
        """True if ``name`` is a tensor that may be named first."""
        return any(fnmatchcase(name, pattern) for pattern in self.tensors.split("|"))


def no_patch(rank: int) -> Patch:
    """The bug is in the keys of the configuration."""
    return nullcontext()


# Sums over "tp" ----------------------------------------------------------------------------------------------------


def norm_gradients_not_summed(rank: int) -> Patch:
    """Each rank keeps the gradient of its own part of the sequence."""
    return patch("shardwise.parallel.tensor.layout.Partial", Replicate)


def averaged_over_tp(rank: int) -> Patch:
    """A mean where a sum belongs."""
    right = SharedGradients.sum

    def wrong(self: SharedGradients) -> None:
        right(self)
        for ranks, held in self._held.items():
            for bucket in held:
                for start, stop in held[bucket]:
                    bucket.gradient.owned[start:stop] /= len(ranks)

    return patch.object(SharedGradients, "sum", wrong)


def replicas_not_reduced(rank: int) -> Patch:
    """Neighbours that hold the same key and value head each keep their own addend."""
    right = SharedGradients.__init__

    def wrong(self: SharedGradients, *args: Any) -> None:
        right(self, *args)
        self._held = {ranks: held for ranks, held in self._held.items() if len(ranks) == 4}

    return patch.object(SharedGradients, "__init__", wrong)


def all_counted_in_the_norm(rank: int) -> Patch:
    """What several ranks hold alike counts on each of them."""
    return patch.object(SharedGradients, "counted", lambda self, bucket: [(0, bucket.gradient.owned.numel())])


def sequence_gradient_not_summed(rank: int) -> Patch:
    """The backward pass of a gather only cuts its gradient."""
    from shardwise.comm import duals

    right = duals.start_scatter

    def wrong(x: Tensor, group: Any, what: str, dim: int = 1, keeps: bool = False) -> Callable[[], Tensor]:
        if torch._C._current_graph_task_id() < 0:
            return right(x, group, what, dim, keeps)
        piece = duals.piece_of(x, group, dim).contiguous()
        return lambda: piece

    return patch("shardwise.comm.duals.start_scatter", wrong)


def pieces_of_the_neighbour(rank: int) -> Patch:
    """Each piece of a row layer's output goes to the rank beside its own."""
    from shardwise.comm import duals

    right = duals.start_scatter

    def wrong(x: Tensor, group: Any, what: str, dim: int = 1, **keys: Any) -> Callable[[], Tensor]:
        moved = x.roll(x.shape[dim] // group.size, dim) if "into" in keys else x
        return right(moved, group, what, dim, **keys)

    return patch("shardwise.comm.duals.start_scatter", wrong)


def column_gradient_not_summed(rank: int) -> Patch:
    """What every rank's columns say of the input's gradient is an addend, taken for the whole."""
    from shardwise.comm import duals

    right = duals.start_sum

    def wrong(x: Tensor, group: Any, what: str) -> Callable[[], Tensor]:
        return right(x, group, what) if torch._C._current_graph_task_id() < 0 else lambda: x

    return patch("shardwise.comm.duals.start_sum", wrong)


def row_bias_on_every_rank(rank: int) -> Patch:
    """The bias is added before the sum over the ranks, so that many times."""

    right = RowLinear.forward

    def wrong(self: RowLinear, x: Tensor) -> Tensor:
        y = right(self, x)
        return y if self.bias is None else y + self.bias * (self.region.group.size - 1)

    return patch.object(RowLinear, "forward", wrong)


def first_positions_everywhere(rank: int) -> Patch:
    """Every rank looks up the positions of the first part of the sequence."""
    from shardwise.comm import duals

    right = duals.piece_of

    def wrong(x: Tensor, group: Any, dim: int = 1) -> Tensor:
        return x.narrow(dim, 0, x.shape[dim] // group.size) if dim == -1 else right(x, group, dim)

    return patch("shardwise.comm.duals.piece_of", wrong)


# The loss over a cut vocabulary ------------------------------------------------------------------------------------


def _loss_with(change: Callable[..., tuple[int, Any]]) -> Patch:
    """The cut loss with another (first row, group)."""
    right = layers.vocabulary_cross_entropy

    def wrong(logits: Tensor, targets: Tensor, first: int, vocabulary: int, site: ExchangeSite) -> Tensor:
        first, group = change(first, site.group)
        changed = copy.copy(site)
        changed.group = group
        return right(logits, targets, first, vocabulary, changed)

    return patch.object(layers, "vocabulary_cross_entropy", wrong)


def loss_of_the_first_rows(rank: int) -> Patch:
    """Every rank takes its columns for the first of the vocabulary."""
    return _loss_with(lambda first, group: (0, group))


class _OwnMaximum:
    """A group whose ranks forget that each has subtracted a maximum of its own."""

    def __init__(self, group: Any):
        self.group, self.size = group, group.size

    def all_gather(self, every: Tensor, own: Tensor, *rest: Any) -> Any:
        pending = self.group.all_gather(every, own, *rest)
        pending.wait()
        stats = every.view(self.size, 3, -1)
        stats[:, 0] = stats[:, 0].amax(0)
        return pending


def loss_of_unlike_maxima(rank: int) -> Patch:
    """exp(z - own maximum) of the ranks is added up as it is."""
    return _loss_with(lambda first, group: (first, _OwnMaximum(group)))


# Pipeline ----------------------------------------------------------------------------------------------------------


def tied_gradient_lost(rank: int) -> Patch:
    """Embedding and head each train on their own."""
    return patch.object(SharedGradients, "tied", {})


def weights_of_microbatches_ignored(rank: int) -> Patch:
    """A microbatch of few targets counts like one of many."""
    right = Accumulation.scale_of
    return patch.object(Accumulation, "scale_of", lambda self, weight: right(self, min(weight, 1.0) and 24.0))


def norm_of_one_stage(rank: int) -> Patch:
    """Each stage clips by its own gradients."""
    right = step_end._over_model

    def wrong(parts: Any, local: Any, total: dict[str, Tensor]) -> dict[str, Tensor]:
        found = right(parts, local, total)
        return found | {"sums": torch.cat([total["sums"][:1], found["sums"][1:]])}

    return patch.object(step_end, "_over_model", wrong)


def targets_of_another_microbatch(rank: int) -> Patch:
    """The last stage looks at the next microbatch."""
    right = _PipelineTraining.forward

    def wrong(self: Any, stage: int, microbatch: int, received: Any) -> Any:
        batches = self._batches
        if stage:
            self._batches = [*batches[1:], batches[0]]
        try:
            return right(self, stage, microbatch, received)
        finally:
            self._batches = batches

    return patch.object(_PipelineTraining, "forward", wrong)


def _last_sent_again(of_gradients: bool) -> Patch:
    right = PointToPoint.send
    before: dict[int, Any] = {}

    def wrong(self: PointToPoint, text: str, tensors: Any, to: int, what: str, *rest: Any) -> Any:
        if "control" in rest:
            pass  # what ranks tell one another of the walk
        elif what.startswith("gradient") == of_gradients and not what.endswith("microbatch 0"):
            text, tensors, before[to] = *before[to], (text, tensors)
        else:
            before[to] = (text, tensors)
        return right(self, text, tensors, to, what, *rest)

    return patch.object(PointToPoint, "send", wrong)


def activation_of_another_microbatch(rank: int) -> Patch:
    """What is sent is the activation of the microbatch before, under the right name."""
    return _last_sent_again(False)


def gradient_of_another_microbatch(rank: int) -> Patch:
    """The same for gradients."""
    return _last_sent_again(True)


def activation_of_another_stage(rank: int) -> Patch:
    """Stage 3 computes on what its rank received for stage 1."""
    right = ScheduleExecutor.receive
    first: dict[int, Any] = {}

    def wrong(self: ScheduleExecutor, action: Any) -> None:
        right(self, action)
        key = (action.stage, action.microbatch)
        if action.carries_gradient or action.stage not in (1, 3):
            return
        if action.stage == 1:
            first[action.microbatch] = self._received[key].detach().clone()
        else:
            swapped = first[action.microbatch].requires_grad_()
            self._received[key], self._inputs[key] = swapped, [swapped]

    return patch.object(ScheduleExecutor, "receive", wrong)


def activation_to_the_stage_before(rank: int) -> Patch:
    """Stage 1 sends the wrong way."""
    right = PointToPoint.send

    def wrong(self: PointToPoint, text: str, tensors: Any, to: int, what: str, *rest: Any) -> Any:
        return right(self, text, tensors, 0 if what.startswith("activation of stage 1") else to, what, *rest)

    return patch.object(PointToPoint, "send", wrong)


# ZeRO --------------------------------------------------------------------------------------------------------------


def last_reduction_skipped(rank: int) -> Patch:
    """At stage 2 every microbatch is reduced by itself; the last one's gradients are forgotten."""
    right = UnitWindows.reduce

    def wrong(self: UnitWindows, action: Any) -> None:
        state = self.of(action)
        for bucket in state.buckets:
            if state.is_last and bucket.gradient.staging is not None:
                bucket.gradient.staging.zero_()
        right(self, action)

    return patch.object(UnitWindows, "reduce", wrong)


@contextmanager
def stale_weights(rank: int) -> Iterator[None]:
    """Units are gathered from the weights of the first step."""
    right = Weight.start_unshard
    first: dict[int, Tensor] = {}

    def wrong(self: Weight) -> None:
        fresh = self._shard
        self._shard = first.setdefault(id(self), fresh.clone())
        try:
            right(self)
        finally:
            self._shard = fresh

    with patch.object(Weight, "start_unshard", wrong):
        yield


# Dropout of foreign models ------------------------------------------------------------------------------------------


def part_of_the_first(rank: int) -> Patch:
    """Every rank drops in its part of the tokens what falls in the first part."""
    right = module_steps.dropout_cuts
    return patch.object(
        module_steps,
        "dropout_cuts",
        lambda *args: {name: each._replace(part=0) for name, each in right(*args).items()},
    )


def parts_where_it_is_whole(rank: int) -> Patch:
    """Ranks drop other features of the embedding, which all of them hold whole."""
    right = module_steps.dropout_cuts

    def wrong(model: Any, table: Any, index: int, *rest: Any) -> Any:
        return right(model, table, index, *rest) | {"transformer.drop": EqualPart(2, 2, index)}

    return patch.object(module_steps, "dropout_cuts", wrong)


def whole_where_it_is_cut(rank: int) -> Patch:
    """Every rank draws for its tokens as if they were all."""
    return patch.object(module_steps, "dropout_cuts", lambda *args: {})


# Sums over the data-parallel ranks --------------------------------------------------------------------------------


def _addends(change: Callable[[Tensor, Gradient], object], name: str = "*") -> Patch:
    """Change the gradients of parameters with this name before any rank adds them up."""
    right = Gradient.accumulate

    def wrong(self: Gradient, index: int, parameter: Any) -> bool:
        if parameter.grad is not None and fnmatchcase(self.layout.slots[index].name, name):
            change(parameter.grad, self)
        return right(self, index, parameter)

    return patch.object(Gradient, "accumulate", wrong)


def _sums(change: Callable[[Tensor, Gradient], object], name: str = "*") -> Patch:
    """Change the sums over the ranks of the gradients of parameters with this name."""
    right = Gradient.finish_reduce

    def wrong(self: Gradient) -> None:
        is_new = self.state is GradientState.REDUCED
        right(self)
        if not is_new:
            return
        for slot, start, stop, local in self.layout.overlaps(*self._around.owned_range):
            if fnmatchcase(slot.name, name):
                change(self.owned[local : local + stop - start], self)

    return patch.object(Gradient, "finish_reduce", wrong)


def not_summed_over_dp(rank: int) -> Patch:
    """Every rank trains on its own gradients."""
    return patch.object(Gradient, "_sum_over", lambda *args: DONE)


def averaged_over_dp(rank: int) -> Patch:
    """Sums that are divided by the global weight already are divided by the ranks too."""
    return _sums(lambda owned, gradient: owned.div_(gradient._around.dp.size))


def summed_twice_over_dp(rank: int) -> Patch:
    """Two techniques each reduce the same gradients."""
    return _sums(lambda owned, gradient: owned.mul_(gradient._around.dp.size))


def norm_addend_missing(rank: int) -> Patch:
    """The norm's gradient of one rank does not reach the sum."""
    return _addends(lambda grad, _: grad.zero_() if rank == 1 else None, "norm.weight")


def norm_addend_doubled(rank: int) -> Patch:
    """A hook that runs twice on one rank."""
    return _addends(lambda grad, _: grad.mul_(2) if rank == 1 else None, "blocks.1.mlp_norm.weight")


def rows_of_the_embedding_lost(rank: int) -> Patch:
    """The first rows of the embedding never get their gradient."""
    return _addends(lambda grad, _: grad[: len(grad) // 2].zero_(), "embed.weight")


def copies_not_summed(rank: int) -> Patch:
    """HSDP: the sums of the replicas are not added."""
    right = Gradient._sum_over

    def wrong(self: Gradient, group: Any, flat: Tensor) -> Any:
        return DONE if group is self._around.replicate else right(self, group, flat)

    return patch.object(Gradient, "_sum_over", wrong)


def summed_over_the_wrong_group(rank: int) -> Patch:
    """HSDP: the second sum runs over the shards, not over the replicas."""
    right = Gradient._sum_over

    def wrong(self: Gradient, group: Any, flat: Tensor) -> Any:
        return right(self, self._around.shard, flat)

    return patch.object(Gradient, "_sum_over", wrong)


def gradient_off_by_one(rank: int) -> Patch:
    """Each rank's range begins one element late."""
    right = Gradient._reduce_scatter

    def wrong(self: Gradient, into: Tensor, full: Tensor, accumulate: bool = False) -> Any:
        return right(self, into, full.roll(-1), accumulate)

    return patch.object(Gradient, "_reduce_scatter", wrong)


def gradient_range_of_the_neighbour(rank: int) -> Patch:
    """Ranks get one another's ranges."""
    right = Gradient._reduce_scatter

    def wrong(self: Gradient, into: Tensor, full: Tensor, accumulate: bool = False) -> Any:
        return right(self, into, full.roll(into.numel()), accumulate)

    return patch.object(Gradient, "_reduce_scatter", wrong)


# Microbatches and their weights -------------------------------------------------------------------------------------


def _microbatch_scaled(factor: Callable[[Accumulation], float]) -> Patch:
    right = Accumulation.scale_of
    return patch.object(Accumulation, "scale_of", lambda self, weight: right(self, weight) * factor(self))


def microbatch_counted_twice(rank: int) -> Patch:
    """The first microbatch counts double."""
    return _microbatch_scaled(lambda each: 2.0 if each.done == 0 else 1.0)


def microbatch_dropped(rank: int) -> Patch:
    """The first microbatch does not count."""
    return _microbatch_scaled(lambda each: 0.0 if each.done == 0 else 1.0)


def microbatch_dropped_on_one_rank(rank: int) -> Patch:
    """The last microbatch of one rank does not count."""
    return _microbatch_scaled(lambda each: 0.0 if rank == 1 and each.is_last else 1.0)


def divided_by_microbatches_twice(rank: int) -> Patch:
    """A user's habit kept: the loss is divided by the accumulation, and the engine averages."""
    return _microbatch_scaled(lambda each: 1.0 / each.microbatches)


def microbatches_summed(rank: int) -> Patch:
    """The gradients of microbatches are summed where their mean belongs."""
    return _microbatch_scaled(lambda each: float(each.microbatches))


def microbatch_overwrites(rank: int) -> Patch:
    """The reduction of a microbatch replaces that of the one before."""
    right = Gradient._reduce_scatter
    return patch.object(
        Gradient, "_reduce_scatter", lambda self, into, full, accumulate=False: right(self, into, full, False)
    )


def loss_scale_left_in(rank: int) -> Patch:
    """Gradients keep the factor of the loss."""

    def scaled(self: Accumulation, weight: float) -> float:
        self.agree(weight)
        return self.divisor_of(weight) * (1.0 if self.loss_scale is None else self.loss_scale.scale)

    @contextmanager
    def both() -> Iterator[None]:
        with (
            patch.object(Accumulation, "divisor_of", lambda self, weight: weight / (self.reference or 1.0)),
            patch.object(Accumulation, "scale_of", scaled),
        ):
            yield

    return both()


# Weights and their gathers --------------------------------------------------------------------------------------------


def _sent_instead(of: Callable[[int, Tensor], Tensor]) -> Patch:
    """Ranks send something else than the range that they have updated (stages 1 and 2)."""
    right = Weight.gather_updated
    begun: set[int] = set()

    def wrong(self: Weight, beside: bool = False) -> Any:
        if not self._updates_range:
            return right(self, beside)
        own = self._shard[self._own]
        fresh = own.clone()
        if id(self) not in begun:  # the start weights come right
            begun.add(id(self))
            of(id(self), fresh)
            return right(self, beside)
        own.copy_(of(id(self), fresh))
        right(self, False).wait()
        own.copy_(fresh)
        return DONE

    return patch.object(Weight, "gather_updated", wrong)


def gathered_before_the_update(rank: int) -> Patch:
    """The gather sends the weights of the step before."""
    last: dict[int, Tensor] = {}

    def before(key: int, fresh: Tensor) -> Tensor:
        stale, last[key] = last.get(key, fresh), fresh
        return stale

    return _sent_instead(before)


def never_gathered(rank: int) -> Patch:
    """The other ranks' ranges keep the start weights."""
    right = Weight.gather_updated
    begun: set[int] = set()

    def wrong(self: Weight, beside: bool = False) -> Any:
        if id(self) in begun:
            return DONE
        begun.add(id(self))
        return right(self, beside)

    return patch.object(Weight, "gather_updated", wrong)


def gathered_off_by_one(rank: int) -> Patch:
    """The range that is sent begins one element late."""
    return _sent_instead(lambda _, fresh: fresh.roll(-1))


def _unsharded(of: Callable[[Tensor], Tensor]) -> Patch:
    right = Weight.start_unshard

    def wrong(self: Weight) -> None:
        fresh = self._shard
        self._shard = of(fresh)
        try:
            right(self)
        finally:
            self._shard = fresh

    return patch.object(Weight, "start_unshard", wrong)


def shard_off_by_one(rank: int) -> Patch:
    """Stage 3 gathers shards that begin one element late."""
    return _unsharded(lambda fresh: fresh.roll(-1))


def shard_of_one_rank_is_zero(rank: int) -> Patch:
    """A rank sends memory that has not been filled."""
    return _unsharded(lambda fresh: torch.zeros_like(fresh) if rank == 1 else fresh)


# Norm and clipping ----------------------------------------------------------------------------------------------------


def _clip(factor: Callable[[float, float | None], float]) -> Patch:
    return patch.object(training_step, "clip_factor", factor)


def clipped_twice(rank: int) -> Patch:
    """The factor is applied to gradients that were scaled by it already."""
    right = training_step.clip_factor
    return _clip(lambda norm, largest: right(norm, largest) ** 2)


def never_clipped(rank: int) -> Patch:
    """The norm is computed and not used."""
    return _clip(lambda norm, largest: 1.0)


def clipped_by_the_square(rank: int) -> Patch:
    """The root is forgotten."""
    return _clip(lambda norm, largest: min(1.0, (largest or math.inf) / norm**2))


def clipped_before_unscaling(rank: int) -> Patch:
    """The norm is that of the sums, before they are divided by the weight of the batch."""
    return patch.object(training_step, "gradient_norm", lambda totals, divisor: totals.squares**0.5)


def norm_of_one_rank(rank: int) -> Patch:
    """Each element's square counts on the first data-parallel rank alone."""
    right = step_end._own_numbers

    def wrong(parts: Any, local: Any, known: Any) -> dict[str, Any]:
        own = right(parts, local, known)
        squares, *rest = own["sums"]
        return own | {"sums": (squares * (parts.dp.index == 0), *rest)}

    return patch.object(step_end, "_own_numbers", wrong)


def every_copy_in_the_norm(rank: int) -> Patch:
    """HSDP: each replica counts all squares."""
    return patch.object(step_end, "share", lambda flat, index, count: flat)


def norm_without_a_unit(rank: int) -> Patch:
    """The last bucket's squares are forgotten."""
    right = step_end._squares_of

    def wrong(parts: Any, bucket: Any) -> list[Tensor]:
        found = right(parts, bucket)
        return [each * 0 for each in found] if bucket is parts.trained[-1][0] else found

    return patch.object(step_end, "_squares_of", wrong)


# Optimizer ------------------------------------------------------------------------------------------------------------


def _rates(change: Callable[[int, dict[str, Any]], dict[str, Any]]) -> Patch:
    """The numbers of a group that the update really uses."""
    right = FlatOptimizer._cut

    def wrong(self: FlatOptimizer, rates: Sequence[Any], unused: Any) -> None:
        right(self, [change(number, dict(group)) for number, group in enumerate(rates)], unused)

    return patch.object(FlatOptimizer, "_cut", wrong)


def rate_of_one_rank(rank: int) -> Patch:
    """One rank steps with twice the rate."""
    return _rates(lambda _, group: group | {"lr": group["lr"] * (1 + (rank == 1))})


def decay_on_every_group(rank: int) -> Patch:
    """Norms decay as matrices do."""
    return _rates(lambda _, group: group | {"weight_decay": 0.1})


def decay_doubled(rank: int) -> Patch:
    """Weight decay is applied by the group and by the optimizer."""
    return _rates(lambda _, group: group | {"weight_decay": 2 * group["weight_decay"]})


def betas_swapped(rank: int) -> Patch:
    """The first moment decays as the second."""
    return _rates(lambda _, group: group | {"betas": tuple(reversed(group["betas"]))})


def _after_update(change: Callable[[FlatOptimizer, dict[str, Any]], object]) -> Patch:
    """Change the state of each segment after its update."""
    right = FlatOptimizer._average

    def wrong(self: FlatOptimizer, steps: int) -> None:
        right(self, steps)
        for segment in self.state.segments:
            change(self, self.state.of(segment.leaf))

    return patch.object(FlatOptimizer, "_average", wrong)


def moments_of_a_neighbour(rank: int) -> Patch:
    """Moments lie one element beside their masters, as after a load with another cut."""
    return _after_update(lambda _, held: held["exp_avg"].copy_(held["exp_avg"].roll(1)))


def second_moments_forgotten(rank: int) -> Patch:
    """What a step has learned of squares is lost at its end."""
    return _after_update(lambda _, held: held["exp_avg_sq"].zero_())


def bias_correction_restarts(rank: int) -> Patch:
    """Every step counts as the first."""
    return _after_update(lambda _, held: held["step"].zero_())


def update_skipped_by_one_rank(rank: int) -> Patch:
    """One rank takes the step for one that overflowed."""
    right = FlatOptimizer.step
    return patch.object(FlatOptimizer, "step", right if rank != 1 else lambda *args, **keys: False)


def masters_lost(rank: int) -> Patch:
    """Masters become what their 16-bit weights hold."""
    right = Weight.copy_from_master

    def wrong(self: Weight, is_rounded: bool = False) -> None:
        right(self, is_rounded)
        if self.master is not None and self.rounded is not None:
            self.master.copy_(self.rounded)

    return patch.object(Weight, "copy_from_master", wrong)


# More on tp -----------------------------------------------------------------------------------------------------------


def row_bias_lost(rank: int) -> Patch:
    """No rank adds the bias."""
    right = RowLinear.forward

    def wrong(self: RowLinear, x: Tensor) -> Tensor:
        y = right(self, x)
        return y if self.bias is None else y - self.bias

    return patch.object(RowLinear, "forward", wrong)


def row_output_not_summed(rank: int) -> Patch:
    """Each rank goes on with its own addend of a row layer's output."""
    from shardwise.comm import duals

    right = duals.start_sum

    def wrong(x: Tensor, group: Any, what: str) -> Callable[[], Tensor]:
        return (
            right(x, group, what)
            if torch._C._current_graph_task_id() >= 0 or "mlp" not in what
            else lambda: x
        )

    return patch("shardwise.comm.duals.start_sum", wrong)


def gathered_in_another_order(rank: int) -> Patch:
    """The pieces of a sequence are joined from the last rank to the first."""
    from shardwise.comm import duals

    right = duals.joined
    return patch.object(duals, "joined", lambda parts, dim: right(parts.flip(0), dim))


def column_gradient_averaged(rank: int) -> Patch:
    """The gradients that the ranks' columns add to the input are averaged."""
    from shardwise.comm import duals

    right = duals.start_sum

    def wrong(x: Tensor, group: Any, what: str) -> Callable[[], Tensor]:
        finish = right(x, group, what)
        return finish if torch._C._current_graph_task_id() < 0 else lambda: finish() / group.size

    return patch("shardwise.comm.duals.start_sum", wrong)


def padding_of_the_vocabulary_counts(rank: int) -> Patch:
    """A column of zeros, which makes the last part as wide as the others, takes part in the softmax."""
    right = layers.vocabulary_cross_entropy

    def wrong(logits: Tensor, targets: Tensor, first: int, vocabulary: int, site: ExchangeSite) -> Tensor:
        if site.group.index == site.group.size - 1:
            logits = torch.nn.functional.pad(logits, (0, 1))
        return right(logits, targets, first, vocabulary + 1, site)

    return patch.object(layers, "vocabulary_cross_entropy", wrong)


def rotary_base_by_rank(rank: int) -> Patch:
    """The heads of one rank turn at another speed."""
    from shardwise.models import gpt

    right = gpt.angles_at

    def wrong(positions: Tensor, size: int, theta: float, *rest: Any) -> Any:
        return right(positions, size, theta * (1 + rank), *rest)

    return patch.object(gpt, "angles_at", wrong)


def mask_shows_the_next_token(rank: int) -> Patch:
    """On one rank every query sees one key too many."""
    right = Attention.forward

    def leaking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(2)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -math.inf)
        return scores.softmax(-1) @ v

    def wrong(self: Attention, *args: Any) -> Tensor:
        before = self.attention
        self.attention = leaking if rank == 1 else before
        try:
            return right(self, *args)
        finally:
            self.attention = before

    return patch.object(Attention, "forward", wrong)


def kv_copy_updated_apart(rank: int) -> Patch:
    """One of the ranks that hold the same key and value heads steps with another rate."""
    return rate_of_one_rank(rank)


# More on pipelines ----------------------------------------------------------------------------------------------------


def gradient_halved_between_stages(rank: int) -> Patch:
    """The gradient of an activation is divided by the stages."""
    right = PointToPoint.send

    def wrong(self: PointToPoint, text: str, tensors: Any, to: int, what: str, *rest: Any) -> Any:
        if what.startswith("gradient") and "control" not in rest:
            tensors = tree_map_only(Tensor, lambda each: each / 2, tensors)
        return right(self, text, tensors, to, what, *rest)

    return patch.object(PointToPoint, "send", wrong)


def microbatch_dropped_by_the_last_stage(rank: int) -> Patch:
    """The second microbatch's loss has no gradient."""
    right = _PipelineTraining.backward

    def wrong(self: Any, stage: int, microbatch: int, *rest: Any) -> Any:
        if microbatch == 1 and microbatch in self._scales:
            self._scales[microbatch] = self._scales[microbatch] * 0
        return right(self, stage, microbatch, *rest)

    return patch.object(_PipelineTraining, "backward", wrong)


def tied_gradient_doubled(rank: int) -> Patch:
    """The gradient of a tied weight is summed over its stages twice."""
    right = SharedGradients.sum

    def wrong(self: SharedGradients) -> None:
        right(self)
        for buckets in self.tied.values():
            for bucket in buckets:
                bucket.gradient.owned.mul_(2)

    return patch.object(SharedGradients, "sum", wrong)


# Experts --------------------------------------------------------------------------------------------------------------


def expert_gradients_ep_times(rank: int) -> Patch:
    """Every rank of ep brings its rows to an expert, whose sum is multiplied by their number once more."""
    return _sums(lambda owned, _: owned.mul_(2), "*.experts.*")


def router_addend_missing(rank: int) -> Patch:
    """The router's gradient of one rank is lost."""
    return _addends(lambda grad, _: grad.zero_() if rank == 1 else None, "*.router.weight")


def rows_return_to_the_neighbour(rank: int) -> Patch:
    """The results of experts come back one message late."""
    right = RowRoutes.sum
    return patch.object(RowRoutes, "sum", lambda self, returned: right(self, returned.roll(1, 0)))


def experts_swapped(rank: int) -> Patch:
    """Rows go to the expert beside their own, on the right rank."""
    right = RoundRoutes.find
    return patch.object(
        RoundRoutes, "find", lambda self, numbers: right(self, torch.where(numbers < 0, numbers, numbers ^ 1))
    )


def expert_weights_of_one_rank_even(rank: int) -> Patch:
    """One rank gives each of a token's experts the same weight."""
    right = expert_router.weights_of

    def wrong(scores: Tensor, index: Tensor, policy: Any) -> Tensor:
        weights = right(scores, index, policy)
        return weights * 0 + 1 / weights.shape[-1] if rank == 1 else weights

    return patch.object(expert_router, "weights_of", wrong)


# Dropout and its keys ------------------------------------------------------------------------------------------------


# Sequences that are cut over ranks ---------------------------------------------------------------------------------


def gradients_of_keys_stay_abroad(rank: int) -> Patch:
    """The gradients of keys and values that another rank's queries saw do not return to their rank."""
    right = context_attention._return

    def wrong(gradients: Tensor, site: Any) -> Any:
        arrive = right(gradients, site)
        return lambda: tuple(torch.zeros_like(each) for each in arrive())

    return patch.object(context_attention, "_return", wrong)


def _pieces(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Patch:
    right = ContextRegion._pieces

    def wrong(self: ContextRegion, given: Any, cut: Any) -> dict[str, Any]:
        found = right(self, given, cut)
        return found | change(found)

    return patch.object(ContextRegion, "_pieces", wrong)


def positions_of_a_part_begin_anew(rank: int) -> Patch:
    """The tokens of a part take the first positions of the sequence."""
    return _pieces(lambda found: {"positions": torch.arange(len(found["positions"]))})


def targets_of_other_tokens(rank: int) -> Patch:
    """The targets of a part lie one place too late."""
    return _pieces(lambda found: {"targets": found["targets"].roll(1, 1)})


def parts_count_alike(rank: int) -> Patch:
    """Each rank along cp divides by its own number of targets and counts like any other."""
    return patch.object(ContextRegion, "share_of", lambda self, *given: 1 / self.group.size)


def keys_of_other_ranks_are_not_seen(rank: int) -> Patch:
    """Each rank along cp attends to its own keys alone."""
    return patch.object(context_attention, "_leave", lambda k, v, site, what: lambda: None)


def ends_of_documents_are_ignored(rank: int) -> Patch:
    """The parts of packed sequences are attended to as one document."""
    right = context_region.packed_documents

    def wrong(documents: Tensor, shape: Any) -> PackedDocuments:
        found = right(documents, shape)
        return PackedDocuments(((0,),) * len(found.starts), found.length)

    return patch.object(context_region, "packed_documents", wrong)


def positions_go_on_through_documents(rank: int) -> Patch:
    """The tokens of a part take their places in the packed sequence as positions."""
    return patch.object(context_region.SequenceCut, "positions", lambda self, places: places)


def windows_are_longer_by_one(rank: int) -> Patch:
    """A token of a part sees one token more than its window has."""
    right = ContextRegion.site

    def wrong(self: ContextRegion, name: str, window: int | None = None) -> Any:
        return right(self, name, None if window is None else window + 1)

    return patch.object(ContextRegion, "site", wrong)


def a_sink_counts_twice(rank: int) -> Patch:
    """The sink is added to each of two parts of the keys, and not to their sum."""
    right = viewed_attention.with_sink

    def wrong(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
        return right(out, right(out, lse, sink), sink)

    return patch.object(viewed_attention, "with_sink", wrong)


def products_are_forgotten(rank: int) -> Patch:
    """W drops the products that wait for it."""
    right = ProductQueue.take

    def wrong(self: ProductQueue, microbatch: int, unit: int) -> Iterator[Any]:
        right(self, microbatch, unit)
        return iter(())

    return patch.object(ProductQueue, "take", wrong)


def products_of_another_sample(rank: int) -> Patch:
    """W multiplies the gradient of an output by the input of another sample."""
    right = deferred.weight_product

    def wrong(grad: Tensor, x: Tensor, transposed: bool = False) -> Tensor:
        return right(grad, x.roll(1, 0), transposed)

    return patch.object(deferred, "weight_product", wrong)


def vectors_counted_in_both_halves(rank: int) -> Patch:
    """The gradient of a norm or a bias, which comes in I, is added again in W."""
    right = ProductQueue.put

    def wrong(self: ProductQueue, parameter: torch.nn.Parameter, product: Any, *held: Tensor) -> None:
        for _ in range(1 + (parameter.dim() == 1)):
            right(self, parameter, product, *held)

    return patch.object(ProductQueue, "put", wrong)


def _masks(change: Callable[[Any], Any]) -> Patch:
    right = dropout.keyed_dropout
    return patch.object(dropout, "keyed_dropout", lambda x, p, draw, cut=None: right(x, p, change(draw), cut))


def masks_by_rank(rank: int) -> Patch:
    """The seed of a mask has the rank in it."""
    return _masks(lambda draw: draw._replace(key=draw.key + rank))


def masks_of_the_first_sample(rank: int) -> Patch:
    """Every microbatch and rank drops what the first samples of the batch drop."""
    return _masks(lambda draw: draw._replace(first_sample=0))


def masks_of_the_first_step(rank: int) -> Patch:
    """Every step drops what the first one dropped."""
    return _masks(lambda draw: draw._replace(step=0))


def recomputed_with_other_masks(rank: int) -> Patch:
    """A block that runs again in the backward pass drops other features."""
    right = KeyedDropout.forward

    def wrong(self: KeyedDropout, x: Tensor) -> Tensor:
        before = self._key
        self._key += bool(self._replay.runs_again)
        try:
            return right(self, x)
        finally:
            self._key = before

    return patch.object(KeyedDropout, "forward", wrong)


# A user's model that branches on its rank ----------------------------------------------------------------------------


def _branch(number: int) -> Callable[[int], Patch]:
    return lambda rank: patch.dict(BRANCH, {"rank": rank, "branch": number})


def start_weights_by_rank(rank: int) -> Patch:
    """Ranks draw unlike weights, and nobody sends those of the first one."""

    @contextmanager
    def both() -> Iterator[None]:
        with (
            patch.dict(BRANCH, {"rank": rank, "branch": 5}),
            patch.object(build, "take_rank_0", lambda *args: None),
        ):
            yield

    return both()


# The list -------------------------------------------------------------------------------------------------------------

GPT2_WHOLE = Case("tp=2", "gpt2", keys=(("tensor.sequence_parallel", False),))
WHOLE = Case("tp=2", keys=(("tensor.sequence_parallel", False),))
PIPELINE = Case("pp=2", microbatches=5)
SPLIT = Case("pp=2", "gpt2", microbatches=4, keys=(("pipeline.schedule", "zb_h1"),))
TIED = Case("pp=3", "gpt2", microbatches=4)
DATA, STAGE_1 = Case("dp=2,zero=0", microbatches=2), Case("dp=2,zero=1", microbatches=2)
STAGE_2, STAGE_3 = Case("dp=2,zero=2", microbatches=2), Case("dp=2,zero=3", microbatches=2)
PACKED, WINDOWS = Case("cp=2", "packed"), Case("cp=2", "windows")
CUT = Case("cp=2", keys=(("context.method", "planned"),))
EXPERTS = Case("dp=2,ep=2,zero=1", "experts")
DROPPING = Case("tp=2", "dropout", reference="layout")
FOREIGN = Case("tp=2", "foreign gpt2", keys=(("optimizer.groups", ()),), reference="layout")
USERS = Case("dp=2,zero=2", "user", microbatches=2)
IN_16_BITS = Case("dp=2,zero=1", microbatches=2, keys=(("precision", "bf16"),), reference="layout")
IN_FP16 = Case("dp=2,zero=0", keys=(("precision", "fp16"),), reference="layout")

ALL = ("gradient", "loss")


def _bug(
    plant: Callable[[int], Patch],
    case: Case,
    kind: str,
    tensors: str = "*",
    shows: tuple[str, ...] = ("gradient",),
    by: str = "",
    name: str = "",
    **rest: Any,
) -> Bug:
    called = name or getattr(plant, "__name__", "").replace("_", " ")
    return Bug(called, case, plant, kind, tensors, shows, frozenset(by.split()), **rest)


def _declared(row: str, words: str, name: str, shows: tuple[str, ...] = ("gradient",), **rest: Any) -> Bug:
    """A row of ``tensor.table`` that is wrong under a cut sequence."""
    keys = (("tensor.table", {row: words}),)
    return _bug(no_patch, Case("tp=2"), shows=shows, by="check static", name=name, keys=keys, **rest)


BUGS: list[Bug] = [
    # Sums over tp
    _bug(norm_gradients_not_summed, Case("tp=2"), "gradient", "*norm*", by="check guard"),
    _bug(averaged_over_tp, Case("tp=2"), "gradient", "*norm*", by="check"),
    _bug(replicas_not_reduced, Case("tp=4", "llama kv2"), "gradient", "*qkv*", by="check guard"),
    _bug(
        all_counted_in_the_norm,
        Case("tp=4", "llama kv2"),
        "norm",
        shows=("norm",),
        name="copies in the norm, tp",
        by="check",
    ),
    _bug(sequence_gradient_not_summed, Case("tp=2"), "gradient", by="check"),
    _bug(
        pieces_of_the_neighbour,
        Case("tp=2", keys=(("tensor.overlap", 3),)),
        "activation",
        "*",
        ALL,
        by="check",
    ),
    _bug(column_gradient_not_summed, WHOLE, "gradient", by="check guard"),
    _bug(column_gradient_averaged, WHOLE, "gradient", by="check"),
    # Biases start at zero, so that all outputs of the first step are right.
    _bug(row_bias_on_every_rank, Case("tp=2", "gpt2"), "gradient", "*.bias", shows=ALL, by="check"),
    _bug(row_bias_lost, GPT2_WHOLE, "gradient", "*.bias", shows=ALL, by="check"),
    _bug(row_output_not_summed, WHOLE, "activation", "*mlp.down", ALL, by="check guard"),
    _bug(gathered_in_another_order, Case("tp=2"), "activation", "*", ALL, by="check"),
    _bug(first_positions_everywhere, Case("tp=2", "gpt2"), "activation", "positions", shows=ALL, by="check"),
    _bug(rotary_base_by_rank, Case("tp=2"), "activation", "*attention*", shows=ALL),
    _bug(mask_shows_the_next_token, Case("tp=2"), "activation", "*attention*", shows=ALL, by="check"),
    _bug(loss_of_the_first_rows, Case("tp=2"), "loss", "*", shows=ALL, by="check"),
    _bug(loss_of_unlike_maxima, Case("tp=2"), "loss", "*", shows=ALL, by="check"),
    _bug(padding_of_the_vocabulary_counts, Case("tp=2"), "loss", "*", shows=ALL, by="check"),
    _bug(kv_copy_updated_apart, Case("tp=4", "llama kv2"), "copy", "*qkv*", shows=("copy",), by="guard"),
    _declared(
        "blocks.*.mlp_norm", "replicate", "norm declared replicate", kind="gradient", tensors="*mlp_norm*"
    ),
    _declared(
        "blocks.*.attention_norm", "replicate", "norm before attention declared replicate", kind="gradient"
    ),
    _declared("norm", "replicate", "last norm declared replicate", kind="gradient", tensors="norm.weight"),
    _declared("norm", "replicate whole", "last norm declared whole", kind="gradient", tensors="norm.weight"),
    _bug(
        norm_gradients_not_summed,
        Case("pp=2,tp=2", microbatches=3),
        "gradient",
        "*norm*",
        by="check guard",
        name="norm gradients not summed in a pipeline",
    ),
    # Pipelines
    _bug(
        tied_gradient_lost,
        Case("pp=2,tp=2,recompute=full", "gpt2", microbatches=3),
        "gradient",
        "embed.weight",
        by="check guard",
        name="tied gradient lost on tp",
    ),
    _bug(tied_gradient_lost, TIED, "gradient", "embed.weight", by="check guard"),
    _bug(tied_gradient_doubled, TIED, "gradient", "embed.weight", by="check"),
    _bug(all_counted_in_the_norm, TIED, "norm", shows=("norm",), name="ties in the norm, pp", by="check"),
    _bug(weights_of_microbatches_ignored, PIPELINE, "gradient", by="check"),
    _bug(norm_of_one_stage, Case("pp=2", microbatches=3), "norm", shows=("norm",), by="check"),
    _bug(targets_of_another_microbatch, PIPELINE, "loss", "*", ALL, by="check"),
    _bug(
        activation_of_another_microbatch,
        PIPELINE,
        "activation",
        "blocks.2*",
        ALL,
        by="check",
    ),
    _bug(gradient_of_another_microbatch, PIPELINE, "gradient", by="check"),
    _bug(gradient_halved_between_stages, PIPELINE, "gradient", "embed.weight|blocks.[01].*", by="check"),
    _bug(microbatch_dropped_by_the_last_stage, PIPELINE, "gradient", "*", by="check"),
    _bug(
        activation_of_another_stage,
        Case("pp=2,virtual=2", microbatches=5),
        "activation",
        "blocks.3*",
        shows=ALL,
        by="check",
    ),
    # Data-parallel sums
    _bug(not_summed_over_dp, DATA, "gradient", "*", by="guard"),
    _bug(averaged_over_dp, DATA, "gradient", "*"),
    _bug(summed_twice_over_dp, STAGE_2, "gradient", "*"),
    _bug(norm_addend_missing, DATA, "gradient", "norm.weight"),
    _bug(norm_addend_doubled, STAGE_2, "gradient", "blocks.1.mlp_norm.weight"),
    _bug(rows_of_the_embedding_lost, STAGE_1, "gradient", "embed.weight"),
    _bug(copies_not_summed, Case("dp=2x2,zero=1"), "gradient", "*", by="guard"),
    _bug(summed_over_the_wrong_group, Case("dp=2x2,zero=2"), "gradient", "*", by="guard"),
    _bug(gradient_off_by_one, STAGE_2, "gradient", "*"),
    _bug(gradient_range_of_the_neighbour, STAGE_2, "gradient", "*"),
    # Microbatches
    _bug(last_reduction_skipped, Case("dp=2,tp=2,zero=2", microbatches=2), "gradient", "*", by="check"),
    _bug(
        last_reduction_skipped,
        Case("pp=2,dp=2,zero=2", microbatches=3),
        "gradient",
        "*",
        name="last reduction skipped in a pipeline",
        by="check",
    ),
    _bug(microbatch_overwrites, STAGE_2, "gradient", "*"),
    _bug(microbatch_counted_twice, DATA, "gradient", "*"),
    _bug(microbatch_dropped, STAGE_3, "gradient", "*"),
    _bug(microbatch_dropped_on_one_rank, STAGE_2, "gradient", "*"),
    _bug(weights_of_microbatches_ignored, DATA, "gradient", "*", name="mean of means over dp"),
    _bug(divided_by_microbatches_twice, STAGE_1, "gradient", "*"),
    _bug(microbatches_summed, DATA, "gradient", "*", in_one_process=True),
    _bug(loss_scale_left_in, IN_FP16, "gradient", "*"),
    # Gathers
    _bug(stale_weights, Case("pp=2,dp=2,zero=3", microbatches=3), "activation", "*"),
    _bug(gathered_before_the_update, STAGE_1, "weight", "*", ("weight",), by="guard"),
    _bug(never_gathered, STAGE_2, "weight", "*", ("weight",), by="guard"),
    _bug(gathered_off_by_one, STAGE_1, "weight", "*", ("weight",), by="guard"),
    _bug(shard_off_by_one, STAGE_3, "activation", "*", ALL),
    _bug(shard_of_one_rank_is_zero, STAGE_3, "activation", "*", ALL),
    # Norm and clipping
    _bug(norm_of_one_rank, STAGE_2, "norm", shows=("norm",)),
    _bug(every_copy_in_the_norm, Case("dp=2x2,zero=2"), "norm", shows=("norm",)),
    _bug(norm_without_a_unit, STAGE_1, "norm", shows=("norm",)),
    _bug(clipped_before_unscaling, STAGE_1, "norm", shows=("norm",)),
    _bug(clipped_twice, STAGE_1, "moment", "*", ("moment",), in_one_process=True),
    _bug(never_clipped, STAGE_3, "moment", "*", ("moment",), in_one_process=True),
    _bug(clipped_by_the_square, DATA, "moment", "*", ("moment",), in_one_process=True),
    # Optimizer
    _bug(rate_of_one_rank, STAGE_1, "master", "*", shows=("weight",)),
    _bug(rate_of_one_rank, DATA, "copy", "*", shows=("weight",), by="guard", name="rate of one copy"),
    _bug(update_skipped_by_one_rank, DATA, "copy", "*", ("weight",), by="guard"),
    _bug(decay_on_every_group, STAGE_2, "master", "*norm*", shows=("weight",), in_one_process=True),
    _bug(decay_doubled, STAGE_3, "master", "*", shows=("weight",), in_one_process=True),
    _bug(betas_swapped, STAGE_1, "moment", "*", shows=("moment",), in_one_process=True),
    _bug(moments_of_a_neighbour, STAGE_1, "moment", "*", ("moment",)),
    _bug(second_moments_forgotten, STAGE_2, "moment", "*", ("moment",), in_one_process=True),
    _bug(bias_correction_restarts, STAGE_3, "master", "*", shows=("weight",), in_one_process=True),
    _bug(masters_lost, IN_16_BITS, "master", "*", shows=("master",)),
    # Experts
    _bug(expert_gradients_ep_times, EXPERTS, "gradient", "*experts*", by="check"),
    _bug(router_addend_missing, EXPERTS, "gradient", "*router*", by="check"),
    _bug(rows_return_to_the_neighbour, EXPERTS, "activation", "*mlp*", ALL, by="check"),
    _bug(experts_swapped, EXPERTS, "activation", "*mlp*", ALL, by="check"),
    _bug(expert_weights_of_one_rank_even, EXPERTS, "activation", "*mlp*", shows=ALL),
    # Sequences that are cut
    _bug(gradients_of_keys_stay_abroad, CUT, "gradient", "*", by="check"),
    _bug(positions_of_a_part_begin_anew, CUT, "activation", "*", ALL, by="check"),
    _bug(targets_of_other_tokens, CUT, "loss", "*", ALL, by="check"),
    _bug(parts_count_alike, CUT, "loss", "*", by="check"),
    _bug(every_copy_in_the_norm, CUT, "norm", shows=("norm",), name="copies in the norm, cp", by="check"),
    _bug(keys_of_other_ranks_are_not_seen, CUT, "activation", "*", ALL, by="check"),
    _bug(ends_of_documents_are_ignored, PACKED, "activation", "*", ALL, by="check"),
    _bug(positions_go_on_through_documents, PACKED, "activation", "*", ALL, by="check"),
    _bug(windows_are_longer_by_one, WINDOWS, "activation", "*", ALL, by="check"),
    # The check's uncut model computes sinks by the same function.
    _bug(a_sink_counts_twice, WINDOWS, "activation", "*", ALL),
    # Backward passes in two parts
    # A parameter whose products are dropped has no gradient to compare, so the norm is the first wrong number.
    _bug(products_are_forgotten, SPLIT, "norm", "*", by="check"),
    _bug(products_of_another_sample, SPLIT, "gradient", "*", by="check"),
    _bug(vectors_counted_in_both_halves, SPLIT, "gradient", "*", by="check"),
    # Dropout
    _bug(masks_by_rank, DROPPING, "activation", "*dropout", ALL, by="check"),
    _bug(
        whole_where_it_is_cut,
        DROPPING,
        "activation",
        "*dropout",
        ALL,
        name="first mask on a cut sequence",
        by="check",
    ),
    _bug(
        masks_of_the_first_sample,
        Case("dp=2", "dropout", microbatches=2, reference="layout"),
        "activation",
        "*dropout",
        ALL,
    ),
    _bug(masks_of_the_first_step, DROPPING, "activation", "*dropout", ALL),
    _bug(
        recomputed_with_other_masks,
        Case("dp=2,recompute=full", "dropout", reference="layout"),
        "gradient",
        "*",
    ),
    _bug(part_of_the_first, FOREIGN, "activation", "*drop*", ALL, by="check"),
    _bug(parts_where_it_is_whole, FOREIGN, "activation", "*drop", ("loss",), by="check guard"),
    _bug(whole_where_it_is_cut, FOREIGN, "activation", "*drop*", ALL, by="check"),
    # A user's model
    _bug(_branch(1), USERS, "activation", "blocks.2", shows=ALL, name="a layer that one rank skips"),
    _bug(_branch(2), USERS, "activation", "blocks.1", shows=ALL, name="a factor on one rank"),
    _bug(_branch(3), USERS, "loss", "*", shows=ALL, name="a loss without the last tokens on one rank"),
    _bug(_branch(4), USERS, "loss", "*", ALL, name="a loss doubled on one rank"),
    _bug(
        start_weights_by_rank,
        Case("dp=2,zero=0", "user"),
        "start weight",
        "blocks.3.weight",
        ("start weight",),
    ),
]

BY_NAME = {bug.name: bug for bug in BUGS}
assert len(BY_NAME) == len(BUGS), "names are unique"
