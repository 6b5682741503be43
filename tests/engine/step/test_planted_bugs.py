"""The parity table can fail: with a bug planted into the engine its figures exceed the limit.

Each bug is patched into the rank processes for the time of one layout, which is a row of the table.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor

from shardwise import initialize
from shardwise.base.errors import CommError, UsageError
from shardwise.comm.operators import ExchangeSite
from shardwise.comm.peers import PointToPoint
from shardwise.comm.world import join
from shardwise.compose import module_steps
from shardwise.engine.engine import Engine
from shardwise.engine.parts.accumulation import Accumulation
from shardwise.engine.parts.shared import SharedGradients
from shardwise.engine.step.pipeline import _PipelineTraining
from shardwise.kernels.dropout import EqualPart
from shardwise.parallel.pipeline.executor import ScheduleExecutor
from shardwise.parallel.tensor.layers import RowLinear
from shardwise.parallel.zero.weight import Weight
from shardwise.parallel.zero.windows import UnitWindows
from shardwise.plan.placement import Replicate
from tests.engine.nets import seeded
from tests.engine.test_model_parallel import LAYOUTS, Figures, Layout, measure

LIMIT = 1e-10
Patch = AbstractContextManager[Any]


class Bug(NamedTuple):
    """``shows``: the figures that must exceed the limit."""

    layout: Layout
    plant: Callable[[], Patch]
    shows: tuple[str, ...] = ("gradients",)


# Sums over "tp" ----------------------------------------------------------------------------------------------------


def norm_gradients_not_summed() -> Patch:
    """Each rank keeps the gradient of its own part of the sequence."""
    return patch("shardwise.parallel.tensor.layout.Partial", Replicate)


def averaged_over_tp() -> Patch:
    """A mean where a sum belongs."""
    right = SharedGradients.sum

    def wrong(self: SharedGradients) -> None:
        right(self)
        for ranks, held in self._held.items():
            for bucket in held:
                for start, stop in held[bucket]:
                    bucket.gradient.owned[start:stop] /= len(ranks)

    return patch.object(SharedGradients, "sum", wrong)


def replicas_not_reduced() -> Patch:
    """Neighbours that hold the same key and value head each keep their own addend."""
    right = SharedGradients.__init__

    def wrong(self: SharedGradients, *args: Any) -> None:
        right(self, *args)
        self._held = {ranks: held for ranks, held in self._held.items() if len(ranks) == 4}

    return patch.object(SharedGradients, "__init__", wrong)


def all_counted_in_the_norm() -> Patch:
    """What several ranks hold alike counts on each of them."""
    return patch.object(SharedGradients, "counted", lambda self, bucket: [(0, bucket.gradient.owned.numel())])


def sequence_gradient_not_summed() -> Patch:
    """The backward pass of a gather only cuts its gradient."""
    from shardwise.comm import duals

    right = duals.start_scatter

    def wrong(x: Tensor, group: Any, what: str, dim: int = 1, keeps: bool = False) -> Callable[[], Tensor]:
        if torch._C._current_graph_task_id() < 0:
            return right(x, group, what, dim, keeps)
        piece = duals.piece_of(x, group, dim).contiguous()
        return lambda: piece

    return patch("shardwise.comm.duals.start_scatter", wrong)


def pieces_of_the_neighbour() -> Patch:
    """Each piece of a row layer's output goes to the rank beside its own."""
    from shardwise.comm import duals

    right = duals.start_scatter

    def wrong(x: Tensor, group: Any, what: str, dim: int = 1, **keys: Any) -> Callable[[], Tensor]:
        moved = x.roll(x.shape[dim] // group.size, dim) if "into" in keys else x
        return right(moved, group, what, dim, **keys)

    return patch("shardwise.comm.duals.start_scatter", wrong)


def column_gradient_not_summed() -> Patch:
    """What every rank's columns say of the input's gradient is an addend, taken for the whole."""
    from shardwise.comm import duals

    right = duals.start_sum

    def wrong(x: Tensor, group: Any, what: str) -> Callable[[], Tensor]:
        return right(x, group, what) if torch._C._current_graph_task_id() < 0 else lambda: x

    return patch("shardwise.comm.duals.start_sum", wrong)


def row_bias_on_every_rank() -> Patch:
    """The bias is added before the sum over the ranks, so that many times."""

    right = RowLinear.forward

    def wrong(self: RowLinear, x: Tensor) -> Tensor:
        y = right(self, x)
        return y if self.bias is None else y + self.bias * (self.region.group.size - 1)

    return patch.object(RowLinear, "forward", wrong)


def first_positions_everywhere() -> Patch:
    """Every rank looks up the positions of the first part of the sequence."""
    from shardwise.comm import duals

    right = duals.piece_of

    def wrong(x: Tensor, group: Any, dim: int = 1) -> Tensor:
        return x.narrow(dim, 0, x.shape[dim] // group.size) if dim == -1 else right(x, group, dim)

    return patch("shardwise.comm.duals.piece_of", wrong)


# The loss over a cut vocabulary ------------------------------------------------------------------------------------


def _loss_with(change: Callable[..., tuple[int, Any]]) -> Patch:
    """The cut loss with another (first row, group)."""
    from shardwise.parallel.tensor import layers

    right = layers.vocabulary_cross_entropy

    def wrong(logits: Tensor, targets: Tensor, first: int, vocabulary: int, site: ExchangeSite) -> Tensor:
        first, group = change(first, site.group)
        changed = copy.copy(site)
        changed.group = group
        return right(logits, targets, first, vocabulary, changed)

    return patch.object(layers, "vocabulary_cross_entropy", wrong)


def loss_of_the_first_rows() -> Patch:
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


def loss_of_unlike_maxima() -> Patch:
    """exp(z - own maximum) of the ranks is added up as it is."""
    return _loss_with(lambda first, group: (first, _OwnMaximum(group)))


# Pipeline ----------------------------------------------------------------------------------------------------------


def tied_gradient_lost() -> Patch:
    """Embedding and head each train on their own."""
    return patch.object(SharedGradients, "tied", {})


def weights_of_microbatches_ignored() -> Patch:
    """A microbatch of few targets counts like one of many."""
    right = Accumulation.scale_of
    return patch.object(Accumulation, "scale_of", lambda self, weight: right(self, min(weight, 1.0) and 24.0))


def norm_of_one_stage() -> Patch:
    """Each stage clips by its own gradients."""
    from shardwise.engine.step import end as step

    right = step._over_model

    def wrong(parts: Any, local: Any, total: dict[str, Tensor]) -> dict[str, Tensor]:
        found = right(parts, local, total)
        return found | {"sums": torch.cat([total["sums"][:1], found["sums"][1:]])}

    return patch.object(step, "_over_model", wrong)


def targets_of_another_microbatch() -> Patch:
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


def activation_of_another_microbatch() -> Patch:
    """What is sent is the activation of the microbatch before, under the right name."""
    return _last_sent_again(False)


def gradient_of_another_microbatch() -> Patch:
    """The same for gradients."""
    return _last_sent_again(True)


def activation_of_another_stage() -> Patch:
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


def activation_to_the_stage_before() -> Patch:
    """Stage 1 sends the wrong way."""
    right = PointToPoint.send

    def wrong(self: PointToPoint, text: str, tensors: Any, to: int, what: str, *rest: Any) -> Any:
        return right(self, text, tensors, 0 if what.startswith("activation of stage 1") else to, what, *rest)

    return patch.object(PointToPoint, "send", wrong)


# ZeRO --------------------------------------------------------------------------------------------------------------


def last_reduction_skipped() -> Patch:
    """At stage 2 every microbatch is reduced by itself; the last one's gradients are forgotten."""
    right = UnitWindows.reduce

    def wrong(self: UnitWindows, action: Any) -> None:
        for bucket in self.of(action).buckets:
            if self._is_last and bucket.gradient.staging is not None:
                bucket.gradient.staging.zero_()
        right(self, action)

    return patch.object(UnitWindows, "reduce", wrong)


@contextmanager
def stale_weights() -> Iterator[None]:
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


BUGS = [
    Bug(Layout(tp=2), norm_gradients_not_summed),
    Bug(Layout(tp=2), averaged_over_tp),
    Bug(Layout(tp=4, kv_heads=2), replicas_not_reduced),
    Bug(Layout(tp=4, kv_heads=2), all_counted_in_the_norm, ("norm",)),
    Bug(Layout(tp=2), sequence_gradient_not_summed),
    Bug(Layout(tp=2, overlap=3), pieces_of_the_neighbour, ("gradients", "loss")),
    Bug(Layout(tp=2, sequence=False), column_gradient_not_summed),
    Bug(Layout(tp=2, family="gpt2"), row_bias_on_every_rank, ("loss",)),
    Bug(Layout(tp=2, family="gpt2"), first_positions_everywhere, ("gradients", "loss")),
    Bug(Layout(tp=2), loss_of_the_first_rows, ("gradients", "loss")),
    Bug(Layout(tp=2), loss_of_unlike_maxima, ("gradients", "loss")),
    Bug(Layout(pp=3, microbatches=4, family="gpt2"), tied_gradient_lost),
    Bug(Layout(pp=3, microbatches=4, family="gpt2"), all_counted_in_the_norm, ("norm",)),
    Bug(Layout(pp=2, microbatches=5), weights_of_microbatches_ignored),
    Bug(Layout(pp=2, microbatches=3), norm_of_one_stage, ("norm", "weights")),
    Bug(Layout(pp=2, microbatches=5), targets_of_another_microbatch, ("gradients", "loss")),
    Bug(Layout(pp=2, microbatches=5), activation_of_another_microbatch, ("gradients", "loss")),
    Bug(Layout(pp=2, microbatches=5), gradient_of_another_microbatch),
    Bug(
        Layout(pp=2, microbatches=5, schedule="interleaved_1f1b", virtual_stages=2),
        activation_of_another_stage,
        ("gradients", "loss"),
    ),
    Bug(Layout(dp=2, tp=2, stage=2, microbatches=2), last_reduction_skipped),
    Bug(Layout(pp=2, dp=2, stage=2, microbatches=3), last_reduction_skipped),
    Bug(Layout(pp=2, dp=2, stage=3, microbatches=3), stale_weights),
]


def measure_planted(world: Any, numbers: list[int]) -> list[Figures]:
    found = []
    for number in numbers:
        with BUGS[number].plant():
            found.append(measure(world, BUGS[number].layout, check="off"))
    return found


@pytest.fixture(scope="module")
def measured(ranks: Any) -> Any:
    """Figures of all bugs, worst over the ranks; one call per number of ranks."""

    @cache
    def get(size: int) -> dict[int, Figures]:
        numbers = [i for i, bug in enumerate(BUGS) if bug.layout.size == size]
        by_rank = ranks(size).run(measure_planted, numbers)
        return {
            number: Figures(*(max(column) for column in zip(*rows, strict=True)))
            for number, *rows in zip(numbers, *by_rank, strict=True)
        }

    return get


@pytest.mark.parametrize("number", range(len(BUGS)), ids=[bug.plant.__name__ for bug in BUGS])
def test_the_table_shows_it(measured: Any, number: int) -> None:
    layout, _, shows = BUGS[number]
    assert layout in LAYOUTS, "without the bug the table holds this layout to the limit"
    figures = measured(layout.size)[number]
    for name in shows:
        assert getattr(figures, name) > 1000 * LIMIT, figures


def errors_planted(world: Any) -> str:
    """What the engine says when a message goes to the wrong neighbour."""
    layout = Layout(pp=3, microbatches=4, family="gpt2")
    train_step = Engine.train_step

    def impatient(self: Engine, *args: Any) -> Any:
        self.clock._timeout_s = 0.3  # ten times as much in the first step
        return train_step(self, *args)

    with (
        activation_to_the_stage_before(),
        patch.object(Engine, "train_step", impatient),
        pytest.raises(CommError) as caught,
    ):
        measure(world, layout, check="off")
    return str(caught.value)


def test_a_message_to_the_wrong_neighbour_is_an_error(ranks: Any) -> None:
    """The rank that it reaches says what it got instead of what; the one that it was for, that it got nothing."""
    pool = ranks(3)
    try:
        first, _, last = pool.run(errors_planted)
    finally:
        pool.close()  # ranks that have failed so are out of step for good
    assert "expects 'gradient of stage 1, microbatch 0'" in first
    assert "is 'activation of stage 1, microbatch 0'" in first
    assert "receive of activation of stage 1, microbatch 0 from rank 1" in last
    # Ranks 1 and 2 wait for one another, equally long: either its own deadline ends it, or rank 1 gives up before.
    assert "did not arrive within" in last
    assert "the other rank did not arrive" in last or "rank 1 gave up" in last


# Dropout of foreign models ------------------------------------------------------------------------------------------


def part_of_the_first() -> Patch:
    """Every rank drops in its part of the tokens what falls in the first part."""
    right = module_steps.dropout_cuts
    return patch.object(
        module_steps,
        "dropout_cuts",
        lambda *args: {name: each._replace(part=0) for name, each in right(*args).items()},
    )


def parts_where_it_is_whole() -> Patch:
    """Ranks drop other features of the embedding, which all of them hold whole."""
    right = module_steps.dropout_cuts

    def wrong(model: Any, table: Any, index: int, *rest: Any) -> Any:
        return right(model, table, index, *rest) | {"transformer.drop": EqualPart(2, 2, index)}

    return patch.object(module_steps, "dropout_cuts", wrong)


def whole_where_it_is_cut() -> Patch:
    """Every rank draws for its tokens as if they were all."""
    return patch.object(module_steps, "dropout_cuts", lambda *args: {})


def dropping(world: Any, tp: int, plant: Callable[[], Patch]) -> list[float] | str:
    """Losses and norms of a GPT-2 of transformers, or how the engine refuses."""
    shape = dict(vocab_size=19, n_positions=8, n_embd=8, n_layer=1, n_head=2, use_cache=False)
    dropouts = dict(attn_pdrop=0.0, resid_pdrop=0.3, embd_pdrop=0.3)
    model = seeded(transformers.GPT2LMHeadModel, transformers.GPT2Config(**shape, **dropouts))
    tokens, found = torch.arange(16).view(2, 8), []
    config = {"mesh": {"tp": tp}, "optimizer": {"type": "sgd", "lr": 0.1}, "check_first_step": "off"}
    with plant():
        engine = initialize(model.train(), config, world=world)
        try:
            for _ in range(2):
                result = engine.train_step([{"input_ids": tokens, "labels": tokens}])
                found += [result.loss, result.grad_norm]
        except UsageError as error:
            return str(error)
        finally:
            engine.close()
    return found


def test_dropout_of_foreign_models_falls_alike_and_its_bugs_show(ranks: Any) -> None:
    truth = dropping(join(quiet=True), 1, nullcontext)
    for found in ranks(2).run(dropping, 2, nullcontext):
        assert found == pytest.approx(truth, rel=1e-6)
    for plant in (part_of_the_first, whole_where_it_is_cut):
        for found in ranks(2).run(dropping, 2, plant):
            assert max(abs(a - b) / b for a, b in zip(found, truth, strict=True)) > 1e-3, plant.__name__
    for found in ranks(2).run(dropping, 2, parts_where_it_is_whole):
        assert (
            found != pytest.approx(truth, rel=1e-3) if isinstance(found, list) else "report losses" in found
        )
