import sys
from pathlib import Path

import pytest

from shardwise.launch import environment
from shardwise.launch.environment import LaunchJob, is_in_job, of_rank, seat
from shardwise.launch.hosts import HostRanks

JOB = LaunchJob("word", HostRanks(4, 4, port=2900), Path("/tmp/failures"), "secret")


def test_a_seat_is_read_as_it_was_given() -> None:
    given = of_rank(JOB, 2, None, {})
    here = seat(given)
    assert (here.rank, here.store_fd) == (2, None)
    assert here.failure_path == JOB.failure_path(2)
    assert seat(of_rank(JOB, 0, 7, {})).store_fd == 7
    assert is_in_job(given) and not is_in_job({})


def test_a_process_that_nobody_launched_has_no_seat() -> None:
    assert seat({}) == environment.RankEnvironment(0, None, None, None)


def test_what_an_outer_launcher_left_is_not_handed_on() -> None:
    outer = {
        "RANK": "9",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "SHARDWISE_STORE_FD": "3",
        "GLOO_SOCKET_IFNAME": "eth0",
        "HOME": "/home/x",
    }
    given = of_rank(JOB, 1, None, outer)
    assert given["RANK"] == "1" and given["HOME"] == "/home/x"
    assert "TORCHELASTIC_USE_AGENT_STORE" not in given and "SHARDWISE_STORE_FD" not in given
    assert given["GLOO_SOCKET_IFNAME"] == ("lo0" if sys.platform == "darwin" else "lo")


@pytest.mark.parametrize(
    ("cores", "given", "threads"), [(16, {}, "4"), (2, {}, "1"), (16, {"OMP_NUM_THREADS": "3"}, "3")]
)
def test_threads_are_shared_out_unless_set(
    monkeypatch: pytest.MonkeyPatch, cores: int, given: dict[str, str], threads: str
) -> None:
    monkeypatch.setattr(environment, "cores", lambda: cores)
    assert of_rank(JOB, 0, None, given)["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(("given", "found"), [({}, "1"), ({"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, "0")])
def test_communicators_start_in_the_order_of_the_calls(given: dict[str, str], found: str) -> None:
    """NCCL reads it when the first communicator is made, so it stands there before a rank starts."""
    assert of_rank(JOB, 0, None, given)["NCCL_LAUNCH_ORDER_IMPLICIT"] == found


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_segments_of_a_device_grow_unless_the_user_sets_the_allocator(
    given: dict[str, str], found: str | None
) -> None:
    made = of_rank(JOB, 0, None, given)
    assert made.get("PYTORCH_ALLOC_CONF") == found
    assert made.get("PYTORCH_CUDA_ALLOC_CONF") == given.get("PYTORCH_CUDA_ALLOC_CONF")
