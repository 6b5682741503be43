"""Keys of several features joined to keys of their group."""

import pytest
import torch
from torch import Tensor

from shardwise.kernels.tables.joined import JoinedKeys, joined, plain_joined

BASES, LIMITS = torch.tensor([0, 10, 10]), torch.tensor([10, 5, 5])
FORMS = pytest.mark.parametrize("form", [joined, plain_joined])


def ones(features: int, samples: int) -> list[Tensor]:
    return [torch.arange(samples + 1) for _ in range(features)]


def of(*lists: list[int]) -> list[Tensor]:
    return [torch.tensor(each, dtype=torch.int64) for each in lists]


def assert_alike(ours: JoinedKeys | None, plain: JoinedKeys | None) -> None:
    assert ours is not None and plain is not None
    for a, b in zip(ours, plain, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@FORMS
def test_the_example(form) -> None:  # type: ignore[no-untyped-def]
    values = of([9, 8], [0, 1], [4, 3])
    found = form(values, ones(3, 2), BASES, LIMITS, True)
    assert found.keys.tolist() == [9, 10, 14, 8, 11, 13]
    assert found.offsets is None, "every bag has one key"
    assert form(values, ones(3, 2), BASES, LIMITS, False).keys.tolist() == [9, 8, 10, 11, 14, 13]


@FORMS
def test_bags_of_any_size_stand_in_either_order(form) -> None:  # type: ignore[no-untyped-def]
    values, ends = of([9, 8, 7], [0], [4, 3]), of([0, 2, 3], [0, 0, 1], [0, 2, 2])
    found = form(values, ends, BASES, LIMITS, True)
    assert found.keys.tolist() == [9, 8, 14, 13, 7, 10]
    assert found.offsets.tolist() == [0, 2, 2, 4, 5, 6, 6]
    assert (found.shortest.tolist(), found.longest.tolist()) == ([1, 0, 0], [2, 1, 2])
    found = form(values, ends, BASES, LIMITS, False)
    assert found.keys.tolist() == [9, 8, 7, 10, 14, 13]
    assert found.offsets.tolist() == [0, 2, 3, 3, 4, 6, 6]


@FORMS
@pytest.mark.parametrize("bad", [-1, 5])
@pytest.mark.parametrize("by_sample", [True, False])
@pytest.mark.parametrize("ends", [[0, 1, 2], [0, 2, 2]], ids=str)
def test_a_key_outside_is_left_to_others(  # type: ignore[no-untyped-def]
    form, bad: int, by_sample: bool, ends: list[int]
) -> None:
    values = of([9, 8], [0, bad], [4, 3])
    assert form(values, [torch.tensor(ends)] * 3, BASES, LIMITS, by_sample) is None


@FORMS
@pytest.mark.parametrize("ends", [[1, 1, 2], [0, 1, 1], [0, 3, 2], [0, -1, 2], [0, 1, 3]], ids=str)
def test_offsets_that_do_not_fit_are_left_to_others(form, ends: list[int]) -> None:  # type: ignore[no-untyped-def]
    offsets = ones(3, 2)
    offsets[1] = torch.tensor(ends)
    assert form(of([0, 1], [0, 1], [0, 1]), offsets, BASES, LIMITS, True) is None


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("samples", [0, 1, 63, 64, 200])
@pytest.mark.parametrize("by_sample", [True, False])
def test_both_forms_agree_and_any_key_is_in_a_table_without_limit(
    samples: int, by_sample: bool, most: int
) -> None:
    lengths = torch.randint(1 if most == 1 else 0, most + 1, (4, samples))
    ends = [torch.cat([torch.zeros(1, dtype=torch.int64), each.cumsum(0)]) for each in lengths]
    # Every second key of a longer tensor: the loops read memory, and take copies of keys with other strides.
    values = [torch.randint(-(2**62), 2**62, (2 * int(each.sum()),))[::2] for each in lengths]
    given = (values, ends, torch.arange(4), torch.full((4,), -1), by_sample)
    assert_alike(joined(*given), plain_joined(*given))


def test_what_the_loops_would_read_beside_memory_is_refused() -> None:
    values = of([9, 8], [0, 1], [4, 3])
    with pytest.raises(ValueError, match="offsets are torch.int32"):
        joined(values, [each.int() for each in ones(3, 2)], BASES, LIMITS, True)
    with pytest.raises(
        ValueError, match=r"3 features with offsets of \[2, 3\] numbers, 3 bases and 3 limits"
    ):
        joined(values, [*ones(2, 2), *ones(1, 1)], BASES, LIMITS, True)
    with pytest.raises(ValueError, match="2 bases"):
        joined(values, ones(3, 2), BASES[:2], LIMITS, True)
