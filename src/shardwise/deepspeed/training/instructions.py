"""DeepSpeed's pipeline schedules as lists of instructions, to read and to compare, not to run.

    for step in TrainSchedule(micro_batches=4, stages=2, stage_id=0):
        print(step)          # [LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0)], ...

The engine's own schedule is ``engine.ours.plan``, whose list of Actions a pipeline runs. The classes of this module
describe the same 1F1B order in DeepSpeed's slots: on stage s of S, slot 2m + s has the forward pass of microbatch m
and slot 2m + 2S - 1 - s its backward pass; the result of a slot is sent in the next slot.
"""

from collections.abc import Iterator
from typing import Any

from shardwise.deepspeed.calls.small_functions import call_to_str


class PipeInstruction:
    """One instruction of a stage, with its arguments as attributes."""

    def __init__(self, **arguments: Any):
        self.name = type(self).__name__
        self.kwargs = arguments
        vars(self).update(arguments)

    def __repr__(self) -> str:
        return call_to_str(self.name, **self.kwargs)


class OptimizerStep(PipeInstruction):
    """The instruction to update the stage's weights."""


class ReduceGrads(PipeInstruction):
    """The instruction to sum the stage's gradients over the data-parallel ranks."""


class ReduceTiedGrads(PipeInstruction):
    """The instruction to sum the gradients of weights that several stages have."""


class BufferOpInstruction(PipeInstruction):
    """An instruction on the buffer ``buffer_id`` of a stage."""

    def __init__(self, buffer_id: int, **arguments: Any):
        super().__init__(buffer_id=buffer_id, **arguments)


class LoadMicroBatch(BufferOpInstruction):
    """The instruction to load the next microbatch of the data into the buffer."""


class ForwardPass(BufferOpInstruction):
    """The instruction to run the stage's forward pass on the buffer."""


class BackwardPass(BufferOpInstruction):
    """The instruction to run the stage's backward pass on the buffer."""


class SendActivation(BufferOpInstruction):
    """The instruction to send the stage's outputs to the next stage."""


class RecvActivation(BufferOpInstruction):
    """The instruction to receive the previous stage's outputs into the buffer."""


class SendGrad(BufferOpInstruction):
    """The instruction to send the gradients of the stage's inputs to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """The instruction to receive the gradients of the stage's outputs from the next stage."""


Step = list[PipeInstruction]


class PipeSchedule:
    """The instructions of one stage for one batch, step by step; a subclass yields them in ``steps``."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int):
        self.micro_batches = self.num_micro_batches = micro_batches
        self.stages = self.num_stages = stages
        self.stage_id = self.stage = stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self._under_way: Iterator[Step] | None = None

    @property
    def is_first_stage(self) -> bool:
        """True if this stage is the first one."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this stage is the last one."""
        return self.stage_id == self.stages - 1

    def num_pipe_buffers(self) -> int:
        """Return the number of microbatches that may be in flight on the stage."""
        return self.micro_batches

    def steps(self) -> Iterator[Step]:
        """Yield the list of instructions of each step.

        Raises:
            NotImplementedError: always; a subclass must override this method.
        """
        raise NotImplementedError(f"{type(self).__name__}.steps: a schedule yields its steps here")

    def __iter__(self) -> "PipeSchedule":
        self._under_way = None
        return self

    def __next__(self) -> Step:
        if self._under_way is None:
            self._under_way = self.steps()
        return next(self._under_way)

    def _has(self, microbatch: int) -> bool:
        return 0 <= microbatch < self.micro_batches


class InferenceSchedule(PipeSchedule):
    """A schedule of forward passes only: stage s runs microbatch m in slot m + s, in two alternating buffers."""

    def num_pipe_buffers(self) -> int:
        """Return 2: one buffer is computed on while the other is sent."""
        return 2

    def steps(self) -> Iterator[Step]:
        """Yield the instructions of each slot."""
        for slot in range(self.micro_batches + self.stages - 1):
            own, other = (slot + self.stage_id % 2) % 2, (slot + 1 + self.stage_id % 2) % 2
            microbatch = slot - self.stage_id
            step: Step = []
            if self._has(microbatch) and (self.is_first_stage or self.is_last_stage):
                step.append(LoadMicroBatch(own))
            send: Step = (
                [SendActivation(other)] if self._has(microbatch - 1) and not self.is_last_stage else []
            )
            receive: Step = [RecvActivation(own)] if self._has(microbatch) and not self.is_first_stage else []
            # Even stages send first and odd stages receive first, so that neighbours never wait for each other.
            step += receive + send if self.stage_id % 2 else send + receive
            if self._has(microbatch):
                step.append(ForwardPass(own))
            yield step


class TrainSchedule(PipeSchedule):
    """A schedule of 1F1B (arXiv:2006.09503) in slots, with the update at the end."""

    def num_pipe_buffers(self) -> int:
        """Return the number of microbatches whose activations are alive, at least 2."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _in_slot(self, slot: int) -> tuple[int, bool]:
        """Return (microbatch, True if the slot has a forward pass); the microbatch may be outside of the batch."""
        is_forward = (slot - self.stage_id) % 2 == 0
        later = slot - self.stage_id if is_forward else slot + 1 + self.stage_id - 2 * self.stages
        return later // 2, is_forward

    def steps(self) -> Iterator[Step]:
        """Yield the instructions of each slot."""
        slots = 2 * (self.micro_batches + self.stages - 1)
        buffers = self.num_pipe_buffers()
        before = -1
        for slot in range(slots):
            microbatch, is_forward = self._in_slot(slot)
            comes, leaves = self._has(microbatch), self._has(before)
            step: Step = []
            if is_forward and not self.is_first_stage:
                step += [SendGrad(before % buffers)] if leaves else []
                step += [RecvActivation(microbatch % buffers)] if comes else []
            if not is_forward and not self.is_last_stage:
                step += [RecvGrad(microbatch % buffers)] if comes else []
                step += [SendActivation(before % buffers)] if leaves else []
            if comes and is_forward and (self.is_first_stage or self.is_last_stage):
                step.append(LoadMicroBatch(microbatch % buffers))
            if comes:
                step.append((ForwardPass if is_forward else BackwardPass)(microbatch % buffers))
            if slot == slots - 1:
                step += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            before = microbatch
            yield step


class DataParallelSchedule(PipeSchedule):
    """A schedule of a single stage: forward and backward pass of each microbatch in turn, then the update."""

    def num_pipe_buffers(self) -> int:
        """Return 1: one microbatch is in flight at a time."""
        return 1

    def steps(self) -> Iterator[Step]:
        """Yield the instructions of each microbatch."""
        for microbatch in range(self.micro_batches):
            step: Step = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            yield step + ([ReduceGrads(), OptimizerStep()] if microbatch == self.micro_batches - 1 else [])
