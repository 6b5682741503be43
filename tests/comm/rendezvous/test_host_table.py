"""The table of hosts, and what hosts refuse that are not alike."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.base.errors import ConfigError
from shardwise.comm.rendezvous import handshake
from shardwise.comm.rendezvous.address import HostRoute
from shardwise.comm.rendezvous.handshake import HandshakeResult, RankIdentity
from shardwise.comm.rendezvous.host_table import (
    clock_warnings,
    described,
    differences,
    refusal_of_addresses,
    refusal_of_versions,
    rows_of,
    table,
)

ALIKE = "shardwise 1.0, torch 2.13.0, python 3.11, code 1a2b"


def identity(host: str, **facts: str) -> RankIdentity:
    """Return a rank on ``host`` with an address of its number."""
    facts = {"name": host, "address": f"10.0.0.{host[-1]}", "versions": ALIKE} | facts
    return RankIdentity(
        host, 1, "", interface="eth1", chosen_by="the way to 10.0.0.1", has="8 cores", **facts
    )


def test_the_table_has_a_row_for_each_host() -> None:
    who = [identity("gpu1"), identity("gpu1"), identity("gpu2"), identity("gpu1")]
    rows = rows_of(who, (0.0, 2.25))
    assert table(rows).splitlines() == [
        "  host  ranks  address   interface  chosen by            has      clock",
        "  gpu1  0,1,3  10.0.0.1  eth1       the way to 10.0.0.1  8 cores",
        "  gpu2  2      10.0.0.2  eth1       the way to 10.0.0.1  8 cores  +2.250 s",
    ]
    assert clock_warnings(rows) == [
        "the clock of gpu2 is 2.2 s ahead of that of gpu1: times in the logs of the two do not agree"
    ]
    many = rows_of([identity(f"gpu{number}") for number in range(100)])
    assert table(many).endswith("and 36 more")


def test_this_host_describes_itself() -> None:
    me = RankIdentity("here", 1, "")
    route = HostRoute("10.0.0.1", "10.0.0.2", "eth1", "the way to 10.0.0.1")
    found = described(me, torch.device("cpu"), route, one_host=False, is_first=True)
    assert found.address == "10.0.0.2" and found.has.endswith(("core", "cores"))
    names = [part.split(" ")[0] for part in found.versions.split(", ")]
    assert names[:4] == ["shardwise", "torch", "python", "code"]
    assert described(me, torch.device("cpu"), None, one_host=True, is_first=True).versions == ""


def test_what_differs_is_named_with_its_hosts() -> None:
    who = [identity("gpu1"), identity("gpu1", versions="torch 2.13.0")]
    assert differences(who) == [], "the first rank of a host speaks for it"
    who += [identity("gpu2", versions="shardwise 1.0, torch 2.12.1, python 3.11, code 9f9f")]
    assert differences(who) == [
        "torch differs between the hosts: 2.13.0 on gpu1; 2.12.1 on gpu2",
        "the source of shardwise differs between the hosts: 1a2b on gpu1; 9f9f on gpu2",
    ]
    assert "comm.versions: warn" in refusal_of_versions(who)


def test_an_address_of_the_internet_is_refused() -> None:
    who = [identity("gpu1"), identity("gpu2", address="8.8.4.4")]
    assert "gpu2 at 8.8.4.4" in refusal_of_addresses(who)
    assert refusal_of_addresses(who[:1]) == ""


def met(who: list[RankIdentity], refusal: handshake.Refusal) -> list[Any]:
    """What each rank gets from a meeting: a result or an exception."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found: list[Any] = [None] * len(who)

    def one(rank: int) -> None:
        base = dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=10), wait_for_workers=False)
        try:
            found[rank] = handshake.meet(base, rank, len(who), who[rank], "s", None, 10.0, refusal)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), name=f"rank {rank}") for rank in range(len(who))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_of_two_hosts_compare_versions_and_clocks() -> None:
    who = [identity("gpu1"), identity("gpu2"), identity("gpu2")]
    for result in met(who, refusal_of_versions):
        assert isinstance(result, HandshakeResult), result
    clocks = met(who, refusal_of_versions)[0].clocks
    assert clocks[0] == 0 and abs(clocks[1]) < 1, "one clock, read by two ranks"
    who[1] = identity("gpu2", versions="torch 2.12.1")
    said = met(who, refusal_of_versions)
    assert all(isinstance(each, ConfigError) for each in said), said
    assert len({str(each) for each in said}) == 1, "one sentence on all ranks"
    assert "2.12.1 on gpu2" in str(said[0])


def test_a_clock_that_is_off_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    real = handshake.time.time
    shift_s = {"rank 1": 2.0}
    monkeypatch.setattr(
        handshake.time, "time", lambda: real() + shift_s.get(threading.current_thread().name, 0.0)
    )
    clocks = met([identity("gpu1"), identity("gpu2")], lambda who: "")[0].clocks
    assert clocks[1] == pytest.approx(2.0, abs=0.5)
