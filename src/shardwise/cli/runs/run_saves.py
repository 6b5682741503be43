"""The saved steps of a run: no step is saved twice, and a save that fails does not end the run at once."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.base.errors import CheckpointError
from shardwise.engine.engine import Engine

_log = logging.getLogger(__name__)


class RunSaves:
    """Saves of a run into ``folder``.

    Args:
        engine: The engine.
        folder: Folder of the steps.
        content: Function that returns the run's own content of a step, as JSON values; collective.
        higher_is_better: True if a larger score is better.
    """

    def __init__(
        self, engine: Engine, folder: Path, content: Callable[[], dict[str, Any]], higher_is_better: bool
    ):
        self._engine = engine
        self._folder = folder
        self._content = content
        self._higher_is_better = higher_is_better
        self._failed = 0
        """Failures in a row, of saves that training waited for."""
        self.step: int | None = None
        """Newest step in the folder."""
        self.restored: int | None = None
        """Step that was loaded after the last alarm of ``guard``."""

    def save(self, score: float | None, is_last: bool = False) -> None:
        """Save this step, unless it is in the folder already.

        A save that fails does not end the run, unless ``checkpoint.tolerate_failures`` saves have failed in a row.

        Args:
            score: Value of an evaluation of this step, if the best step is kept.
            is_last: True for the last save of the run, which must not fail.

        Raises:
            CheckpointError: if the save fails and may not fail.
        """
        if self.step == self._engine.step_count:
            return
        try:
            self._engine.save(
                self._folder, self._content(), score=score, higher_is_better=self._higher_is_better
            )
        except CheckpointError as error:
            policy = self._engine.config.checkpoint
            self._failed += 1
            if is_last or policy.asynchronous or self._failed > policy.tolerate_failures:
                raise  # saves in the background are counted by Checkpoints
            _log.warning("%s; training continues and the next save tries again", error)
            return
        self._failed = 0
        self.step = self._engine.step_count

    def finish(self, score: float | None) -> None:
        """Wait for the last save, which must not fail: one that failed is tried once more. Collective.

        Raises:
            CheckpointError: if the save fails again.
        """
        try:
            self._engine.wait_for_save()
        except CheckpointError as error:
            _log.warning("the last save of the run is tried once more: %s", error)
            self.step = None
        self.save(score, is_last=True)
        self._engine.wait_for_save()
