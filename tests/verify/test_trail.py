"""What a rank did between the last right tensor and the first wrong one."""

import torch

from shardwise.verify.tensors import ComparedTensor
from shardwise.verify.trail import END, SUMMED, cause_lines, entries_between, marks_of

TRAIL = [
    ("action", "F(u0,0)"),
    ("tensor", "output a step 1 piece 0"),
    ("collective", "all_reduce of a.output on tp"),
    ("tensor", "output b step 1 piece 0"),
    ("tensor", "own gradient of a.weight"),
    ("action", "REDUCE(u0)"),
    ("tensor", SUMMED),
    ("action", "STEP(u0)"),
    ("tensor", END),
]


def tensor(what: str, name: str, key: str = "", ranks: tuple[int, ...] = ()) -> ComparedTensor:
    ones = torch.ones(1)
    return ComparedTensor("activations", what, name, 0, ones, ones, 1.0, "b", ranks, key)


def test_actions_and_collectives_in_between_are_listed() -> None:
    found = entries_between(TRAIL, "output b step 1 piece 0", set())
    assert [each.text for each in found] == [TRAIL[1][1], TRAIL[2][1], TRAIL[3][1]]
    wrong = {"output a step 1 piece 0"}
    assert [each.text for each in entries_between(TRAIL, "output b step 1 piece 0", wrong)][0] == "F(u0,0)"
    assert entries_between(TRAIL, "output c step 1 piece 0", set()) == []


def test_each_kind_of_tensor_has_its_window() -> None:
    assert (
        marks_of(tensor("activation", "b, microbatch 0", "b step 1 piece 0"))[0] == "output b step 1 piece 0"
    )
    assert marks_of(tensor("activation", "", "b#1 step 1 piece 0"))[0] == "input b#1 step 1 piece 0"
    used = tensor("weight", "b.weight in the forward pass of microbatch 0", "b.weight")
    assert marks_of(used)[0] == "output b step 1 piece 0"
    assert marks_of(tensor("gradient", "a.weight")) == (SUMMED, "own gradient of a.weight")
    assert marks_of(tensor("moment", "a.weight exp_avg")) == (END, SUMMED)


def test_the_lines_say_that_nothing_ran() -> None:
    by_rank = [{"held": {"trails": [TRAIL]}}, {"held": {"trails": [[TRAIL[1], TRAIL[3]]]}}]
    wrong = tensor("activation", "b, microbatch 0", "b step 1 piece 0", (0, 1))
    lines = cause_lines([wrong], by_rank)
    assert lines[0] == "rank 1, step 0:" and lines[-1] == "  no Action and no collective ran in between"
    assert any("all_reduce" in line for line in cause_lines([wrong._replace(ranks=(0,))], by_rank))
