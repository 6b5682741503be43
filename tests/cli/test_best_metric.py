"""The metric of an evaluation by which the best steps are kept: its name, its direction, and results without it."""

import logging

import pytest

from shardwise.base.errors import UsageError
from shardwise.checkpoint.policy import CheckpointPolicy
from shardwise.cli.best_metric import BestMetric


def test_the_direction_follows_from_the_name_unless_it_is_given() -> None:
    assert BestMetric.of(CheckpointPolicy(keep_best=2), "auc") == ("auc", True)
    assert BestMetric.of(CheckpointPolicy(keep_best=2), "validation_loss") == ("validation_loss", False)
    policy = CheckpointPolicy(keep_best=2, best_metric="mine", best_is="higher")
    assert BestMetric.of(policy, "auc") == ("mine", True)


def test_a_metric_that_no_evaluation_has_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="no metric 'acu'.*auc"):
        BestMetric("acu", True).value_in({"auc": 0.5, "loss": 1.0}, 3)


def test_an_undefined_value_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert BestMetric("auc", True).value_in({"auc": float("nan")}, 3) != 0
    assert "step 3" in caplog.text and "not one of the best" in caplog.text
