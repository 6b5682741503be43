"""Calibration: the rates of this machine's CPU ranks, measured once by several of them and kept for later plans.

    found = calibrate()              # starts two ranks, and keeps what they measure in ~/.cache/shardwise/hardware
    found = calibrated()             # what was kept; None if nothing was
    found.staleness()                # why the figures may be wrong today: another processor, torch, number of threads
    found.hardware                   # rates by which a plan's seconds are computed

The file is a table of hardware like those that users write (base/hardware_files.py), with the machine and the date
beside the figures; it can be copied to another machine, and named there by its path.

``cpu_hardware`` is what a plan for CPU ranks uses: the calibrated table, or a short measurement if there is none.

Cost: less than a minute on idle cores; reading is one small file.
"""

import datetime
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.base.errors import ConfigError, RankError
from shardwise.base.hardware import Hardware, Link, Neighbours, Product
from shardwise.base.hardware_files import plain_hardware, read_table, shipped_tables, with_source
from shardwise.base.regular_files import read_small_file, write_small_file
from shardwise.base.strict_json import StrictModel, read_object, validated
from shardwise.base.words import in_words
from shardwise.simulate.rates import DiskRates, assumed_disk, measured_hardware
from shardwise.simulate.work import Work
from shardwise.tiers.scratch_folder import check_folder

_RANK_MODULE = "shardwise.engine.fit.calibration_rank"
_PATIENCE_S = 600.0
_CLUSTER = Link(1.25e9, 5e-5)
_LEAST_FACTOR, _MOST_FACTOR = 0.1, 10.0
"""Range of the factors that a file of hardware may have."""
_SPREAD_OF = {"waits": "exchange", "bubble": "compute", "data": "exchange", "rest": "compute"}
"""Use of the time whose measured spread counts for a use that is not measured by itself."""


class Machine(StrictModel):
    """The machine on which rates were measured, and the date."""

    date: str
    """Date and time of the measurement, in UTC."""
    processor: str
    cores: int
    """Cores that the process may use."""
    torch: str
    ranks: int
    """Ranks that measured at the same time."""
    threads: int
    """Threads of a rank."""


class Calibration(NamedTuple):
    """Measured hardware, with the machine that measured it."""

    hardware: Hardware
    machine: Machine

    def staleness(self) -> str:
        """Return a sentence that says what has changed on this machine since the measurement; "" if nothing has."""
        now = this_machine(self.machine.ranks)
        changed = [
            f"{name} was {then!r} and is {value!r}"
            for name in ("processor", "cores", "torch", "threads")
            if (then := getattr(self.machine, name)) != (value := getattr(now, name))
        ]
        if not changed:
            return ""
        return f"the calibration of {self.machine.date} is stale: {'; '.join(changed)}; --calibrate measures again"


def this_machine(ranks: int) -> Machine:
    """Return a description of this machine, for ``ranks`` ranks that share its cores.

    Args:
        ranks: Ranks that compute at the same time.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Machine(
        date=date,
        processor=_processor(),
        cores=cores,
        torch=torch.__version__,
        ranks=ranks,
        threads=max(cores // ranks, 1),
    )


def _processor() -> str:
    """Return the model of the processor."""
    with suppress(OSError):
        for line in read_small_file(Path("/proc/cpuinfo"), 16 << 20).decode(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return value.strip()
    return platform.processor() or platform.machine()


def calibration_file(folder: Path | None = None) -> Path:
    """Return the path of the file in which calibration keeps its figures.

    Args:
        folder: Folder of the file; None: the user's cache folder.
    """
    return (Path.home() / ".cache" / "shardwise" / "hardware" if folder is None else folder) / "cpu.json"


def calibrate(ranks: int = 2, disk_path: Path | None = None, folder: Path | None = None) -> Calibration:
    """Measure the rates of this machine with CPU ranks that ``shardwise launch`` starts, and keep them.

    Args:
        ranks: Ranks that measure at the same time.
        disk_path: Folder on the disk to measure; None: the disk of ``ASSUMED_HARDWARE``.
        folder: Folder in which to keep the figures; None: the user's cache folder.

    Raises:
        ConfigError: if a folder cannot be used.
        RankError: if the ranks failed.
    """
    if disk_path is not None:
        check_folder(disk_path)
    machine = this_machine(ranks)
    figures = _measured(ranks, disk_path)
    machine = machine.model_copy(update={"threads": figures["threads"]})
    found = Calibration(_hardware(figures, machine), machine)
    path = calibration_file(folder)
    plain = {**plain_hardware(found.hardware), "measured": machine.model_dump()}
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_small_file(path, (json.dumps(plain, indent=2) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"{path}: {in_words(error)}, where the calibration is kept") from None
    return found


def calibrated(folder: Path | None = None) -> Calibration | None:
    """Return the kept calibration; None if there is none.

    Args:
        folder: Folder in which it was kept; None: the user's cache folder.

    Raises:
        ConfigError: if the file is not valid.
    """
    path = calibration_file(folder)
    try:
        data = read_small_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"calibration {path}: {in_words(error)}") from None
    where = f"calibration {path}"
    found = read_object(data, where, kind=ConfigError)
    table = read_table(found, where, shipped_tables(), str(path))
    machine = validated(Machine, found.get("measured"), f"{where}: measured", kind=ConfigError)
    return Calibration(table.hardware("cpu"), machine)


def cpu_hardware(
    dtype: torch.dtype, disk_path: Path | None = None, folder: Path | None = None
) -> tuple[Hardware, str]:
    """Return the hardware of CPU ranks of this machine, and a sentence that says where its figures come from.

    Args:
        dtype: Dtype of the products, for a short measurement.
        disk_path: Folder on the disk, for a short measurement.
        folder: Folder in which a calibration was kept; None: the user's cache folder.
    """
    kept = calibrated(folder)
    if kept is None:
        found = measured_hardware(torch.device("cpu"), dtype, disk_path)
        return found, "rates of this machine were measured here in a second; --calibrate measures them better"
    return kept.hardware, kept.staleness() or f"rates of this machine were calibrated on {kept.machine.date}"


def _measured(ranks: int, disk_path: Path | None) -> Mapping[str, Any]:
    """Return the figures of ranks that measure at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        disk = [] if disk_path is None else [str(disk_path.absolute())]
        run_ranks(
            f"calibration: its {ranks} ranks", _RANK_MODULE, [str(out), *disk], ranks, [out], _PATIENCE_S
        )
        return read_object(out.read_bytes(), "calibration", kind=RankError)


def run_ranks(
    who: str, module: str, arguments: Sequence[str], ranks: int, results: Sequence[Path], patience_s: float
) -> None:
    """Start ranks of a module by ``shardwise launch``, and wait until they have ended.

    Args:
        who: Name of the ranks in errors.
        module: The module.
        arguments: Its arguments.
        ranks: Number of ranks.
        results: Files that the ranks write.
        patience_s: Seconds after which the ranks are ended.

    Raises:
        RankError: if the ranks failed, took longer, or left out a file.
    """
    launcher = [sys.executable, "-m", "shardwise", "launch", "-q", "--ranks", str(ranks)]
    try:
        ended = subprocess.run(
            [*launcher, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=patience_s,
        )
    except subprocess.TimeoutExpired:
        raise RankError(f"{who} did not end within {patience_s:.0f} s") from None
    if ended.returncode or not all(path.exists() for path in results):
        said = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1:] or ["without a word"]
        raise RankError(f"{who} ended with exit code {ended.returncode}: {said[0]}")


def _hardware(figures: Mapping[str, Any], machine: Machine) -> Hardware:
    """Return hardware from the figures of a rank."""
    rates: Mapping[str, Sequence[Sequence[float]]] = figures["rates"]
    peaks = {
        name.removeprefix("product "): max(rate for _, rate in points)
        for name, points in rates.items()
        if name.startswith("product ")
    }
    shares = {name: _shares(points, peaks[name.split()[1]]) for name, points in rates.items()}
    efficiency = {kind: shares[f"{kind} fp32"] for kind in ("product", "attention", "convolution", "batched")}
    own = {name: shares[name] for name in shares if name.startswith("product ") and name != "product fp32"}
    exchanges, operations = figures["exchanges"], figures["operations"]
    memory = operations["arithmetic"][-1][1]
    spread = {use: tuple(ends) for use, ends in figures["spread"].items()}
    disk = assumed_disk() if figures["disk"] is None else DiskRates(*figures["disk"])
    copied, seconds = exchanges["all_gather"][-1]
    hardware = Hardware(
        "cpu",
        peaks=peaks,
        efficiency=efficiency | own,
        memory_bytes={},
        memory_bytes_s={
            "device": memory,
            "host": memory,
            "disk": disk.bytes_s,
        },
        links={
            "device": Link(memory, 0.0),
            "host": Link(copied / 2 / seconds, exchanges["all_gather"][0][1]),
            "cluster": _CLUSTER,
        },
        operation_s=figures["operation"],
        action_s=figures["action"],
        ending_action_s=figures["ending_action"],
        operations=_tables(operations) | (disk.operations if figures["disk"] else {}),
        row_bytes_s=figures["rows"],
        spread=spread | {use: spread[measured] for use, measured in _SPREAD_OF.items()},
        exchanges=_tables(exchanges),
        sources={"links.cluster": "assumed: a port of 10 Gbit/s"}
        | ({} if figures["disk"] else {"memory.disk.rate": "assumed"}),
    )
    unevenness = tuple((worked, min(max(share, 1e-4), 1.0)) for worked, share in figures["unevenness"])
    hardware = replace(hardware, neighbours=Neighbours(unevenness, _pass_factors(figures, hardware)))
    said = f"measured on {machine.date} by {machine.ranks} ranks of {machine.threads} threads on {machine.processor}"
    return with_source(hardware, said)


def _pass_factors(figures: Mapping[str, Any], hardware: Hardware) -> tuple[tuple[float, float], ...]:
    """Return the seconds of measured passes over their price, by the number of ranks that ran them at once."""
    counted = figures["work"]
    products = {Product(*row[:3]): row[3:] for row in counted["products"]}
    work = Work(
        {product: calls for product, (calls, _) in products.items()},
        {product: nbytes for product, (_, nbytes) in products.items()},
        counted["calls"],
        others={(name, nbytes): calls for name, nbytes, calls in counted["others"]},
    )
    price_s = work.seconds(hardware, sum(nbytes * calls for _, nbytes, calls in counted["others"]), "host")
    return tuple(
        (float(ranks), min(max(seconds / price_s, _LEAST_FACTOR), _MOST_FACTOR))
        for ranks, seconds in figures["passes"]
    )


def _tables(
    found: Mapping[str, Sequence[Sequence[float]]],
) -> dict[str, tuple[tuple[float, float], ...]]:
    """Return tables of two columns."""
    return {name: tuple((size, figure) for size, figure in points) for name, points in found.items()}


def _shares(points: Sequence[Sequence[float]], peak: float) -> tuple[tuple[float, float], ...]:
    """Return shares of a peak, which no operation exceeds."""
    return tuple((flops, min(max(rate / peak, 1e-6), 1.0)) for flops, rate in points if math.isfinite(rate))
