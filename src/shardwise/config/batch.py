"""BatchPolicy and TrainPolicy: the numbers of the training loop.

    global batch = micro batch · accumulation · data-parallel ranks

The user gives the global batch; the other numbers follow from it and are printed.
"""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from shardwise.base.errors import ConfigError
from shardwise.base.policy import Policy
from shardwise.observe.early_stop import EarlyStopPolicy

_ACCUMULATION_LIMIT = 65_536
"""Microbatches of one step on a rank, at most, because the plan has several Actions for each microbatch."""


class BatchPolicy(Policy):
    """Keys under ``batch:``, in samples."""

    global_size: PositiveInt | None = None
    """Samples per optimizer step over all ranks."""
    micro_size: PositiveInt | None = None
    """Samples per rank and forward pass."""
    accumulation: PositiveInt | None = None
    """Microbatches per optimizer step; follows from the other two sizes if both are given."""
    weigh_by: Literal["auto", "tokens", "shifted_tokens", "batches"] = "auto"
    """The weight of a microbatch in a step if the training loop passes none. ``auto``: the number of labels of which
    the loss is the mean, read from the graph of the loss without ignored labels (-100), so that uneven ranks and
    microbatches give the gradient of one batch; equal weights if the graph has no labels or the loss is a sum; an error
    if the graph does not contain the number (a compiled model, a custom loss function) and the numbers of labels are
    uneven. ``tokens``: if the graph does not contain the number, the number of labels that are not -100; no labels are
    an error. ``shifted_tokens``: as ``tokens``, but without the first label of each row, for a model that shifts its
    labels. ``batches``: equal weights."""
    duplicates: Literal["error", "allow"] = "error"
    """The treatment of two data-parallel ranks with the same batches in the first step: an error, because usually a
    DataLoader was not divided among the ranks, or allowed."""

    scaled_losses: Literal["error", "allow"] = "error"
    """The treatment of a loss that the first step passes to ``engine.backward`` multiplied by 1/accumulation or by a
    power of two of 2^10 or more: an error, because the engine itself averages microbatches and scales fp16 losses, or
    allowed."""

    def derived(self, dp: int) -> "BatchPolicy":
        """Compute all three sizes on ``dp`` data-parallel ranks, as far as they are determined.

        Args:
            dp: The number of data-parallel ranks.

        Returns:
            A new policy; sizes that do not follow stay None, except that the accumulation becomes 1.

        Raises:
            ConfigError: if the sizes contradict one another, or the accumulation is too large.
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
    """Steps between two evaluations on the held-out data; 0: only at the end."""
    early_stop: EarlyStopPolicy | None = None
    """The condition that ends the run early, when its evaluations stop improving; left out: the run takes all steps."""
    metrics: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")] | None = None
    """``module:function`` for metrics beyond loss and accuracy on held-out pictures. The function is called with
    (outputs, labels) of a batch and returns {name: sum} or {name: (sum, count)}; the metric is the sum of all sums over
    the sum of all counts (left out: the number of samples), on all ranks."""
    seed: NonNegativeInt = 0
    """The seed of start weights, data order and samples, which are the same on any number of ranks."""
    forecast: bool = True
    """Foresee memory and seconds of a step before the first one, on rank 0, in a second or so: a line at the start, and
    ``outcome.json`` beside what the run then takes."""
    sample_tokens: NonNegativeInt = 200
    """Tokens of the text that is generated at the end of a language model's run; 0: none."""
    sample_prompt: str | None = None
    """The beginning of the generated text; left out: the first words of the held-out text."""
