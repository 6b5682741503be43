"""The saved steps of a run: none twice, and a save that fails does not end the run at once."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.engine.engine import Engine
from shardwise.plan.errors import CheckpointError

_log = logging.getLogger(__name__)


class RunSaves:
    """Into ``folder``. ``content``: what a step keeps of the run beside the engine's state, as JSON; collective."""

    def __init__(
        self, engine: Engine, folder: Path, content: Callable[[], dict[str, Any]], higher_is_better: bool
    ):
        self._engine = engine
        self._folder = folder
        self._content = content
        self._higher_is_better = higher_is_better
        self._failed = 0
        """In a row, of saves that training waited for."""
        self.step: int | None = None
        """The newest in the folder."""

    def save(self, score: float | None, is_last: bool = False) -> None:
        """Save this step, unless it lies in the folder already. A save that fails does not end the run, unless
        ``checkpoint.tolerate_failures`` of them have failed in a row. Errors: CheckpointError.

        score   what an evaluation of this step gave, where the best one is to be kept
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
                raise  # behind training they are counted where they fail
            _log.warning("%s; training continues and the next save tries again", error)
            return
        self._failed = 0
        self.step = self._engine.step_count

    def finish(self, score: float | None) -> None:
        """Wait for the last save, which a run cannot do without: one that failed is tried once more. Collective."""
        try:
            self._engine.wait_for_save()
        except CheckpointError as error:
            _log.warning("the last save of the run is tried once more: %s", error)
            self.step = None
        self.save(score, is_last=True)
        self._engine.wait_for_save()
