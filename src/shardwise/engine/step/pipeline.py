"""The engine's side of a pipeline: a step's microbatches, walked through the stages by the schedule's list.

    schedule -> SEND and RECV -> validated -> what Units do in each pass -> walked (plan/walker.py)

Every rank that shares a model is given the same batches: the first stage reads tokens, the last one targets, and those
between make masks and positions of their own. The stages of a list (``Layers``) compute nothing from a batch, so a rank
may pass None for the parts that its stages do not read. Then one small all-reduce a step tells all ranks the number of
samples of each microbatch, by which dropout is keyed, and its weight.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from textwrap import indent
from typing import Any, get_args

import torch
from torch import Tensor, nn

from shardwise.base.errors import PlanError, UsageError
from shardwise.base.ragged import samples_in
from shardwise.comm.peers import PointToPoint
from shardwise.engine.parts.inputs import Loss, call_model, cast_inputs, find_loss
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.parts.sums import Number, filled_like, number_of
from shardwise.engine.parts.weighing import MicrobatchWeights
from shardwise.engine.step.check import FirstStepCheck
from shardwise.engine.step.measured_step import MeasuredStep
from shardwise.engine.step.nonfinite import NonFiniteProbe
from shardwise.observe.schedule_picture import draw_text
from shardwise.parallel.pipeline.executor import ScheduleExecutor
from shardwise.parallel.pipeline.layers import Layers, brought_in
from shardwise.parallel.pipeline.messages import check_refusal, is_refusal, likeness, pack, refusal, unpack
from shardwise.parallel.pipeline.passes import last_passes, nominal_s
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.parallel.pipeline.stage_module import kind_of
from shardwise.passes.recompute import told_again
from shardwise.plan.action import Action, Kind
from shardwise.plan.dataflow import timeline_of
from shardwise.plan.kinds import Lane
from shardwise.plan.plan import Plan
from shardwise.plan.timeline import Span, Timeline

_KINDS = tuple(Kind)
_LANES: tuple[Lane, ...] = get_args(Lane)
_CHUNK = 8
"""Batches of an evaluation in one walk, per rank: at most 1/9 of the walk is idle while it fills and drains."""


class PipelineRunner:
    """The walks of one rank through the stages of a pipeline: training steps, evaluations and predictions."""

    def __init__(self, parts: EngineParts, policy: PipelinePolicy, loss: Loss | None, peers: PointToPoint):
        self._parts = parts
        self._policy = policy
        self._loss = loss
        self._peers = peers
        self._group = parts.groups["pp"]
        self.stages = self._group.size * policy.stages_per_rank
        self.schedule = ScheduleExecutor(peers, self.stages, policy.folded)
        """Handlers of F, B, SEND and RECV."""
        self._stages = {stage.index: stage for stage in parts.stages}
        self._is_list = isinstance(parts.model, Layers) and loss is None
        """True if ranks may pass parts of batches."""
        self.measured = MeasuredStep(parts, policy)
        """Seconds of the second step."""
        self._rows: list[int] | None = None
        """Samples of the running step's microbatches, if ranks pass parts of batches."""

    # A step ----------------------------------------------------------------------------------------------------

    def accumulate(
        self,
        batches: Sequence[Any],
        weights: Sequence[float] | None,
        weighing: MicrobatchWeights,
        check: FirstStepCheck | None,
    ) -> bool:
        """Run the forward and backward passes of all microbatches of a step.

        Args:
            batches: The microbatches.
            weights: Their weights; None if the labels are to be counted.
            weighing: Counts the labels of microbatches without weights.
            check: The comparison with the uncut model in the first step, if any.

        Returns:
            True if every rank was given whole batches.

        Raises:
            UsageError: if the step before was interrupted, or if a rank lacks a part that its stages read.
        """
        if self._parts.walker.has_begun:
            raise UsageError(
                "train_step: the step before was interrupted in its middle (by Ctrl-C?); its gradients are "
                "dropped now: call train_step again, on all ranks"
            )
        step = self._parts.clock.step = self._parts.progress.step_count + 1
        accumulation = self._parts.accumulation
        # Only the last stage has the loss, whose graph shows its divisor. But r must be the same on all stages, so it
        # is taken from the labels of the batches.
        each: list[Number] = (
            [1.0 if count is None else count for count in map(weighing.of_batch, batches)]
            if weights is None
            else [weighing.of_given(*pair) for pair in zip(map(float, weights), batches, strict=True)]
        )
        actions = self._parts.program.passes[self._group.index]
        is_whole = not self._is_list or self._meet(batches, each)
        accumulation.agree(each[0])

        def weigh(microbatch: int, loss: Tensor) -> Number:
            if weights is None:
                each[microbatch] = weighing.of_loss(loss, batches[microbatch])
            return accumulation.scale_of(each[microbatch])

        if check is not None:
            for batch in batches:
                check.sees((batch,), {})
        runner = _PipelineTraining(
            self._parts, step, batches, self._loss_of, weigh, actions, self.stages - 1, self._rows
        )
        likes = self._likes(batches, "train") if is_whole else ()
        with self._parts.passes.replay.draws.walk(step, trains=True), self.measured.passes():
            results = self.schedule.run(self._parts.walker, runner, likes=likes)
        for i, weight in enumerate(each):
            if i:
                accumulation.end_microbatch()
            accumulation.count(results.get(i), weight)
        if check is not None:
            check.counted([*map(float, each)], [float(accumulation.scale_of(weight)) for weight in each])
        return is_whole

    def _meet(self, batches: Sequence[Any], each: list[Number]) -> bool:
        """Exchange the samples that the first stage reads and the weights that the last stage counts.

        Returns:
            True if every rank has all of every batch.

        Raises:
            UsageError: on all ranks alike, if a rank was given None for a part that its stage reads.
        """
        group, last = self._group, self._parts.last_place
        brought = [brought_in(batch) for batch in batches]
        reads_targets = getattr(self._parts.model, "loss", None) is not None
        inputs = [float(group.index == 0 and part.inputs is not None) for part in brought]
        targets = [
            float(group.index == last and not (reads_targets and part.targets is None)) for part in brought
        ]
        whole = sum(
            part.inputs is not None and not (reads_targets and part.targets is None) for part in brought
        )
        rows = [float(samples_in(part.inputs) or 0) * has for part, has in zip(brought, inputs, strict=True)]
        counted = [float(weight) * (group.index == last) for weight in each]
        told = torch.tensor([float(whole), *inputs, *targets, *rows, *counted], dtype=torch.float64)
        group.all_reduce(told, "what the stages were given", purpose="control").wait()
        (everything,), *columns = told[:1].tolist(), *(part.tolist() for part in told[1:].chunk(4))
        for name, stage, ranks, has in (
            ("inputs", "first", 0, columns[0]),
            ("targets", "last", last, columns[1]),
        ):
            if not all(has):
                raise UsageError(
                    f"train_step: the {stage} stage, rank {group.ranks[ranks]}, was given no {name} for microbatch "
                    f"{has.index(0.0)}; of (inputs, targets) a rank may bring None for what its stages do not read"
                )
        self._rows, each[:] = [int(count) for count in columns[2]], columns[3]
        return bool(everything == group.size * len(batches))

    def look_again(self, batches: Sequence[Any], look: NonFiniteProbe) -> None:
        """Run the forward passes of the running step once more for ``look``, which notes values that are not finite."""
        for i, batch in enumerate(batches):
            look.batch(i, batch)
        # A new kind of batch: in its first pass the values that a stage does not have are marked as absent.
        kind = f"step {self._parts.progress.step_count} again"
        for i, loss in self._forward_only(batches, self._loss_of, kind, self._rows).items():
            look.loss(i, loss, batches[i])

    # Without gradients -----------------------------------------------------------------------------------------

    def losses(self, batches: Iterable[tuple[Any, float]]) -> Iterator[tuple[Tensor | None, float]]:
        """Yield (loss, weight) of each batch; the loss is None on ranks that do not compute it.

        Several batches are in the pipeline at a time.
        """
        pairs = iter(batches)
        while chunk := list(islice(pairs, _CHUNK * self._group.size)):
            found = self._forward_only([batch for batch, _ in chunk], self._loss_of)
            for i, (_, weight) in enumerate(chunk):
                yield found.get(i), weight

    def predict(
        self, batches: Sequence[Any], call: Callable[[nn.Module, Any], Any], everywhere: bool
    ) -> list[Any]:
        """Return the results of ``call`` for each batch.

        Args:
            batches: The batches.
            call: Calls the model with a batch.
            everywhere: True for the results on every rank of the pipeline, False for the last stage's rank only.
                Mappings of
                their own class become dictionaries on the way to other ranks.
        """
        if not batches:
            return []
        device = self._parts.device
        found = self._forward_only(
            batches, lambda root, batch: call(root, cast_inputs(self._read(batch), device, None)), "output"
        )
        if not everywhere:
            return [found[i] for i in sorted(found)]
        outputs = [self._told(found.get(i), f"output of microbatch {i}") for i in range(len(batches))]
        self._peers.flush()
        return outputs

    def _loss_of(self, root: nn.Module, batch: Any) -> Tensor:
        return find_loss(call_model(root, self._loss, self._read(batch), self._parts.device))

    def _read(self, batch: Any) -> Any:
        """Check that the first stage has its inputs, and return ``batch``.

        Raises:
            UsageError: in a walk, and so on all ranks, if the first stage lacks its inputs.
        """
        if self._is_list and self._group.index == 0 and brought_in(batch).inputs is None:
            raise UsageError(
                f"the first stage, rank {self._group.ranks[0]}, was given no inputs; of (inputs, targets) a rank may "
                "bring None for what its stages do not read"
            )
        return batch

    def _told(self, output: Any, what: str) -> Any:
        """Return the last stage's ``output`` on every rank; the ranks pass it on in a ring.

        Raises:
            PlanError: on all ranks, if the output cannot be sent.
        """
        index, last = self._group.index, self._parts.last_place
        output, text = _plain(output), ""
        tensors: list[Tensor] = []
        if index == last:
            try:
                text, tensors = pack(output, "the model's output")
            except PlanError as error:
                text = refusal(error, self._group.ranks[index])
        else:
            text, tensors = self._peers.receive((index - 1) % self._group.size, what)
        if (index + 1) % self._group.size != last:
            self._peers.send(text, tensors, (index + 1) % self._group.size, what, "activations")
        if is_refusal(text):
            self._peers.flush()
            check_refusal(text)
        return output if index == last else unpack(text, tensors)

    def _forward_only(
        self,
        batches: Sequence[Any],
        call: Callable[[nn.Module, Any], Any],
        wants: str = "loss",
        rows: Sequence[int] | None = None,
    ) -> dict[int, Any]:
        actions, walker = self._parts.program.forward(len(batches)), self._parts.walker
        runner = _PipelineForward(
            self._parts, self._parts.progress.step_count + 1, batches, call, wants, rows
        )
        draws = self._parts.passes.replay.draws.walk(self._parts.progress.step_count + 1, trains=False)
        with torch.no_grad(), draws, walker.aside(actions):
            # A user's own call may make activations of other shapes from the same batch, and so may parts of batches:
            # then messages carry their shapes.
            likes = self._likes(batches, wants) if wants == "loss" and not self._is_list else ()
            return self.schedule.run(walker, runner, trains=False, likes=likes)

    def _likes(self, batches: Sequence[Any], walk: str) -> Sequence[int | None]:
        """Return for each microbatch the value that determines the shapes of its messages.

        The list is empty if messages always carry their shapes.
        """
        if not self._peers.agrees or self._policy.shapes == "described":
            return ()
        return [likeness(batch, walk) for batch in batches]

    # Looking at it ---------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Return the Plan, with a drawing of the schedule in its notes."""
        plan = self._parts.program.plan
        table = draw_text(timeline_of(self._parts.program.passes, nominal_s))
        drawn = f"{self._policy.schedule}, a backward drawn as two forwards:\n" + indent(table, "    ")
        return replace(plan, notes=(*plan.notes, drawn))

    def timeline(self) -> Timeline:
        """Return the passes, messages and waits of the last step with their lanes, by index on "pp". Collective."""
        axes = ("", *self._parts.groups)
        rows = [
            [_KINDS.index(span.action.kind), *span.action[1:], span.start_s, span.stop_s]
            + [_LANES.index(span.lane), axes.index(span.axis) if span.axis in axes else 0, span.is_exposed]
            for span in self._parts.walker.last.spans(self._group.index)
            if span.action.unit < 0 and not span.action.kind.ends_step
        ]
        sizes = torch.zeros(self._group.size, dtype=torch.float64)
        sizes[self._group.index] = len(rows)
        self._group.all_reduce(sizes, "the length of timelines", purpose="control").wait()
        most, width = int(sizes.max()), len(Action._fields) + 5
        own = torch.zeros(most, width, dtype=torch.float64)
        own[: len(rows)] = torch.tensor(rows, dtype=torch.float64).view(len(rows), width)
        every = torch.zeros(self._group.size, most, width, dtype=torch.float64)
        self._group.all_gather(every.view(-1), own.view(-1), "timelines", purpose="control").wait()
        return Timeline.of(
            _span(index, row, axes)
            for index, size in enumerate(sizes.tolist())
            for row in every[index, : int(size)].tolist()
        )

    def passes(self) -> Mapping[int, Sequence[Action]]:
        """Return the passes and messages of a step by the rank's index on "pp"."""
        return self._parts.program.passes


class _PipelineForward:
    """The forward passes of this rank's stages; ``call`` calls the whole model with one batch."""

    def __init__(
        self,
        parts: EngineParts,
        step: int,
        batches: Sequence[Any],
        call: Callable[[nn.Module, Any], Any],
        wants: str = "loss",
        rows: Sequence[int] | None = None,
    ):
        self._rows = rows
        self._parts = parts
        self._step = step
        self._batches = batches
        self._call = call
        self._wants = wants
        self._stages = {stage.index: stage for stage in parts.stages}

    def forward(self, stage: int, microbatch: int, received: Any) -> Any:
        """Compute a stage's forward pass. See ``StageRunner``."""
        here, batch = self._stages[stage], self._batches[microbatch]
        here.hooks.microbatch = microbatch
        assert here.run is not None, "a stage of a pipeline knows how to run"
        rows = None if self._rows is None else self._rows[microbatch]
        with self._parts.passes.at(self._step, microbatch, batch, rows):
            return here.run(lambda root: self._call(root, batch), received, (self._wants, kind_of(batch)))

    def backward(
        self, stage: int, microbatch: int, run: Callable[[Tensor | None], None], said: Tensor | None
    ) -> Tensor | None:
        """Raise an error, because a list without gradients has no B."""
        raise NotImplementedError

    def weights(self, stage: int, microbatch: int) -> None:
        """Raise an error, because a list without gradients has no W."""
        raise NotImplementedError


class _PipelineTraining(_PipelineForward):
    """The passes of this rank's stages in both directions; ``call`` returns the loss, which is scaled."""

    def __init__(
        self,
        parts: EngineParts,
        step: int,
        batches: Sequence[Any],
        call: Callable[[nn.Module, Any], Tensor],
        weigh: Callable[[int, Tensor], Number],
        actions: Sequence[Action],
        last_stage: int,
        rows: Sequence[int] | None,
    ):
        super().__init__(parts, step, batches, call, rows=rows)
        self._weigh = weigh
        self._scales: dict[int, Number] = {}
        self._last = {key: actions[i].microbatch for key, i in last_passes(actions).items()}
        """Last microbatch of I and of W of each stage; B is both."""
        self._last_stage = last_stage
        self._losses: dict[int, Tensor] = {}

    def forward(self, stage: int, microbatch: int, received: Any) -> Any:
        """Compute a stage's forward pass, and keep the loss on the last stage. See ``StageRunner``."""
        output = super().forward(stage, microbatch, received)
        if stage == self._last_stage:
            if not output.requires_grad:
                raise UsageError(
                    f"train_step: the loss of microbatch {microbatch} asks for no gradient on the last stage (it is a "
                    f"{type(output).__name__} of dtype {output.dtype} without a graph), so nothing would train; "
                    "return a loss computed from the model's output, without detach(), item() or torch.no_grad() on "
                    "the way"
                )
            self._losses[microbatch] = output
            self._scales[microbatch] = self._weigh(microbatch, output)
        return output

    def backward(
        self, stage: int, microbatch: int, run: Callable[[Tensor | None], None], said: Tensor | None
    ) -> Tensor | None:
        """Compute a stage's backward pass. See ``StageRunner``.

        If the model has experts, ``said`` is the microbatch's scale, which the stages pass on from the last to the
        first.
        """
        hooks, passes = self._stages[stage].hooks, self._parts.passes
        hooks.microbatch = microbatch
        loss = self._losses.pop(microbatch) if stage == self._last_stage else None
        scale: Number = 1.0 if said is None else number_of(said)
        if loss is not None:
            scale = self._scales.pop(microbatch)
        first = None if loss is None else filled_like(loss, scale)
        for follower in self._parts.followers:
            follower.begin_backward(microbatch, scale)
        hooks.begin_backward(last=microbatch == self._last[Kind.I, stage])
        with passes.backward(), passes.replay.scaled(scale), told_again(passes.replay):
            hooks.run_backward(lambda: run(first))
        if not passes.loads.layers:
            return None
        return filled_like(torch.empty((), dtype=torch.float64, device=self._parts.device), scale)

    def weights(self, stage: int, microbatch: int) -> None:
        """Compute the gradients of weights that a stage's backward pass has left. See ``StageRunner``."""
        hooks = self._stages[stage].hooks
        hooks.microbatch = microbatch
        hooks.run_weights(last=microbatch == self._last[Kind.W, stage])


def _plain(output: Any) -> Any:
    """Return ``output`` with mappings of any class as dictionaries, so that it can be sent."""
    if isinstance(output, Mapping):
        return {key: _plain(value) for key, value in output.items()}
    return output


def _span(index: int, row: Sequence[float], axes: Sequence[str]) -> Span:
    kind, *numbers = (int(number) for number in row[:5])
    start_s, stop_s, lane, axis, is_exposed = row[5:]
    action = Action(_KINDS[kind], *numbers)
    return Span(index, action, start_s, stop_s, _LANES[int(lane)], axes[int(axis)], bool(is_exposed))
