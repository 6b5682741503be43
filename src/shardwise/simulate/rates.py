"""Measurements of a rank's rates, as far as the price of memory tiers and recomputation depends on them.

``measured_hardware`` takes a tenth of a second for each, beside whatever else runs on the machine: right to a factor,
and good for comparing one change with another. One process cannot measure the rate between ranks. CPU ranks of one
host copy through memory, whose rate is measured; devices are assumed to send as fast as over their host's link, the
least that two devices of one host reach. A caller with better numbers can pass them.
"""

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from shardwise.base.errors import ConfigError
from shardwise.base.hardware import ASSUMED_HARDWARE, PAGE_BYTES, Hardware, even_hardware
from shardwise.base.words import bytes_text, in_words
from shardwise.memory.direct_io import ALIGNMENT_BYTES, Bytes, DirectFile, aligned_empty, bytes_of
from shardwise.observe.flops import measured_peak, peak_of
from shardwise.precision.policy import NAMES
from shardwise.tiers.scratch_folder import DISK_PATH, check_folder

_BYTES = 32 << 20
_ROUNDS = 3
_PAGES, _DISK_THREADS = 512, 4
"""Pages that are read at random places, and threads that read them, as many as read rows of tables."""
_REACHED = 0.5
"""Share of a device's data-sheet peak that products of a step reach."""


def measured_hardware(device: torch.device, dtype: torch.dtype, disk_path: Path | None = None) -> Hardware:
    """Measure the rates of this machine in about a second.

    Args:
        device: Device that computes.
        dtype: Dtype of the products.
        disk_path: Folder on the disk; None: the disk of ``ASSUMED_HARDWARE``.

    Raises:
        ConfigError: if the folder cannot be used.
    """
    host = _copy_rate(torch.device("cpu"), torch.device("cpu"))
    disk = assumed_disk() if disk_path is None else measured_disk(disk_path)
    if device.type == "cpu":
        # One rank copies data into shared memory and another copies it out, and both copies read and write.
        flops_s, near, link, exchange = measured_peak(dtype), host, host, host / 4
    else:
        flops_s, near = (peak_of(device, dtype) or 100e12) * _REACHED, _copy_rate(device, device)
        link = exchange = _copy_rate(torch.device("cpu"), device) / 2
    found = even_hardware(
        f"{device.type}, measured here",
        flops_s,
        host_bytes_s=host,
        device_bytes_s=near,
        link_bytes_s=link,
        disk_bytes_s=disk.bytes_s,
        exchange_bytes_s=exchange,
        dtypes=[NAMES[dtype]],
        source="measured here, in about a second",
    )
    return replace(found, operations=disk.operations)


def _copy_rate(source: torch.device, target: torch.device) -> float:
    """Return the bytes per second that a copy reads and writes."""
    crosses = source != target
    a = torch.ones(_BYTES, dtype=torch.uint8, device=source, pin_memory=crosses)
    b = torch.empty(_BYTES, dtype=torch.uint8, device=target)

    def copy() -> None:
        b.copy_(a)
        if target.type != "cpu":
            torch.accelerator.synchronize(target)

    return 2 * _BYTES / _best_s(copy)


class DiskRates(NamedTuple):
    """Rates of a disk."""

    bytes_s: float
    """Bytes of large blocks read or written per second."""
    request_s: float
    """Seconds of one read of a page at a random place while several are under way."""

    @property
    def operations(self) -> dict[str, tuple[tuple[float, float], ...]]:
        """The rate of reads of pages, as ``Hardware.operations`` has it."""
        return {"page": ((PAGE_BYTES, PAGE_BYTES / self.request_s),)}


def assumed_disk() -> DiskRates:
    """Return the rates of the disk of ``ASSUMED_HARDWARE``."""
    return DiskRates(ASSUMED_HARDWARE.memory_bytes_s["disk"], ASSUMED_HARDWARE.disk_request_s)


def with_disk(hardware: Hardware, folder: Path, key: str) -> Hardware:
    """Return hardware with the rates of a folder's disk, measured in a tenth of a second.

    Args:
        hardware: Hardware, which is returned as it is if reads of pages were measured before.
        folder: Folder on the disk.
        key: Key of the configuration that names the folder, for errors.

    Raises:
        ConfigError: if the folder cannot be used.
    """
    if "page" in hardware.operations:
        return hardware
    disk = measured_disk(folder, key)
    rates = {**hardware.memory_bytes_s, "disk": disk.bytes_s}
    return replace(hardware, memory_bytes_s=rates, operations={**hardware.operations, **disk.operations})


def measured_disk(folder: Path, key: str = DISK_PATH) -> DiskRates:
    """Measure the rates of the disk of a folder.

    Args:
        folder: Folder on the disk.
        key: Key of the configuration that names the folder, for errors.

    Raises:
        ConfigError: if the folder cannot be used.
    """
    check_folder(folder, key)
    path = folder / f".shardwise-rate-{os.getpid()}"
    try:
        with contextlib.closing(DirectFile(path, _BYTES)) as file:
            data = bytes_of(aligned_empty(_BYTES, torch.uint8).zero_())
            spare = bytes_of(aligned_empty(1 << 20, torch.uint8))
            write_s = _best_s(lambda: file.write(data, 0, spare))
            read_s = _best_s(lambda: file.read(data, 0, spare))
            request_s = _best_s(lambda: _read_pages(file, data)) / _PAGES
    except OSError as error:
        raise ConfigError(
            f"{key}: {in_words(error)}, where the disk's rate is measured with a file of "
            f"{bytes_text(_BYTES)}; look to the disk, or give another folder"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return DiskRates(2 * _BYTES / (write_s + read_s), request_s)


def _read_pages(file: DirectFile, into: Bytes) -> None:
    """Read pages at random places on threads."""
    pages = torch.randperm(_BYTES // ALIGNMENT_BYTES)[:_PAGES].tolist()

    def read(first: int) -> None:
        for place in range(first, _PAGES, _DISK_THREADS):
            begin = place * ALIGNMENT_BYTES
            file.read_pages(into[begin : begin + ALIGNMENT_BYTES], pages[place] * ALIGNMENT_BYTES)

    with ThreadPoolExecutor(_DISK_THREADS) as pool:
        list(pool.map(read, range(_DISK_THREADS)))


def _best_s(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best
