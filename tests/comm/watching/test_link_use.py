"""What a process sends to addresses of other hosts is counted, and nothing else; here the other host is this one."""

import contextlib
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
        with contextlib.suppress(BlockingIOError):
            near.send(bytes(min(left, 1 << 16)))
        left -= len(far.recv(min(left, 1 << 20)))
    time.sleep(0.05)


def test_bytes_are_counted_once(pair: Pair) -> None:
    meter = LinkMeter(["127.0.0.9"])
    assert meter.take() == (0.0, 0.0)
    send(pair, 1 << 16)
    assert meter.take() == (1 << 16, 0.0)
    assert meter.take() == (0.0, 0.0)


def test_what_goes_elsewhere_is_not_counted(pair: Pair) -> None:
    meter = LinkMeter(["127.0.0.8", "fd00::1"])
    meter.take()
    send(pair, 1 << 16)
    assert meter.take() == (0.0, 0.0)


def test_bytes_that_have_not_arrived_are_left(pair: Pair) -> None:
    """The receiver's kernel has no room for all of them."""
    near, far = pair
    meter = LinkMeter(["127.0.0.9"])
    meter.take()
    near.setblocking(False)
    handed = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            handed += near.send(bytes(1 << 16))
    time.sleep(0.1)
    sent_bytes, left_bytes = meter.take()
    # An unacknowledged segment counts as a whole one.
    assert 0 < sent_bytes < handed and handed - sent_bytes <= left_bytes < handed - sent_bytes + (1 << 18)
    far.settimeout(1)
    got = 0
    while got < handed:
        got += len(far.recv(1 << 20))
    time.sleep(0.1)
    assert meter.take() == (handed - sent_bytes, 0.0)


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
