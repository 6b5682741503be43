"""Features of one key a sample, joined."""

import pytest
import torch
from torch import Tensor

from shardwise.kernels.tables.one_each import one_each, plain_one_each

BASES, LIMITS = torch.tensor([0, 10, 10]), torch.tensor([10, 5, 5])


def offsets(features: int, samples: int) -> Tensor:
    return torch.arange(samples + 1).repeat(features, 1)


@pytest.mark.parametrize("form", [one_each, plain_one_each])
def test_the_example(form) -> None:  # type: ignore[no-untyped-def]
    values = torch.tensor([[9, 8], [0, 1], [4, 3]])
    assert form(values, offsets(3, 2), BASES, LIMITS).tolist() == [9, 10, 14, 8, 11, 13]
    assert form(values, offsets(3, 2), BASES, LIMITS, by_sample=False).tolist() == [9, 8, 10, 11, 14, 13]


@pytest.mark.parametrize("form", [one_each, plain_one_each])
@pytest.mark.parametrize("bad", [-1, 5])
def test_a_key_outside_is_left_to_others(form, bad: int) -> None:  # type: ignore[no-untyped-def]
    assert form(torch.tensor([[9, 8], [0, bad], [4, 3]]), offsets(3, 2), BASES, LIMITS) is None


@pytest.mark.parametrize("form", [one_each, plain_one_each])
def test_a_sample_with_other_than_one_key_is_left_to_others(form) -> None:  # type: ignore[no-untyped-def]
    uneven = offsets(3, 2)
    uneven[1, 1] = 0  # none, then two
    assert form(torch.zeros(3, 2, dtype=torch.int64), uneven, BASES, LIMITS) is None


@pytest.mark.parametrize("samples", [0, 1, 63, 64, 200])
@pytest.mark.parametrize("by_sample", [True, False])
def test_both_forms_agree_and_any_key_is_in_a_table_without_limit(samples: int, by_sample: bool) -> None:
    values = torch.randint(-(2**62), 2**62, (4, samples))
    none = torch.full((4,), -1)
    given = (values, offsets(4, samples), torch.zeros(4, dtype=torch.int64), none, by_sample)
    ours, plain = one_each(*given), plain_one_each(*given)
    assert ours is not None and plain is not None
    assert torch.equal(ours, plain)
