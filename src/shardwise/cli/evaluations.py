"""Evaluations of a run: whether they still improve, and the score of a step."""

import logging
from typing import Any

from shardwise.base.words import counted
from shardwise.config.run import RunConfig
from shardwise.observe.early_stop import EarlyStop, EarlyStopPolicy

_log = logging.getLogger(__name__)


def notes_on(config: RunConfig) -> list[str]:
    """Return a sentence for each key whose number of steps is larger than that of the run."""
    train, every, said = config.train, config.checkpoint.every, []
    run = f"the run has {counted(train.steps, 'step')}"
    evaluations = (
        train.steps // train.eval_every + bool(train.steps % train.eval_every) if train.eval_every else 1
    )
    if train.eval_every and train.eval_every > train.steps:
        said.append(
            f"train.eval_every is {train.eval_every} and {run}: it evaluates once, after the last one"
        )
    if every is not None and every > train.steps:
        said.append(f"checkpoint.every is {every} and {run}: it saves once, after the last one")
    stop = train.early_stop
    if stop is not None and evaluations <= stop.patience:
        said.append(
            f"train.early_stop waits for {counted(stop.patience, 'evaluation')} that are no better, after the first, "
            f"and {run} with {counted(evaluations, 'evaluation')}: it cannot act; lower train.eval_every"
        )
    return said


class RunEvaluations:
    """Results of a run's evaluations. All ranks get the same values, so all decide the same.

    Args:
        stop: Conditions for ending the run early; None: it never ends early.
        higher_is_better: True if a larger value is better.
    """

    def __init__(self, stop: EarlyStopPolicy | None, higher_is_better: bool):
        self.step: int | None = None
        """Step that was evaluated last."""
        self._score: float | None = None
        """Score of the step that was evaluated last, if this process made the evaluation and best steps are kept."""
        self._stop = None if stop is None else EarlyStop(stop.patience, stop.min_delta, higher_is_better)

    def judge(self, step: int, value: float, score: float | None = None) -> None:
        """Record the evaluation after ``step``.

        Args:
            step: Number of the step.
            value: Value that decides whether the run ends early.
            score: Value that decides whether the step is one of the best; None: no such steps are kept.
        """
        stop = self._stop
        self.step, self._score = step, score
        if stop is not None and stop.update(step, value):
            _log.info(
                "the last %d evaluations were no better than %.5f after step %d: the run ends",
                stop.waited,
                stop.best,
                stop.best_step,
            )

    @property
    def is_over(self) -> bool:
        """True if the run should end."""
        return self._stop is not None and self._stop.is_over

    def score_of(self, step: int) -> float | None:
        """Return the score of ``step``; None if it has none, or another step was evaluated last."""
        return self._score if self.step == step else None

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {} if self._stop is None else {"early_stop": self._stop.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state()`` returned."""
        if self._stop is not None and "early_stop" in state:
            self._stop.load_state(state["early_stop"])
