"""Hostfiles, filters, and where a host's ranks stand."""

import os
from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError, ShardwiseError, UsageError
from shardwise.launch import hosts as places
from shardwise.launch.environment import LaunchJob, of_rank, seat
from shardwise.launch.hosts import (
    Host,
    HostRanks,
    choose,
    parse_cores,
    ranks_here,
    read_hostfile,
    shares,
    visible_devices,
)

HOSTS = [Host("gpu1", (0, 1, 2, 3)), Host("gpu2", (0, 1))]


def test_a_hostfile_is_read_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two hosts\ngpu1 slots=4\n\n  gpu2   slots=2  # the old one\n")
    assert read_hostfile(path) == HOSTS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpu1 slot=4", "line 1: 'gpu1 slot=4'"),
        ("gpu1 slots=4\ngpu1 slots=2", "line 2: gpu1 is there twice"),
        ("gpu1 slots=0", "N from 1 to 4096"),
        ("a;rm slots=1", "'a;rm' is not the name of a host"),
        ("# nobody", "names no host"),
        ("gpu1 slots=1000000000", "N from 1 to 4096"),
        (f"gpu1 slots={'9' * 5000}", "N from 1 to 4096"),
        ("\n".join(f"gpu{i} slots=4096" for i in range(1000)), "line 257: more than 1048576 slots"),
        ("x" * 100_000, r"line 1: 'x{80}\.\.\.'"),
        ("caf\udce9", "not text in UTF-8"),
    ],
)
def test_a_faulty_hostfile_is_refused_by_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=says) as caught:
        read_hostfile(path)
    assert len(str(caught.value)) < 600


def test_a_hostfile_is_a_regular_file_of_any_length(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("".join(f"gpu{i} slots=2\n" for i in range(100_000)))
    hosts = read_hostfile(path)
    assert len(hosts) == 100_000 and hosts[-1] == Host("gpu99999", (0, 1))
    with pytest.raises(UsageError, match="on gpu15: .*\n  and so on, for 99984 more") as caught:
        ranks_here(hosts, None, None, 29500)
    assert len(str(caught.value)) < 3000
    with pytest.raises(UsageError, match="there are gpu0, .* and 99984 more"):
        choose(hosts, "other")
    for other in ("fifo", "zero"):
        (os.mkfifo if other == "fifo" else lambda path: path.symlink_to("/dev/zero"))(tmp_path / other)
        with pytest.raises(ConfigError, match="not a regular file"):
            read_hostfile(tmp_path / other)


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", HOSTS),
        ("gpu2", "", [HOSTS[1]]),
        ("gpu2@gpu1:3,1", "", [Host("gpu1", (3, 1)), HOSTS[1]]),
        ("", "gpu1", [HOSTS[1]]),
        ("", "gpu1:0,2@gpu2:1", [Host("gpu1", (1, 3)), Host("gpu2", (0,))]),
    ],
)
def test_filters_keep_the_order_of_hosts(include: str, exclude: str, left: list[Host]) -> None:
    assert choose(HOSTS, include, exclude) == left


@pytest.mark.parametrize(
    ("include", "exclude", "says"),
    [
        ("gpu1", "gpu2", "exclude one another"),
        ("gpu3", "", "the host 'gpu3'; there are gpu1, gpu2"),
        ("gpu2:0,2", "", "slot 2 of gpu2"),
        ("gpu2:0,0", "", "names a slot twice"),
        ("gpu2@gpu2:1", "", "names gpu2 twice"),
        ("gpu2:x", "", "expected HOST or HOST:SLOT"),
        ("a;rm", "", "not the name of a host"),
        (f"gpu1:{'9' * 5000}", "", "expected HOST or HOST:SLOT,SLOT"),
        ("gpu1:4096", "", "slots count from 0 to 4095"),
        ("", "gpu1@gpu2", "leaves no slot"),
    ],
)
def test_filters_that_make_no_sense_are_refused(include: str, exclude: str, says: str) -> None:
    with pytest.raises(ShardwiseError, match=says):
        choose(HOSTS, include, exclude)


def test_ranks_count_host_by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "own_address", lambda address: "10.0.0.2")
    monkeypatch.setattr(places, "interface_of", lambda address: "eth7")
    here = ranks_here(HOSTS, 1, None, 29500)
    assert here == HostRanks(2, 6, 4, "gpu1", 29500, "eth7", (0, 1))
    job = LaunchJob("word", here, Path("/tmp/failures"), "")
    given = of_rank(job, 5, None, {"NCCL_SOCKET_IFNAME": "ib0"})
    wanted = {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu1",
    }
    assert wanted.items() <= given.items()
    assert given["GLOO_SOCKET_IFNAME"] == "eth7" and given["NCCL_SOCKET_IFNAME"] == "ib0", (
        "the user's own stays"
    )
    assert "SHARDWISE_SECRET" not in given, "one that this host alone drew would part it from the others"


def test_several_hosts_must_say_which_one_this_is() -> None:
    with pytest.raises(UsageError, match="on gpu2: shardwise launch --node_rank 1 --master_addr gpu1"):
        ranks_here(HOSTS, None, None, 29500)
    with pytest.raises(UsageError, match="--node_rank 2 of 2 hosts"):
        ranks_here(HOSTS, 2, None, 29500)
    with pytest.raises(UsageError, match="cannot be reached from the other hosts"):
        ranks_here(HOSTS, 1, "127.0.0.1", 29500)


def test_one_host_meets_on_its_loopback_interface_whatever_is_given() -> None:
    assert ranks_here(HOSTS[1:], None, "10.0.0.1", 29500) == HostRanks(2, 2, slots=(0, 1))


def test_slots_count_through_the_devices_that_are_visible() -> None:
    assert visible_devices([1, 2], None) == "1,2"
    assert visible_devices([0, 2], "4,5,GPU-7f") == "4,GPU-7f"
    assert visible_devices([0, 1], "") == "", "none is to be seen, as on a CPU"
    with pytest.raises(UsageError, match="slot 3 is asked for"):
        visible_devices([3], "4,5")


def test_an_address_that_is_no_name_of_a_host() -> None:
    for address in ("a\0b", "x" * 300, "a..b"):
        with pytest.raises(ConfigError, match="finds no way to --master_addr"):
            ranks_here(HOSTS, 1, address, 29500)


def test_cores_are_shared_out() -> None:
    assert shares(parse_cores("0,2-5"), 2) == [(0, 2), (3, 4)]
    for text in ("2-1", "x", "1,1", "", "0-1000000000", "9" * 5000, "0-65535,0-65535"):
        with pytest.raises(UsageError, match="bind_core_list"):
            parse_cores(text)
    with pytest.raises(UsageError, match="3 ranks cannot be bound to 2 cores"):
        shares([0, 1], 3)
    job = LaunchJob("word", HostRanks(2, 2), Path("/tmp/failures"), "s", shares([4, 5, 6, 7], 2))
    given = of_rank(job, 1, None, {})
    assert seat(given).cores == (6, 7) and given["OMP_NUM_THREADS"] == "2"
