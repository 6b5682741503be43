"""What gloo and NCCL read is set before the first group, and nothing that a user has set is changed."""

import logging
import os
import resource
import socket
import subprocess
import sys

import pytest

from shardwise.comm.rendezvous import environment
from shardwise.comm.rendezvous.environment import interfaces_of, prepare_for_groups, raise_descriptor_limit

PRESENT = ["lo", "eth0", "eth1", "ib0", "docker0"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("=eth", []),
        ("ib,eth1", ["eth1", "ib0"]),
        ("^eth", ["ib0"]),
        ("^=eth0,ib0", ["eth1"]),
    ],
)
def test_the_interfaces_that_nccl_would_take(pattern: str, found: list[str]) -> None:
    assert interfaces_of(pattern, PRESENT) == found


def test_over_several_hosts_gloo_takes_the_interface_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(PRESENT)))
    env = {"NCCL_SOCKET_IFNAME": "ib"}
    prepare_for_groups(False, "nccl", 2, False, env)
    assert env["GLOO_SOCKET_IFNAME"] == "ib0"
    own = {"NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": "eth1"}
    prepare_for_groups(False, "nccl", 2, False, own)
    assert own["GLOO_SOCKET_IFNAME"] == "eth1"
    nothing: dict[str, str] = {}
    prepare_for_groups(False, "gloo", 2, False, nothing)
    assert nothing == {}


def test_on_one_host_all_stay_on_loopback() -> None:
    env: dict[str, str] = {}
    prepare_for_groups(True, "nccl", 2, False, env)
    assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] in ("lo", "lo0")


@pytest.mark.parametrize("adopts", [False, True])
def test_nccl_leaves_failures_to_the_watch(adopts: bool) -> None:
    env: dict[str, str] = {}
    prepare_for_groups(False, "nccl", 2, adopts, env)
    assert env == {"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    prepare_for_groups(False, "nccl", 2, adopts, own)
    assert own["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


@pytest.mark.parametrize("came_late", [False, True])
def test_a_default_group_that_came_first_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, came_late: bool
) -> None:
    monkeypatch.setattr(environment, "_CAME_LATE", came_late)
    with caplog.at_level(logging.WARNING):
        prepare_for_groups(False, "nccl", 2, True, {})
    assert ("import shardwise before init_process_group" in caplog.text) is came_late


IMPORTED_LATE = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import os, shardwise
print(shardwise.comm.rendezvous.environment._CAME_LATE, os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"])
"""
IMPORTED_FIRST = """
import os, shardwise
print(shardwise.comm.rendezvous.environment._CAME_LATE, os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"])
"""


@pytest.mark.parametrize(("script", "is_late"), [(IMPORTED_LATE, "True"), (IMPORTED_FIRST, "False")])
def test_the_import_sets_the_order_and_sees_a_group_that_was_there(script: str, is_late: str) -> None:
    env = {key: value for key, value in os.environ.items() if key != "NCCL_LAUNCH_ORDER_IMPLICIT"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.split()[-2:] == [is_late, "1"]


def test_the_limit_of_descriptors_is_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        prepare_for_groups(False, "gloo", 8, False, {})
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(512, before[1])
        prepare_for_groups(False, "gloo", 512, False, {})
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    raise_descriptor_limit()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, False),
        ({"MALLOC_ARENA_MAX": "2", "GLIBC_TUNABLES": "glibc.rtld.nns=8"}, False),
        ({"MALLOC_TRIM_THRESHOLD_": "1048576"}, True),
        ({"MALLOC_MMAP_THRESHOLD_": "1048576"}, True),
        ({"GLIBC_TUNABLES": "glibc.rtld.nns=8:glibc.malloc.trim_threshold=1048576"}, True),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, True),
    ],
)
def test_limits_of_the_heap_that_a_user_sets_are_seen(env: dict[str, str], found: bool) -> None:
    assert environment.sets_heap(env) is found
