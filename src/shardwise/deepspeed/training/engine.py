"""The engine that ``initialize`` returns: DeepSpeed's methods, counters and attributes on a Shardwise engine.

    loss = engine(batch)                     runs the model; outputs have the model's own dtypes
    engine.backward(loss)                    backward of the loss divided by gradient_accumulation_steps
    engine.step()                            ends a microbatch; at the boundary, updates weights, steps the scheduler

Counters: ``micro_steps`` counts calls of ``step``; ``global_steps`` counts the calls at a boundary; ``skipped_steps``
counts the calls at a boundary that changed no weight; ``global_samples`` is global_steps times train_batch_size.
Methods that only report are in engine_facts.py; any other attribute is looked up on the module. ``engine.ours`` is
the Shardwise engine with its full interface.
"""

import gc
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, optim

from shardwise.base.errors import UsageError
from shardwise.deepspeed.calls.living import live
from shardwise.deepspeed.calls.unmet import UnmetError
from shardwise.deepspeed.files import parameter_facts, saved
from shardwise.deepspeed.training.engine_facts import EngineFacts
from shardwise.deepspeed.training.loader import DeepSpeedDataLoader
from shardwise.deepspeed.training.settings import DeepSpeedConfig
from shardwise.engine.engine import Engine
from shardwise.engine.state.away import AwayTier, StateKind
from shardwise.engine.step.end import StepResult

_log = logging.getLogger(__name__)


_PLACES: dict[str, AwayTier | None] = {"cpu": "host", "nvme": "disk", "none": None}
_KINDS_OF_STATE: dict[str, StateKind | None] = {
    "optim_states": "moments",
    "hp_params": "masters",
    "lp_params": "weights",
    "lp_grads": None,
    "contiguous_grad_buffer": None,
}
"""DeepSpeed's name of each kind of state, with Shardwise's name; None for kinds without memory between steps."""


class DeepSpeedEngine(EngineFacts):
    """DeepSpeed's engine interface on a Shardwise engine; see the module's docstring. Created by ``initialize``."""

    def __init__(
        self,
        ours: Engine,
        config: DeepSpeedConfig,
        optimizer: optim.Optimizer | None,
        lr_scheduler: Any = None,
        collate_fn: Any = None,
        mpu: Any = None,
    ):
        super().__init__(ours, config, optimizer)
        self.lr_scheduler = lr_scheduler
        """The learning rate scheduler, stepped after each applied step; None if there is none."""
        self.collate_fn = collate_fn
        self.mpu = mpu
        self.training_dataloader: DeepSpeedDataLoader | None = None
        """The loader of ``training_data``; None if ``initialize`` got no training data."""
        self._applied = False
        if optimizer is not None and ours.plan.mesh.pp == 1:
            ours.adopt_backward()
        self._is_marked = ours.config.zero.stage == 3 and ours.config.compile.scope == "none"
        if self._is_marked:
            parameter_facts.mark(self)
        live(self)

    # Training --------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model and return its output."""
        return self.ours(*inputs, **kwargs) if kwargs else self.ours(inputs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Accumulate the gradients of ``loss`` into the running step and return the loss that was differentiated.

        Args:
            loss: The loss of one microbatch.
            retain_graph: True to keep the graph for another backward pass.
            scale_wrt_gas: True to divide the loss by gradient_accumulation_steps; False if the loss is divided
                already.

        Returns:
            The loss divided by gradient_accumulation_steps, or ``loss`` itself if ``scale_wrt_gas`` is False.

        Raises:
            UsageError: if the engine has no optimizer.
        """
        parts = self.gradient_accumulation_steps()
        self._refuse_without_optimizer("backward")
        self.ours.backward(loss if scale_wrt_gas else loss * parts, weight=1.0, retain_graph=retain_graph)
        return loss / parts if scale_wrt_gas else loss

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` for a ``loss.backward()`` call of the script's own.

        The loss scale is not applied to the loss: the engine applies it where the gradient enters the model.

        Raises:
            UsageError: if the loss is not a single number with a graph.
        """
        if loss.numel() != 1 or not loss.requires_grad:
            raise UsageError("scale: expected a loss of one number with a graph")
        return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a microbatch; at the accumulation boundary, update the weights and step the scheduler.

        Args:
            lr_kwargs: Keyword arguments for the scheduler's ``step``.

        Raises:
            UsageError: if the engine has no optimizer.
        """
        self._refuse_without_optimizer("step")
        result = self.ours.step(weight=float(self.gradient_accumulation_steps()))
        self.counters.micro_steps += 1
        self._applied = False
        if result is not None:
            self._note_step(result, lr_kwargs)

    def _note_step(self, result: StepResult, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        self._result = result
        self._applied = not result.skipped
        if result.skipped:
            self.counters.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.counters.global_steps += 1
        self.counters.global_samples += self.train_batch_size()

    def _refuse_without_optimizer(self, call: str) -> None:
        if self.optimizer is None:
            raise UsageError(
                f"engine.{call}: initialize() got no optimizer; name one in the configuration (optimizer: "
                '{"type": "AdamW", ...}) or give it one'
            )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next ``step()`` updates the weights."""
        return self.ours.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether this microbatch and the following ones end a step, in place of counting microbatches."""
        self.ours.set_boundary(is_boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which gradients stay on their rank; call ``step()`` after leaving the context.

        Raises:
            UsageError: at stages 2 and 3, where every backward pass reduces gradients into shards.
        """
        if self.zero_optimization_partition_gradients():
            raise UnmetError(
                f"no_sync: at zero stage {self.zero_optimization_stage()} gradients lie in pieces on all ranks, so "
                "they travel with every backward pass; use stage 1 or 0"
            )
        with self.ours.no_sync():
            yield

    coalesce_grad_reduction = no_sync

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Do nothing: the backward pass that ends a step, or ``step()``, has reduced the gradients."""

    def clip_fp32_gradients(self) -> None:
        """Do nothing: ``step()`` clips to ``gradient_clipping``, at every stage and in every dtype."""

    def was_step_applied(self) -> bool:
        """Return whether the last ``step()`` changed weights."""
        return self._applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of a microbatch that ``step()`` has not ended.

        Such gradients arise, for example, if the loss of another engine passes through this model. After ``step()``
        no gradients are left to drop.

        Raises:
            UsageError: in the middle of an accumulation, because the gradients of earlier microbatches would be
                dropped too.
        """
        if not self.ours.open_backwards:
            return
        if self.ours.open_microbatches:
            raise UsageError(
                f"zero_grad: {self.ours.open_microbatches} microbatches of this step have ended, and their gradients "
                "lie with those of the running one; call it before the first backward of a step, or "
                "engine.ours.discard() to give up the step"
            )
        self.ours.discard()

    def train(self, mode: bool = True) -> "DeepSpeedEngine":
        """Set the training mode of the engine and the model, and return the engine."""
        self.training = mode
        self.ours.train(mode)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: with ``"compile": {"deepcompile": true}`` the blocks are compiled by ``initialize``."""

    # Batch sizes -----------------------------------------------------------------------------------------------

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size from the next step on, by changing the number of microbatches.

        Raises:
            UsageError: if the size is not a multiple of the microbatch size times the data-parallel ranks.
        """
        part = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if not isinstance(train_batch_size, int) or train_batch_size < part or train_batch_size % part:
            raise UsageError(
                f"set_train_batch_size: {train_batch_size} does not divide into microbatches of "
                f"{self.train_micro_batch_size_per_gpu()} on {self.dp_world_size} ranks; give a multiple of {part}"
            )
        self.ours.set_accumulation(train_batch_size // part)
        self._config.change("train_batch_size", train_batch_size)
        self._config.change("gradient_accumulation_steps", train_batch_size // part)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the microbatch size from the next microbatch on; the script must provide batches of that size."""
        self._config.change("train_micro_batch_size_per_gpu", micro_batch_size)
        whole = micro_batch_size * self.gradient_accumulation_steps() * self.dp_world_size
        self._config.change("train_batch_size", whole)

    # Data ------------------------------------------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Return a loader of this rank's batches of ``dataset``.

        Args:
            dataset: A torch Dataset or IterableDataset.
            batch_size: Samples per batch; None: the microbatch size.
            route: ``train`` shuffles; ``eval`` and ``predict`` do not.
            pin_memory: No effect; memory is pinned if the machine has an accelerator.
            data_sampler: A sampler that replaces the default one.
            collate_fn: The function that makes a batch from samples; None: the engine's.
            num_local_io_workers: Worker processes; None: DeepSpeed's default.
        """
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            (self.ours.dp_index, self.ours.dp_size),
            collate_fn or self.collate_fn,
            data_sampler,
            num_local_io_workers,
            bool(self.dataloader_drop_last()),
            shuffle=route == "train",
        )

    def take_training_data(self, dataset: Any) -> None:
        """Make the loader of ``training_data``, the argument of ``initialize``.

        Log a warning if one pass over the data has fewer microbatches than a step: the accumulation then continues in
        the next pass, and a script with a single pass trains nothing.
        """
        loader = self.training_dataloader = self.deepspeed_io(dataset)
        parts = self.gradient_accumulation_steps()
        if self.ours.is_main and self.is_map_style_dataset(dataset) and len(loader) < parts:
            _log.warning(
                "training_data: a pass has %d microbatches for each rank, and a step takes %d "
                "(gradient_accumulation_steps): it ends in a later pass, and in a single one no weight moves",
                len(loader),
                parts,
            )

    def offload_states(
        self,
        include: Iterable[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move state off the device between two steps, until ``reload_states``. Collective.

        Args:
            include: Some of ``optim_states`` (moments), ``hp_params`` (masters), ``lp_params`` (weights),
                ``lp_grads`` and ``contiguous_grad_buffer``; gradients have no memory between steps. None: all.
            device: ``cpu``: host memory; ``nvme``: the folder of ``nvme_path``; ``none``: nothing moves.
            pin_memory: No effect: the host memory is always pinned.
            non_blocking: No effect: the copy is complete when this method returns.

        Raises:
            UsageError: for other values of ``device`` or ``include``, and if ``Engine.offload_states`` raises it.
        """
        if device not in _PLACES:
            raise UsageError(f"offload_states: device: {device!r} is none of {', '.join(_PLACES)}")
        kinds = [*_KINDS_OF_STATE] if include is None else [str(kind) for kind in include]
        if unknown := [kind for kind in kinds if kind not in _KINDS_OF_STATE]:
            raise UsageError(
                f"offload_states: include: {unknown[0]!r} is none of {', '.join(_KINDS_OF_STATE)}"
            )
        place, wanted = (
            _PLACES[device],
            [ours for kind in kinds if (ours := _KINDS_OF_STATE[kind]) is not None],
        )
        if place is not None and wanted:
            self.ours.offload_states(place, include=wanted)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move state back to the device after ``offload_states``. Collective."""
        self.ours.reload_states()

    # The whole model -------------------------------------------------------------------------------------------

    def module_state_dict(self, exclude_frozen_parameters: bool = False, **ignored: Any) -> dict[str, Tensor]:
        """Return the whole model on the CPU, under the model's own names. Collective."""
        return self.ours.state_dict(trained_only=exclude_frozen_parameters)

    def load_module_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, **ignored: Any
    ) -> None:
        """Load weights and buffers from whole tensors. Collective."""
        self.ours.load_state_dict(state_dict.get("module", state_dict), strict)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        whole = self.ours.state_dict(trained_only=exclude_frozen_parameters)
        return whole if self.global_rank == 0 else None

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    # Saving ----------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a step as ``save_dir/tag``; saved.py documents the files. Collective.

        Args:
            save_dir: The folder of all checkpoints.
            tag: The name of the step's folder; None: ``global_stepN``.
            client_state: Numbers, text, tensors, lists and dictionaries, which ``load_checkpoint`` returns.
            save_latest: True to write the tag into ``save_dir/latest``.
            exclude_frozen_parameters: True to leave frozen parameters out of the file for torch.

        Returns:
            True.

        Raises:
            UsageError: if ``client_state`` has a value that could only be read back by running code; the error names
                its key.
            CheckpointError: if the step cannot be written.
        """
        return saved.save(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load the step ``load_dir/tag``, which Shardwise or DeepSpeed saved. Collective.

        The step may come from another number of ranks and another stage.

        Args:
            load_dir: The folder of all checkpoints.
            tag: The name of the step's folder; None: the tag in the file ``latest``.
            load_module_strict: True to raise if names or shapes differ from the model's.
            load_optimizer_states: False to load only the weights.
            load_lr_scheduler_states: True to restore the scheduler.
            load_module_only: True to load only the weights, without optimizer, scheduler and counters.
            custom_load_fn: Must be None.

        Returns:
            (folder of the step, client state), or (None, {}) if ``load_dir`` has no file ``latest``.

        Raises:
            CheckpointError: if there is no such step, or its files are damaged.
            MismatchError: if the step belongs to another model and ``load_module_strict`` is True.
        """
        if custom_load_fn is not None:
            raise UsageError(
                "load_checkpoint: custom_load_fn: load what it needs yourself, and the rest here"
            )
        return saved.load(
            self,
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
        )

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole model in its 16-bit dtype as one file for torch. Collective.

        Args:
            save_dir: The folder of the file.
            save_filename: The name of the file.
            exclude_frozen_parameters: True to leave out frozen parameters.

        Returns:
            True.

        Raises:
            CheckpointError: if rank 0 cannot write the file.
        """
        return saved.save_16bit(self, save_dir, save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model

    def collect_python_gc(self) -> int:
        """Run Python's garbage collector and return the number of unreachable objects that it found."""
        return gc.collect()

    def empty_partition_cache(self) -> None:
        """Do nothing: no gathered weights are kept between passes."""

    def destroy(self) -> None:
        """Close the engine and restore the model to its original form. Collective."""
        if self._is_marked:
            parameter_facts.unmark(list(self.module.parameters()))
        self.ours.close()
