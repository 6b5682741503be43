"""Where the rank comes from, in which order, and what a contradiction says."""

import errno
import socket
from pathlib import Path

import pytest
import torch

from shardwise.base.errors import CommError, ConfigError, DeadlineError, UsageError
from shardwise.comm import world as world_module
from shardwise.comm.rendezvous.device import choose_device
from shardwise.comm.rendezvous.seat import Seat, find_seat, first_host
from shardwise.comm.world import World, join

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],cpu1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
    "SLURM_JOB_ID": "77",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


def test_nothing_is_one_process() -> None:
    assert find_seat({})[:2] == (0, 1)


def test_torchrun_comes_before_slurm_before_mpi() -> None:
    assert find_seat(OPEN_MPI | SLURM | TORCHRUN)[:6] == (3, 8, 1, 2, "10.0.0.1", 1234)
    assert find_seat(OPEN_MPI | SLURM)[:5] == (5, 8, 1, 2, "gpu07")
    assert find_seat(OPEN_MPI)[:5] == (1, 4, 1, 4, "127.0.0.1")


def test_a_batch_script_outside_srun_is_one_process() -> None:
    """sbatch sets SLURM_PROCID=0 and SLURM_NTASKS; a plain python there would wait for ranks that nobody started."""
    outside = {key: value for key, value in SLURM.items() if "STEP" not in key} | {"SLURM_PROCID": "0"}
    assert find_seat(outside)[:2] == (0, 1)


def test_ranks_of_one_job_agree_on_a_port() -> None:
    ports = {find_seat(SLURM | {"SLURM_PROCID": str(rank)}).port for rank in range(8)}
    assert len(ports) == 1
    assert find_seat(SLURM | {"SLURM_JOB_ID": "78"}).port not in ports


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[07-09,12],cpu1", "gpu07"), ("n[3,5]", "n3"), ("x-1", "x-1")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_contradictions_name_the_variable() -> None:
    with pytest.raises(ConfigError, match="rank 9 does not fit 8 ranks"):
        find_seat(TORCHRUN | {"RANK": "9"})
    with pytest.raises(ConfigError, match="WORLD_SIZE='eight'"):
        find_seat(TORCHRUN | {"WORLD_SIZE": "eight"})
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        find_seat(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})


def test_one_process_prints_where_its_rank_came_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert join().size == 1
    assert "shardwise: one process, cpu" in capsys.readouterr().out


def test_texts_under_a_key() -> None:
    world = World(0, 1)
    with pytest.raises(CommError, match="nothing was ever posted"):
        world.collect("plan", 1.0)
    world.post("plan", "text")
    assert world.collect("plan", 1.0) == ["text"]


def test_a_missing_text_names_the_rank() -> None:
    world = World(0, 2)
    world.post("plan", "text")
    with pytest.raises(DeadlineError, match=r"'plan': no word from rank 1"):
        world.collect("plan", 0.05)


def listens_at(port: int) -> set[str]:
    """Addresses of this host on which somebody listens at ``port``, as the kernel spells them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, _, state = line.split()[1:4]
            if state == "0A" and int(address.rpartition(":")[2], 16) == port:
                found.add(address.rpartition(":")[0])
    return found


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "192.0.2.1"])
def test_the_store_of_one_host_listens_on_loopback_alone(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where RANK stands in the environment or mpirun started the ranks: torch's own store listens everywhere."""
    for name in ("SHARDWISE_STORE_FD", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = world_module._connect(Seat(0, 2, 0, 2, address, port, "test"), 5.0)
    store.set("k", "v")
    assert listens_at(port) == {"0100007F"}


def test_a_loopback_address_says_that_all_ranks_are_here() -> None:
    env = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert find_seat(env)[2:4] == (2, 4)
    assert find_seat(env | {"MASTER_ADDR": "10.0.0.1"})[2:4] == (0, 1)


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


def seat_at(local_rank: int, local_size: int) -> Seat:
    return Seat(local_rank, local_size, local_rank, local_size, "127.0.0.1", 0, "test")


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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_without_a_loopback_interface_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Each rank waited for a minute, and quoted an address that torch made up."""

    def bind(self: socket.socket, address: tuple[str, int]) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(socket.socket, "bind", bind)
    with pytest.raises(CommError, match=f"rank {rank}: this host has no loopback interface"):
        join(rank, 2, port=29517, timeout_s=5)
