"""Gradients that wait until one launch copies all of a bucket: the sums of gradients that are copied one by one."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shardwise.parallel.zero import waiting
from shardwise.parallel.zero.waiting import WaitingGradients, most_waiting_bytes

BF16 = torch.bfloat16


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host's tensors are taken for those of a device."""
    monkeypatch.setattr(waiting, "_is_on_host", lambda view: False)
    yield


def views(count: int) -> list[Tensor]:
    """Views of a buffer of NaN, four elements each."""
    return list(torch.full((4 * count,), float("nan")).split(4))


def test_on_a_host_nothing_waits() -> None:
    there, held = views(2), WaitingGradients(2)
    assert held.put(0, there[0], torch.ones(4))
    assert there[0].tolist() == [1.0] * 4 and held.nbytes == 0
    assert not held.put(0, there[0], torch.ones(4))
    assert there[0].tolist() == [2.0] * 4


@pytest.mark.usefixtures("device")
def test_gradients_wait_for_the_last_one() -> None:
    there, held = views(3), WaitingGradients(3)
    for index in (2, 0):
        assert held.put(index, there[index], torch.full((4,), float(index)))
    assert torch.stack(there).isnan().all() and held.nbytes == 2 * 16
    assert held.put(1, there[1], torch.full((4,), 1.0))
    assert torch.stack(there)[:, 0].tolist() == [0.0, 1.0, 2.0] and held.nbytes == 0


@pytest.mark.usefixtures("device")
def test_those_that_have_come_are_copied_at_the_end_of_a_pass() -> None:
    there, held = views(2), WaitingGradients(2)
    held.put(1, there[1], torch.ones(4))
    held.flush()
    assert there[1].tolist() == [1.0] * 4 and there[0].isnan().all() and held.has_come == [False, True]
    held.put(0, there[0], torch.ones(4))
    held.drop()
    held.flush()
    assert there[0].isnan().all(), "a dropped gradient is in no sum"


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_further_gradients_are_added_to_the_bit(dtype: torch.dtype) -> None:
    """Of a pass behind another, and of a parameter that is used twice in one."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(2, 4, generator=generator).to(dtype) for _ in range(9)]
    there, one_by_one, held = [each.view(2, 2) for each in views(3)], torch.zeros(3, 4), WaitingGradients(3)
    for number, grad in enumerate(grads):
        index = number % 3
        held.put(index, there[index], grad[0].view(2, 2))
        one_by_one[index] += grad[0]
        if number == 4:
            held.put(index, there[index], grad[1].view(2, 2))
            one_by_one[index] += grad[1]
    assert torch.equal(torch.stack(there).view(3, 4), one_by_one)
    assert held.nbytes == 0


@pytest.mark.usefixtures("device")
def test_large_gradients_do_not_wait_and_small_ones_only_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "LARGEST_BYTES", 16)
    monkeypatch.setattr(waiting, "MOST_BYTES", 40)
    there, held = [*views(4), torch.zeros(5)], WaitingGradients(6)
    held.put(4, there[4], torch.ones(5))
    assert there[4].tolist() == [1.0] * 5
    for index in range(3):
        held.put(index, there[index], torch.ones(4))
        assert held.nbytes <= 40
    assert [bool(each.isnan().any()) for each in there[:4]] == [False, False, True, True]
    assert most_waiting_bytes([20, 16, 16]) == 32 and most_waiting_bytes([16] * 9) == 40
