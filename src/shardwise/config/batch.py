"""BatchPolicy and TrainPolicy: the numbers of the training loop.

    global batch = micro batch · accumulation · data-parallel ranks

The user's number is the global one; the others follow and are printed.
"""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from shardwise.observe.early_stop import EarlyStopPolicy
from shardwise.plan.errors import ConfigError
from shardwise.plan.policy import Policy

_ACCUMULATION_LIMIT = 65_536
"""Microbatches of one step on a rank: the plan has a few Actions for each."""


class BatchPolicy(Policy):
    """Keys under ``batch:``, in samples."""

    global_size: PositiveInt | None = None
    """Samples per optimizer step over all ranks."""
    micro_size: PositiveInt | None = None
    """Samples per rank and forward pass."""
    accumulation: PositiveInt | None = None
    """Microbatches per optimizer step; follows from the other two where both are given."""
    weigh_by: Literal["auto", "tokens", "shifted_tokens", "batches"] = "auto"
    """The weight of a microbatch in a step where none is given. ``auto``: the number of labels that the loss is the
    mean of, by the graph of the loss, ignored ones (-100) left out, so that uneven ranks and microbatches give the
    gradient of one batch; all alike where no labels are seen or the loss is a sum; an error where the graph does not
    show the number (a compiled model, a custom loss function) and numbers of labels are uneven. ``tokens``: there the
    labels that are not -100 count, and no labels are an error. ``shifted_tokens``: there all but the first label of
    each row count, for a model that shifts its labels. ``batches``: all alike."""
    duplicates: Literal["error", "allow"] = "error"
    """What two data-parallel ranks with the same batches in the first step are: an error, since usually a DataLoader
    was not divided among the ranks, or allowed."""

    scaled_losses: Literal["error", "allow"] = "error"
    """A loss that the first step gives to ``engine.backward`` multiplied by 1/accumulation or by a power of two of 2^10
    or more: an error, since the engine averages microbatches and scales fp16 losses itself, or allowed."""

    def derived(self, dp: int) -> "BatchPolicy":
        """All three numbers on ``dp`` data-parallel ranks, as far as they are determined.

        Errors: ConfigError where they contradict one another.
        """
        total, micro, accumulation = self.global_size, self.micro_size, self.accumulation
        if total is not None:
            per_step = micro or accumulation
            if total % dp or (per_step is not None and total % (per_step * dp)):
                what = f"micro_size {micro}" if micro else f"accumulation {accumulation}"
                near = max(round(total / ((per_step or 1) * dp)), 1) * (per_step or 1) * dp
                raise ConfigError(
                    f"batch: global_size {total} does not divide into {what if per_step else 'one share'} × {dp} "
                    f"data-parallel ranks; the nearest that does is {near}"
                )
            micro = micro or total // dp // (accumulation or 1)
            found = total // (micro * dp)
            if accumulation is not None and accumulation != found:
                raise ConfigError(
                    f"batch: global_size {total} = micro_size {micro} × accumulation × {dp} ranks needs accumulation "
                    f"{found}, given {accumulation}; leave one of the three out"
                )
            accumulation = found
        accumulation = accumulation or 1
        if accumulation > _ACCUMULATION_LIMIT:
            raise ConfigError(
                f"batch: {accumulation} microbatches of {micro} samples in one step on each of {dp} ranks; at most "
                f"{_ACCUMULATION_LIMIT} are planned. Raise micro_size, or lower global_size"
            )
        if micro is not None and total is None:
            total = micro * accumulation * dp
        return self.model_copy(
            update={"global_size": total, "micro_size": micro, "accumulation": accumulation}
        )


class TrainPolicy(Policy):
    """Keys under ``train:``."""

    steps: PositiveInt = 500
    """Optimizer steps of the run."""
    eval_every: NonNegativeInt = 100
    """Steps between two evaluations on the held-out data; 0: at the end alone."""
    early_stop: EarlyStopPolicy | None = None
    """End the run when its evaluations no longer get better; left out: after all steps."""
    metrics: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")] | None = None
    """``module:function`` for more than loss and accuracy over held-out pictures: called with (outputs, labels) of a
    batch, it returns {name: sum} or {name: (sum, count)}; what is shown is all sums over all counts (left out: the
    samples), of all ranks."""
    seed: NonNegativeInt = 0
    """Start weights, order of the data and samples follow from it, on any number of ranks."""
    sample_tokens: NonNegativeInt = 200
    """Tokens of the text that is generated at the end of a language model's run; 0: none."""
    sample_prompt: str | None = None
    """What that text starts with; left out: the first words of the held-out text."""
