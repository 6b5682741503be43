"""Lists the configuration keys that the package deepspeed itself reads; run in an environment that has it:

    DS_ACCELERATOR=cpu PYTHON_WITH_DEEPSPEED benchmarks/deepspeed/keys.py > tests/config/deepspeed_names.txt

A line for a key: its dotted path, a tab, its default. Blocks that are pydantic models or dataclasses are read off their
fields; the others by handing the package's own functions a dictionary that notes what it is asked for. Scheduler and
optimizer parameters are read off the constructors.
"""

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from typing import Any, get_args

import torch
from deepspeed.autotuning.config import DeepSpeedAutotuningConfig
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.inference.config import WeightQuantConfig
from deepspeed.module_inject.auto_ep_presets.base import AutoEPConfig
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime import config as package
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
from deepspeed.runtime.data_pipeline.config import get_data_efficiency_config
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import BaseModel

MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "compile": package.CompileConfig,
    "tensor_parallel": TPTrainingConfig,
    "hybrid_engine": package.HybridEngineConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
    "comms_logger": CommsLoggerConfig,
    "weight_quantization": WeightQuantConfig,
}
READERS = {
    "": package.DeepSpeedConfig._initialize_params,
    "autotuning": DeepSpeedAutotuningConfig,
    "activation_checkpointing": DeepSpeedActivationCheckpointingConfig,
    "data_efficiency": get_data_efficiency_config,
}
BLOCKS = """optimizer scheduler activation_checkpointing autotuning model_info flops_profiler checkpoint parallel_write
writer data_types data_efficiency data_sampling data_routing curriculum_learning dynamic_batching random_ltd aio
torch_autocast timers throughput pipeline expert_parallel"""
OPTIMIZERS = (
    FusedAdam,
    DeepSpeedCPUAdam,
    torch.optim.AdamW,
    FusedLamb,
    FusedLion,
    DeepSpeedCPULion,
    DeepSpeedCPUAdagrad,
)


def main() -> None:
    """Print the keys, sorted."""
    found = dict(all_keys())
    for path in sorted(found):
        sys.stdout.write(f"{path}\t{found[path]!r}\n".replace("\t'auto'", "\tauto"))


def all_keys() -> Iterator[tuple[str, Any]]:
    """Path and default of every key."""
    noted: dict[str, Any] = {}
    asked = Asked("", noted)
    config = package.DeepSpeedConfig.__new__(package.DeepSpeedConfig)
    config._param_dict = asked
    config._initialize_params(asked)
    config.optimizer_params = None
    yield from noted.items()
    for path, model in MODELS.items():
        yield from of_model(path, model)
    for name in ("tensorboard", "wandb", "csv_monitor", "comet"):
        from deepspeed.monitor.config import DeepSpeedMonitorConfig

        yield from of_model(name, DeepSpeedMonitorConfig.model_fields[name].annotation)
    for field in dataclasses.fields(AutoEPConfig):
        if not field.name.startswith("_"):
            yield (
                f"expert_parallel.{field.name}",
                field.default if isinstance(field.default, str | int | float) else None,
            )
    for name in lr_schedules.VALID_LR_SCHEDULES:
        yield from of_signature(f"scheduler.params({name})", getattr(lr_schedules, name))
    for kind in OPTIMIZERS:
        yield from of_signature(f"optimizer.params({kind.__name__})", kind)
    for name in package._REMOVED_TOP_LEVEL_CONFIG_KEYS:
        yield name, "removed"
    for name in package._REMOVED_ZERO_CONFIG_KEYS:
        yield f"zero_optimization.{name}", "removed"


class Asked(dict):
    """A dictionary that notes which keys it is asked for; every block is there, and empty."""

    def __init__(self, path: str, noted: dict[str, Any]) -> None:
        super().__init__()
        self.path, self.noted = path, noted

    def _block(self, key: str) -> "Asked | None":
        inner = f"{self.path}.{key}".strip(".")
        self.noted.setdefault(inner, None)
        return Asked(inner, self.noted) if key in BLOCKS.split() else None

    def __contains__(self, key: object) -> bool:
        return self._block(str(key)) is not None

    def keys(self) -> "Asked":  # type: ignore[override]
        return self

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def items(self) -> list[Any]:  # type: ignore[override]
        return []

    def get(self, key: str, default: Any = None) -> Any:
        block = self._block(key)
        if block is not None:
            return block
        if not isinstance(default, dict):
            self.noted[f"{self.path}.{key}".strip(".")] = default
        return default

    def __getitem__(self, key: str) -> Any:
        return self.get(key)

    def __bool__(self) -> bool:
        return True

    def __copy__(self) -> "Asked":
        return self


def of_model(path: str, model: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a pydantic model, and of those inside."""
    for name, field in model.model_fields.items():
        default = None if field.default_factory or field.is_required() else field.default
        for each in {name, field.alias or name}:
            yield f"{path}.{each}", None if isinstance(default, BaseModel | dict) else default
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                for each in {name, field.alias or name}:
                    yield from of_model(f"{path}.{each}", inner)


def of_signature(path: str, kind: Any) -> Iterator[tuple[str, Any]]:
    """What its constructor takes besides the parameters or the optimizer."""
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name not in ("self", "params", "model_params", "optimizer"):
            yield f"{path}.{name}", None if parameter.default is parameter.empty else parameter.default


if __name__ == "__main__":
    main()
