"""What a process costs: memory that is its own share, and bytes that left through its sockets.

Memory is the proportional set size (PSS): a page that k processes map counts 1/k in each, so a buffer in
shared memory counts once over all ranks. Pages of files (the code of torch itself, loaded on first use and
evictable) belong to no contender and are left out. The peak comes from the kernel's high-water mark of the
resident set, which misses nothing between two readings, less what PSS would not count:

    peak = VmHWM - pages of files - (shared memory resident - its proportional part)

Bytes are ``tcpi_bytes_sent`` of the process's own TCP sockets, as the kernel counts them: payload, without
TCP/IP headers, and untouched by whatever else uses the loopback device.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from pathlib import Path

_BYTES_SENT_OFFSET = 200  # of tcpi_bytes_sent in the kernel's struct tcp_info (Linux 4.19 and later)
_TCP_ESTABLISHED = 1
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of parameters in glibc's mallopt


def own_bytes(pid: int) -> int:
    """What a process of ours holds now: PSS of anonymous and shared memory."""
    fields = _fields(pid, "smaps_rollup")
    return fields["Pss_Anon"] + fields["Pss_Shmem"]


def reset_peak(pid: int) -> None:
    """Start the high-water mark again from what is resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pid: int) -> int:
    """The most it has held since ``reset_peak``."""
    fields = _fields(pid, "status")
    twice_counted = fields["RssShmem"] - _fields(pid, "smaps_rollup")["Pss_Shmem"]
    return fields["VmHWM"] - fields["RssFile"] - twice_counted


def _fields(pid: int, name: str) -> dict[str, int]:
    """The lines ``key: number kB`` of a file in /proc, in bytes."""
    lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
    words = [line.split() for line in lines]
    return {w[0].rstrip(":"): int(w[1]) * 1024 for w in words if len(w) == 3 and w[2] == "kB"}


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


def keep_freed_memory() -> None:
    """Keep freed blocks in this process instead of giving them back to the system.

    glibc gives freed blocks of megabytes back and takes zeroed pages for the next, in every step or in none, depending
    on what lies at the end of the heap. That is no property of a contender: here all of them keep what they freed, as
    with the allocators that people preload for training on CPUs.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 1 << 30)
        mallopt(_MMAP_THRESHOLD, 1 << 30)
