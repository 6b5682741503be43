"""The device of a rank: one of its own, the processor, or a refusal with both numbers."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.base.errors import ConfigError, UsageError
from shardwise.comm.rendezvous.device import choose_device, identity_of
from shardwise.comm.rendezvous.handshake import HandshakeResult
from shardwise.comm.rendezvous.seat import JobSeat, find_seat
from shardwise.comm.world import World
from tests.comm.rendezvous.test_handshake import meeting


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


class Machine(Accelerators):
    """A host with eight devices, of which a process sees those that its environment shows."""

    def __init__(self) -> None:
        super().__init__("cuda", 8)
        self.visible = ""

    def device_count(self) -> int:
        return len(self._shown)

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"5d5ba0d6-{self._shown[index]}")

    @property
    def _shown(self) -> list[str]:
        return self.visible.split(",") if self.visible else [str(number) for number in range(8)]


def by_srun(rank: int) -> dict[str, str]:
    """``srun --ntasks=8 --gpus-per-task=1``."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_TASKS_PER_NODE": "8",
        "CUDA_VISIBLE_DEVICES": str(rank),
    }


def by_ray(rank: int) -> dict[str, str]:
    """An actor for each rank, which says nothing of its host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "CUDA_VISIBLE_DEVICES": str(rank),
    }


def by_torchrun(rank: int) -> dict[str, str]:
    return {
        **{key: str(rank) for key in ("RANK", "LOCAL_RANK")},
        **{key: "8" for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }


def met(machine: Machine, environments: list[dict[str, str]]) -> list[Any]:
    """What each rank's meeting returned or raised, after the rank has chosen its device."""
    devices = []
    for environment in environments:
        machine.visible = environment.get("CUDA_VISIBLE_DEVICES", "")
        seat = find_seat(environment)
        device, _ = choose_device("cuda", seat, machine.visible or None)
        devices.append(identity_of(device, machine.visible or None))
    return meeting(dist.HashStore(), len(devices), devices=devices)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(torch, "accelerator", made)
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    return made


@pytest.mark.parametrize("start", [by_srun, by_ray, by_torchrun])
def test_ranks_that_see_a_device_each_meet(machine: Machine, start: Callable[[int], dict[str, str]]) -> None:
    found = met(machine, [start(rank) for rank in range(8)])
    assert all(isinstance(each, HandshakeResult) for each in found), found
    assert len({each.device for each in found[0].who}) == 8


@pytest.mark.parametrize("start", [by_srun, by_ray])
def test_two_ranks_that_see_the_same_device_are_both_named(
    machine: Machine, start: Callable[[int], dict[str, str]]
) -> None:
    environments = [start(rank) for rank in range(8)]
    environments[5]["CUDA_VISIBLE_DEVICES"] = "2"
    for each in met(machine, environments):
        assert isinstance(each, ConfigError)
        assert "cuda:GPU-5d5ba0d6-2 is that of ranks 2, 5" in str(each)
        assert "CUDA_VISIBLE_DEVICES shows these ranks one device" in str(each)


def test_parts_of_a_device_are_told_apart(machine: Machine) -> None:
    """The properties of a part may have the number of the whole device."""
    parts = [{**by_srun(rank), "CUDA_VISIBLE_DEVICES": f"MIG-{rank % 7}"} for rank in range(8)]
    found = met(machine, parts)
    assert all("cuda:MIG-0 is that of ranks 0, 7" in str(each) for each in found), found


def test_a_host_with_one_device_for_all_ranks_is_refused(machine: Machine) -> None:
    only = [{**by_torchrun(rank), "CUDA_VISIBLE_DEVICES": "3"} for rank in range(8)]
    for each in met(machine, only):
        assert "8 ranks on one host took 1 device: cuda:GPU-5d5ba0d6-3 is that of ranks 0" in str(each)


def test_a_part_names_each_rank_once() -> None:
    with pytest.raises(UsageError, match="rank 0 of 2 asked for a World of the ranks \\[1\\]"):
        World(0, 2).among((1,))
    with pytest.raises(UsageError, match="name each rank once"):
        World(0, 2).among((0, 0))
