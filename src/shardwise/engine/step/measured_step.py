"""MeasuredStep: the seconds of the second step's passes, which all ranks are told once.

    of stages    F, I and W of each stage, from the trace: zb_greedy makes its order from them, and follows it from the
                 third step on
    of blocks    the forward and the backward pass of each block: ``pipeline.partition: measured`` writes them to
                 ``pipeline.seconds``, by which the next run cuts

The marks of blocks are hooks that stay for this step alone. A forward pass lasts from the call of the block to its
return. A backward pass lasts from the gradient of the block's output to that of its input, or to the next gradient of
another block's output, or to the end of the stage's pass if neither comes. W of a Unit counts for the block that
contains it. Each number is the median over the microbatches, then the mean over the ranks that hold the stage, so all
ranks have the same numbers.

The first step is not measured, because it takes longer: it allocates memory.

Cost: two hooks for each block and two for each tensor between blocks in the second step; one exchange of a number for
each pass of a stage and each block.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.pytree import tensors_in
from shardwise.engine.parts.parts import EngineParts
from shardwise.parallel.pipeline.block_seconds import BlockSeconds, write_seconds
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.plan.action import Kind
from shardwise.plan.timeline import Span, Timeline
from shardwise.plan.trace import TraceClock

_log = logging.getLogger(__name__)

_PASSES = (Kind.F, Kind.I, Kind.W)
_STEP = 2


class MeasuredStep:
    """The measurement of one step of a pipeline.

    Args:
        parts: The engine's parts.
        policy: Keys under ``pipeline:``.
    """

    def __init__(self, parts: EngineParts, policy: PipelinePolicy):
        self._parts = parts
        self._policy = policy
        spec = parts.program.planned.spec
        self._starts = spec.stage_starts(policy, parts.groups["pp"].size)
        self._names = () if spec.blocks is None else spec.blocks.names
        self._makes_order = policy.schedule == "zb_greedy"
        self._of_blocks = policy.partition == "measured" and (
            spec.blocks is None or spec.blocks.seconds is None
        )
        self._left = _STEP if self._makes_order or self._of_blocks else 0
        """Steps up to the one that is measured, with it; 0: none is."""
        self._marks: _BlockMarks | None = None

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Measure the blocks that run inside the ``with`` block, if they run in the step that is measured."""
        if self._left != 1 or not self._of_blocks:
            yield
            return
        self._marks = _BlockMarks(self._parts.walker.trace.clock)
        with self._marks.on(self._own_blocks()):
            yield

    def follow(self) -> None:
        """Use the seconds of the step that ends, if this step was to be measured. Collective."""
        if not self._left:
            return
        self._left -= 1
        if self._left:
            return
        of_stages, of_blocks = self._told()
        if self._makes_order:
            self._parts.program.adopt_seconds(of_stages)
        if self._of_blocks:
            self._keep(of_stages, of_blocks)
            self._marks = None

    def _own_blocks(self) -> dict[str, nn.Module]:
        """Return the blocks of this rank's stages, by name."""
        own = {stage.index: stage.module for stage in self._parts.stages}
        return {
            name: own[stage].get_submodule(name) for name, stage in self._stage_of().items() if stage in own
        }

    def _stage_of(self) -> dict[str, int]:
        """Return the stage of each block, by name."""
        first = [self._names.index(name) for name in self._starts]
        return {name: sum(begin <= place for begin in first) for place, name in enumerate(self._names)}

    def _told(self) -> tuple[dict[tuple[Kind, int], float], dict[str, float]]:
        """Return the seconds of each stage's passes and of each block, the same on all ranks. Collective."""
        parts, stages = self._parts, len(self._starts) + 1
        spans = parts.walker.trace.spans(parts.groups["pp"].index)
        of_stages = torch.zeros(len(_PASSES), stages, dtype=torch.float64)
        typical = Timeline.of(spans).typical_pass_s()
        for (kind, stage), seconds in typical.items():
            if kind is not Kind.B:
                of_stages[_PASSES.index(kind), stage] = seconds
            elif (
                Kind.I,
                stage,
            ) not in typical:  # a stage may have both halves of one pass, and another pass whole
                of_stages[_PASSES.index(Kind.I), stage] = seconds
        measured = {} if self._marks is None else self._marks.seconds(spans, self._unit_names())
        of_blocks = [measured.get(name, 0.0) for name in self._names] if self._of_blocks else []
        own = torch.cat([of_stages.view(-1), torch.tensor(of_blocks, dtype=torch.float64)])
        world = parts.groups["world"]
        every = torch.zeros(world.size, len(own), dtype=torch.float64)
        world.all_gather(every.view(-1), own, "the seconds of passes", purpose="control").wait()
        mean = (every.sum(0) / (every > 0).sum(0).clamp(min=1)).tolist()
        rows = [mean[place : place + stages] for place in range(0, len(_PASSES) * stages, stages)]
        told = {
            (kind, stage): row[stage]
            for kind, row in zip(_PASSES, rows, strict=True)
            for stage in range(stages)
        }
        return told, dict(zip(self._names, mean[len(_PASSES) * stages :], strict=False))

    def _unit_names(self) -> list[str]:
        return [unit.name for unit in self._parts.program.plan.own.units]

    def _keep(self, of_stages: Mapping[tuple[Kind, int], float], of_blocks: Mapping[str, float]) -> None:
        """Write the seconds of blocks on rank 0, with a line in the log."""
        if self._parts.site.world.rank != 0:
            return
        path, where = self._policy.seconds, "pipeline.partition: measured:"
        assert path is not None, "the policy asks for a file"
        unknown = [name for name, seconds in of_blocks.items() if not seconds]
        if unknown:
            _log.warning(
                "%s the block %s was not called as a module in step %d, so its seconds are not known, and %s was not "
                "written; name the blocks that begin each stage in pipeline.partition",
                *(where, unknown[0], _STEP, path),
            )
            return
        stage_of, last = self._stage_of(), len(self._starts)
        whole = {stage: sum(of_stages[kind, stage] for kind in _PASSES) for stage in (0, last)}
        rest = {
            stage: max(0.0, seconds - sum(of_blocks[name] for name in of_blocks if stage_of[name] == stage))
            for stage, seconds in whole.items()
        }
        try:
            write_seconds(path, BlockSeconds(of_blocks, rest[0], rest[last]))
        except OSError as error:
            _log.warning("%s %s could not be written: %s", where, path, error.strerror or error)
        else:
            _log.info(
                "%s the seconds of %d blocks in step %d are in %s; the next run cuts stages by them",
                *(where, len(of_blocks), _STEP, path),
            )


class _BlockMarks:
    """Marks of the forward and the backward passes of blocks.

    Args:
        clock: Clock of the trace.
    """

    def __init__(self, clock: TraceClock):
        self._clock = clock
        self._begun: dict[str, Any] = {}
        self._forward: list[tuple[str, Any, Any]] = []
        self._backward: list[tuple[str, Any]] = []
        """Marks at which backward passes begin, with the block's name, and at which they end, with ""."""

    @contextmanager
    def on(self, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Mark the passes of ``blocks`` that run inside the ``with`` block."""
        with ExitStack() as handles:
            for name, block in blocks.items():
                enter = block.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
                leave = block.register_forward_hook(partial(self._leave, name))
                handles.callback(enter.remove)
                handles.callback(leave.remove)
            yield

    def _enter(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        if _runs_backward():  # a recomputed forward pass is part of the backward pass
            return
        self._hook((args, kwargs), "")
        self._begun[name] = self._clock.mark()

    def _leave(self, name: str, block: nn.Module, args: Any, output: Any) -> None:
        if _runs_backward() or name not in self._begun:
            return
        self._forward.append((name, self._begun.pop(name), self._clock.mark()))
        self._hook(output, name)

    def _hook(self, value: Any, name: str) -> None:
        """Mark the time at which the gradient of the first differentiable tensor in ``value`` arrives."""
        found = next((each for each in tensors_in(value) if each.requires_grad), None)
        if found is not None:
            found.register_hook(self._marks_gradient(name))

    def _marks_gradient(self, name: str) -> Callable[[Tensor], None]:
        def mark(grad: Tensor) -> None:
            self._backward.append((name, self._clock.mark()))

        return mark

    def seconds(self, spans: Sequence[Span], units: Sequence[str]) -> dict[str, float]:
        """Return the seconds of one microbatch in each block, forward and backward.

        Args:
            spans: The Actions of the step.
            units: Names of the rank's Units, by number.
        """
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        marks = [mark for _, start, stop in self._forward for mark in (start, stop)]
        times = self._clock.seconds([*marks, *(mark for _, mark in self._backward)])
        for place, (name, _, _) in enumerate(self._forward):
            found[name, "forward"].append(times[2 * place + 1] - times[2 * place])
        blocks = {name for name, _, _ in self._forward}
        gradients = list(zip((name for name, _ in self._backward), times[len(marks) :], strict=True))
        for span in spans:
            kind, unit = span.action[:2]
            if span.lane == "compute" and unit < 0 and kind in (Kind.B, Kind.I):
                here = [pair for pair in gradients if span.start_s <= pair[1] <= span.stop_s]
                for (name, start_s), (_, stop_s) in zip(here, [*here[1:], ("", span.stop_s)], strict=True):
                    found[name, kind.name].append(stop_s - start_s)
            elif kind is Kind.W and unit >= 0:
                name = _around(units[unit], blocks)
                found[name, units[unit]].append(span.stop_s - span.start_s)
        total: dict[str, float] = defaultdict(float)
        for (name, what), values in found.items():
            if what != Kind.B.name or (name, Kind.I.name) not in found:  # else I and W have the same seconds
                total[name] += sorted(values)[len(values) // 2]
        return {name: total[name] for name in blocks}


def _runs_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


def _around(module: str, blocks: set[str]) -> str:
    """Return the block that contains a module, or "" if none does."""
    while module and module not in blocks:
        module = module.rpartition(".")[0]
    return module
