"""The engine of a ``PipelineModule``, which runs whole batches through all stages.

    loss = engine.train_batch(iterator)      gradient_accumulation_steps microbatches, one update
    loss = engine.eval_batch(iterator)       the same number of microbatches, without gradients

A microbatch is (inputs, labels). Ranks of the first stage use the inputs and ranks of the last stage use the labels,
so these ranks must pass an iterator; for the other ranks an iterator is optional. Several pipelines are
data-parallel: each reads its own share of the data.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardwise.base.errors import DataError, UsageError
from shardwise.comm import default_group
from shardwise.deepspeed.training.engine import DeepSpeedEngine
from shardwise.deepspeed.training.loader import RepeatingLoader
from shardwise.deepspeed.training.pipeline_module import PipelineError, PipelineModule

BatchFunction = Callable[[Any], Any]


class PipelineEngine(DeepSpeedEngine):
    """The engine of a ``PipelineModule``; see the module's docstring. Created by ``initialize``."""

    log_batch_step_id = -1
    """The microbatch index at which DeepSpeed logs; -1 because this engine logs nothing per microbatch."""
    has_attention_mask = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        assert isinstance(self.module, PipelineModule), "initialize chose the engine by the module"
        self._pipeline: PipelineModule = self.module
        self.grid = self.module.mpu()
        """The pipeline grid: this rank's coordinates and torch's process groups."""
        self.data_iterator: Iterator[Any] | None = None
        """The iterator from which ``train_batch`` reads."""
        self.batch_fn: BatchFunction | None = None
        """The function that is called with each batch that was read; None for no function."""
        self.agg_train_loss: Tensor | None = None
        """The loss that the last ``train_batch`` returned."""

    # A whole batch ---------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run one optimizer step on ``gradient_accumulation_steps()`` microbatches. Collective.

        Args:
            data_iter: The iterator to read from, in this and in later calls; None: the iterator of an earlier call.

        Returns:
            The mean loss over all microbatches and pipelines, on every rank.

        Raises:
            DataError: on all ranks, if the data of one rank ends too early.
            UsageError: inside ``torch.no_grad()``, without an optimizer, or without an iterator.
        """
        if not torch.is_grad_enabled():
            raise UsageError("train_batch: inside of torch.no_grad(); call eval_batch there")
        self._refuse_without_optimizer("train_batch")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.train()
        batches = self._read(self.data_iterator, self.micro_batches, "train_batch")
        result = self.ours.train_step(batches)
        self._note_step(result)
        self.agg_train_loss = self._number(result.loss)
        return self.agg_train_loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Return the mean loss of microbatches over all pipelines, in ``eval`` mode and without gradients. Collective.

        Args:
            data_iter: The iterator to read from.
            return_logits: True to return (result, output of the last microbatch); the output is None except on the
                last stage.
            compute_loss: False to return outputs in place of losses, only on the last stage.
            reduce_output: ``avg`` for the mean; None for a list with this pipeline's result of each microbatch.
            bcast_loss: False to return the loss only on the last stage, and None on other ranks.
            num_micro_batches: The number of microbatches; None: as many as a step has.

        Raises:
            DataError: on all ranks, if the data of one rank ends too early.
            UsageError: if an argument is invalid.
        """
        if reduce_output is not None and str(reduce_output).lower() != "avg":
            raise UsageError(f"eval_batch: reduce_output {reduce_output!r}; expected 'avg' or None")
        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        if not isinstance(count, int) or count < 1:
            raise UsageError(f"eval_batch: num_micro_batches {count!r}; expected at least 1")
        self.eval()
        batches = self._read(data_iter, count, "eval_batch")

        def call(model: nn.Module, batch: Any) -> Any:
            inputs, labels = batch or (None, None)
            output = model(inputs)
            assert isinstance(model, PipelineModule), "a stage is one, too"
            found = model.loss_of(output, labels) if compute_loss else output
            return found, (output if return_logits else None)

        pairs = self.ours.predict(batches, call, everywhere=False)
        found = [each for each, _ in pairs] or None
        logits = pairs[-1][1] if pairs else None
        if compute_loss:
            result = self._told_losses(found, count, reduce_output is not None)
            result = result if bcast_loss or self.is_last_stage() else None
        else:
            result = None if found is None else self._mean(found) if reduce_output is not None else found
        return (result, logits) if return_logits else result

    def _told_losses(self, losses: list[Tensor] | None, count: int, is_mean: bool) -> Any:
        """Return the last stage's losses on all ranks: the mean over all pipelines, or this pipeline's list."""
        own = torch.zeros(self.grid.data_parallel_size, count, dtype=torch.float64, device=self.device)
        if losses is not None and not self.get_tensor_parallel_rank():
            own[self.ours.dp_index] = torch.stack([loss.double().reshape(()) for loss in losses])
        if default_group.size() > 1:
            default_group.all_reduce(own)
        if is_mean:
            return self._number(float(own.mean()))
        return [self._number(loss) for loss in own[self.ours.dp_index].tolist()]

    def _mean(self, outputs: list[Any]) -> Any:
        """Return the mean output over the microbatches of all pipelines; only the last stage calls this method."""
        size = self.grid.data_parallel_size

        def mean(*each: Tensor) -> Tensor:
            total = torch.stack(each).mean(0)
            if size > 1:
                default_group.all_reduce(total, group=self.grid.get_data_parallel_group())
            return total / size

        return tree_map(mean, *outputs)

    def _number(self, value: float) -> Tensor:
        precise = next(self.module.parameters()).dtype is torch.float64
        return torch.tensor(value, dtype=torch.float64 if precise else torch.float32, device=self.device)

    # Data ------------------------------------------------------------------------------------------------------

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Set the iterator from which ``train_batch`` reads."""
        self.data_iterator = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Set the loader from which ``train_batch`` reads, and start at its beginning."""
        self.training_dataloader = loader
        self.data_iterator = iter(loader)

    def set_batch_fn(self, fn: BatchFunction | None) -> None:
        """Set the function that makes (inputs, labels) from each batch that was read."""
        self.batch_fn = fn

    def take_training_data(self, dataset: Any) -> None:
        """Read training batches from ``dataset`` in its order, starting over at the end."""
        self.set_dataloader(RepeatingLoader(self.deepspeed_io(dataset, route="eval")))

    def reset_activation_shape(self) -> None:
        """Do nothing: shapes are sent with each tensor and may change at any time."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Do nothing: stages send all tensors as they are, attention masks included."""

    def get_additional_losses(self) -> None:
        """Return None: ``train_batch`` returns the whole loss, and its parts are not recorded."""

    def _read(self, iterator: Iterator[Any] | None, count: int, call: str) -> list[Any]:
        """Read ``count`` microbatches of this rank. Collective.

        Raises:
            DataError: on all ranks, if one rank could not read its microbatches.
            UsageError: if there is no iterator, or a batch is not (inputs, labels).
        """
        found: list[Any] = []
        error: Exception | None = None
        try:
            if self.is_first_stage() or self.is_last_stage():
                found = [self._next(iterator, f"{call}: microbatch {i} of {count}") for i in range(count)]
            else:
                found = [None] * count
        except Exception as caught:
            error = caught
        if self.ours.agree(error is not None):
            raise error or DataError(
                f"{call}: another rank could not read its {count} microbatches; see its log"
            )
        return found

    def _next(self, iterator: Iterator[Any] | None, where: str) -> Any:
        if iterator is None:
            raise UsageError(
                f"{where}: nothing to read from; give an iterator, set_dataloader(...), or initialize(training_data=)"
            )
        try:
            batch = next(iterator)
        except StopIteration:
            raise DataError(
                f"{where}: the data ended; a step takes gradient_accumulation_steps of them, and "
                "deepspeed.utils.RepeatingLoader(loader) begins again"
            ) from None
        if self.batch_fn is not None:
            batch = self.batch_fn(batch)
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise UsageError(
                f"{where}: expected (inputs, labels), given a {type(batch).__name__}; engine.set_batch_fn(function) "
                "makes them of what the loader gives"
            )
        return _as_tuple(batch[0]), _as_tuple(batch[1])

    # Who and where ---------------------------------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        """The number of pipeline stages."""
        return self.grid.pipe_parallel_size

    @property
    def stage_id(self) -> int:
        """The index of this rank's stage."""
        return self.grid.stage_id

    @property
    def micro_batches(self) -> int:
        """The number of microbatches of a step."""
        count: int = self.gradient_accumulation_steps()
        return count

    @property
    def micro_batch_size(self) -> int:
        """The number of samples of a microbatch."""
        size: int = self.train_micro_batch_size_per_gpu()
        return size

    def is_first_stage(self) -> bool:
        """Return whether this rank is on the first stage, which uses the inputs."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Return whether this rank runs the last stage, which uses the labels; rank 0 of a ``DualPipeVModule`` does."""
        return self.stage_id == self._pipeline.loss_stage_id

    def get_pipeline_parallel_rank(self) -> int:
        """Return the index of this rank's stage."""
        return self.stage_id

    @property
    def is_pipe_parallel(self) -> bool:
        """True if the pipeline has several stages."""
        return self.num_stages > 1

    @property
    def is_data_parallel(self) -> bool:
        """True if there are several pipelines."""
        return self.grid.data_parallel_size > 1

    # Refused --------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise PipelineError: a pipeline runs whole batches."""
        raise PipelineError(
            "engine(...): a pipeline runs whole batches; call train_batch or eval_batch(return_logits=True)"
        )

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raise PipelineError: a pipeline runs whole batches."""
        raise PipelineError("engine.backward: a pipeline runs whole batches; call train_batch")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Raise PipelineError: a pipeline runs whole batches."""
        raise PipelineError("engine.step: a pipeline runs whole batches; call train_batch")


def _as_tuple(value: Any) -> Any:
    """Return a tuple for a list, because a DataLoader turns a tuple of tensors into a list."""
    return tuple(value) if isinstance(value, list) else value
