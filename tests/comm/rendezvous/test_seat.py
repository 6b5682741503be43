"""Rank and world size from the variables of a launcher, in their order, and contradictions between them."""

import pytest

from shardwise.base.errors import ConfigError
from shardwise.comm.rendezvous.seat import find_seat, first_host

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
    [
        *(("a", "a"), ("a,b", "a"), ("gpu[07-09,12],cpu1", "gpu07"), ("n[3,5]", "n3"), ("x-1", "x-1")),
        *(("rack[2-3]n[07,9],b", "rack2n07"), ("n[1-2].net,b", "n1.net")),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_slurm_counts_the_tasks_of_every_host() -> None:
    """The first number of the list was that of every host, so rank 6 of 7 took two ranks to be on its host."""
    uneven = SLURM | {"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
    local = [find_seat(uneven | {"SLURM_NODEID": str(node)}).local_size for node in range(4)]
    assert local == [2, 2, 2, 1]
    assert find_seat(SLURM).local_size == 2, "equal counts need no number of the host"
    for wrong in ({}, {"SLURM_NODEID": "4"}, {"SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "8"}):
        with pytest.raises(ConfigError, match=r"'2\(x3\),1' has 4 hosts and 7 tasks"):
            find_seat(uneven | wrong)
    with pytest.raises(ConfigError, match="'2;rm' is not a list of counts"):
        find_seat(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2;rm"})


def test_the_pods_of_an_indexed_job_are_ranks_if_the_job_says_so() -> None:
    pod = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "train-0.train"}
    assert find_seat(pod)[:6] == (2, 4, 0, 1, "train-0.train", 29500)
    assert find_seat({"JOB_COMPLETION_INDEX": "2"})[:2] == (0, 1), "a job array"
    assert find_seat(pod | {"RANK": "1"}).rank == 1
    with pytest.raises(ConfigError, match="set MASTER_ADDR to the first pod's name"):
        find_seat({"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4"})


def test_mpi_on_several_hosts_needs_an_address_or_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    several = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="or install mpi4py"):
        find_seat(several)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert find_seat(several).address == "", "the ranks exchange it"
    assert find_seat(several | {"MASTER_ADDR": "gpu1"}).address == "gpu1"


def test_contradictions_name_the_variable() -> None:
    with pytest.raises(ConfigError, match="rank 9 does not fit 8 ranks"):
        find_seat(TORCHRUN | {"RANK": "9"})
    with pytest.raises(ConfigError, match="WORLD_SIZE='eight'"):
        find_seat(TORCHRUN | {"WORLD_SIZE": "eight"})
