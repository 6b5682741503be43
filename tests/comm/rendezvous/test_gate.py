"""The gate before the store: ranks come in, strangers on any interface do not, and the job does not notice them."""

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.base.errors import CommError, DeadlineError
from shardwise.comm.rendezvous import connection, gate
from shardwise.comm.rendezvous.connection import connect, refused_hosts
from shardwise.comm.rendezvous.gate import DialRelay, Gate, GateRefused, belongs_to, dial
from shardwise.comm.rendezvous.seat import JobSeat
from tests.comm.rendezvous.besieged import SECRET as SECRET_OF_BOTH
from tests.comm.rendezvous.besieged import STRANGERS, besiege, steps_beside_strangers, sums_of
from tests.comm.rendezvous.strangers import KINDS, visit
from tests.namespaces import call_on, namespaces

SECRET = b"of the job"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(address: str = "127.0.0.1") -> socket.socket:
    opened = socket.socket()
    opened.bind((address, 0))
    opened.listen(64)
    return opened


class Echo:
    """A server that answers every byte, behind a gate that runs in a thread."""

    def __init__(self) -> None:
        self.server = listening()
        self.door = listening()
        self.place = self.door.getsockname()
        self.visits = 0
        self.received = 0
        self.gate = Gate([self.door], self.server.getsockname(), SECRET, b"")
        for target in (self._serve, self.gate.run):
            threading.Thread(target=target, daemon=True).start()

    def _serve(self) -> None:
        while True:
            opened, _ = self.server.accept()
            self.visits += 1
            threading.Thread(target=self._answer, args=(opened,), daemon=True).start()

    def _answer(self, opened: socket.socket) -> None:
        with opened:
            while data := opened.recv(1 << 16):
                self.received += len(data)
                opened.sendall(data)


@pytest.fixture(scope="module")
def echo() -> Echo:
    return Echo()


def test_a_rank_comes_in_and_bytes_go_both_ways(echo: Echo) -> None:
    with dial(echo.place, SECRET, 5) as opened:
        sent = random.Random(0).randbytes(3 << 20)
        threading.Thread(target=lambda: (opened.sendall(sent), opened.shutdown(socket.SHUT_WR))).start()
        found = b"".join(iter(lambda: opened.recv(1 << 16), b""))
        assert found == sent, "and the end of one side reaches the other after the last byte"


def test_another_secret_is_refused_by_both_sides(echo: Echo) -> None:
    before = echo.visits
    with pytest.raises(GateRefused, match="does not know this rank's secret"):
        dial(echo.place, b"another", 5)
    assert echo.visits == before
    with listening() as false_gate:

        def pretend() -> None:
            opened, _ = false_gate.accept()
            with opened:
                opened.recv(40)
                opened.sendall(bytes(32))
                opened.recv(32)
                opened.sendall(b"\x01" + bytes(32))

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(GateRefused):
            dial(false_gate.getsockname(), SECRET, 5)


def recorded_proof(place: Any) -> bytes:
    """The bytes that a rank sends to a gate, as a listener on the network records them."""
    with listening() as tap:
        said = bytearray()

        def pass_on() -> None:
            near, _ = tap.accept()
            far = socket.create_connection(place)
            with near, far:
                for count, answer in ((40, 32), (32, 33)):
                    data = near.recv(count)
                    said.extend(data)
                    far.sendall(data)
                    near.sendall(far.recv(answer))

        thread = threading.Thread(target=pass_on, daemon=True)
        thread.start()
        dial(tap.getsockname(), SECRET, 5).close()
        thread.join(5)
        return bytes(said)


@pytest.mark.parametrize("kind", [each for each in KINDS if each not in ("silent", "half_open")])
def test_a_stranger_gets_nothing(echo: Echo, kind: str) -> None:
    """The bytes of a rank's proof prove nothing a second time."""
    visits = echo.visits
    proof = recorded_proof(echo.place)
    assert len(proof) == 72
    while echo.visits == visits:  # the server's thread counts the rank that was recorded
        time.sleep(0.001)
    before = echo.visits, echo.received
    assert visit(kind, *echo.place, proof) in ("closed", "refused")
    assert (echo.visits, echo.received) == before, "no byte has reached the server"


def test_visitors_that_say_nothing_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_PROOF_S", 0.2)
    monkeypatch.setattr(gate, "_TICK_S", 0.05)
    monkeypatch.setattr(gate, "_VISITORS", 8)
    echo = Echo()
    crowd = [socket.create_connection(echo.place) for _ in range(40)]
    dial(echo.place, SECRET, 5).close()
    for opened in crowd:
        opened.settimeout(5)
        with opened:
            assert opened.recv(1) == b""
    assert echo.visits == 1


def test_a_value_is_not_held_in_memory(echo: Echo) -> None:
    """A side that does not read stops the other: buffers are bounded."""
    ends = [pair for pair in (socket.socketpair() for _ in range(2))]
    relay = gate.Relay([])
    threading.Thread(target=relay.run, daemon=True).start()
    relay.pair(ends[0][1], ends[1][1])
    sender, receiver = ends[0][0], ends[1][0]
    sender.settimeout(0.3)
    sent = 0
    with pytest.raises(TimeoutError):
        while sent < 1 << 30:
            sent += sender.send(bytes(1 << 16))
    assert sent < 1 << 24
    received = 0
    receiver.settimeout(5)
    while received < sent:
        received += len(receiver.recv(1 << 20))
    for end in (sender, receiver):  # the relay, whose thread reads the other two, closes these
        end.close()


def test_a_relay_lets_its_own_process_in_alone(echo: Echo) -> None:
    door = listening()
    threading.Thread(target=DialRelay(door, os.getpid(), echo.place, SECRET).run, daemon=True).start()
    place = door.getsockname()
    with socket.create_connection(place, 5) as opened:
        opened.sendall(b"ours")
        assert opened.recv(4) == b"ours"
    before = echo.visits
    words = [sys.executable, "-I", "-S", str(STRANGERS), "garbage", *map(str, place)]
    assert subprocess.run(words, capture_output=True, text=True, timeout=20).stdout == "closed\n"
    assert echo.visits == before
    assert not belongs_to(os.getpid(), ("127.0.0.1", 1), place)


@pytest.fixture
def seats(tmp_path: Path) -> Iterator[list[JobSeat]]:
    port = free_port()
    yield [JobSeat(rank, 2, rank, 2, "127.0.0.1", port, "test") for rank in range(2)]
    for served in connection._SERVED.values():
        if served.place[1] == port:
            os.close(served.control)
    for table in (connection._SERVED, connection._DIALLED):
        for named in [each for each in table if each[2] == port]:
            del table[named]


@pytest.mark.parametrize(("secret", "in_thread"), [("s", True), ("", True), ("s", False)])
def test_torch_s_store_works_behind_the_gate(
    seats: list[JobSeat], tmp_path: Path, secret: str, in_thread: bool
) -> None:
    """Without SHARDWISE_SECRET ranks of one host share one that rank 0 draws, in a folder of their own."""
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    env = {"SHARDWISE_SECRET": secret} if secret else {}
    first, second = (connect(seat, None, 10.0, env, folder, in_thread) for seat in seats)
    first.set("a", "1")
    assert bytes(second.get("a")) == b"1" and second.add("n", 2) == 2
    assert bytes(second.clone().get("a")) == b"1", "clones come by the same way"  # type: ignore[attr-defined]
    assert len(list(folder.iterdir())) == (0 if secret else 1)
    connection.forget_secret(seats[0], folder)
    assert not list(folder.iterdir())


def test_no_door_of_a_job_lets_a_stranger_of_this_host_in(seats: list[JobSeat]) -> None:
    """At the gate, at the relays of both ranks, and at torch's own server, which has a loopback address."""
    env = {"SHARDWISE_SECRET": "s"}
    before = set(doors())
    first, second = (connect(seat, None, 10.0, env) for seat in seats)
    first.set("k", "1")
    found = sorted(set(doors()) - before)
    assert len(found) == 4, found
    words = [sys.executable, "-I", "-S", str(STRANGERS), "torch"]
    started = [
        subprocess.Popen(
            [*words, *map(str, place)], env=os.environ | {"SILENCE_S": "1"}, stdout=subprocess.PIPE, text=True
        )
        for place in found
    ]
    said = [process.communicate(timeout=30)[0].strip() for process in started]
    assert "accepted" not in said and said.count("closed") >= 3, dict(zip(found, said, strict=True))
    assert bytes(second.get("k")) == b"1" and first.num_keys() == 1


def doors() -> list[tuple[str, int]]:
    """IPv4 addresses and ports at which anybody on this host listens."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        address, _, state = line.split()[1:4]
        if state == "0A":
            number, port = address.split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(number)[::-1]), int(port, 16)))
    return found


def test_a_host_with_another_secret_is_named(seats: list[JobSeat]) -> None:
    connect(seats[0], None, 10.0, {"SHARDWISE_SECRET": "s"})
    for other in ({"SHARDWISE_SECRET": "t"}, {}):
        with pytest.raises(
            CommError, match=f"rank 1 on host {socket.gethostname()}: .* another SHARDWISE_SECRET"
        ):
            connect(seats[1], None, 10.0, other)
    assert refused_hosts(seats[0]) == ["127.0.0.1"]


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM and MPI name no port; one that followed from the job's number alone could be anybody's."""
    monkeypatch.setattr(connection, "_SHORT_ANSWER_S", 0.1)
    seat = JobSeat(0, 2, 0, 2, "127.0.0.1", free_port(), "SLURM", gives_port=False)
    access = connection.StoreAccess(seat, "127.0.0.1", 1.0, b"s", None, True)
    ports = access.ports(b"s")
    assert len(set(ports)) == 8 and access.ports(b"t") != ports
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0]))
        taken.listen()
        first = connect(seat, None, 10.0, {"SHARDWISE_SECRET": "s"})
        second = connect(seat._replace(rank=1), None, 10.0, {"SHARDWISE_SECRET": "s"})
    first.set("a", "1")
    assert bytes(second.get("a")) == b"1"
    assert connection._SERVED[os.getpid(), "127.0.0.1", seat.port].place[1] == ports[1]


def test_a_store_that_is_not_served_ends_in_time(seats: list[JobSeat]) -> None:
    with pytest.raises(CommError, match="rank 0, which serves it, has not come within 0 s"):
        connect(seats[1], None, 0.2, {"SHARDWISE_SECRET": "s"})


def joined_with_a_secret_of_its_own() -> None:
    """Join with a secret that the other host does not have."""
    from shardwise.comm.policy import CommPolicy
    from shardwise.comm.world import join

    os.environ["SHARDWISE_SECRET"] = f"secret {os.environ['RANK']}"
    join(quiet=True, policy=CommPolicy(join_timeout_s=8.0, device="cpu"))


@pytest.mark.soak  # rank 0 waits until its time is over
def test_both_hosts_name_the_one_with_another_secret() -> None:
    with namespaces() as hosts:
        first, second = call_on(hosts, joined_with_a_secret_of_its_own)
    assert isinstance(second, CommError) and "rank 1 on host node2" in str(second), second
    assert isinstance(first, DeadlineError) and "gate refused 10.213.7.2" in str(first), first


def as_torch_s_own_client() -> None:
    """Connect to the gate as torch's own client does."""
    from datetime import timedelta

    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        29500,
        is_master=False,
        timeout=timedelta(seconds=2),
        wait_for_workers=False,
    )
    store.set("k", "v")


@pytest.mark.soak
def test_a_thousand_strangers_do_not_stop_a_job(tmp_path: Path) -> None:
    """Half of them come from the other host, half from the host of rank 0; each kind, and torch's own client."""
    with namespaces() as hosts:
        done = tmp_path / "done"
        found: list[Any] = []
        job = threading.Thread(
            target=lambda: found.extend(
                call_on(hosts, steps_beside_strangers, str(done), SHARDWISE_SECRET=SECRET_OF_BOTH)
            )
        )
        job.start()
        while hosts[0].run("ss", "-Htln", "sport = :29500", capture_output=True).stdout == b"":
            time.sleep(0.1)
        answers = besiege(hosts, (hosts[0].address, 29500))
        errors = call_on(hosts[1:], as_torch_s_own_client, MASTER_ADDR=hosts[0].address)
        done.touch()
        job.join()
    assert all(isinstance(each, list) for each in found), found
    assert found[0] == found[1] == sums_of(len(found[0]), 2)
    print(f"{len(found[0])} steps beside {sum(answers.values())} strangers: {dict(answers)}")
    assert isinstance(errors[0], Exception), "torch's own client"
