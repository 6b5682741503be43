"""What a process sends to addresses of other hosts is counted, and nothing else; here the other host is this one."""

import socket
import sys
import time
from collections.abc import Iterator

import pytest

from shardwise.comm.watching import link_use
from shardwise.comm.watching.link_use import LinkMeter

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="TCP_INFO is Linux's")
Pair = tuple[socket.socket, socket.socket]


def connected(address: str) -> Pair:
    with socket.create_server((address, 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, far


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = connected("127.0.0.9")
    with near, far:
        yield near, far


def send(pair: Pair, count: int) -> None:
    """Send bytes, and return once the kernel has had them acknowledged."""
    near, far = pair
    near.setblocking(False)
    left = count
    while left:
        try:
            near.send(bytes(min(left, 1 << 16)))
        except BlockingIOError:
            pass
        left -= len(far.recv(min(left, 1 << 20)))
    time.sleep(0.05)


def test_bytes_and_their_seconds_are_counted_once(pair: Pair) -> None:
    meter = LinkMeter(["127.0.0.9"])
    assert meter.take() == (0.0, 0.0)
    send(pair, 1 << 16)
    sent_bytes, seconds = meter.take()
    assert sent_bytes == 1 << 16 and 0 <= seconds < 5
    assert meter.take() == (0.0, 0.0)


def test_what_goes_elsewhere_is_not_counted(pair: Pair) -> None:
    meter = LinkMeter(["127.0.0.8", "fd00::1"])
    meter.take()
    send(pair, 1 << 16)
    assert meter.take() == (0.0, 0.0)


def test_a_receiver_without_room_is_no_slow_cable(pair: Pair) -> None:
    """The bytes wait for the receiver's program and not for the cable."""
    near, far = pair
    meter = LinkMeter(["127.0.0.9"])
    meter.take()
    near.setblocking(False)
    try:
        while True:
            near.send(bytes(1 << 16))
    except BlockingIOError:
        pass
    time.sleep(0.6)
    far.setblocking(False)
    try:
        while True:
            far.recv(1 << 20)
            time.sleep(0.001)
    except BlockingIOError:
        pass
    time.sleep(0.3)
    sent_bytes, seconds = meter.take()
    assert sent_bytes > 1 << 16 and seconds < 0.3


def test_connections_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that has the descriptor of a closed one does not count with the other's bytes."""
    monkeypatch.setattr(link_use, "_SCAN_EVERY", 2)
    meter = LinkMeter(["127.0.0.9"])
    first = connected("127.0.0.9")
    meter.take()
    send(first, 1 << 17)
    for end in first:
        end.close()
    second = connected("127.0.0.9")
    assert second[0].fileno() in (first[0].fileno(), second[0].fileno())
    assert meter.take() == (0.0, 0.0)
    meter.take()
    send(second, 1 << 10)
    assert meter.take().sent_bytes == 1 << 10
    for end in second:
        end.close()
