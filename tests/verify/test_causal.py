"""Copies of a weight are compared with one another, and a module that did not run for a microbatch is wrong."""

from typing import Any

import torch

from shardwise.verify.causal import forward_tensors, unequal_copies
from shardwise.verify.ranks import RankRecords
from shardwise.verify.reference import Reference

WEIGHT = torch.arange(4.0, dtype=torch.float64)


def rank(weight: torch.Tensor, tp: int = 0, dp: int = 0, **more: Any) -> dict[str, Any]:
    held = {"copies": [{"a.weight": weight}], "positions": {"a.weight": torch.arange(4)}, "canonical": {}}
    empty: dict[str, Any] = {"outputs": {}, "inputs": {}, "gradients": {}, "weights": {}}
    return {**empty, "held": held, "place": {"tp": tp, "dp": dp, "pp": 0}, **more}


def test_a_copy_that_differs_is_named_with_its_rank() -> None:
    shapes = {"a.weight": (4,)}
    equal = RankRecords([rank(WEIGHT), rank(WEIGHT, dp=1)], 1, shapes)
    assert not list(unequal_copies(0, {"a.weight": WEIGHT}, equal))
    unequal = RankRecords([rank(WEIGHT), rank(WEIGHT + 1, dp=1)], 1, shapes)
    (found,) = unequal_copies(0, {"a.weight": WEIGHT}, unequal)
    assert (found.what, found.name, found.ranks) == ("replica", "a.weight at the start", (1,))
    assert torch.equal(found.got, WEIGHT + 1)


def test_a_module_that_did_not_run_for_a_microbatch_is_wrong() -> None:
    outputs = {f"a step 1 piece {piece}": WEIGHT + piece for piece in range(2)}
    reference = Reference({"a.weight": WEIGHT}, [], [], activations=outputs, order=["a"], began=["a >", "a"])
    first = {"a step 1 piece 0": WEIGHT}
    ran = RankRecords([rank(WEIGHT, outputs=first), rank(WEIGHT, dp=1)], 1, {})
    right, wrong = forward_tensors(reference, ran, 0, {})
    assert right.error == 0 and wrong.error == float("inf")
    assert wrong.said == "the module did not run for this microbatch"


def test_a_module_that_no_rank_calls_is_left_out() -> None:
    reference = Reference(
        {}, [], [], activations={"a step 1 piece 0": WEIGHT}, order=["a"], began=["a >", "a"]
    )
    left_out: dict[str, str] = {}
    assert not list(forward_tensors(reference, RankRecords([rank(WEIGHT)], 1, {}), 0, left_out))
    assert left_out == {"a": "no rank runs this module by its own call"}


def test_the_weights_that_a_pass_used_are_compared() -> None:
    used = {"a.weight step 1 piece 0": WEIGHT * 2}
    outputs = {"a step 1 piece 0": WEIGHT}
    reference = Reference({"a.weight": WEIGHT}, [], [], activations=outputs, order=["a"], began=["a >", "a"])
    records = RankRecords([rank(WEIGHT, outputs=outputs, weights=used)], 1, {"a.weight": (4,)})
    weight, output = forward_tensors(reference, records, 0, {})
    assert weight.name == "a.weight in the forward pass of microbatch 0" and weight.error > 0.1
    assert output.error == 0
