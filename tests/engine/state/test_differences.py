"""Differences between a saved step and a model, and those that are allowed."""

import pytest

from shardwise.base.errors import MismatchError, UsageError
from shardwise.engine.state.differences import StepDifferences


def test_what_is_allowed_is_told_and_no_error() -> None:
    differences = StepDifferences(missing=["head.*"], unexpected=["old"])
    assert differences.lacks("weight", "head.bias", "is not there") and differences.lacks(
        "weight", "b", "is [2]", "head.b"
    )
    differences.holds("weight", "old", [3])
    differences.grown.append("users")
    differences.check("step 3")
    assert differences.kept == {"head.bias": "is not there", "b": "is [2]"} and differences.passed_over == [
        "old"
    ]
    assert differences.lines() == [
        "not loaded, stays as it starts with fresh optimizer state: head.bias (is not there), b (is [2])",
        "not loaded, starts fresh: users",
        "passed over, not in this model: old",
    ]
    assert StepDifferences().lines() == []


def test_what_is_not_allowed_is_named_with_what_would_allow_it() -> None:
    differences = StepDifferences(missing=["head.*"])
    assert not differences.lacks("weight", "body", "is not there")
    differences.holds("buffer", "old", [3, 2])
    with pytest.raises(MismatchError) as caught:
        differences.check("step 3")
    assert str(caught.value).startswith(
        "step 3: a checkpoint of another model: weight 'body' is not there; buffer 'old' (3, 2) is not in this model. "
    )
    assert "with missing=['body'], unexpected=['old'] what is missing" in str(caught.value)
    assert (caught.value.missing, caught.value.unexpected) == (("body",), ("old",))


def test_an_error_names_five_and_counts_the_rest() -> None:
    differences = StepDifferences()
    for number in range(7):
        differences.fault(f"fault {number}")
    with pytest.raises(
        MismatchError, match=r"fault 4; and 2 more\. Load it into the model that wrote it"
    ) as caught:
        differences.check("step 3")
    assert "fault 5" not in str(caught.value) and "missing=" not in str(caught.value)


def test_a_pattern_that_matches_no_name_is_an_error() -> None:
    ours, theirs = ["body.weight", "head.bias"], ["old.weight"]
    StepDifferences(["head.*"], ["old*"]).check_patterns(ours, theirs, "step 3")
    with pytest.raises(
        MismatchError, match="missing: pattern 'haed.bias' matches no name of the model.*head.bias"
    ):
        StepDifferences(["haed.bias"]).check_patterns(ours, theirs, "step 3")
    with pytest.raises(MismatchError, match=r"unexpected: pattern 'head\.\*' matches no name in step 3"):
        StepDifferences(unexpected=["head.*"]).check_patterns(ours, theirs, "step 3")
    many = [f"layer.{number:02}" for number in range(20)]
    with pytest.raises(MismatchError, match=r"there are layer.00, .*layer.11 \.\.\."):
        StepDifferences(["zzz"]).check_patterns(many, [], "step 3")


def test_a_pattern_alone_is_no_list() -> None:
    with pytest.raises(
        UsageError, match=r"missing: expected a list of patterns, given 'a'; write missing=\['a'\]"
    ):
        StepDifferences(missing="a")
