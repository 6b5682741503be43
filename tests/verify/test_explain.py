"""Each kind of mistake gets the sentence that describes it, and a tensor without a pattern gets none."""

import pytest
import torch
from torch import Tensor

from shardwise.verify.explain import AdamUpdate, Evidence, explain, wrong_slice


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


WANTED = drawn(0, 4, 6)
ADDENDS = {"microbatch 0": WANTED * 0.5 + 1, "microbatch 1": WANTED * 0.5 - 1}
EVIDENCE = Evidence(
    {"tp": 2.0, "dp": 3.0, "ep": 3.0}, ADDENDS, others={"the gradient of step 1": WANTED.exp()}
)
NUMBER = torch.tensor([2.0], dtype=torch.float64)


def said(got: Tensor, evidence: Evidence = EVIDENCE) -> str:
    return explain(got, WANTED, evidence)


def test_factors_are_named_by_all_numbers_that_fit() -> None:
    assert said(2 * WANTED) == "it is the right tensor times tp = 2"
    assert said(WANTED / 3) == "it is the right tensor times 1/dp = 1/ep = 1/3"
    assert said(1.7 * WANTED) == "it is the right tensor times 1.7"


def test_rounding_is_found() -> None:
    assert said(WANTED.bfloat16().double()) == "it is rounded to bfloat16"
    assert said(WANTED.float().double()) == "it is rounded to float32"


def test_addends_are_found() -> None:
    assert said(ADDENDS["microbatch 0"]) == "microbatch 1: missing in the sum"
    assert said(WANTED + ADDENDS["microbatch 1"]) == "microbatch 1: counted twice in the sum"
    assert said(WANTED + 0.5 * ADDENDS["microbatch 1"]) == "microbatch 1: counted times 1.5 in the sum"


def test_a_missing_sum_over_ranks_is_found() -> None:
    pieces = Evidence(pieces=list(ADDENDS.values()))
    assert "holds an addend" in said(ADDENDS["microbatch 0"], pieces)
    other = Evidence(pieces=[WANTED, WANTED.exp()])
    assert said(WANTED.exp(), other) == ""


def test_zeros_and_factors_of_a_part_are_found() -> None:
    holed = WANTED.clone()
    holed[1:3] = 0
    assert said(holed) == "[1:3, 0:6] is zero, and the rest is right"
    assert said(torch.zeros_like(WANTED)) == "it is zero"
    flat = WANTED.flatten().clone()
    flat[4:15] *= 2
    part = "elements [4, 15) of the flattened tensor are the right ones times tp = 2, and the rest is right"
    assert said(flat.view(4, 6)) == part


def test_order_shifts_and_copies_are_found() -> None:
    assert "order [1, 0]" in said(torch.cat([WANTED[2:], WANTED[:2]]))
    assert said(torch.cat([WANTED[:2], WANTED[:2]])) == "of 2 blocks along dim 0 block 1 is a copy of block 0"
    assert "shifted by 1 places along dim 1" in said(WANTED.roll(1, 1))
    assert "flattened tensor are shifted by -1 places" in said(WANTED.flatten().roll(-1).view(4, 6))
    assert said(WANTED.exp()) == "it is the gradient of step 1"
    assert said(WANTED[:, [0, 4, 2, 3, 1, 5]]) == "rows 1 and 4 along dim 1 are swapped"


def test_masks_and_constants_are_found() -> None:
    wanted, got = WANTED.flatten().clone(), WANTED.flatten().clone()
    wanted[::3], got[1::3] = 0, 0
    assert explain(got, wanted, Evidence()).startswith("8 other elements are zero")
    others = {"the output of microbatch 1": got.exp() * (got != 0)}
    assert "those of the output of microbatch 1" in explain(got, wanted, Evidence(others=others))
    assert said(torch.full_like(WANTED, 0.5)) == "all its elements are 0.5"


@pytest.mark.parametrize(
    ("decay", "step", "wanted"),
    [
        (0.1, 3, ""),
        (0.0, 3, "its update is one without weight decay; this is update 3"),
        (0.2, 3, "its update is one with twice the weight decay; this is update 3"),
        (0.1, 1, "its update is one with moments corrected as in update 1; this is update 3"),
        (0.35, 3, "its update has a weight decay of 0.35 in place of 0.1"),
    ],
)
def test_updates_are_explained(decay: float, step: int, wanted: str) -> None:
    update = AdamUpdate(0.01, 0.1, (0.9, 0.95), 1e-8, 3, drawn(1, 4, 6), drawn(2, 4, 6) ** 2)
    right, got = update.weight(WANTED, 0.1, 3), update.weight(WANTED, decay, step)
    evidence = Evidence(before=WANTED, update=update)
    assert explain(got, right, evidence) == wanted
    assert explain(WANTED, right, evidence) == "it is the weight before the step"
    assert explain(2 * right - WANTED, right, evidence) == "its update is the right one times 2"


def test_a_single_number_is_explained_by_numbers_of_the_run_alone() -> None:
    evidence = Evidence({"tp": 2.0}, sums={"it is the norm of stage 0 alone": 1.5})
    assert explain(2 * NUMBER, NUMBER, evidence) == "it is the right number times tp = 2"
    assert explain(0.75 * NUMBER, NUMBER, evidence) == "it is the norm of stage 0 alone"
    assert explain(1.7 * NUMBER, NUMBER, evidence) == ""


def test_a_tensor_without_a_pattern_has_no_explanation() -> None:
    assert said(drawn(5, 4, 6)) == ""
    # Nearly right: an error of 10^-7 that is no addend must not pass for one whose factor is near 1.
    assert said(WANTED + 1e-7 * drawn(6, 4, 6)) == ""


def test_the_slice_is_the_box_around_wrong_elements() -> None:
    got = WANTED.clone()
    got[1, 2] += 1
    got[2, 4] += 1
    assert wrong_slice(got, WANTED, 1e-10) == "[1:3, 2:5]"
    assert wrong_slice(WANTED, WANTED, 1e-10) == ""
