"""The use of a host's cable: what this rank sends to other hosts, and what is left to send when an exchange is over.

The kernel has both for each TCP connection (``TCP_INFO``), so nothing is added to what is sent:

    sent     bytes that the other host has acknowledged since the last look
    left     bytes that this process has handed over and the other host has not acknowledged

All ranks of a collective end it together, so their waits do not tell whose cable is slow. Nor do the times for which
bytes are on their way, because acknowledgements of what comes in queue behind what goes out. But a rank ends its part
of a sum when it has all from the others and its own last bytes are with the kernel: on the host with the slow cable
these are then still queued, and on the other hosts they have arrived (observe/stragglers.py).

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
_INFO_BYTES = 152
_SEGMENT = struct.Struct("=I")
_SEGMENT_AT, _UNACKED_AT, _UNSENT_AT = 16, 24, 144
"""Bytes of a segment, segments that are not acknowledged, and bytes that are in no segment yet."""
_ACKED = struct.Struct("=Q")
_ACKED_AT = 120
_TCP_INFO = 11
_PLACE_BYTES = 128
"""Bytes of a socket's address of any family."""
_MAPPED = bytes(10) + b"\xff\xff"
"""Beginning of an IPv4 address in the form of IPv6."""


class _Counts(NamedTuple):
    """The counts of one connection."""

    acked_bytes: int
    left_bytes: int


class LinkMeter:
    """Measures what this process sends to other hosts.

    Args:
        addresses: Addresses of the job's other hosts.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = {_packed(each) for each in addresses}
        self._connections: dict[tuple[int, str], int] = {}
        """Acknowledged bytes at the last call, by the descriptor and the kernel's name of the connection."""
        self._turn = 0
        self._info = ctypes.create_string_buffer(_INFO_BYTES)
        self._place = ctypes.create_string_buffer(_PLACE_BYTES)
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None

    def take(self) -> LinkUse:
        """Return the bytes since the last call, and those that are left now; zeros without ``TCP_INFO``."""
        if self._libc is None:
            return LinkUse()
        if self._turn % _SCAN_EVERY == 0:
            self._scan()
        self._turn += 1
        sent_bytes = left_bytes = 0
        for named, before in list(self._connections.items()):
            counts = self._counts_of(named[0])
            if counts is None or counts.acked_bytes < before:
                del self._connections[named]  # closed, and perhaps another connection has the descriptor
                continue
            self._connections[named] = counts.acked_bytes
            sent_bytes += counts.acked_bytes - before
            left_bytes += counts.left_bytes
        return LinkUse(float(sent_bytes), float(left_bytes))

    def _scan(self) -> None:
        """Find the connections to other hosts; those that are new count from now on."""
        found = {}
        with contextlib.suppress(OSError):
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    what = os.readlink(f"/proc/self/fd/{name}")
                    named = int(name), what
                    if named in self._connections:
                        found[named] = self._connections[named]
                    elif what.startswith("socket:") and self._goes_to_host(named[0]):
                        counts = self._counts_of(named[0])
                        found |= {} if counts is None else {named: counts.acked_bytes}
        self._connections = found

    def _goes_to_host(self, descriptor: int) -> bool:
        """Return whether a socket is connected to another host; no Python object may own it, or change its mode."""
        assert self._libc is not None, "only called where there is TCP_INFO"
        size = ctypes.c_uint32(_PLACE_BYTES)
        if self._libc.getpeername(descriptor, self._place, ctypes.byref(size)):
            return False
        family = int.from_bytes(self._place.raw[:2], sys.byteorder)
        at = {int(socket.AF_INET): slice(4, 8), int(socket.AF_INET6): slice(8, 24)}.get(family)
        return at is not None and _short(self._place.raw[at]) in self._addresses

    def _counts_of(self, descriptor: int) -> _Counts | None:
        """Return the counts of a connection; None if the descriptor is no TCP connection any more."""
        assert self._libc is not None, "only called where there is TCP_INFO"
        size = ctypes.c_uint32(_INFO_BYTES)
        given = descriptor, socket.IPPROTO_TCP, _TCP_INFO, self._info, ctypes.byref(size)
        if self._libc.getsockopt(*given) or size.value < _INFO_BYTES:
            return None
        segment, unacked, unsent = (
            int(_SEGMENT.unpack_from(self._info, at)[0]) for at in (_SEGMENT_AT, _UNACKED_AT, _UNSENT_AT)
        )
        return _Counts(int(_ACKED.unpack_from(self._info, _ACKED_AT)[0]), unsent + unacked * segment)


def _packed(address: str) -> bytes:
    """Return the bytes of a numeric address."""
    text = address.partition("%")[0]
    return _short(socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text))


def _short(address: bytes) -> bytes:
    """Return the bytes of an address, IPv4 in four bytes."""
    return address.removeprefix(_MAPPED) if len(address) == 16 else address
