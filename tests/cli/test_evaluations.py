"""Evaluations of a run: keys that cannot act in so few steps, and the end when nothing gets better."""

from typing import Any

import pytest

from shardwise.cli.evaluations import RunEvaluations, notes_on
from shardwise.config.run import RunConfig
from shardwise.observe.early_stop import EarlyStopPolicy


def config(**keys: Any) -> RunConfig:
    given: dict[str, Any] = {"train": {"steps": 10, "eval_every": 5}, "checkpoint": {"every": 5}}
    for path, value in keys.items():
        block, name = path.split("__")
        given[block][name] = value
    return RunConfig.parse(given)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, []),
        ({"train__eval_every": 10, "checkpoint__every": 10}, []),
        ({"train__eval_every": 11}, ["train.eval_every is 11 and the run has 10 steps: it evaluates once"]),
        ({"checkpoint__every": 11}, ["checkpoint.every is 11 and the run has 10 steps: it saves once"]),
        ({"train__early_stop": {"patience": 1}}, []),
        ({"train__early_stop": {"patience": 2}}, ["train.early_stop waits for 2 evaluations"]),
        ({"train__eval_every": 4, "train__early_stop": {"patience": 2}}, []),
    ],
)
def test_a_key_beyond_the_steps_of_a_run_is_noted(keys: dict[str, Any], said: list[str]) -> None:
    found = notes_on(config(**keys))
    assert len(found) == len(said) and all(a.startswith(b) for a, b in zip(found, said, strict=True)), found


def test_a_run_ends_after_as_many_evaluations_without_a_better_one() -> None:
    evaluations = RunEvaluations(EarlyStopPolicy(patience=2), higher_is_better=False)
    for step, value in enumerate([3.0, 2.0, 2.5]):
        evaluations.judge(step, value)
        assert not evaluations.is_over
    resumed = RunEvaluations(EarlyStopPolicy(patience=2), higher_is_better=False)
    resumed.load_state(evaluations.state())
    resumed.judge(3, 2.1)
    assert resumed.is_over and not evaluations.is_over


def test_without_conditions_a_run_never_ends_early() -> None:
    evaluations = RunEvaluations(None, higher_is_better=True)
    for step in range(5):
        evaluations.judge(step, -float(step))
    assert not evaluations.is_over and evaluations.state() == {}


def test_the_score_of_a_step_is_that_of_the_last_evaluation_alone() -> None:
    evaluations = RunEvaluations(None, higher_is_better=True)
    assert evaluations.score_of(1) is None
    evaluations.judge(1, 0.5, 7.0)
    evaluations.judge(2, 0.25, 8.0)
    assert (evaluations.score_of(1), evaluations.score_of(2)) == (None, 8.0)
    evaluations.judge(3, 0.25)
    assert evaluations.score_of(3) is None
