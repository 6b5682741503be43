"""Limits, the causal order, and tensors that are not compared."""

from typing import Any

import torch

from shardwise.verify.compare import (
    compared,
    hold_to_bits,
    hold_to_limit,
    row_bits,
    state_bits,
)
from shardwise.verify.reference import Reference, Truth

ONES = torch.ones(4, dtype=torch.float64)


def reference() -> Reference:
    gradients = {"a.weight": ONES, "b.weight": 2 * ONES}
    truth = Truth(1.0, 3.0, gradients, gradients, gradients)
    return Reference(gradients, [truth], [{"a.weight exp_avg": ONES}], order=["a", "b"])


def layout(first: int = 0, **changes: object) -> dict[str, Any]:
    same = {"a.weight": ONES, "b.weight": 2 * ONES}
    step = {
        "loss": 1.0,
        "norm": 3.0,
        "gradients": same,
        "weights": same,
        "moments": {"a.weight exp_avg": ONES},
    }
    return {"first": first, "start": same, "steps": [step | changes]}


def test_equal_numbers_pass_and_are_counted() -> None:
    figures = hold_to_limit(compared(layout(), reference(), None, {}))
    assert not figures.wrong
    assert (figures.compared["gradients"], figures.compared["weights"], figures.compared["loss"]) == (2, 4, 1)


def test_the_last_module_is_wrong_before_the_first() -> None:
    wrong = {"a.weight": 3 * ONES, "b.weight": 3 * ONES}
    figures = hold_to_limit(compared(layout(gradients=wrong), reference(), None, {}))
    assert [each.name for each in figures.wrong] == ["b.weight", "a.weight"]


def wrong_names(**changes: object) -> list[str]:
    figures = hold_to_limit(compared(layout(**changes), reference(), None, {}))
    return [each.name for each in figures.wrong]


def test_a_tensor_that_one_side_lacks_is_wrong() -> None:
    assert wrong_names(gradients={"b.weight": 2 * ONES}) == ["a.weight, which the layout does not have"]
    more = {"a.weight": ONES, "b.weight": 2 * ONES, "c": ONES}
    for kind in ("gradients", "weights"):
        assert wrong_names(**{kind: more}) == ["c, which one process does not have"]
    assert wrong_names(moments={}) == ["a.weight exp_avg, which the layout does not have"]
    moments = {"a.weight exp_avg": ONES, "b.weight exp_avg": ONES}
    assert wrong_names(moments=moments) == ["b.weight exp_avg, which one process does not have"]
    # A parameter that no pass has used has zeros here, and nothing in torch's optimizer.
    assert not wrong_names(moments=moments | {"b.weight exp_avg": 0 * ONES})


def test_statistics_of_each_ranks_own_samples_are_declared() -> None:
    declared: dict[str, str] = {}
    found = layout(weights={"a.weight": ONES, "b.weight": 2 * ONES, "running": ONES})
    found |= {"start": {**found["start"], "running": ONES}, "per_rank": ["running", "not saved"]}
    assert not hold_to_limit(compared(found, reference(), None, {}, declared=declared)).wrong
    assert list(declared) == ["running"]


def test_the_sign_of_a_gradient_of_rounding_decides_no_update() -> None:
    """Adam makes a whole step of a gradient that is zero but for rounding."""
    tiny = torch.tensor([1.0, 1.0, 1.0, 1e-20], dtype=torch.float64)
    weights = {"a.weight": ONES - 0.01 * tiny.sign(), "b.weight": 2 * ONES}
    truth = reference()
    truth.steps = [
        truth.steps[0]._replace(gradients={"a.weight": tiny, "b.weight": 2 * ONES}, weights=weights)
    ]
    truth.rates = [[0.01]]
    other = weights | {"a.weight": ONES - 0.01 * tiny.sign() * torch.tensor([1.0, 1.0, 1.0, -1.0])}
    gradients = {"a.weight": tiny * torch.tensor([1.0, 1.0, 1.0, -1.0]), "b.weight": 2 * ONES}
    found = layout(gradients=gradients, weights=other)
    assert not hold_to_limit(compared(found, truth, None, {})).wrong
    truth.rates = [[1e-4]]  # a step that is larger than the learning rate is no rounding
    assert hold_to_limit(compared(found, truth, None, {})).wrong


def test_step_counts_and_rates_are_compared() -> None:
    truth = reference()
    truth.counts, truth.rates = [{"a.weight": 1.0}], [[0.5]]
    for count, rate, wrong in ((1.0, 0.5, []), (2.0, 0.5, ["step count"]), (1.0, 0.25, ["rate"])):
        by_rank = [{"counts": [{"a.weight": [1.0, count]}], "rows": []}]
        found = hold_to_limit(compared(layout(lr=rate), truth, None, {}, by_rank))
        assert [each.what for each in found.wrong] == wrong


def table(keys: list[int], first: int = 0, columns: int = 2, value: float = 1.0) -> dict[str, Any]:
    weights = value * torch.arange(1.0, 1 + 4 * columns).view(4, columns)[keys]
    return {"t": {"keys": torch.tensor(keys), "first_column": first, "columns": {"weights": weights}}}


def test_rows_are_compared_by_key_and_column() -> None:
    truth = reference()
    truth.rows = [table([0, 1, 2, 3])]

    def wrong(*by_rank: dict[str, Any]) -> list[str]:
        ranks = [{"counts": [{}], "rows": [rows]} for rows in by_rank]
        return [each.name for each in hold_to_limit(compared(layout(), truth, None, {}, ranks)).wrong]

    assert not wrong(table([3, 1]), table([2, 0]))
    halves = [table([0, 1, 2, 3]), table([0, 1, 2, 3])]
    for place, half in enumerate(halves):
        weights = half["t"]["columns"]["weights"]
        half["t"] = {
            **half["t"],
            "first_column": place,
            "columns": {"weights": weights[:, place : place + 1]},
        }
    assert not wrong(*halves)
    assert wrong(halves[0]) == ["rows of t keys that no rank has"]
    assert wrong(table([3, 1]), table([2])) == ["rows of t keys that no rank has"]
    assert wrong(table([3, 1]), table([2, 0], value=1.1)) == ["rows of t"]
    extra = table([0, 1, 2, 3])
    extra["t"]["keys"] = torch.tensor([0, 1, 2, 9])
    assert wrong(extra)[0] == "rows of t keys that one process does not have"
    pairs = [[{"rows": [table([0, 1])]}], [{"rows": [table([0, 1], value=1.1)]}]]
    assert row_bits(pairs[0], pairs[1], 0, 0).wrong and not row_bits(pairs[0], pairs[0], 0, 0).wrong
    cut = [[{"rows": [halves[1]]}], [{"rows": [table([3])]}]]  # the second column of all rows; another key
    assert not row_bits(cut[0], cut[0], 0, 0).wrong and row_bits(cut[0], cut[1], 0, 0).wrong


def test_one_bit_is_seen() -> None:
    other = layout(weights={"a.weight": ONES.nextafter(2 * ONES), "b.weight": 2 * ONES})
    assert [each.name for each in hold_to_bits(layout(), other).wrong] == ["a.weight"]
    assert not hold_to_bits(layout(), layout()).wrong
    moved = layout()["steps"][0] | {"moments": {"a.weight exp_avg": ONES.nextafter(2 * ONES)}}
    assert [each.kind for each in state_bits(layout()["steps"][0], moved, 0).wrong] == ["moments"]


def test_runs_without_a_common_step_are_not_equal() -> None:
    """A resumed run that goes on from another step, or runs none, must not pass with nothing compared."""
    assert hold_to_bits(layout(), layout(first=1)).wrong
    assert hold_to_bits(layout(), layout() | {"steps": []}).wrong
