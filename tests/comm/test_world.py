"""Where the rank comes from, in which order, and what a contradiction says."""

import errno
import os
import socket
from pathlib import Path

import pytest

from shardwise.base.errors import CommError, DeadlineError
from shardwise.comm.policy import CommPolicy
from shardwise.comm.rendezvous.connection import connect
from shardwise.comm.rendezvous.seat import JobSeat, find_seat
from shardwise.comm.world import World, join


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


def test_ranks_of_several_hosts_measure_what_they_send_to_the_others() -> None:
    several, one = World(0, 3, hosts=(0, 0, 1)), World(0, 2)
    several.addresses, one.addresses = ("10.0.0.1", "10.0.0.2"), ("",)
    meter = several.link_meter()
    assert meter is not None and meter.take() == (0.0, 0.0)
    assert one.link_meter() is None


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
    for name in ("SHARDWISE_STORE_FD", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = connect(JobSeat(0, 2, 0, 2, address, port, "test"), None, 5.0, os.environ)
    store.set("k", "v")
    assert listens_at(port) == {"0100007F"}


def test_a_loopback_address_says_that_all_ranks_are_here() -> None:
    env = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert find_seat(env)[2:4] == (2, 4)
    assert find_seat(env | {"MASTER_ADDR": "10.0.0.1"})[2:4] == (0, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_without_a_loopback_interface_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Each rank waited for a minute, and quoted an address that torch made up."""

    def bind(self: socket.socket, address: tuple[str, int]) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(socket.socket, "bind", bind)
    with pytest.raises(CommError, match=f"rank {rank}: this host has no loopback interface"):
        join(rank, 2, port=29517, policy=CommPolicy(join_timeout_s=5))
