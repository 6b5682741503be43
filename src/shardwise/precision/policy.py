"""PrecisionPolicy: the dtype of each buffer.

    compute   weights and activations              grad     the buffer in which gradients accumulate
    linear    products of linear layers (fp8.py)
    master    the weights that the optimizer       reduce   gradients on the wire
              updates

The 16-bit contract: floating inputs are cast to ``compute`` at the root of the model, the loss is computed in fp32,
and masters, moments and accumulated gradients are fp32 unless configured otherwise (arXiv:1710.03740).
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, PrivateAttr, model_validator

from shardwise.base.policy import Policy

Name = Literal["fp64", "fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
SixteenBits = Literal["bf16", "fp16"]
Level = Literal["O0", "O1", "O2", "O3"]
LEVELS: dict[Any, dict[str, Any]] = {
    "O0": {"compute": "fp32"},
    "O1": {"compute": "fp32", "operations": "fp16"},
    "O2": {"compute": "fp16"},
    "O3": {"compute": "fp16", "grad": "fp16", "master": "fp16", "buffers": "fp16", "loss_scale": 1.0},
}
"""The keys for which a level of ``amp`` stands."""


class LossScalePolicy(Policy):
    """Keys under ``precision.loss_scale``, which have an effect only with fp16.

    One number (``loss_scale: 128``) is a constant scale: ``{init_scale: 128, dynamic: false}``.
    """

    init_scale: PositiveFloat = 2.0**16
    """The scale of the first step."""
    dynamic: bool = True
    """False for a constant scale; ``precision.nonfinite`` then applies at an overflow."""
    growth_interval: PositiveInt = 1000
    """Clean steps in a row after which the scale grows."""
    growth_delay: NonNegativeInt = 0
    """Clean steps before the first growth after the start and after an overflow, in addition to ``growth_interval``
    (DeepSpeed: 1)."""
    growth_factor: float = Field(2.0, gt=1)
    """The factor of the scale when it grows. A power of two changes no digit of a gradient."""
    backoff_factor: float = Field(0.5, gt=0, lt=1)
    """The factor of the scale at an overflow."""
    hysteresis: PositiveInt = 2
    """The overflow count at which the scale falls; earlier overflows are tolerated. Growth restores the tolerance."""
    consecutive_hysteresis: bool = False
    """True if the overflows must be consecutive, because a clean step restores the tolerance too."""
    min_scale: PositiveFloat = 1.0
    """The smallest scale; ``precision.nonfinite`` applies at an overflow that would reduce the scale further."""

    @model_validator(mode="before")
    @classmethod
    def _one_number(cls, given: Any) -> Any:
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        return {"init_scale": given, "dynamic": False} if is_number else given


class BucketDtypes(NamedTuple):
    """The four dtypes of one bucket."""

    compute: torch.dtype
    grad: torch.dtype
    reduce: torch.dtype
    master: torch.dtype


class PrecisionPolicy(Policy):
    """Keys under ``precision:``; one word (``precision: bf16``) sets ``compute``; the other dtypes follow."""

    amp: Level | None = None
    """The level of mixed precision, under apex's names; an abbreviation for the keys of ``LEVELS``. O0: all in fp32.
    O1: fp32 weights, fp16 only for products (``operations``). O2: fp16 weights, norms with statistics in fp32, fp32
    masters. O3: all in fp16, the loss scale 1. ``compute: bf16`` together with a level (O1: ``operations: bf16``)
    replaces fp16 by bf16; the other keys of a level may not be given with other values."""
    compute: Name | None = None
    """The dtype of weights and activations; left out, the model's own dtypes stay."""
    operations: SixteenBits | None = None
    """The dtype of products and convolutions, operation by operation; softmax, norms, losses, sums and exponentials are
    then computed in fp32 (``precision/operations.py`` lists them), and all other operations in the dtype of their
    inputs."""
    grad: Name | None = None
    """The dtype of the gradient buffer; left out, fp32 for 16-bit compute, else as ``compute``."""
    reduce: Name | None = None
    """The dtype of gradients between ranks; left out, as ``grad``. A dtype wider than ``compute`` is the dtype of the
    sum: a 16-bit gradient to which nothing was added yet is sent in its own 16 bits, which are the same numbers."""
    master: Name | None = None
    """The dtype of the weights that the optimizer updates; left out, fp32 for 16-bit compute, else as ``compute``."""
    buffers: Name | None = None
    """The dtype of floating buffers; left out, the model's own dtypes stay."""
    linear: Literal["fp8"] | None = None
    """The dtype of the products of linear layers inside Units, by torchao; left out, as ``compute``. ``fp8`` chooses
    every plain ``nn.Linear`` in a Unit below the root, with inputs and outputs in multiples of 16, that ``fp8_skip``
    and ``keep_fp32`` do not name. Needs ``compute: bf16`` or ``fp32``."""
    fp8_recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    """The scales of numbers in fp8: one for a tensor, or one for each row (a power of two)."""
    fp8_skip: list[str] = Field(default_factory=lambda: ["*router*", "*.gate"])
    """Patterns of names of modules whose products ``linear: fp8`` leaves in ``compute``; a list replaces the default,
    which names routers."""
    fp8_emulate: bool = False
    """True to compute products of fp8 numbers in fp32, on a device without fp8 products or on a CPU: for tests, since
    it is slower than ``compute``."""
    keep_fp32: list[str] = Field(default_factory=list)
    """Patterns of names of parameters and buffers that stay in fp32 under 16 bits; ``class:LayerNorm`` matches those of
    all modules of this class or a derived one. Norms with wide running statistics stay in fp32 without being named.
    Under ``operations``, a module all of whose parameters are named computes its products in fp32 too."""
    narrow_reduce: list[str] = Field(default_factory=list)
    """Patterns, as in ``keep_fp32``, of parameters whose gradients are sent between ranks in the dtype of
    ``operations``."""
    loss_scale: LossScalePolicy = Field(default_factory=LossScalePolicy)
    """The loss scale of fp16."""
    nonfinite: Literal["raise", "skip"] = "raise"
    """The reaction to a step with NaN or infinity that no smaller loss scale would avoid (bf16, fp32, a scale that is
    constant or at its minimum, a loss of NaN): ``raise`` ends the run and names the first module with such an output,
    ``skip`` leaves the weights as they are and continues."""
    max_skipped_steps: PositiveInt = 100
    """Steps in a row that may be skipped; one more ends the run as ``nonfinite: raise`` does."""

    _kept: frozenset[str] = PrivateAttr(default=frozenset())
    _narrow: frozenset[str] = PrivateAttr(default=frozenset())
    _in_fp8: tuple[str, ...] = PrivateAttr(default=())
    _gathers_fp8: bool = PrivateAttr(default=False)

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"compute": given}
        level = LEVELS.get(given.get("amp"), {}) if isinstance(given, dict) else {}
        if not level:
            return given
        half = "operations" if "operations" in level else "compute"
        narrow = given.get(half) if given.get(half) == "bf16" else "fp16"
        filled = {key: narrow if value == "fp16" else value for key, value in level.items()}
        for key, value in filled.items():
            same = LossScalePolicy.model_validate if key == "loss_scale" else str
            if key in given and same(given[key]) != same(value):
                raise ValueError(
                    f"amp: {given['amp']} sets {key}: {value}, beside which {key}: {given[key]} is given; leave one "
                    "of them out"
                )
        return {**given, **filled}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.operations and self.compute not in (None, "fp32", self.operations):
            raise ValueError(
                f"operations: {self.operations} narrows products of fp32 weights, and compute is {self.compute}; set "
                f"compute: fp32 or {self.operations}, or leave operations out"
            )
        if self.linear and (self.operations or self.compute not in (None, "bf16", "fp32")):
            given = f"operations: {self.operations}" if self.operations else f"compute: {self.compute}"
            raise ValueError(
                f"linear: {self.linear} multiplies weights of bf16 or fp32, and {given} is given; set compute: bf16 "
                "and leave operations and amp out, or leave linear out"
            )
        if self.fp8_emulate and not self.linear:
            raise ValueError("fp8_emulate: no product is in fp8; set linear: fp8, or leave fp8_emulate out")
        if self.narrow_reduce and not self.operations:
            raise ValueError(
                "narrow_reduce: gradients travel in the dtype of operations, which is not set; set reduce"
            )
        return self

    def with_names(self, kept: Iterable[str] = (), narrow: Iterable[str] = ()) -> Self:
        """Return the same policy with the names ``kept`` added to ``keep_fp32``, and ``narrow`` to ``narrow_reduce``.

        Args:
            kept: Names of parameters and buffers that stay in fp32.
            narrow: Names of parameters whose gradients are sent in the dtype of ``operations``.
        """
        made = self.model_copy()
        made._kept, made._narrow = self._kept.union(kept), self._narrow.union(narrow)
        return made

    def with_fp8(self, layers: Iterable[str], gathers: bool) -> Self:
        """Return the same policy with the linear layers that compute in fp8.

        Args:
            layers: Names of the layers.
            gathers: True if weights that are cut are gathered in fp8.
        """
        made = self.model_copy()
        made._in_fp8, made._gathers_fp8 = tuple(layers), gathers
        return made

    @property
    def fp8_layers(self) -> tuple[str, ...]:
        """Names of the linear layers that compute in fp8, in order of registration."""
        return self._in_fp8

    def gather_dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype in which a cut weight is sent to the ranks that gather it; None: its compute dtype.

        Args:
            name: The parameter's fully qualified name.
        """
        layer, _, leaf = name.rpartition(".")
        gathers = self._gathers_fp8 and leaf == "weight" and layer in self._in_fp8
        return torch.float8_e4m3fn if gathers else None

    @property
    def product_dtype(self) -> torch.dtype | None:
        """The dtype of products; None if it follows from the model."""
        return DTYPES[self.operations] if self.operations else self.compute_dtype

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype to which floating inputs are cast; None if they are not cast."""
        return None if self.compute is None else DTYPES[self.compute]

    def dtypes(self, name: str, own: torch.dtype) -> BucketDtypes:
        """Return the dtypes of a parameter.

        Args:
            name: The parameter's fully qualified name.
            own: The parameter's dtype in the model.
        """
        if not own.is_floating_point:
            return BucketDtypes(own, own, own, own)
        compute = self.compute_dtype or own
        if compute in SIXTEEN_BITS and self.keeps(name):
            compute = torch.float32
        wide = torch.float32 if compute in SIXTEEN_BITS else compute
        grad = DTYPES[self.grad] if self.grad else wide
        reduce = DTYPES[self.reduce] if self.reduce else grad
        if self.operations and (name in self._narrow or _matches(name, self.narrow_reduce)):
            reduce = DTYPES[self.operations]
        return BucketDtypes(compute, grad, reduce, DTYPES[self.master] if self.master else wide)

    def buffer_dtype(self, name: str, own: torch.dtype) -> torch.dtype:
        """Return the dtype of a buffer.

        Args:
            name: The buffer's fully qualified name.
            own: The buffer's dtype in the model.
        """
        dtype = DTYPES[self.buffers] if self.buffers and own.is_floating_point else own
        return torch.float32 if dtype in SIXTEEN_BITS and self.keeps(name) else dtype

    def keeps(self, name: str) -> bool:
        """Return whether the parameter or buffer ``name`` stays in fp32."""
        return name in self._kept or _matches(name, self.keep_fp32)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
