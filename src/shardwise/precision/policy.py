"""PrecisionPolicy: which dtype each buffer has.

    compute   weights and activations              grad     the buffer in which gradients accumulate
    master    what the optimizer updates           reduce   gradients on the wire

The 16-bit contract: floating inputs are cast to ``compute`` at the root of the model, the loss is computed in fp32, and
masters, moments and accumulated gradients are fp32 unless asked otherwise (arXiv:1710.03740).
"""

from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, PositiveInt, model_validator

from shardwise.plan.policy import Policy

Name = Literal["fp64", "fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class LossScalePolicy(Policy):
    """Keys under ``precision.loss_scale``; they act with fp16 compute alone."""

    init_scale: float = 2.0**16
    """Scale of the first step."""
    growth_interval: PositiveInt = 1000
    """Clean steps after which the scale doubles."""
    hysteresis: PositiveInt = 2
    """Overflows that are tolerated before the scale halves."""
    min_scale: float = 1.0
    """Smallest scale; an overflow at it ends the run and names the first module with a non-finite output."""


class Dtypes(NamedTuple):
    """The dtypes of one bucket."""

    compute: torch.dtype
    grad: torch.dtype
    reduce: torch.dtype
    master: torch.dtype


class PrecisionPolicy(Policy):
    """Keys under ``precision:``; one word (``precision: bf16``) sets ``compute`` and leaves the others to follow."""

    compute: Name | None = None
    """Dtype of weights and activations; left out, the model's own dtypes stay."""
    grad: Name | None = None
    """Dtype of the gradient buffer; left out, fp32 for 16-bit compute, else as ``compute``."""
    reduce: Name | None = None
    """Dtype of gradients between ranks; left out, as ``grad``. A wider one than ``compute`` is the dtype of the sum: a
    16-bit gradient to which nothing was added yet travels in its own 16 bits, which are the same numbers."""
    master: Name | None = None
    """Dtype of the weights that the optimizer updates; left out, fp32 for 16-bit compute, else as ``compute``."""
    keep_fp32: list[str] = Field(default_factory=list)
    """Patterns of parameter names that stay in fp32 under 16-bit compute. Norms with running statistics do so
    without being named."""
    loss_scale: LossScalePolicy = Field(default_factory=LossScalePolicy)
    """Dynamic loss scale of fp16."""

    @model_validator(mode="before")
    @classmethod
    def _one_word(cls, given: Any) -> Any:
        return {"compute": given} if isinstance(given, str) else given

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype to which floating inputs are cast; None where they stay."""
        return None if self.compute is None else DTYPES[self.compute]

    def dtypes(self, name: str, own: torch.dtype) -> Dtypes:
        """Dtypes of the parameter ``name`` whose dtype in the model is ``own``."""
        if not own.is_floating_point:
            return Dtypes(own, own, own, own)
        compute = self.compute_dtype or own
        if compute in SIXTEEN_BITS and any(fnmatchcase(name, pattern) for pattern in self.keep_fp32):
            compute = torch.float32
        wide = torch.float32 if compute in SIXTEEN_BITS else compute
        grad = DTYPES[self.grad] if self.grad else wide
        return Dtypes(
            compute,
            grad,
            DTYPES[self.reduce] if self.reduce else grad,
            DTYPES[self.master] if self.master else wide,
        )
