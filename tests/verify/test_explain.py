"""Each kind of mistake gets the sentence that describes it, and a tensor without a pattern gets none."""

import torch

from shardwise.verify.explain import explain, wrong_slice

WANTED = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ADDENDS = [WANTED * 0.5 + 1, WANTED * 0.5 - 1]
FACTORS = {"tp": 2.0, "dp": 3.0}


def said(got: torch.Tensor) -> str:
    return explain(got, WANTED, FACTORS, ADDENDS, {"the gradient of step 1": WANTED.exp()})


def test_factors_are_named() -> None:
    assert "tp = 2" in said(2 * WANTED)
    assert "1/dp = 1/3" in said(WANTED / 3)
    assert "times 1.7" in said(1.7 * WANTED)


def test_addends_are_found() -> None:
    assert said(ADDENDS[0]) == "the addend of microbatch 1 of the global batch is missing"
    assert said(WANTED + ADDENDS[1]) == "the addend of microbatch 1 of the global batch is counted twice"


def test_zeros_order_shifts_and_copies_are_found() -> None:
    holed = WANTED.clone()
    holed[1:3] = 0
    assert said(holed) == "places 1 to 2 of dim 0 are zero, and the rest is right"
    assert said(torch.zeros_like(WANTED)) == "it is zero"
    assert "order [1, 0]" in said(torch.cat([WANTED[2:], WANTED[:2]]))
    assert "shifted by 1 places along dim 1" in said(WANTED.roll(1, 1))
    assert said(WANTED.exp()) == "it is the gradient of step 1"
    assert said(WANTED[:, [0, 4, 2, 3, 1, 5]]) == "rows 1 and 4 along dim 1 are swapped"


def test_a_tensor_without_a_pattern_has_no_explanation() -> None:
    assert said(torch.randn(4, 6, dtype=torch.float64)) == ""


def test_the_slice_is_the_box_around_wrong_elements() -> None:
    got = WANTED.clone()
    got[1, 2] += 1
    got[2, 4] += 1
    assert wrong_slice(got, WANTED, 1e-10) == "[1:3, 2:5]"
    assert wrong_slice(WANTED, WANTED, 1e-10) == ""
