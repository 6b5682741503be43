"""The device of a rank: one of its own, the processor, or a refusal with both numbers."""

import pytest
import torch

from shardwise.base.errors import ConfigError, UsageError
from shardwise.comm.rendezvous.device import choose_device
from shardwise.comm.rendezvous.seat import JobSeat
from shardwise.comm.world import World


class Accelerators:
    """Stands in for torch.accelerator on a host with ``count`` devices of one kind."""

    def __init__(self, kind: str, count: int):
        self._kind, self._count = kind, count
        self.chosen: int | None = None

    def is_available(self) -> bool:
        return True

    def current_accelerator(self) -> torch.device:
        return torch.device(self._kind)

    def device_count(self) -> int:
        return self._count

    def set_device_index(self, index: int) -> None:
        self.chosen = index


def seat_at(local_rank: int, local_size: int) -> JobSeat:
    return JobSeat(local_rank, local_size, local_rank, local_size, "127.0.0.1", 0, "test")


def test_without_an_accelerator_ranks_compute_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert choose_device("auto", seat_at(0, 2), None) == (torch.device("cpu"), "gloo")
    with pytest.raises(ConfigError, match="'cuda' is asked for, and torch finds no accelerator here"):
        choose_device("cuda", seat_at(0, 2), None)
    with pytest.raises(ConfigError, match="'gpu' is no device of torch's"):
        choose_device("gpu", seat_at(0, 2), None)


def test_auto_leaves_a_device_without_fp64_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's: the first step would end in a TypeError."""
    monkeypatch.setattr(torch, "accelerator", Accelerators("mps", 1))
    assert choose_device("auto", seat_at(0, 1), None)[0].type == "cpu"


def test_cpu_can_be_asked_for_beside_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "accelerator", Accelerators("cuda", 2))
    assert choose_device("cpu", seat_at(0, 8), None) == (torch.device("cpu"), "gloo")


def test_ranks_get_devices_of_their_own_or_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A modulo once put two ranks on one device, and NCCL said so in its own way."""
    fake = Accelerators("cuda", 2)
    monkeypatch.setattr(torch, "accelerator", fake)
    assert choose_device("cuda", seat_at(1, 2), None) == (torch.device("cuda:1"), "nccl")
    assert fake.chosen == 1
    assert choose_device("cuda:0", seat_at(1, 2), None)[0] == torch.device("cuda:0"), (
        "the meeting compares them"
    )
    with pytest.raises(
        ConfigError, match=r"3 ranks on this host .*, but 2 devices .*CUDA_VISIBLE_DEVICES=0,1"
    ):
        choose_device("cuda", seat_at(0, 3), "0,1")


def test_a_device_that_is_not_here_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Accelerators("cuda", 2)
    monkeypatch.setattr(torch, "accelerator", fake)
    with pytest.raises(
        ConfigError, match=r"3 ranks on this host \('cuda:0' is asked for.*\), but 2 devices of type cuda"
    ):
        choose_device("cuda:0", seat_at(0, 3), None)
    with pytest.raises(ConfigError, match=r"1 rank on this host \('cuda:2' is asked for.*\), but 2 devices"):
        choose_device("cuda:2", seat_at(0, 1), None)
    assert fake.chosen is None


def test_parts_of_a_device_are_shown_one_to_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "accelerator", Accelerators("cuda", 1))
    assert choose_device("cuda", seat_at(0, 1), "MIG-a,MIG-b")[0] == torch.device("cuda:0")
    with pytest.raises(ConfigError, match=r"2 ranks .* 1 device of .*=MIG-a,MIG-b .*shows a process one"):
        choose_device("cuda", seat_at(0, 2), "MIG-a,MIG-b")


def test_a_part_names_each_rank_once() -> None:
    with pytest.raises(UsageError, match="rank 0 of 2 asked for a World of the ranks \\[1\\]"):
        World(0, 2).among((1,))
    with pytest.raises(UsageError, match="name each rank once"):
        World(0, 2).among((0, 0))
