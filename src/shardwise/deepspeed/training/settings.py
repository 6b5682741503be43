"""DeepSpeedConfig: a DeepSpeed configuration with a lookup for each key.

    config = DeepSpeedConfig({"train_batch_size": 32})
    config.value("zero_optimization.stage")      0, the default
    config.train_batch_size                      32, as an attribute; blocks are dictionaries

config/deepspeed.py, which translates the configuration, defines the effect of each key.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.comm import default_group
from shardwise.config.deepspeed import from_base64, translate
from shardwise.config.deepspeed_keys import REQUIRED
from shardwise.config.deepspeed_values import row_of
from shardwise.config.run import read_file

_BLOCKS = {
    "zero_config": "zero_optimization",
    "float16_config": "fp16",
    "bfloat16_config": "bf16",
    "activation_checkpointing_config": "activation_checkpointing",
    "flops_profiler_config": "flops_profiler",
    "tensor_parallel_config": "tensor_parallel",
    "autotuning_config": "autotuning",
    "compile_config": "compile",
    "hybrid_engine": "hybrid_engine",
}
"""The attributes that are blocks of keys; a block's keys are attributes of the block."""
_SWITCHES = {
    "zero_enabled": "zero_optimization.stage",
    "fp16_enabled": "fp16.enabled",
    "bfloat16_enabled": "bf16.enabled",
}
_KEYS = {
    "zero_optimization_stage": "zero_optimization.stage",
    "optimizer_name": "optimizer.type",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "loss_scale": "fp16.loss_scale",
    "checkpoint_config": "checkpoint",
}


_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class DeepSpeedConfig:
    """A DeepSpeed configuration from a dictionary, a path, or url-safe base64 of JSON; see the module's docstring."""

    def __init__(
        self,
        given: "Mapping[str, Any] | str | Path",
        mpu: Any = None,
        mesh_device: Any = None,
        auto: Mapping[str, Any] | None = None,
    ):
        self.given = self._param_dict = read(given)
        try:
            self.translation = translate(self.given, _title(given), auto)
        except ConfigError as error:
            raise DeepSpeedConfigError(str(error)) from None
        self._changed: dict[str, Any] = {}

    def value(self, path: str) -> Any:
        """Return the value of a key: the changed value, the given value, or the key's default; None if there is none.

        The value of a block is a dictionary, or None if the block is optional and was left out.
        """
        if path in self._changed:
            return self._changed[path]
        values = self.translation.values
        if path in values:
            return values[path]
        given: Any = self.given
        for step in path.split("."):
            given = given.get(step) if isinstance(given, Mapping) else None
        row = row_of(path)
        if given is None and (row is None or row.default is None):
            return None
        inside = f"{path}."
        below = {key[len(inside) :]: self.value(key) for key in values if key.startswith(inside)}
        direct = {key: found for key, found in below.items() if "." not in key}
        return {**direct, **given} if isinstance(given, Mapping) else direct or given

    def change(self, path: str, value: Any) -> None:
        """Replace the value of a key, after the engine has resolved it or a method has changed it."""
        self._changed[path] = value

    def _configure_train_batch_size(self) -> None:
        """Compute the sizes of a batch that follow from the given ones, and check all three.

        Raises:
            DeepSpeedConfigError: if the sizes do not fit one another.
        """
        ranks = max(1, default_group.size() // (self.translation.config.get("mesh", {}).get("tp", 1)))
        whole, micro, parts = (vars(self).get(name, self.value(name)) for name in _SIZES)
        if micro is None and whole is not None:
            micro = whole // ((parts or 1) * ranks)
        elif whole is None and micro is not None:
            whole = micro * (parts or 1) * ranks
        if (
            whole is None
            or micro is None
            or (parts or whole // max(micro * ranks, 1)) * micro * ranks != whole
        ):
            raise DeepSpeedConfigError(
                f"config: train_batch_size {whole} is not train_micro_batch_size_per_gpu {micro} times "
                f"gradient_accumulation_steps {parts} times {ranks} ranks; give two of them that divide"
            )
        for name, size in zip(_SIZES, (whole, micro, parts or whole // (micro * ranks)), strict=True):
            setattr(self, name, size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "translation" not in vars(self):
            raise AttributeError(name)
        if name in _SWITCHES:
            return bool(self.value(_SWITCHES[name]))
        if name in _BLOCKS:
            return SimpleNamespace(**(self.value(_BLOCKS[name]) or {}))
        found = self.value(_KEYS.get(name, name))
        if found is None and name in _SIZES:
            return self._following(name)
        return found

    def _following(self, name: str) -> int | None:
        """Return the batch size ``name`` as it follows from the other sizes; None if it does not follow."""
        ranks = max(1, default_group.size() // self.translation.config.get("mesh", {}).get("tp", 1))
        whole, micro, parts = (self.value(each) for each in _SIZES)
        if name == _SIZES[0]:
            return None if micro is None else micro * (parts or 1) * ranks
        if name == _SIZES[1]:
            return None if whole is None else whole // ((parts or 1) * ranks)
        return 1 if whole is None or micro is None else whole // (micro * ranks)


def _getter(path: str) -> Callable[[Mapping[str, Any]], Any]:
    def get(param_dict: Mapping[str, Any]) -> Any:
        given: Any = param_dict
        for step in path.split("."):
            given = given.get(step) if isinstance(given, Mapping) else None
        row = row_of(path)
        default = None if row is None or row.default == REQUIRED else row.default
        return default if given is None else given

    get.__doc__ = f"""Return ``{path}`` of a configuration, or its default."""
    return get


get_gradient_clipping = _getter("gradient_clipping")
get_log_level = _getter("log_level")
get_train_batch_size = _getter("train_batch_size")
get_train_micro_batch_size_per_gpu = _getter("train_micro_batch_size_per_gpu")
get_gradient_accumulation_steps = _getter("gradient_accumulation_steps")
get_optimizer_name = _getter("optimizer.type")
get_optimizer_params = _getter("optimizer.params")
get_scheduler_name = _getter("scheduler.type")
get_scheduler_params = _getter("scheduler.params")


class DeepSpeedConfigError(ConfigError, ValueError, AssertionError):
    """An error in a DeepSpeed configuration.

    The class also inherits from ValueError and AssertionError, because DeepSpeed raises either of them, depending on
    the key.
    """


def read(given: Any) -> dict[str, Any]:
    """Return the configuration as a dictionary.

    Args:
        given: A dictionary, the path of a JSON file, or url-safe base64 of JSON.

    Raises:
        ConfigError: if ``given`` is none of these, or the file cannot be read.
    """
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, str) and not Path(given).exists():
        found = from_base64(given)
        if found is not None:
            return found
    try:
        if isinstance(given, str | os.PathLike):
            return read_file(Path(given))
    except ConfigError as error:
        raise DeepSpeedConfigError(str(error)) from None
    raise DeepSpeedConfigError(
        f"config: expected a dictionary or the path of a JSON file, given a {type(given).__name__}"
    )


def _title(given: Any) -> str:
    return str(given) if isinstance(given, str | Path) and len(str(given)) < 200 else "config"
