"""The read-only part of DeepSpeed's engine: counters, ranks, dtypes, and numbers of the last step.

An attribute of the engine is found in one of three places:

    engine.global_steps, engine.get_lr(), engine.dp_world_size       this module
    engine.zero_optimization_stage(), engine.fp16_enabled() ...      getters.py: each returns the value of a key
    any other attribute of the engine                                the module's attribute, or an AttributeError
                                                                     that names a replacement
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import IterableDataset

from shardwise.deepspeed.calls import groups
from shardwise.deepspeed.training import experts, getters
from shardwise.deepspeed.training.monitor_events import EngineEvents
from shardwise.deepspeed.training.optimizer import optimizer_of
from shardwise.deepspeed.training.refusals import INSTEAD
from shardwise.deepspeed.training.settings import DeepSpeedConfig
from shardwise.deepspeed.training.timers import milliseconds
from shardwise.engine.engine import Engine
from shardwise.engine.step.end import StepResult


@dataclass
class ProgressCounters:
    """The progress of a run, counted as DeepSpeed counts."""

    global_steps: int = 0
    """Calls of ``step`` at an accumulation boundary."""
    global_samples: int = 0
    """Samples of all global steps."""
    micro_steps: int = 0
    """Calls of ``step``."""
    skipped_steps: int = 0
    """Calls of ``step`` at a boundary that changed no weight."""


class EngineFacts(nn.Module):
    """Read-only attributes and methods of DeepSpeed's engine; see the module's docstring."""

    def __init__(self, ours: Engine, config: DeepSpeedConfig, optimizer: optim.Optimizer | None):
        super().__init__()
        self.module = ours.module
        """The user's model."""
        self.ours = ours
        """The Shardwise engine."""
        stage = ours.config.zero.stage
        self.optimizer = (
            None if optimizer is None else optimizer_of(optimizer, ours, stage, self._was_skipped)
        )
        """The optimizer, whose ``param_groups`` are read before each step."""
        self.counters = ProgressCounters()
        """The counters of the run's progress."""
        self._config = config
        self._result: StepResult | None = None
        """The result of the last step at a boundary; None before the first one."""

    def _was_skipped(self) -> bool:
        return self._result is not None and self._result.skipped

    # Who and where ---------------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as it was given."""
        return self._config.given

    @property
    def global_steps(self) -> int:
        """Calls of ``step`` at an accumulation boundary."""
        return self.counters.global_steps

    @property
    def global_samples(self) -> int:
        """Samples of all global steps."""
        return self.counters.global_samples

    @property
    def micro_steps(self) -> int:
        """Calls of ``step``."""
        return self.counters.micro_steps

    @property
    def skipped_steps(self) -> int:
        """Calls of ``step`` at a boundary that changed no weight."""
        return self.counters.skipped_steps

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        return self.ours.device

    @property
    def local_rank(self) -> int:
        """The index of this rank on its host."""
        return self.ours.world.local_rank

    @property
    def global_rank(self) -> int:
        """The index of this rank in the job."""
        return self.ours.world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the job."""
        return self.ours.world.size

    @property
    def dp_world_size(self) -> int:
        """The number of data-parallel ranks."""
        return self.ours.dp_size

    @property
    def mp_world_size(self) -> int:
        """The number of ranks that hold one copy of the model together."""
        return self.ours.world.size // (self.ours.dp_size * self.ours.plan.mesh.cp)

    is_deepcompile_enabled = is_deepcompile_active = lambda self: False

    @property
    def seq_dp_world_size(self) -> int:
        """The number of ranks that share the state of a part of the model."""
        return self.ours.plan.mesh.size("dp")

    @property
    def sequence_parallel_size(self) -> int:
        """The number of ranks that share a sequence."""
        return self.ours.plan.mesh.cp

    @property
    def seq_parallel_group(self) -> Any:
        """Torch's process group of the ranks that share sequences with this rank; None if they are whole."""
        return self.get_sequence_parallel_group()

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """An empty set: gradients are summed dense."""
        return set()

    @property
    def has_moe_layers(self) -> bool:
        """True if the model has layers of experts."""
        return bool(self.num_experts)

    @property
    def num_experts(self) -> list[int]:
        """The number of experts of each layer of experts."""
        return [layer.num_experts for layer in experts.layers_of(self.module)]

    @property
    def data_parallel_group(self) -> Any:
        """The torch process group of the data-parallel ranks.

        Raises:
            UsageError: if the data-parallel ranks are not all ranks of the job.
        """
        return groups.get_data_parallel_group()

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype of gradients on the wire: ``communication_data_type`` if it is given, else the weights' dtype."""
        said = self._config.value("communication_data_type")
        known = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
        own = "fp16" if self.fp16_enabled() else "bf16" if self.bfloat16_enabled() else "fp32"
        return known[said or own]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return (dtype of the weights, dtype of accumulated gradients)."""
        own = (
            torch.float16
            if self.fp16_enabled()
            else torch.bfloat16
            if self.bfloat16_enabled()
            else torch.float32
        )
        return own, torch.float32

    def get_data_parallel_rank(self) -> int:
        """Return the index of this rank among the data-parallel ranks."""
        return self.ours.dp_index

    def get_tensor_parallel_rank(self) -> int:
        """Return the index of this rank among the tensor-parallel ranks, which share its matrices."""
        return self.ours.plan.mesh.index("tp", self.global_rank)

    get_model_parallel_rank = get_tensor_parallel_rank

    # Numbers of the last step ----------------------------------------------------------------------------------

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradient before clipping; None before the first step."""
        return None if self._result is None else self._result.grad_norm

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group for the next step."""
        return self._of_groups("lr")

    def get_type(self) -> list[Any]:
        """Return the ``type`` of each parameter group; 0.0 for groups without one."""
        return self._of_groups("type")

    def get_mom(self) -> list[Any]:
        """Return the momentum or the betas of each parameter group."""
        return self._of_groups("momentum" if self.optimizer_name() in ("SGD", "sgd", "RMSprop") else "betas")

    def _of_groups(self, name: str) -> list[Any]:
        groups: Sequence[Any] = () if self.optimizer is None else self.optimizer.param_groups
        return [group.get(name, 0.0) for group in groups]

    def optimizer_name(self) -> str | None:
        """Return the optimizer's name in the configuration, or the class name of the given optimizer object."""
        named: str | None = self._config.value("optimizer.type")
        if named is not None or self.optimizer is None:
            return named
        return type(self.optimizer.optimizer).__name__

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (global batch size, microbatch size, microbatches of a step)."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    # Numbers and clocks ----------------------------------------------------------------------------------------

    @property
    def monitor(self) -> EngineEvents:
        """The writer for a script's own numbers: ``write_events([(tag, value, samples)])``."""
        return EngineEvents(self.ours.monitor, self.train_batch_size())

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Return the milliseconds that the last step spent in ``fwd``, ``bwd`` and ``step``."""
        return milliseconds(self.ours.trace)

    def get_sequence_parallel_group(self) -> Any:
        """Return torch's process group of the ranks that share sequences with this rank; None if they are whole.

        Raises:
            UsageError: if these ranks are some of the job's, and the engine was given no mpu with a group of them.
        """
        return groups._get_sequence_parallel_group()

    def is_map_style_dataset(self, obj: Any) -> bool:
        """Return whether samples of ``obj`` can be looked up by index."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    def is_iterable_style_dataset(self, obj: Any) -> bool:
        """Return whether ``obj`` is an IterableDataset."""
        return isinstance(obj, IterableDataset)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the settings of the dynamic loss scale."""
        return {
            "init_scale": 2 ** self._config.value("fp16.initial_scale_power"),
            "scale_window": self._config.value("fp16.loss_scale_window"),
            "min_scale": self._config.value("fp16.min_loss_scale"),
            "delayed_shift": self._config.value("fp16.hysteresis"),
            "consecutive_hysteresis": self._config.value("fp16.consecutive_hysteresis"),
        }

    # Anything else ---------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name in getters.NAMES:
            return lambda: getters.answer(name, self._config.value)
        try:
            return super().__getattr__(name)
        except AttributeError:
            pass
        module = self._modules.get("module") if "_modules" in vars(self) else None
        if module is not None and hasattr(module, name):
            return getattr(module, name)
        if name in INSTEAD:
            raise AttributeError(f"engine.{name}: not here: {INSTEAD[name]}")
        raise AttributeError(
            f"engine.{name}: neither the engine nor the model ({type(module).__name__}) has it; docs/deepspeed.md "
            "lists what the engine has"
        )
