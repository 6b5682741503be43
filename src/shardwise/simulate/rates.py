"""Rates of a rank's hardware, as far as memory tiers and recomputation have a price by them.

``measured_rates`` takes a tenth of a second for each, on whatever else runs there: right to a factor, good for
comparing one change with another. One process cannot measure what goes between ranks: CPU ranks of one host copy it
through memory, whose rate is measured, and devices are taken to send as fast as over their host's link, which is the
least that two of one host do. Who knows better gives numbers.
"""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from shardwise.memory.direct_io import DirectFile, aligned_empty, bytes_of
from shardwise.memory.scratch_folder import check_folder
from shardwise.observe.flops import measured_peak, peak_of
from shardwise.observe.progress import bytes_text
from shardwise.plan.errors import ConfigError
from shardwise.plan.words import in_words

_BYTES = 32 << 20
_ROUNDS = 3
_REACHED = 0.5
"""Share of a device's data sheet that products of a step reach."""


class Rates(NamedTuple):
    """Of one rank, with what its neighbours on the host leave it."""

    flops_s: float
    """Floating-point operations a second, of products in the compute dtype."""
    host_bytes_s: float
    """Bytes read and written a second in host memory."""
    device_bytes_s: float
    """... and in the device's; on CPU ranks the same."""
    link_bytes_s: float
    """Bytes a second between them, one way."""
    disk_bytes_s: float
    """Bytes read or written a second."""
    exchange_bytes_s: float
    """Bytes a second that a rank sends to others while it receives as many."""


def measured_rates(device: torch.device, dtype: torch.dtype, disk_path: Path | None = None) -> Rates:
    """Of this machine; without a ``disk_path`` a disk of 1 GB/s is taken. Errors: ConfigError of the folder."""
    host = _copy_rate(torch.device("cpu"), torch.device("cpu"))
    disk = 1e9 if disk_path is None else _disk_rate(disk_path)
    if device.type == "cpu":
        # What goes through shared memory is copied in by one rank and out by the other, read and written both times.
        return Rates(measured_peak(dtype), host, host, host, disk, host / 4)
    flops = (peak_of(device, dtype) or 100e12) * _REACHED
    link = _copy_rate(torch.device("cpu"), device) / 2
    return Rates(flops, host, _copy_rate(device, device), link, disk, link)


def _copy_rate(source: torch.device, target: torch.device) -> float:
    """Bytes read and written a second by a copy."""
    crosses = source != target
    a = torch.ones(_BYTES, dtype=torch.uint8, device=source, pin_memory=crosses)
    b = torch.empty(_BYTES, dtype=torch.uint8, device=target)

    def copy() -> None:
        b.copy_(a)
        if target.type != "cpu":
            torch.accelerator.synchronize(target)

    return 2 * _BYTES / _best_s(copy)


def _disk_rate(folder: Path) -> float:
    check_folder(folder)
    path = folder / f".shardwise-rate-{os.getpid()}"
    try:
        with contextlib.closing(DirectFile(path, _BYTES)) as file:
            data = bytes_of(aligned_empty(_BYTES, torch.uint8).zero_())
            spare = bytes_of(aligned_empty(1 << 20, torch.uint8))
            write_s = _best_s(lambda: file.write(data, 0, spare))
            read_s = _best_s(lambda: file.read(data, 0, spare))
    except OSError as error:
        raise ConfigError(
            f"offload.disk_path: {in_words(error)}, where the disk's rate is measured with a file of "
            f"{bytes_text(_BYTES)}; look to the disk, or give another folder"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return 2 * _BYTES / (write_s + read_s)


def _best_s(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best
