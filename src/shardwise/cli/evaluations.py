"""What the evaluations of a run say about it: whether they still get better, and what a step is worth."""

import logging
from typing import Any

from shardwise.observe.early_stop import EarlyStop, EarlyStopPolicy

_log = logging.getLogger(__name__)


class Evaluations:
    """All ranks see the same values, so all decide alike. ``stop``: when the run ends early; None: never."""

    def __init__(self, stop: EarlyStopPolicy | None, higher_is_better: bool):
        self.step: int | None = None
        """That was evaluated last."""
        self._value: float | None = None
        """What that evaluation gave, if it is of this run."""
        self._stop = None if stop is None else EarlyStop(stop.patience, stop.min_delta, higher_is_better)

    def judge(self, step: int, value: float) -> None:
        """Take the value of the evaluation after ``step``."""
        stop = self._stop
        self.step, self._value = step, value
        if stop is not None and stop.update(step, value):
            _log.info(
                "the last %d evaluations were no better than %.5f after step %d: the run ends",
                stop.waited,
                stop.best,
                stop.best_step,
            )

    @property
    def is_over(self) -> bool:
        """True where the run is to end."""
        return self._stop is not None and self._stop.is_over

    def value_of(self, step: int) -> float | None:
        """What the evaluation after ``step`` gave; None where it was not the last one."""
        return self._value if self.step == step else None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return {} if self._stop is None else {"early_stop": self._stop.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        if self._stop is not None and "early_stop" in state:
            self._stop.load_state(state["early_stop"])
