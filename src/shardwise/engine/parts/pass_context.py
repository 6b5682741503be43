"""The contexts around every pass of a model: where its random numbers are drawn, and what is checked and counted.

replay        random numbers belong to the samples' position in the run                        passes/replay.py
draws         the model's own random numbers are alike on the ranks of one model               passes/draws.py
vocabulary    tokens outside the model's are named before a device computes with them          vocabulary.py
loads         tokens of every expert are counted by microbatch                                 parallel/expert
own_use       slices are only used by their owners; checked in the first passes                parallel/tensor
profile       modules are measured in one step, if configured                                  module_profile.py
shapes        if shapes do not fit in a first pass over slices, the error names the table of styles
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.base.errors import PlanError
from shardwise.base.ragged import samples_in
from shardwise.comm.collectives import Group
from shardwise.comm.step_clock import StepClock
from shardwise.engine.parts.failed_pass import explained
from shardwise.engine.parts.module_profile import ModuleProfile
from shardwise.engine.parts.vocabulary import VocabularyBounds
from shardwise.engine.parts.weighing import labels_in
from shardwise.parallel.context.region import ContextRegion
from shardwise.parallel.expert.loads import ExpertLoads
from shardwise.parallel.tensor.own_use import OwnUse
from shardwise.passes.replay import BatchPosition, DrawReplay


@dataclass(frozen=True)
class PassContext:
    """The contexts around the passes of one engine."""

    data: Group
    tp: Group
    clock: StepClock
    replay: DrawReplay
    """The position in the run for which random numbers are drawn."""
    vocabulary: VocabularyBounds
    """The values that the tokens of a batch may have."""
    own_use: OwnUse
    """The modules that use each slice."""
    profile: ModuleProfile
    """The costs of modules, in the step that is measured."""
    loads: ExpertLoads
    """The token counts of every expert."""
    context: ContextRegion | None = None
    """State of passes whose sequences are cut over ranks; None if they are whole."""
    is_profiled: bool = False
    """True if a step of the run measures its modules."""

    @contextmanager
    def at(self, step: int, microbatch: int, batch: Any, rows: int | None = None) -> Iterator[None]:
        """Run the body as the pass of a microbatch: with its random numbers, checks and counts.

        Args:
            step: Number of the step.
            microbatch: Number of the microbatch in the step.
            batch: The batch, or (args, kwargs) of the call.
            rows: Samples of the batch; None counts them in ``batch``, of which this rank may have no part in a
                pipeline.

        Raises:
            DataError: if tokens are outside the model's vocabulary.
            PlanError: if shapes do not fit in a first pass over slices.
        """
        if self.loads.layers:
            self.loads.microbatch = microbatch
        place = self.place(step, microbatch, batch, rows)
        # A run enters only the contexts of the techniques that it contains.
        looked_at = self.own_use.looked_at() if self.tp.size > 1 else nullcontext()
        counted = self.profile.forward() if self.is_profiled else nullcontext()
        draws = self.replay.draws.at(microbatch, torch.is_grad_enabled())
        with (
            self._told_as_cut(),
            explained(_as_given(batch)),
            self.vocabulary.checked(batch),
            self.replay.at(place),
            looked_at,
            counted,
            draws,
        ):
            yield

    def share_of(self, batch: Any) -> float:
        """Return the share of a batch's targets that this rank's part of the sequences has."""
        if self.context is None:
            return 1.0
        targets = labels_in(batch)
        if targets is None or targets.dim() != 2:
            return 1 / self.context.group.size
        return self.context.share_of(targets, _as_given(batch))

    def keeps_documents_apart(self, batch: Any) -> bool:
        """Return whether attention keeps documents of ``batch`` apart that the uncut model may not tell apart."""
        return self.context is not None and self.context.keeps_apart(_as_given(batch))

    def share_of_loss(self) -> float:
        """Return this rank's share in the loss of the last pass with gradients: below 1 if ranks have the same loss."""
        is_whole = self.context is not None and self.context.outputs.loss_is_whole
        return 1 / self.context.group.size if self.context is not None and is_whole else 1.0

    def backward(self) -> AbstractContextManager[None]:
        """Return the context of a backward pass."""
        return self.profile.backward() if self.is_profiled else nullcontext()

    def place(self, step: int, microbatch: int, batch: Any, rows: int | None = None) -> BatchPosition:
        """Return the position of the samples of ``batch`` in the global batch of ``step``."""
        rows = (samples_in(batch) or 0) if rows is None else rows
        return BatchPosition(step, (microbatch * self.data.size + self.data.index) * rows, rows or None)

    @contextmanager
    def _told_as_cut(self) -> Iterator[None]:
        """Raise PlanError in place of an error of shapes in the first pass over slices.

        Such an error most often means that the table of styles does not fit the model.
        """
        try:
            yield
        except RuntimeError as error:
            text = " ".join(str(error).split())
            misfit = any(word in text for word in ("shape", "size", "dimension"))
            if self.tp.size == 1 or self.clock.steps_done or not misfit:
                raise
            raise PlanError(
                f"tensor: the first pass over tp={self.tp.size} ranks ended with: {text}. Where the same "
                "pass runs with mesh.tp: 1, a module counts heads or features in attributes that its table does not "
                "divide: name them in its row, as in tensor.table: {'layers.*.attention': 'num_heads'}, keep the "
                "module whole with 'replicate', or set mesh.tp: 1"
            ) from error


def _as_given(batch: Any) -> Any:
    """Return the batch as the user passed it, also if ``batch`` is (args, kwargs) of a call."""
    is_call = isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[0], tuple)
    if not is_call or not isinstance(batch[1], dict):
        return batch
    args, kwargs = batch
    return kwargs or (args[0] if len(args) == 1 else args)
