"""Early stop: end a run when its evaluations no longer improve.

    >>> stop = EarlyStop(patience=3, higher_is_better=True)           # AUC
    >>> for step in ...:
    ...     if stop.update(step, score.auc):
    ...         break

All ranks decide the same if every rank passes the same value, as ``ClickMetrics.result`` returns it.
"""

import math
from dataclasses import dataclass
from typing import Any

from pydantic import NonNegativeFloat, PositiveInt

from shardwise.base.policy import Policy


class EarlyStopPolicy(Policy):
    """Keys under ``train.early_stop:``, for the AUC of a click-through model or the validation loss of any other."""

    patience: PositiveInt = 3
    """Evaluations in a row that may be no better than the best before them."""
    min_delta: NonNegativeFloat = 0.0
    """Least improvement: a value counts as better if it is better by more than this."""


@dataclass
class EarlyStop:
    """Counter of the evaluations since the best evaluation."""

    patience: int
    """Evaluations in a row that may be no better than the best before them."""
    min_delta: float = 0.0
    """Least improvement: a value counts as better if it is better by more than this."""
    higher_is_better: bool = True
    best: float = math.nan
    """The best value so far; NaN before the first."""
    best_step: int = -1
    """Step of the best value; -1 before the first."""
    waited: int = 0

    def update(self, step: int, value: float) -> bool:
        """Record the value of the evaluation after ``step``. A NaN is never better.

        Args:
            step: Step of the evaluation.
            value: The measure.

        Returns:
            True if the run should end.
        """
        gain = value - self.best if self.higher_is_better else self.best - value
        if gain > self.min_delta or (math.isnan(self.best) and not math.isnan(value)):
            self.best, self.best_step, self.waited = value, step, 0
        else:
            self.waited += 1
        return self.is_over

    @property
    def is_over(self) -> bool:
        """True if the run should end."""
        return self.waited >= self.patience

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        best = None if math.isnan(self.best) else self.best
        return {"best": best, "best_step": self.best_step, "waited": self.waited}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state()`` returned."""
        self.best = math.nan if state["best"] is None else float(state["best"])
        self.best_step, self.waited = int(state["best_step"]), int(state["waited"])
