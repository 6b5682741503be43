"""The engine of a ``PipelineModule``: whole batches in, through all stages.

    loss = engine.train_batch(iterator)      gradient_accumulation_steps microbatches, one update
    loss = engine.eval_batch(iterator)       as many, without gradients

A microbatch is (inputs, labels). Ranks of the first stage use the inputs and those of the last one the labels, so these
bring an iterator; the others may. Pipelines side by side are data-parallel: each has a share of the data of its own.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardwise.comm import default_group
from shardwise.deepspeed.engine import DeepSpeedEngine
from shardwise.deepspeed.loader import RepeatingLoader
from shardwise.deepspeed.pipeline_module import PipelineError, PipelineModule
from shardwise.plan.errors import DataError, UsageError

BatchFunction = Callable[[Any], Any]


class PipelineEngine(DeepSpeedEngine):
    """See the module's docstring. Made by ``initialize``."""

    log_batch_step_id = -1
    """Nothing is logged by microbatch."""
    has_attention_mask = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        assert isinstance(self.module, PipelineModule), "initialize chose the engine by the module"
        self.grid = self.module.mpu()
        """This rank's place, with torch's groups."""
        self.data_iterator: Iterator[Any] | None = None
        """Where ``train_batch`` reads."""
        self.batch_fn: BatchFunction | None = None
        """Called with each batch that was read."""
        self.agg_train_loss: Tensor | None = None
        """What the last ``train_batch`` returned."""

    # A whole batch ---------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One step on ``gradient_accumulation_steps()`` microbatches of ``data_iter``, which stays for the next calls;
        the mean of their losses over all pipelines, on every rank. Collective.

        Errors: DataError, on all ranks, where a rank's data ends before; UsageError.
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
        """The mean loss of ``num_micro_batches`` microbatches (default: as many as a step has) over all pipelines, in
        ``eval`` mode, without gradients. Collective.

        return_logits   (that, the last microbatch's output on ranks of the last stage, and None on others)
        compute_loss    False: the outputs take the place of the losses, on the last stage alone
        reduce_output   None: a list by microbatch, of this pipeline's
        bcast_loss      False: the last stage alone is told, and others get None

        Errors: as ``train_batch``.
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
        """The last stage's, on all ranks: the mean of pipelines and microbatches, or its own by microbatch."""
        own = torch.zeros(self.grid.data_parallel_size, count, dtype=torch.float64, device=self.device)
        if losses is not None and not self.get_tensor_parallel_rank():
            own[self.ours.dp_index] = torch.stack([loss.double().reshape(()) for loss in losses])
        if default_group.size() > 1:
            default_group.all_reduce(own)
        if is_mean:
            return self._number(float(own.mean()))
        return [self._number(loss) for loss in own[self.ours.dp_index].tolist()]

    def _mean(self, outputs: list[Any]) -> Any:
        """Of the microbatches of all pipelines; the last stage's ranks call it."""
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
        """Where ``train_batch`` reads from here on."""
        self.data_iterator = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Read ``loader`` from its beginning."""
        self.training_dataloader = loader
        self.data_iterator = iter(loader)

    def set_batch_fn(self, fn: BatchFunction | None) -> None:
        """``fn`` of each batch that is read gives (inputs, labels)."""
        self.batch_fn = fn

    def take_training_data(self, dataset: Any) -> None:
        """In its order, again and again."""
        self.set_dataloader(RepeatingLoader(self.deepspeed_io(dataset, route="eval")))

    def reset_activation_shape(self) -> None:
        """Nothing: shapes travel with what has them, and may change at any time."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Nothing: what goes from stage to stage is sent as it is."""

    def get_additional_losses(self) -> None:
        """None: ``train_batch`` returns the whole loss, and parts of it are not told."""

    def _read(self, iterator: Iterator[Any] | None, count: int, call: str) -> list[Any]:
        """This rank's microbatches. Collective. Errors: alike on all ranks."""
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
        """Stages."""
        return self.grid.pipe_parallel_size

    @property
    def stage_id(self) -> int:
        """This rank's."""
        return self.grid.stage_id

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        count: int = self.gradient_accumulation_steps()
        return count

    @property
    def micro_batch_size(self) -> int:
        """Samples of one."""
        size: int = self.train_micro_batch_size_per_gpu()
        return size

    def is_first_stage(self) -> bool:
        """Whether this rank uses the inputs."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this rank uses the labels."""
        return self.stage_id == self.num_stages - 1

    def get_pipeline_parallel_rank(self) -> int:
        """The stage of this rank."""
        return self.stage_id

    @property
    def is_pipe_parallel(self) -> bool:
        """Whether there are several stages."""
        return self.num_stages > 1

    @property
    def is_data_parallel(self) -> bool:
        """Whether pipelines stand side by side."""
        return self.grid.data_parallel_size > 1

    # Not here --------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise PipelineError(
            "engine(...): a pipeline runs whole batches; call train_batch or eval_batch(return_logits=True)"
        )

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refused."""
        raise PipelineError("engine.backward: a pipeline runs whole batches; call train_batch")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        raise PipelineError("engine.step: a pipeline runs whole batches; call train_batch")


def _as_tuple(value: Any) -> Any:
    """Of several tensors, which a DataLoader makes a list of."""
    return tuple(value) if isinstance(value, list) else value
