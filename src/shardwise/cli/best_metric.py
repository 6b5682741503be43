"""The metric of an evaluation by which a run keeps its best steps (``checkpoint.best_metric``)."""

import logging
import math
from collections.abc import Mapping
from typing import NamedTuple

from shardwise.base.errors import UsageError
from shardwise.base.policy import nearest
from shardwise.checkpoint.policy import HIGHER_IS_BETTER, CheckpointPolicy

_log = logging.getLogger(__name__)


class BestMetric(NamedTuple):
    """A metric, and which of its values are better."""

    name: str
    higher_is_better: bool

    @classmethod
    def of(cls, policy: CheckpointPolicy, default: str) -> "BestMetric":
        """Return the metric that a configuration names.

        Args:
            policy: The keys under ``checkpoint:``.
            default: Name of the metric if the configuration names none.
        """
        name = policy.best_metric or default
        known = HIGHER_IS_BETTER.get(name, False)
        return cls(name, known if policy.best_is is None else policy.best_is == "higher")

    def value_in(self, results: Mapping[str, float], step: int) -> float:
        """Return the metric's value in the results of the evaluation after ``step``; a warning is logged for NaN.

        Raises:
            UsageError: if the evaluation has no such metric.
        """
        if self.name not in results:
            raise UsageError(
                f"checkpoint.best_metric: the evaluation has no metric {self.name!r}"
                f"{nearest(self.name, results)}; it has {', '.join(results)}"
            )
        value = results[self.name]
        if not math.isfinite(value):
            _log.warning(
                "the evaluation after step %d has the %s %s, so this step is not one of the best",
                step,
                self.name,
                value,
            )
        return value
