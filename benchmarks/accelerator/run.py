"""What to run first on a new device: checks, faults, then one table. One device takes about ten minutes.

    make gpu                                            the tests marked gpu, then this
    python benchmarks/accelerator/run.py                all devices of this host; writes README.md beside this file
    python benchmarks/accelerator/run.py --device cpu --tiny --page FILE          a trial on CPU ranks, without figures
    python benchmarks/accelerator/run.py --python deepspeed=/other/bin/python     a contender of another environment

Every job has processes of its own (jobs.py), so that a job that dies or hangs stops no other job:

    resume      a step after a load has the bits of a step without      ahead      keys of tables a step ahead
    syncs       the host waits once in a step                           pp 2, 4    the losses of one rank
    tp 2        the losses of one rank                                  profile    kernels of stage 3
    killed      one rank is killed in mid-step: the others name it and end
    late        one rank is late in mid-step: the others name it, and the step goes on
    rows        step ms, tokens/s, MFU, exposed communication by axis, syncs, memory beside its prediction: ours
                (table_rows.py), then torch, FSDP2, DeepSpeed, torchtitan

A job that fails is named in its row, the other jobs run, and the exit status is 1 at the end. A job ends after
``--limit`` seconds, and no job begins after ``--minutes``. The results are also written as JSON, beside the page.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "data_parallel"))
sys.path.append(str(Path(__file__).resolve().parent))
from machine import describe  # noqa: E402
from table_rows import ROWS, left_out  # noqa: E402

import shardwise  # noqa: E402
from shardwise.observe.metrics import exposed_columns  # noqa: E402

HERE = Path(__file__).resolve().parent
CHECKS = (
    ("resume", 1),
    ("ahead", 1),
    ("syncs", 1),
    ("one", 1),
    ("pp", 2),
    ("pp", 4),
    ("tp", 2),
    ("killed", -2),
    ("late", -2),
    ("profile", 0),
)
"""(check, ranks); 0: a rank on each device; -2: as 0, but at least two."""
FAULTS = ("killed", "late")
THEIRS = {
    "torch": "torch alone (DDP over several)",
    "fsdp2": "FSDP2",
    "deepspeed": "DeepSpeed, stage 3",
    "torchtitan": "torchtitan",
}
CONTENDERS = {**{name: f"shardwise, {row.title}" for name, row in ROWS.items()}, **THEIRS}
NOT_MEASURED = "not yet measured on a device"
BOUND_S = 90.0
"""Seconds after which the ranks beside a killed rank must have ended. They ask for it after 15 s, and aborting the
communicators may take 30 s."""
_LIMIT_S = 120.0
_MINUTES_OF_ONE, _MINUTES_OF_SEVERAL = 10.0, 30.0
_FAILED = "FAILED"
_LEFT_OUT = "left out"
_HEAD = (
    "| | ranks | step, ms | tokens/s | MFU | exposed | of it by axis | syncs | memory, GiB | foreseen, GiB | "
    "measured / foreseen | reserved, GiB |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
)
_EMPTY = " |" * (_HEAD[1].count("|") - 4)


class Outcome(NamedTuple):
    """The outcome of one job."""

    name: str
    ranks: int
    found: dict[str, Any] | None
    """The results; None if the job was left out or has failed."""
    said: str = ""
    """Reason why there are no results."""

    @property
    def has_failed(self) -> bool:
        """True if the job has failed."""
        return self.said.startswith(_FAILED)


class Setting(NamedTuple):
    """The arguments that all jobs have in common."""

    device: str
    tiny: bool
    limit_s: float = _LIMIT_S
    """Seconds after which a job is ended."""


def _environment(device: str) -> dict[str, str]:
    """Return the environment of a job, in which this package is found wherever it is installed."""
    ours = str(Path(shardwise.__file__).resolve().parents[1])
    more = {"PYTHONPATH": os.pathsep.join([ours, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    if device == "cpu":
        more["DS_ACCELERATOR"] = "cpu"
    return os.environ | more


def _words(job: str, out: Path, setting: Setting) -> list[str]:
    """Return the command line of a job, without the interpreter."""
    tiny = ["--tiny"] if setting.tiny else []
    return [str(HERE / "jobs.py"), job, "--out", str(out), "--device", setting.device, *tiny]


def _error_in(text: str) -> str:
    """Return the last line of ``text`` that names an error, else its last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line] or lines
    return errors[-1][:300] if errors else "without a word"


def run(job: str, ranks: int, setting: Setting, python: str = sys.executable) -> Outcome:
    """Run a job in processes of its own, under the launcher if there are several ranks."""
    name = f"{job} {ranks}" if job in ("pp", "tp") else job
    launch = [sys.executable, "-m", "shardwise", "launch", "--ranks", str(ranks), "--no_python"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        try:
            with subprocess.Popen(
                [*(launch if ranks > 1 else []), python, *_words(job, out, setting)],
                env=_environment(setting.device),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            ) as process:
                try:
                    said, _ = process.communicate(timeout=setting.limit_s)
                except subprocess.TimeoutExpired:
                    _end(process)
                    return Outcome(name, ranks, None, f"{_FAILED}: not over after {setting.limit_s:.0f} s")
        except OSError as error:
            return Outcome(name, ranks, None, f"{_FAILED}: {error}")
        if process.returncode or not out.exists():
            return Outcome(name, ranks, None, f"{_FAILED}: {_error_in(said)}")
        return Outcome(name, ranks, json.loads(out.read_text()))


def _end(process: subprocess.Popen[str]) -> None:
    """End a job and the ranks that it has started, which share its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 15)
    try:
        process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.communicate()


def run_fault(job: str, ranks: int, setting: Setting) -> Outcome:
    """Run a job in which rank 1 is at fault, without a launcher, which would end the other ranks itself."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ending, socket.socket() as free:
        out = Path(folder) / "found.json"
        free.bind(("127.0.0.1", 0))
        common = _environment(setting.device) | {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
        }
        free.close()
        processes = []
        for rank in range(ranks):
            log = ending.enter_context((Path(folder) / f"log.{rank}").open("w"))
            process = subprocess.Popen(
                [sys.executable, *_words(job, out, setting)],
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )
            processes.append(process)
            ending.callback(_end, process)
        ended_s = _wait_for_all(processes, setting.limit_s + BOUND_S)
        return _judged(job, ranks, out, ended_s)


def _wait_for_all(processes: Sequence[subprocess.Popen[str]], limit_s: float) -> list[float]:
    """Return the time at which each process was found to have ended; infinity for one that has not."""
    ended_s = [math.inf] * len(processes)
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s and math.inf in ended_s:
        for place, process in enumerate(processes):
            if math.isinf(ended_s[place]) and process.poll() is not None:
                ended_s[place] = time.monotonic()
        time.sleep(0.1)
    return ended_s


def _judged(job: str, ranks: int, out: Path, ended_s: Sequence[float]) -> Outcome:
    """Return the outcome of a fault: each rank that goes on must have named rank 1 and ended in time."""
    at = out.with_suffix(".at")
    if not at.exists():
        return Outcome(job, ranks, None, f"{_FAILED}: rank 1 did not come to its fault: {_logs_of(out)}")
    begin_s = float(at.read_text())
    others = [rank for rank in range(ranks) if job == "late" or rank != 1]
    took_s = max(ended_s[rank] - begin_s for rank in others)
    if not took_s <= BOUND_S:
        rank = max(others, key=lambda rank: ended_s[rank])
        return Outcome(
            job,
            ranks,
            None,
            f"{_FAILED}: rank {rank} has not ended {BOUND_S:.0f} s after the fault of rank 1",
        )
    told = {}
    for rank in others:
        path = out.with_suffix(f".{rank}")
        if not path.exists():
            return Outcome(job, ranks, None, f"{_FAILED}: rank {rank}: {_logs_of(out, rank)}")
        told[rank] = str(json.loads(path.read_text())["found"])
    unnamed = [rank for rank in others if job == "killed" and not re.search(r"\brank 1\b", told[rank])]
    if unnamed:
        return Outcome(
            job, ranks, None, f"{_FAILED}: rank {unnamed[0]} did not name rank 1: {told[unnamed[0]][:200]}"
        )
    what = "all others named it and ended" if job == "killed" else "it was named, and all ended"
    return Outcome(job, ranks, {"found": f"{what} within {took_s:.0f} s: {_first_sentence(told[0])}"})


def _first_sentence(text: str) -> str:
    """Return the beginning of an error, without the stack of the rank at fault."""
    return text.split(" Its main thread")[0].replace("\n", " ")[:200]


def _logs_of(out: Path, rank: int | None = None) -> str:
    """Return the last error in the log of ``rank``, or in the logs of all ranks."""
    logs = sorted(out.parent.glob("log.*")) if rank is None else [out.parent / f"log.{rank}"]
    return _error_in("\n".join(log.read_text(errors="replace") for log in logs))


def compared(outcome: Outcome, one: Sequence[float] | None, close: float) -> Outcome:
    """Compare the losses of a cut model with those of one rank."""
    losses = None if outcome.found is None else outcome.found.get("losses")
    if one is None or losses is None or outcome.name == "one":
        return outcome
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, one, strict=True))
    told = f"losses of 3 steps within {apart:.1e} of one rank's"
    if not apart <= close or not all(map(math.isfinite, losses)):
        return Outcome(outcome.name, outcome.ranks, None, f"{_FAILED}: {told}, at most {close:.0e} expected")
    return outcome._replace(found={**(outcome.found or {}), "found": told})


# The page -----------------------------------------------------------------------------------------------------------


_TEXT = """# First run on a device

`make gpu` writes this page: what no machine without a device can show, in the order in which things break, then one
table. The model has a billion parameters (16 blocks of width 2048, 8 sequences of 2048 tokens a rank), in bf16 with
fp32 masters and AdamW. Every job has processes of its own. [docs/accelerators.md](../../docs/accelerators.md) explains
the columns.

{machine}

## Checks

| check | ranks | found |
|---|---|---|
{checks}

## Table

- **exposed**: share of a step in which the computation's stream waits for other ranks, by events around every wait,
  and the milliseconds by axis. Rank 0. Not known for other libraries.
- **syncs**: waits of the host in one step, as `torch.cuda.set_sync_debug_mode` counts them; the loops of other
  libraries read their loss.
- **memory**: the most that tensors took on rank 0; **foreseen**: what `shardwise.foresee` says of the same tensors;
  **reserved**: with torch's cache.

{table}
"""
_NO_DEVICE = (
    f"No device was there when this page was written: everything below is {NOT_MEASURED}. `--device cpu --tiny` runs "
    "all of it on CPU ranks."
)


def written(
    checks: Sequence[Outcome], rows: Mapping[str, Outcome], where: Mapping[str, Any], is_device: bool
) -> str:
    """Return the page."""
    machine = _NO_DEVICE
    if is_device:
        machine = f"{where['machine']}; commit {where['commit']}, torch {where['versions']['torch']}, {where['date']}."
    lines = []
    for each in checks:
        found = (each.found or {}).get("found", "") if is_device and not each.said else _told(each, is_device)
        lines.append(f"| {each.name} | {each.ranks} | {_in_a_cell(found)} |")
    page = _TEXT.format(machine=machine, checks="\n".join(lines), table="\n".join(table(rows, is_device)))
    profile = next((each.found["profile"] for each in checks if each.found and "profile" in each.found), None)
    if profile and is_device:
        listed = "\n".join(profile)
        page += f"\n## Stage 3 by kernels\n\nShare of the device's time, calls, name.\n\n```\n{listed}\n```\n"
    return page


def table(rows: Mapping[str, Outcome], has_figures: bool) -> list[str]:
    """Return a line for each contender; a contender that failed is named even if there are no figures."""
    lines = list(_HEAD)
    for name, title in CONTENDERS.items():
        each = rows[name]
        if each.found is not None and has_figures:
            lines.append(f"| {title} | {each.ranks} | {' | '.join(_cells(each.found))} |")
        else:
            lines.append(f"| {title} | {each.ranks} | {_in_a_cell(_told(each, has_figures))} |{_EMPTY}")
    return lines


def _in_a_cell(text: str) -> str:
    """Return text that does not break a table."""
    return text.replace("|", "/").replace("\n", " ")


def _told(outcome: Outcome, has_figures: bool) -> str:
    """Return the text in the place of figures."""
    return outcome.said if has_figures or outcome.has_failed else NOT_MEASURED


def _cells(found: Mapping[str, Any]) -> list[str]:
    def text(value: float | None, form: str, unit: float = 1.0) -> str:
        return "" if value is None else format(value / unit, form)

    gib = float(1 << 30)
    exposed, foreseen = found["exposed_s"], found["foreseen"]
    samples = " samples" if found["unit"] == "samples" else ""
    return [
        text(found["step_s"], ",.1f", 1e-3),
        text(found["per_s"], ",.0f") + samples,
        text(found["mfu"], ".3f"),
        "" if exposed is None else text(sum(exposed.values()) / found["step_s"], ".1%"),
        "" if exposed is None else _by_axis(exposed),
        text(found["syncs"], ".0f"),
        text(found["memory"], ".2f", gib),
        text(foreseen, ".2f", gib),
        "" if foreseen is None else text(found["memory"] / foreseen, ".2f"),
        text(found["reserved"], ".2f", gib),
    ]


def _by_axis(seconds: Mapping[str, float]) -> str:
    """Return the milliseconds of the axes of the mesh, and of the groups over several axes together."""
    columns = exposed_columns(seconds)
    whole_s = columns.pop("exposed_s", 0.0)
    found = {name.removeprefix("exposed_").removesuffix("_s"): each_s for name, each_s in columns.items()}
    rest_s = whole_s - sum(found.values())
    if rest_s > 1e-9 * whole_s:
        found["several"] = rest_s
    return ", ".join(f"{axis} {each_s * 1e3:,.2f} ms" for axis, each_s in found.items())


# All of it ----------------------------------------------------------------------------------------------------------


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="toy models")
    parser.add_argument("--page", type=Path, default=HERE / "README.md")
    parser.add_argument("--only", nargs="*", help="jobs, such as resume row:fsdp2")
    parser.add_argument("--limit", type=float, default=_LIMIT_S, help="seconds of one job, at most")
    parser.add_argument(
        "--minutes", type=float, help="no job begins after so many minutes: 10 on one device, 30 on several"
    )
    parser.add_argument(
        "--python",
        nargs="*",
        default=[],
        metavar="NAME=PATH",
        help="the Python of a contender, such as deepspeed=...",
    )
    given = parser.parse_args()
    given.pythons = dict(each.split("=", 1) for each in given.python)
    if unknown := [name for name in given.pythons if name not in CONTENDERS]:
        raise SystemExit(f"run.py: --python {unknown[0]}: expected one of {', '.join(CONTENDERS)}")
    jobs = {*(job for job, _ in CHECKS), *(f"row:{name}" for name in CONTENDERS)}
    if unknown := [job for job in given.only or () if job not in jobs]:
        raise SystemExit(f"run.py: --only {unknown[0]}: expected one of {', '.join(sorted(jobs))}")
    return given


class Session:
    """All jobs of one call, in their order.

    Args:
        given: The arguments.
        is_device: True if the jobs run on devices.
        devices: Number of devices, or of CPU ranks that a trial may have.
    """

    def __init__(self, given: argparse.Namespace, is_device: bool, devices: int) -> None:
        self.given = given
        self.is_device = is_device
        self.devices = devices
        self.ranks = devices if is_device else 2
        self.minutes = given.minutes
        if self.minutes is None:
            self.minutes = _MINUTES_OF_ONE if devices == 1 else _MINUTES_OF_SEVERAL
        self._begin_s = time.perf_counter()
        self._one: Sequence[float] | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the first job."""
        return time.perf_counter() - self._begin_s

    def checks(self) -> list[Outcome]:
        """Run the checks and the faults."""
        found = []
        for job, wanted in CHECKS:
            if self.given.only and job not in self.given.only:
                continue
            ranks = max(wanted if wanted > 0 else self.ranks, -wanted)
            found.append(self._check(job, ranks))
            self._say(found[-1])
        return found

    def _check(self, job: str, ranks: int) -> Outcome:
        if ranks > self.devices:
            said = f"{_LEFT_OUT}: {ranks} devices wanted, {self.devices} here"
            return Outcome(f"{job} {ranks}" if job in ("pp", "tp") else job, ranks, None, said)
        if self._is_over:
            return Outcome(job, ranks, None, self._over)
        found = (run_fault if job in FAULTS else run)(job, ranks, self._setting)
        self._one = (found.found or {}).get("losses") if job == "one" else self._one
        return compared(found, self._one, 2e-2 if self.is_device else 1e-4)

    def rows(self) -> dict[str, Outcome]:
        """Run the rows of the table."""
        found = {}
        for name in CONTENDERS:
            found[name] = self._row(name)
            if found[name].said != "not asked for":
                self._say(found[name])
        return found

    def _row(self, name: str) -> Outcome:
        row, pythons = ROWS.get(name), self.given.pythons
        # A trial has two ranks, or as many as the row needs.
        ranks = self.ranks if row is None or self.is_device else max(self.ranks, row.fewest)
        if self.given.only and f"row:{name}" not in self.given.only:
            return Outcome(name, ranks, None, "not asked for")
        if row is not None and (said := left_out(row, ranks)):
            return Outcome(name, ranks, None, said)
        package = name if name in ("deepspeed", "torchtitan") else "torch"
        if name not in pythons and importlib.util.find_spec(package) is None:
            return Outcome(name, ranks, None, "not installed")
        if name == "torchtitan":
            return Outcome(name, ranks, None, "installed; run by its own command, with a model of this size")
        if self._is_over:
            return Outcome(name, ranks, None, self._over)
        return run(f"row:{name}", ranks, self._setting, pythons.get(name, sys.executable))

    @property
    def _setting(self) -> Setting:
        return Setting(self.given.device, self.given.tiny, self.given.limit)

    @property
    def _is_over(self) -> bool:
        return self.seconds > 60 * self.minutes

    @property
    def _over(self) -> str:
        return f"{_LEFT_OUT}: {self.minutes:g} minutes were over; --minutes and --only give it time"

    def _say(self, outcome: Outcome) -> None:
        found = outcome.found or {}
        told = outcome.said or found.get("found") or f"{found['step_s'] * 1e3:,.1f} ms a step"
        print(f"{self.seconds:6.0f} s  {outcome.name} on {outcome.ranks}: {told}", flush=True)


def main() -> None:
    """Run all jobs, print the table, and write the page and the JSON."""
    import torch

    given = _arguments()
    is_device = given.device == "auto" and torch.accelerator.is_available()
    if not is_device and not given.tiny:
        raise SystemExit("run.py: no accelerator here; --device cpu --tiny runs toy models on the processor")
    session = Session(given, is_device, torch.accelerator.device_count() if is_device else 4)
    checks, rows = session.checks(), session.rows()
    where = describe()
    given.page.write_text(written(checks, rows, where, is_device), encoding="utf-8")
    everything = {
        "is_device": is_device,
        "where": where,
        "checks": [each._asdict() for each in checks],
        "rows": {name: each._asdict() for name, each in rows.items()},
    }
    beside = given.page.with_suffix(".json")
    beside.write_text(json.dumps(everything, indent=1, default=str) + "\n", encoding="utf-8")
    print("", *table(rows, True), "", sep="\n")
    if not is_device:
        print(
            "A trial: the figures say that a job runs, nothing else. MFU and syncs are known of a device alone."
        )
    print(f"{given.page} and {beside}, after {session.seconds:.0f} s")
    if failed := [each.name for each in [*checks, *rows.values()] if each.has_failed]:
        sys.exit(f"run.py: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
