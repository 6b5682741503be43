"""Saves: the steps that one engine saves and loads, and the best of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.state import saving
from shardwise.engine.state.loaders import EngineLoaders


class StepSaves:
    """The saving and loading of one engine's steps."""

    def __init__(self, parts: EngineParts, loaders: EngineLoaders) -> None:
        self._parts = parts
        self._loaders = loaders
        self.not_loaded: list[str] = []
        """Names of tensors that the last load left at their start values; see ``Engine.not_loaded``."""

    def save(
        self,
        directory: str | Path,
        trainer: Mapping[str, Any] | None,
        score: float | None,
        higher_is_better: bool,
        **options: Any,
    ) -> None:
        """Save a step, and record it as the best if its score is. Implements ``Engine.save``."""
        if score is not None and self.is_best(score, higher_is_better):
            self._parts.progress.best = (self._parts.progress.step_count, float(score))
        saving.save(self._parts, self._loaders, Path(directory), dict(trainer or {}), **options)

    def is_best(self, score: float, higher_is_better: bool) -> bool:
        """Return whether a score is better than all scores before. Implements ``Engine.is_best``."""
        best = self._parts.progress.best
        if best is None:
            return score == score
        return score > best[1] if higher_is_better else score < best[1]

    def load(
        self,
        directory: str | Path,
        weights_only: bool,
        missing: Sequence[str],
        unexpected: Sequence[str],
        required: bool | None,
    ) -> dict[str, Any] | None:
        """Load a step, and return its user state. Implements ``Engine.load``."""
        loaded = saving.load(
            self._parts, self._loaders, Path(directory), weights_only, missing, unexpected, required
        )
        if loaded is None:
            return None
        self.not_loaded = loaded.not_loaded
        return loaded.user
