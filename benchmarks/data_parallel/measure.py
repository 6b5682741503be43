"""What a process costs: memory that is its own share, and bytes that left through its sockets.

Memory is the proportional set size (PSS): a page that k processes map counts 1/k in each, so a buffer in
shared memory counts once over all ranks. The growth is taken on anonymous and shared memory; pages of files
(the code of torch itself, loaded on first use and evictable) belong to no contender.

Bytes are ``tcpi_bytes_sent`` of the process's own TCP sockets, as the kernel counts them: payload, without
TCP/IP headers, and untouched by whatever else uses the loopback device.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

_BYTES_SENT_OFFSET = 200  # of tcpi_bytes_sent in the kernel's struct tcp_info (Linux 4.19 and later)
_TCP_ESTABLISHED = 1


class Memory(NamedTuple):
    """One reading of a process, in bytes."""

    anonymous_bytes: int
    shared_bytes: int
    file_bytes: int

    @property
    def own_bytes(self) -> int:
        """What the benchmark compares: everything but pages of files."""
        return self.anonymous_bytes + self.shared_bytes


def read_memory(pid: int) -> Memory:
    """PSS of a process of ours, by kind of page."""
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        key, value = line.split(":")
        fields[key] = int(value.split()[0]) * 1024
    return Memory(fields["Pss_Anon"], fields["Pss_Shmem"], fields["Pss_File"])


def sent_bytes() -> int:
    """Bytes this process has sent over all its TCP sockets since they were opened."""
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                    continue
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed between listing and reading, or not a socket that can tell
            continue
        if info[0] == _TCP_ESTABLISHED and len(info) >= _BYTES_SENT_OFFSET + 8:
            total += struct.unpack_from("=Q", info, _BYTES_SENT_OFFSET)[0]
    return total


def give_back_free_memory() -> None:
    """Return freed heap to the system, so that sleeping contenders leave it to the one that runs."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
