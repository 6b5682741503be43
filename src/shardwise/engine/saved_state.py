"""What ``trainer.json`` of a step holds, as a schema: it comes from a file, and may come from a stranger.

    {"engine": {"step", "reference", "loss_scale", "optimizer": {"common", "exceptions"}, "layout", ...},
     "user":   what ``Engine.save`` was given as ``trainer``}

Keys that this version does not know are kept as they are.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from shardwise.plan.strict_json import Count, StrictModel, validated

Scalars = dict[str, float]
"""Numbers of an optimizer that are the same for a whole parameter."""


class OptimizerState(StrictModel):
    """Step counts and the like."""

    common: Scalars = {}
    """Of almost every parameter."""
    exceptions: dict[str, Scalars] = {}
    """By name of the parameter."""


class LossScaleState(StrictModel):
    """Of fp16."""

    scale: Annotated[float, Field(gt=0)]
    clean_steps: int
    overflows_left: int


class Layout(StrictModel):
    """How the ranks that saved were arranged; for people."""

    mesh: Annotated[str, Field(max_length=200)] = ""
    zero_stage: int = 0


class EngineState(StrictModel):
    """The engine's own part."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

    step: Count | None = None
    groups: list[dict[str, Any]] | None = None
    """Numbers of a given optimizer's groups."""
    reference: float = 0.0
    loss_scale: LossScaleState | None = None
    optimizer: OptimizerState = OptimizerState()
    layout: Layout | None = None


class SavedState(StrictModel):
    """The whole file."""

    engine: EngineState = EngineState()
    user: dict[str, Any] = {}

    @classmethod
    def of(cls, trainer: Mapping[str, Any] | None, where: object) -> "SavedState":
        """Check what was read. Errors: DamagedError names the key."""
        return validated(cls, dict(trainer or {}), f"{where}/trainer.json")
