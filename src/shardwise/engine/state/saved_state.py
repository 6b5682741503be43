"""The schema of a step's ``trainer.json``, which comes from a file and may come from a stranger.

    {"engine": {"step", "reference", "loss_scale", "optimizer": {"common", "exceptions"}, "layout", ...},
     "user":   the mapping that ``Engine.save`` was given as ``trainer``}

Keys that this version does not define are kept as they are.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from shardwise.base.strict_json import Count, StrictModel, validated

Scalars = dict[str, float]
"""Numbers of an optimizer that are the same for all elements of a parameter."""


_Pair = Annotated[list[float], Field(min_length=2, max_length=2)]
_Best = list[_Pair] | _Pair
"""Pairs; or a single pair, as versions wrote it that kept one step."""


def best_steps(saved: Any) -> list[tuple[int, float]]:
    """Return (step, score) of the steps that were saved with a score, best first, from the field ``best``."""
    pairs = [] if not saved else saved if isinstance(saved[0], list | tuple) else [saved]
    return [(int(step), float(score)) for step, score in pairs]


class OptimizerState(StrictModel):
    """Step counts and other single numbers of the optimizer."""

    common: Scalars = {}
    """Numbers of all parameters that are not in ``exceptions``."""
    exceptions: dict[str, Scalars] = {}
    """Numbers of other parameters, by name."""


class LossScaleState(StrictModel):
    """State of the loss scale under fp16."""

    scale: Annotated[float, Field(gt=0)]
    clean_steps: int
    overflows_left: int


class SavedLayout(StrictModel):
    """The arrangement of the ranks that saved the step; information for people only."""

    mesh: Annotated[str, Field(max_length=200)] = ""
    zero_stage: int = 0


class EngineState(StrictModel):
    """The engine's part of the file."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

    step: Count | None = None
    groups: list[dict[str, Any]] | None = None
    """Numbers of the groups of a user's optimizer."""
    best: _Best | None = None
    """(step, score) of the steps that were saved with a score, best first."""
    reference: float = 0.0
    loss_scale: LossScaleState | None = None
    optimizer: OptimizerState = OptimizerState()
    layout: SavedLayout | None = None
    click_model: dict[str, Any] | None = None
    """Description of a built-in click-through model, for serving; None for other models."""


class SavedState(StrictModel):
    """The contents of the whole file."""

    engine: EngineState = EngineState()
    user: dict[str, Any] = {}

    @classmethod
    def of(cls, trainer: Mapping[str, Any] | None, where: object) -> "SavedState":
        """Check the contents of a file.

        Args:
            trainer: The contents as read; None for an empty file.
            where: The folder of the step, for errors.

        Raises:
            DamagedError: if a key or value does not fit the schema; the error names the key.
        """
        return validated(cls, dict(trainer or {}), f"{where}/trainer.json")
