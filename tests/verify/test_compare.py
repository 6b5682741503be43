"""Limits, the causal order, and tensors that are not compared."""

import torch

from shardwise.verify.compare import compared, hold_to_bits, hold_to_limit, hold_to_noise
from shardwise.verify.reference import Reference, Truth

ONES = torch.ones(4, dtype=torch.float64)


def reference() -> Reference:
    gradients = {"a.weight": ONES, "b.weight": 2 * ONES}
    truth = Truth(1.0, 3.0, gradients, gradients, gradients)
    return Reference(gradients, [truth], [{"a.weight exp_avg": ONES}], {}, {}, ["a", "b"])


def layout(**changes: object) -> dict[str, object]:
    same = {"a.weight": ONES, "b.weight": 2 * ONES}
    step = {
        "loss": 1.0,
        "norm": 3.0,
        "gradients": same,
        "weights": same,
        "moments": {"a.weight exp_avg": ONES},
    }
    return {"first": 0, "start": same, "steps": [step | changes]}


def test_equal_numbers_pass_and_are_counted() -> None:
    figures = hold_to_limit(compared(layout(), reference(), None, {}))
    assert not figures.wrong
    assert (figures.compared["gradients"], figures.compared["weights"], figures.compared["loss"]) == (2, 4, 1)


def test_the_last_module_is_wrong_before_the_first() -> None:
    wrong = {"a.weight": 3 * ONES, "b.weight": 3 * ONES}
    figures = hold_to_limit(compared(layout(gradients=wrong), reference(), None, {}))
    assert [each.name for each in figures.wrong] == ["b.weight", "a.weight"]


def test_what_is_missing_is_wrong_or_listed() -> None:
    left_out: dict[str, str] = {}
    changed = layout(gradients={"b.weight": 2 * ONES}, moments={})
    figures = hold_to_limit(compared(changed, reference(), None, left_out))
    assert [each.name for each in figures.wrong] == ["a.weight"]
    assert list(left_out) == ["a.weight exp_avg"]


def test_noise_of_the_plain_loop_sets_the_limit() -> None:
    near = {name: tensor * (1 + 1e-3) for name, tensor in reference().start.items()}
    truth = list(compared(layout(gradients=near), reference(), None, {}))
    plain = list(compared(layout(), reference(), None, {}))
    assert hold_to_noise(truth, plain, torch.float32).wrong
    assert not hold_to_noise(truth, truth, torch.float32).wrong


def test_one_bit_is_seen() -> None:
    other = layout(weights={"a.weight": ONES.nextafter(2 * ONES), "b.weight": 2 * ONES})
    assert [each.name for each in hold_to_bits(layout(), other).wrong] == ["a.weight"]
    assert not hold_to_bits(layout(), layout()).wrong
