"""The engine that ``initialize`` returns: DeepSpeed's methods, counters and attributes on ours.

    loss = engine(batch)                     runs the model, its own dtypes in its outputs
    engine.backward(loss)                    the loss, over gradient_accumulation_steps
    engine.step()                            ends a microbatch; at the boundary it updates, and the scheduler steps

Counters, as such scripts read them: ``micro_steps`` calls of ``step``, ``global_steps`` those at a boundary,
``skipped_steps`` of them those that changed no weight, ``global_samples`` global_steps times train_batch_size.
What it says of itself is in engine_facts.py; whatever is in neither is the module's. ``engine.ours`` is our engine,
with all that it can do.
"""

import gc
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, optim

from shardwise.deepspeed import parameter_facts, saved
from shardwise.deepspeed.engine_facts import EngineFacts
from shardwise.deepspeed.living import live
from shardwise.deepspeed.loader import DeepSpeedDataLoader
from shardwise.deepspeed.settings import DeepSpeedConfig
from shardwise.engine.away import AwayTier, StateKind
from shardwise.engine.engine import Engine
from shardwise.engine.step import StepResult
from shardwise.plan.errors import UsageError

_log = logging.getLogger(__name__)


_PLACES: dict[str, AwayTier | None] = {"cpu": "host", "nvme": "disk", "none": None}
_KINDS_OF_STATE: dict[str, StateKind | None] = {
    "optim_states": "moments",
    "hp_params": "masters",
    "lp_params": "weights",
    "lp_grads": None,
    "contiguous_grad_buffer": None,
}
"""Theirs; None of what has no memory between steps."""


class DeepSpeedEngine(EngineFacts):
    """See the module's docstring. Made by ``initialize``."""

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
        """Stepped after each applied step."""
        self.collate_fn = collate_fn
        self.mpu = mpu
        self.training_dataloader: DeepSpeedDataLoader | None = None
        """Of ``training_data``."""
        self._applied = False
        if optimizer is not None and ours.plan.mesh.pp == 1:
            ours.adopt_backward()
        self._is_marked = ours.config.zero.stage == 3 and ours.config.compile.scope == "none"
        if self._is_marked:
            parameter_facts.mark(self)
        live(self)

    # Training --------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        return self.ours(*inputs, **kwargs) if kwargs else self.ours(inputs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Accumulate the gradients of ``loss``, over the microbatches of a step; returns the loss so divided.

        ``scale_wrt_gas=False``: the loss is divided already.
        """
        parts = self.gradient_accumulation_steps()
        self._refuse_without_optimizer("backward")
        self.ours.backward(loss if scale_wrt_gas else loss * parts, weight=1.0, retain_graph=retain_graph)
        return loss / parts if scale_wrt_gas else loss

    def scale(self, loss: Tensor) -> Tensor:
        """``loss``, for a ``loss.backward()`` of the script's own: the loss scale is put in where the gradient enters
        the model."""
        if loss.numel() != 1 or not loss.requires_grad:
            raise UsageError("scale: expected a loss of one number with a graph")
        return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a microbatch. At the boundary: update, and let the scheduler step."""
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
        """Whether ``step()`` will update."""
        return self.ours.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the microbatch that comes ends a step, in place of counting."""
        self.ours.set_boundary(is_boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients stay on their rank; ``step()`` comes after it.

        Errors: UsageError at stages 2 and 3, whose gradients lie in pieces.
        """
        if self.zero_optimization_partition_gradients():
            raise UsageError(
                f"no_sync: at zero stage {self.zero_optimization_stage()} gradients lie in pieces on all ranks, so "
                "they travel with every backward pass; use stage 1 or 0"
            )
        with self.ours.no_sync():
            yield

    coalesce_grad_reduction = no_sync

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Nothing: the backward pass that ends a step has summed them, or ``step()`` does."""

    def clip_fp32_gradients(self) -> None:
        """Nothing: ``step()`` clips to ``gradient_clipping``, at every stage and in every dtype."""

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` changed weights."""
        return self._applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of a microbatch that ``step()`` has not ended, as of another engine's loss that passed
        through this model. After ``step()`` nothing is left to drop.

        Errors: UsageError in the middle of an accumulation, for those of its earlier microbatches would go too.
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
        """The model's training mode."""
        self.training = mode
        self.ours.train(mode)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Nothing after ``initialize``; ``"compile": {"deepcompile": true}`` compiles the blocks when it begins."""

    # Batch sizes -----------------------------------------------------------------------------------------------

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another global batch from the next step on, by more or fewer microbatches. Errors: UsageError."""
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
        """Another microbatch from the next one on; the script brings it."""
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
        """This rank's batches of ``dataset``. ``route``: ``train`` shuffles, ``eval`` and ``predict`` do not."""
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
        """``training_data`` of ``initialize``. A pass over it that is shorter than a step is told: the accumulation
        goes on in the next pass, and a script of one pass would train nothing."""
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
        """State leaves the device between two steps (``Engine.offload_states``) until ``reload_states``. Collective.

        ``include``: some of ``optim_states``, ``hp_params`` (masters), ``lp_params`` (weights); gradients have no
        memory between steps. ``device``: ``cpu``; ``nvme``: the folder of ``nvme_path``; ``none``: nothing moves.
        ``pin_memory``, ``non_blocking``: no effect; what is copied to is pinned, and is there when this returns.
        Errors: UsageError for other words, and as there.
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
        """End of ``offload_states``."""
        self.ours.reload_states()

    # The whole model -------------------------------------------------------------------------------------------

    def module_state_dict(self, exclude_frozen_parameters: bool = False, **ignored: Any) -> dict[str, Tensor]:
        """The whole model on the CPU, under the model's own names. Collective."""
        return self.ours.state_dict(trained_only=exclude_frozen_parameters)

    def load_module_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, **ignored: Any
    ) -> None:
        """Weights and buffers from whole tensors. Collective."""
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
        """Save a step as ``save_dir/tag`` (default: ``global_stepN``); see saved.py. Collective.

        ``client_state``: numbers, text, tensors, lists and dictionaries, which ``load_checkpoint`` returns.
        ``exclude_frozen_parameters``: leave them out of the file for torch. Errors: UsageError names the key of what
        could be read back by running code alone; CheckpointError.
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
        """Load ``load_dir/tag`` (default: what ``latest`` names), ours or one that DeepSpeed saved, whatever ranks and
        stage saved it; (its folder, the client's state), or (None, {}) where ``load_dir`` names no latest. Collective.

        Errors: CheckpointError, MismatchError where it is of another model and ``load_module_strict``.
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
        """The whole model in its 16 bits, as one file for torch. Collective; rank 0 holds it on the CPU meanwhile."""
        return saved.save_16bit(self, save_dir, save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model

    def collect_python_gc(self) -> int:
        """Let Python look for objects that hold one another; how many it found."""
        return gc.collect()

    def empty_partition_cache(self) -> None:
        """Nothing: no weights are kept between passes."""

    def destroy(self) -> None:
        """Give the model back as it came. Collective."""
        if self._is_marked:
            parameter_facts.unmark(list(self.module.parameters()))
        self.ours.close()
