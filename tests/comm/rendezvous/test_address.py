"""Addresses of hosts, however the ranks were started and whatever the hosts' names resolve to."""

import os
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest

from shardwise.base.errors import ConfigError, ShardwiseError
from shardwise.comm.policy import CommPolicy
from shardwise.comm.rendezvous import address as addresses
from shardwise.comm.rendezvous.address import (
    HostAddress,
    find_route,
    is_local,
    is_public,
    own_addresses,
    resolved,
    selected,
)
from tests.namespaces import NamespaceHost, call_on, namespaces

PRESENT = [
    HostAddress("lo", "127.0.0.1"),
    HostAddress("eth0", "10.0.0.5"),
    HostAddress("ib0", "192.168.3.5"),
    HostAddress("lo", "::1"),
    HostAddress("ib0", "fe80::1%ib0"),
    HostAddress("ib0", "fd00::5"),
]


def test_the_addresses_of_this_host_are_found() -> None:
    found = own_addresses()
    assert HostAddress("lo", "127.0.0.1", 8) in found
    assert {each.interface for each in found} <= {name for _, name in socket.if_nameindex()}


@pytest.mark.parametrize(
    ("asked", "is_found"),
    [
        ("eth0", "10.0.0.5"),
        ("ib0", "192.168.3.5"),
        ("10.0.0.0/8", "10.0.0.5"),
        ("10.0.0.5", "10.0.0.5"),
        ("fd00::/16", "fd00::5"),
    ],
)
def test_an_interface_is_chosen_by_name_network_or_address(asked: str, is_found: str) -> None:
    assert selected(asked, PRESENT).address == is_found


@pytest.mark.parametrize("asked", ["eth1", "172.16.0.0/12", "10.0.0.6", "a\0b", "x" * 500])
def test_an_interface_that_is_not_there_is_refused_with_those_that_are(asked: str) -> None:
    with pytest.raises(ConfigError, match=r"10\.0\.0\.5 \(eth0\), 192\.168\.3\.5 \(ib0\)") as caught:
        selected(asked, PRESENT)
    assert len(str(caught.value)) < 400


def test_kinds_of_addresses() -> None:
    assert is_local("127.0.1.1") and is_local("::1") and is_local("::ffff:127.0.0.1") and is_local("0.0.0.0")
    assert not is_local("10.0.0.1") and not is_local("fe80::1%eth0")
    assert is_public("8.8.8.8") and is_public("2606:4700::1")
    assert not any(
        map(is_public, ["10.0.0.1", "192.168.0.1", "100.64.0.1", "fd00::1", "fe80::1%eth0", "gpu1"])
    )


def test_a_name_that_no_server_answers_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(0.5) or [])
    with pytest.raises(OSError, match="no answer within 0 s"):
        resolved("gpu1", 0.05)
    monkeypatch.undo()
    for name in ("a\0b", "x" * 300, "a..b"):
        with pytest.raises(OSError):
            resolved(name)


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_the_user_s_variable_comes_first_and_that_of_our_launcher_last(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setattr(addresses, "source_of", lambda address: "10.0.0.5")
    monkeypatch.setattr(addresses, "interface_of", lambda address: "eth0")
    env = {variable: "ib0"}
    assert find_route("10.0.0.1", env, "eth0", PRESENT).own == "192.168.3.5"
    by_launcher = env | {"SHARDWISE_INTERFACE": "ib0"}
    assert find_route("10.0.0.1", by_launcher, "eth0", PRESENT).reason == "comm.interface: eth0"
    assert find_route("10.0.0.1", by_launcher, "", PRESENT).reason == "the way to 10.0.0.1"


class Case(NamedTuple):
    """One network and what ranks on it must do."""

    hosts: Callable[[], AbstractContextManager[list[NamespaceHost]]]
    env: dict[str, str]
    interface: str = ""
    says: str = ""
    """Part of the sentence of every rank, if the job cannot begin."""
    net: str = "cable"
    """The interface that must carry the data."""


def _names(address: str) -> dict[str, str]:
    return {"node1": address, "node2": address}


CASES = {
    "own_name_unknown": Case(lambda: namespaces(), {}),
    "own_name_is_127.0.1.1": Case(lambda: namespaces(resolves=_names("127.0.1.1")), {}),
    "store_name_is_127.0.1.1_on_its_host": Case(
        lambda: namespaces(resolves=[{"node1": "127.0.1.1"}, {"node1": "10.213.7.1"}]),
        {"MASTER_ADDR": "node1"},
    ),
    "store_name_is_unknown": Case(
        lambda: namespaces(resolves=[{}, {}]), {"MASTER_ADDR": "node7"}, says="does not resolve"
    ),
    "store_is_at_localhost": Case(
        lambda: namespaces(), {"MASTER_ADDR": "localhost"}, says="set MASTER_ADDR to the first host's address"
    ),
    "two_interfaces": Case(lambda: namespaces(second=True, resolves="all"), {}),
    "two_interfaces_one_is_chosen": Case(
        lambda: namespaces(second=True, resolves="all"), {}, interface="10.213.8.0/24", net="second"
    ),
    "two_interfaces_and_no_default_route": Case(
        lambda: namespaces(second=True, resolves=[{"node1": "127.0.1.1"}, {"node1": "10.213.7.1"}]),
        {"MASTER_ADDR": "node1"},
        says="no default route",
    ),
    "a_default_route": Case(
        lambda: namespaces(
            second=True, default_route=True, resolves=[{"node1": "127.0.1.1"}, {"node1": "10.213.7.1"}]
        ),
        {"MASTER_ADDR": "node1"},
    ),
    "store_is_on_another_host": Case(
        lambda: namespaces(),
        {"MASTER_ADDR": "10.213.7.2"},
        says="this one has 127.0.0.1 (lo), 10.213.7.1 (cable1)",
    ),
    "no_way": Case(lambda: namespaces(), {"MASTER_ADDR": "10.9.9.9"}, says="no way to the store at 10.9.9.9"),
    "v6_alone": Case(lambda: namespaces(versions=[6]), {}),
    "v6_alone_in_brackets": Case(lambda: namespaces(versions=[6]), {"MASTER_ADDR": "[fd00:213:7::1]"}),
    "v4_and_v6": Case(lambda: namespaces(versions=[4, 6], resolves="all"), {"MASTER_ADDR": "node1"}),
}
IN_SUITE = ("own_name_is_127.0.1.1", "store_name_is_unknown", "two_interfaces_one_is_chosen", "v6_alone")


def exchanged(interface: str, timeout_s: float = 20) -> tuple[float, str, list[str], tuple[str, ...]]:
    """Join, sum megabytes, and return the sum, gloo's interface, all listeners and the addresses of the hosts."""
    import torch
    import torch.distributed as dist

    from shardwise.comm.world import join

    torch.set_num_threads(1)
    policy = CommPolicy(interface=interface, join_timeout_s=timeout_s, device="cpu")
    world = join(quiet=True, policy=policy)
    tensor = torch.full((1 << 18,), float(world.rank + 1))
    dist.all_reduce(tensor)
    found = float(tensor[0]), os.environ["GLOO_SOCKET_IFNAME"], listeners(), world.addresses
    dist.barrier()
    world.close()
    return found


def listeners() -> list[str]:
    """Addresses at which processes of this network namespace listen, as the kernel spells them."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as rows:
            for line in list(rows)[1:]:
                address, _, state = line.split()[1:4]
                if state == "0A":
                    found.append(address)
    return found


def check(name: str) -> None:
    """Run one case: the sum is right and travels by the right cable, or every rank says one sentence in time."""
    case = CASES[name]
    with case.hosts() as hosts:
        found: list[Any] = call_on(
            hosts,
            exchanged,
            case.interface,
            5 if case.says else 20,
            **{"SHARDWISE_SECRET": "of both"} | case.env,
        )
        if case.says:
            assert any(isinstance(each, ShardwiseError) and case.says in str(each) for each in found), found
            assert all(isinstance(each, Exception) and "\n" not in str(each) for each in found), found
            return
        for host, result in zip(hosts, found, strict=True):
            assert isinstance(result, tuple), (name, found)
            total, interface, listening, at = result
            assert at == tuple((each.v4 or each.v6)[f"{case.net}{each.number}"] for each in hosts)
            assert total == 3.0
            assert interface == f"{case.net}{host.number}"
            assert not [each for each in listening if set(each.split(":")[0]) == {"0"}], listening
            assert host.counted(interface).sent > 1 << 19
            if case.net == "second":
                assert host.counted().sent < 1 << 19


@pytest.mark.parametrize("name", IN_SUITE)
def test_hosts_meet_or_say_why_not(name: str) -> None:
    check(name)


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_hosts_meet_or_say_why_not_each_time(name: str) -> None:
    for _ in range(20):
        check(name)
