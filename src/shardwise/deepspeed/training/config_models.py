"""Blocks of a DeepSpeed configuration as objects: ``runtime.config_utils``, ``precision_config``, ``zero.config``.

    DeepSpeedZeroConfig(stage=3).overlap_comm            attributes of a block, with DeepSpeed's defaults
    class Mine(DeepSpeedConfigModel): ...                a pydantic model whose fields may have older names

config/deepspeed_keys.py defines the effect of each key on an engine; these objects only return values.
"""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from shardwise.config.deepspeed_keys import KEYS
from shardwise.deepspeed.training.settings import DeepSpeedConfig, DeepSpeedConfigError


class DeepSpeedConfigModel(BaseModel):
    """A pydantic model whose fields may have older names.

    A field with an older name is declared as ``Field(json_schema_extra={"deprecated": True, ...})`` with
    ``new_param`` (dotted for a field of a nested model) and optionally ``new_param_fn``, which computes the new value
    from the old one. Values of "auto" are left out unless ``strict`` is True.

    Raises:
        pydantic.ValidationError: for an unknown field or a wrong value.
        DeepSpeedConfigError: if a field is given under both names.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **values: Any):
        super().__init__(**{key: value for key, value in values.items() if strict or value != "auto"})
        for name, field in type(self).model_fields.items():
            said = field.json_schema_extra
            if isinstance(said, Mapping) and said.get("deprecated") and name in self.model_fields_set:
                self._rename(name, said)

    def _rename(self, old: str, said: Mapping[str, Any]) -> None:
        """Copy the value of the deprecated field ``old`` into the field that replaces it."""
        path = str(said.get("new_param", ""))
        if not path or not said.get("set_new_param", True):
            return
        *outer, new = path.split(".")
        target: Any = self
        for step in outer:
            target = getattr(target, step)
        if new in target.model_fields_set:
            raise DeepSpeedConfigError(
                f"{type(self).__name__}: {old} is an older name of {path}, and both are given; keep {path}"
            )
        value = getattr(self, old)
        setattr(target, new, said["new_param_fn"](value) if "new_param_fn" in said else value)


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """The block ``fp16``."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: int = 1
    fp16_master_weights_and_grads: bool = False

    @field_validator("loss_scale", mode="before")
    @classmethod
    def _is_a_scale(cls, given: Any) -> Any:
        if isinstance(given, bool) or not isinstance(given, int | float | str):
            raise ValueError(f"loss_scale must be a number, given {given!r:.80}; 0 lets the scale move")
        found = float(given)
        if not math.isfinite(found) or found < 0:
            raise ValueError(
                f"loss_scale must be a number of at least 0, given {given!r}; 0 lets the scale move"
            )
        return found

    @field_validator("loss_scale_window", "min_loss_scale", mode="before")
    @classmethod
    def _is_whole(cls, given: Any) -> Any:
        if isinstance(given, bool):
            raise ValueError(f"expected an integer, given {given}")
        return given

    @model_validator(mode="after")
    def _moves_by_positive_numbers(self) -> "DeepSpeedFP16Config":
        if self.enabled and self.loss_scale == 0 and min(self.loss_scale_window, self.min_loss_scale) <= 0:
            raise ValueError(
                f"a loss scale that moves needs loss_scale_window and min_loss_scale above 0, given "
                f"{self.loss_scale_window} and {self.min_loss_scale}"
            )
        return self


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """The block ``bf16``."""

    enabled: bool = False
    immediate_grad_update: bool = True
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


def get_float16_config(given: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """Return the block ``fp16`` of a configuration."""
    return DeepSpeedFP16Config(**given.get("fp16", {}))


def get_bfloat16_config(given: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """Return the block ``bf16`` of a configuration, under either of its names."""
    return DeepSpeedBF16Config(**given.get("bf16", given.get("bfloat16", {})))


class _ConfigBlock:
    """A block of the key table, with keys as attributes and DeepSpeed's defaults.

    Raises:
        DeepSpeedConfigError: if the block does not have a given key, or a value is wrong.
    """

    _path = ""
    _prefix = ""
    """The prefix of key names that attributes may leave out."""

    def __init__(self, **keys: Any):
        given: Any = keys
        for step in reversed(self._path.split(".")):
            given = {step: given}
        found = DeepSpeedConfig({"train_batch_size": 1, **given})
        inside = f"{self._path}."
        rows = [row for row in KEYS if row.path.startswith(inside) and not row.stands_for]
        names = [row.path.removeprefix(inside) for row in rows]
        self._values = {name: found.value(inside + name) for name in names if "." not in name}
        self._given = keys

    def __getattr__(self, name: str) -> Any:
        values = vars(self).get("_values", {})
        for each in (name, f"{self._prefix}{name}"):
            if each in values:
                return values[each]
        raise AttributeError(f"{type(self).__name__} has no {name!r}; it has {', '.join(sorted(values))}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.model_dump().items())})"

    def model_dump(self, **ignored: Any) -> dict[str, Any]:
        """Return the keys and values of the block."""
        return dict(self._values)


class DeepSpeedZeroOffloadParamConfig(_ConfigBlock):
    """The block ``zero_optimization.offload_param``."""

    _path = "zero_optimization.offload_param"


class DeepSpeedZeroOffloadOptimizerConfig(_ConfigBlock):
    """The block ``zero_optimization.offload_optimizer``."""

    _path = "zero_optimization.offload_optimizer"

    @property
    def pipeline(self) -> bool:
        """True if reads or writes may overlap the update."""
        return bool(self.pipeline_read or self.pipeline_write)


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """The block ``zero_optimization.leaf_module``; a single text stands for a list of one."""

    classes: list[str] = []
    names: list[str] = []
    name_suffixes: list[str] = []

    @field_validator("classes", "names", "name_suffixes", mode="before")
    @classmethod
    def _is_a_list(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given


class DeepSpeedZeroConfig(_ConfigBlock):
    """The block ``zero_optimization``."""

    _path = "zero_optimization"
    _prefix = "stage3_"

    def __init__(self, **keys: Any):
        leaves = DeepSpeedZeroLeafModuleConfig(**(keys.get("leaf_module") or {}))
        super().__init__(
            **{**keys, **({"leaf_module": leaves.model_dump()} if "leaf_module" in keys else {})}
        )
        self._values["leaf_module"] = leaves
        if self._values["overlap_comm"] is None:
            self._values["overlap_comm"] = self.stage == 3
        olds = {
            "offload_param": ("cpu_offload_param", "cpu_offload_params"),
            "offload_optimizer": ("cpu_offload",),
        }
        kinds = {
            "offload_param": DeepSpeedZeroOffloadParamConfig,
            "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        }
        for name, kind in kinds.items():
            given = keys.get(name)
            if given is None and any(keys.get(old) for old in olds[name]):
                given = {"device": "cpu"}
            self._values[name] = None if given is None else kind(**given)
