"""Forms of moments and their sizes."""

import pytest
import torch

from shardwise.plan.state_form import BLOCK, StateForm, stored_dtype, stored_elements


@pytest.mark.parametrize(
    ("form", "dtype", "elements"),
    [("fp32", torch.float64, 33), ("bf16", torch.bfloat16, 33), ("int8", torch.uint8, 33 + 3)],
)
def test_dtype_and_elements_of_33_moments(form: StateForm, dtype: torch.dtype, elements: int) -> None:
    assert stored_dtype(form, torch.float64) == dtype
    assert stored_elements(form, 33) == elements


def test_a_scale_for_each_block() -> None:
    assert [stored_elements("int8", BLOCK * n) - BLOCK * n for n in (0, 1, 2)] == [0, 1, 2]
