"""The use of a host's cable: bytes that this rank sends to other hosts, and the seconds that they are on their way.

The kernel counts both for each TCP connection (``TCP_INFO``), so nothing is added to what is sent:

    bytes     acknowledged by the other host
    seconds   some bytes were sent and not yet acknowledged, without the time in which the receiver had no room for
              more, or this process had handed over nothing more

    pace      = seconds / bytes                  the slower the cable of the sending host, the larger

All ranks of a collective end it together, so their waits do not tell whose cable is slow. The pace does, because a
connection counts what leaves its own host only (observe/stragglers.py).

Seconds are counted in ticks of the kernel's clock, of 1 to 10 ms: those of one short message are a guess, right in the
mean.

The connections are those of this process to addresses of the job's other hosts, which gloo, and NCCL without RDMA, have
opened. What RDMA sends is not seen.

Cost: 2 µs for each connection and step; every ``_SCAN_EVERY`` steps a look at each open file of the process, some 2 µs
for each of them.
"""

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterable
from typing import NamedTuple

from shardwise.plan.norm_numbers import LinkUse

_SCAN_EVERY = 16
_INFO_BYTES = 192
_ACKED = struct.Struct("=Q")
_ACKED_AT = 120
_TIMES = struct.Struct("=QQQ")
"""Microseconds with bytes on the way, without room at the receiver, and without bytes of this process."""
_TIMES_AT = 168
_TCP_INFO = 11
_PLACE_BYTES = 128
"""Bytes of a socket's address of any family."""
_MAPPED = bytes(10) + b"\xff\xff"
"""Beginning of an IPv4 address in the form of IPv6."""


class _Counts(NamedTuple):
    """What the kernel has counted for one connection."""

    acked_bytes: int
    way_us: int


class LinkMeter:
    """Measures what this process sends to other hosts.

    Args:
        addresses: Addresses of the job's other hosts.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = {_packed(each) for each in addresses}
        self._connections: dict[tuple[int, str], _Counts] = {}
        """Counts at the last call, by the descriptor and the kernel's name of the connection."""
        self._turn = 0
        self._info = ctypes.create_string_buffer(_INFO_BYTES)
        self._place = ctypes.create_string_buffer(_PLACE_BYTES)
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None

    def take(self) -> LinkUse:
        """Return the bytes and seconds since the last call; zeros on a system without ``TCP_INFO``."""
        if self._libc is None:
            return LinkUse()
        if self._turn % _SCAN_EVERY == 0:
            self._scan()
        self._turn += 1
        sent_bytes = way_us = 0
        for named, before in list(self._connections.items()):
            counts = self._counts_of(named[0])
            if counts is None or counts.acked_bytes < before.acked_bytes or counts.way_us < before.way_us:
                del self._connections[named]  # closed, and perhaps another connection has the descriptor
                continue
            self._connections[named] = counts
            sent_bytes += counts.acked_bytes - before.acked_bytes
            way_us += counts.way_us - before.way_us
        return LinkUse(float(sent_bytes), way_us * 1e-6)

    def _scan(self) -> None:
        """Find the connections to other hosts; those that are new count from now on."""
        found = {}
        with contextlib.suppress(OSError):
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    what = os.readlink(f"/proc/self/fd/{name}")
                    named = int(name), what
                    if not what.startswith("socket:"):
                        continue
                    counts = self._connections.get(named)
                    if counts is None and self._goes_to_host(named[0]):
                        counts = self._counts_of(named[0])
                    if counts is not None:
                        found[named] = counts
        self._connections = found

    def _goes_to_host(self, descriptor: int) -> bool:
        """Return whether a socket is connected to another host; no Python object may own it, or change its mode."""
        assert self._libc is not None, "only called where there is TCP_INFO"
        size = ctypes.c_uint32(_PLACE_BYTES)
        if self._libc.getpeername(descriptor, self._place, ctypes.byref(size)):
            return False
        family = int.from_bytes(self._place.raw[:2], sys.byteorder)
        at = {socket.AF_INET: slice(4, 8), socket.AF_INET6: slice(8, 24)}.get(socket.AddressFamily(family))
        return at is not None and _short(self._place.raw[at]) in self._addresses

    def _counts_of(self, descriptor: int) -> _Counts | None:
        """Return what the kernel has counted; None if the descriptor is no TCP connection any more."""
        assert self._libc is not None, "only called where there is TCP_INFO"
        size = ctypes.c_uint32(_INFO_BYTES)
        if self._libc.getsockopt(
            descriptor, socket.IPPROTO_TCP, _TCP_INFO, self._info, ctypes.byref(size)
        ) or (size.value < _INFO_BYTES):
            return None
        (acked_bytes,) = _ACKED.unpack_from(self._info, _ACKED_AT)
        busy_us, full_us, empty_us = _TIMES.unpack_from(self._info, _TIMES_AT)
        return _Counts(acked_bytes, max(busy_us - full_us - empty_us, 0))


def _packed(address: str) -> bytes:
    """Return the bytes of a numeric address."""
    text = address.partition("%")[0]
    return _short(socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text))


def _short(address: bytes) -> bytes:
    """Return the bytes of an address, IPv4 in four bytes."""
    return address.removeprefix(_MAPPED) if len(address) == 16 else address
