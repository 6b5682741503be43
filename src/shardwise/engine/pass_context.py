"""What stands around every pass of a model: where its random numbers are drawn, and what is looked at on the way.

replay        random numbers belong to the samples' place in the run                           memory/replay.py
draws         those of the model's own are alike on the ranks of one model                     memory/draws.py
vocabulary    tokens outside the model's are named before a device works on them               vocabulary.py
loads         what goes to which expert is counted by microbatch                               parallel/expert
own_use       slices are used by their owners alone, in the first passes                       parallel/tensor
profile       modules are counted in one step, if wished                                       module_profile.py
shapes        a first pass over slices that ends in shapes which do not fit is told as a table that does not fit
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm.collectives import Clock, Group
from shardwise.engine.failed_pass import explained
from shardwise.engine.module_profile import ModuleProfile
from shardwise.engine.vocabulary import Vocabulary
from shardwise.memory.replay import BatchPosition, Replay
from shardwise.parallel.expert.loads import ExpertLoads
from shardwise.parallel.tensor.own_use import OwnUse
from shardwise.plan.errors import PlanError
from shardwise.plan.pytree import tensors_in


@dataclass(frozen=True)
class PassContext:
    """Of one engine."""

    dp: Group
    tp: Group
    clock: Clock
    replay: Replay
    """The microbatch that random numbers are drawn for."""
    vocabulary: Vocabulary
    """What the tokens of a batch may be."""
    own_use: OwnUse
    """Who uses which slice."""
    profile: ModuleProfile
    """What modules cost, in the step that is counted."""
    loads: ExpertLoads
    """What went to which expert."""

    @contextmanager
    def at(self, step: int, microbatch: int, batch: Any, rows: int | None = None) -> Iterator[None]:
        """Around a pass: random numbers are drawn at its place. ``rows``: of the batch, where this rank has none of it.
        Errors: DataError where tokens are outside the model's vocabulary."""
        self.loads.microbatch = microbatch
        place, looked_at = self.place(step, microbatch, batch, rows), self.own_use.looked_at()
        counted = self.profile.forward()
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

    def place(self, step: int, microbatch: int, batch: Any, rows: int | None = None) -> BatchPosition:
        """Where the samples of ``batch`` stand in the global batch of ``step``."""
        rows = rows_of(batch) if rows is None else rows
        return BatchPosition(step, (microbatch * self.dp.size + self.dp.index) * rows, rows or None)

    @contextmanager
    def _told_as_cut(self) -> Iterator[None]:
        """A first pass over slices that ends in shapes which do not fit is most often a table that does not fit."""
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
    """Return the batch as the user has it, of (args, kwargs) of a call too."""
    is_call = isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[0], tuple)
    if not is_call or not isinstance(batch[1], dict):
        return batch
    args, kwargs = batch
    return kwargs or (args[0] if len(args) == 1 else args)


def rows_of(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor."""
    return next((len(each) for each in tensors_in(batch) if each.dim()), 0)
