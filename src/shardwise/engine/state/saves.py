"""Saves: the steps that one engine saves and loads, and the best of them."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.base.errors import DivergedError
from shardwise.checkpoint.steps import folder_of, newest_until, step_of
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.state import saving
from shardwise.engine.state.loaders import EngineLoaders
from shardwise.engine.state.table_increments import TableIncrements
from shardwise.engine.state.vector_export import VectorExport

_SPARE = 8
"""Scored steps that are remembered beside the best, which one of them follows if its save fails."""


class StepSaves:
    """The saving and loading of one engine's steps."""

    def __init__(self, parts: EngineParts, loaders: EngineLoaders) -> None:
        self._parts = parts
        self._loaders = loaders
        self._increments = TableIncrements(parts)
        self.exports = VectorExport(parts)
        """Exports of vectors for serving."""
        self.not_loaded: list[str] = []
        """Names of tensors that the last load left at their start values; see ``Engine.not_loaded``."""
        self._folder: Path | None = None
        """Folder of steps that was last saved to or loaded from."""

    def save(
        self,
        directory: str | Path,
        trainer: Mapping[str, Any] | None,
        score: float | None,
        higher_is_better: bool,
        **options: Any,
    ) -> None:
        """Save a step, and record its score. Implements ``Engine.save``."""
        progress, before = self._parts.progress, self._parts.progress.best
        if score is not None:
            progress.best = self._ranked(float(score), higher_is_better)
        self._folder = Path(directory)
        try:
            saving.save(
                self._parts, self._loaders, self._increments, Path(directory), dict(trainer or {}), **options
            )
        except BaseException:
            progress.best = before
            raise

    def is_best(self, score: float, higher_is_better: bool) -> bool:
        """Return whether a step with this score would be kept for it. Implements ``Engine.is_best``."""
        ranked = self._ranked(float(score), higher_is_better)
        return (self._parts.progress.step_count, score) in ranked[: self._most]

    @property
    def _most(self) -> int:
        """Number of the best steps that are kept."""
        return max(self._parts.config.checkpoint.keep_best, 1)

    def _ranked(self, score: float, higher_is_better: bool) -> list[tuple[int, float]]:
        """Return the scored steps with this step among them, best first; of equal scores, the earlier step first.

        A score that is no finite number is left out.
        """
        progress = self._parts.progress
        others = [each for each in progress.best if each[0] != progress.step_count]
        if not math.isfinite(score):
            return others
        sign = -1.0 if higher_is_better else 1.0
        ranked = sorted([*others, (progress.step_count, score)], key=lambda each: (sign * each[1], each[0]))
        return ranked[: self._most + _SPARE]

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
        self.exports.forget()
        self._increments.forget()
        self.not_loaded = loaded.not_loaded
        self._folder = folder_of(Path(directory))
        return loaded.user

    def restore(self, error: DivergedError) -> DivergedError:
        """Load the newest saved step that was good, if ``guard.on_alarm`` says so. Collective.

        Returns:
            The error, which says what was loaded.
        """
        guard, folder, good = self._parts.config.guard, self._folder, error.last_good_step
        if guard is None or guard.on_alarm != "restore":
            return error
        if folder is None or good is None:
            why = "no comparison was good yet" if folder is not None else "nothing was saved or loaded yet"
            return _with(error, f"{error}. Nothing was restored: {why}")
        self._parts.folders.wait()
        # One rank decides, because files may appear at other times on other hosts.
        name = self._parts.folders.exchange("the step to restore", newest_until(folder, good))[0]
        if not name:
            return _with(error, f"{error}. Nothing was restored: {folder} has no step that old")
        newest = step_of(folder, name)
        state = self.load(newest, False, (), (), None)
        told = _with(error, f"{error}. The engine has loaded {newest}, to go on from there")
        told.restored_step, told.trainer = self._parts.progress.step_count, state
        return told


def _with(error: DivergedError, message: str) -> DivergedError:
    told = DivergedError(message)
    told.last_good_step = error.last_good_step
    return told
