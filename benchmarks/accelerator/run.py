"""What to run first on a new device: the checks that no pretended device can make, then one table. About ten minutes.

    make gpu                                            the tests marked gpu, then this
    python benchmarks/accelerator/run.py                all devices of this host; writes README.md beside this file
    python benchmarks/accelerator/run.py --device cpu --tiny --page FILE      does it run at all? No figures in the page
    python benchmarks/accelerator/run.py --python deepspeed=/other/bin/python     a contender that lives elsewhere

Order, each in processes of its own (jobs.py), so that one that dies or hangs takes no other along:

    resume      load and go on: the state lies where it lay           ahead      keys of tables a step ahead
    syncs       a step waits once                                     pp 2, 4    the losses of one rank
    tp 2        the losses of one rank                                profile    kernels of stage 3
    rows        tokens/s, MFU, exposed communication, syncs, memory   beside torch, FSDP2, DeepSpeed, torchtitan

What fails is named in its row, and the rest goes on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "data_parallel"))
from machine import describe  # noqa: E402

import shardwise  # noqa: E402

HERE = Path(__file__).resolve().parent
CHECKS = (
    ("resume", 1),
    ("ahead", 1),
    ("syncs", 1),
    ("one", 1),
    ("pp", 2),
    ("pp", 4),
    ("tp", 2),
    ("profile", 0),
)
"""With how many ranks; 0: one a device."""
CONTENDERS = {
    "shardwise-0": "shardwise, stage 0",
    "shardwise-1": "shardwise, stage 1",
    "shardwise-2": "shardwise, stage 2",
    "shardwise-3": "shardwise, stage 3",
    "torch": "torch alone (DDP over several)",
    "fsdp2": "FSDP2",
    "deepspeed": "DeepSpeed, stage 3",
    "torchtitan": "torchtitan",
}
NOT_MEASURED = "not yet measured on a device"
_LIMIT_S = 300.0
_FAILED = "FAILED"
_HEAD = (
    "| | ranks | tokens/s | MFU | exposed | syncs | memory, GiB | reserved, GiB |",
    "|---|---|---|---|---|---|---|---|",
)


class Outcome(NamedTuple):
    """Of one job."""

    name: str
    ranks: int
    found: dict[str, Any] | None
    """None where it was left out, or failed."""
    said: str = ""


def run(job: str, ranks: int, device: str, tiny: bool, python: str = sys.executable) -> Outcome:
    """In processes of its own, of ``python``, which finds this package wherever it is installed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        words = [
            str(HERE / "jobs.py"),
            job,
            "--out",
            str(out),
            "--device",
            device,
            *(["--tiny"] if tiny else []),
        ]
        launch = [sys.executable, "-m", "shardwise", "launch", "--ranks", str(ranks), "--no_python"]
        ours = str(Path(shardwise.__file__).resolve().parents[1])
        more = {"PYTHONPATH": os.pathsep.join([ours, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
        if device == "cpu":
            more["DS_ACCELERATOR"] = "cpu"
        name = f"{job} {ranks}" if job in ("pp", "tp") else job
        try:
            done = subprocess.run(
                [*(launch if ranks > 1 else []), python, *words],
                env=os.environ | more,
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return Outcome(name, ranks, None, f"{_FAILED}: not over after {_LIMIT_S:.0f} s")
        if done.returncode or not out.exists():
            lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            errors = [line for line in lines if "Error" in line] or lines
            return Outcome(
                name, ranks, None, f"{_FAILED}: {errors[-1][:300] if errors else 'without a word'}"
            )
        return Outcome(name, ranks, json.loads(out.read_text()))


def compared(outcome: Outcome, one: Sequence[float] | None, close: float) -> Outcome:
    """Losses of a cut model against those of one rank."""
    losses = None if outcome.found is None else outcome.found.get("losses")
    if one is None or losses is None or outcome.name == "one":
        return outcome
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, one, strict=True))
    told = f"losses of 3 steps within {apart:.1e} of one rank's"
    if not apart <= close or not all(map(math.isfinite, losses)):
        return Outcome(outcome.name, outcome.ranks, None, f"{_FAILED}: {told}, at most {close:.0e} expected")
    return outcome._replace(found={**(outcome.found or {}), "found": told})


# The page -----------------------------------------------------------------------------------------------------------


def written(
    checks: Sequence[Outcome], rows: Mapping[str, Outcome], where: Mapping[str, Any], is_device: bool
) -> str:
    """The page."""
    machine = (
        f"{where['machine']}; commit {where['commit']}, torch {where['versions']['torch']}, {where['date']}."
        if is_device
        else f"No device was there when this page was written: everything below is {NOT_MEASURED}. "
        "`--device cpu --tiny` runs all of it on CPU ranks."
    )
    lines = [
        "# First run on a device",
        "",
        "`make gpu` writes this page: what no machine without a device can show, in the order in which things break,",
        "then one table. A billion parameters (16 blocks of width 2048, 8 sequences of 2048 tokens a rank), bf16 with",
        "fp32 masters, AdamW; every contender in processes of its own.",
        "",
        machine,
        "",
        "## Checks",
        "",
        "| check | ranks | found |",
        "|---|---|---|",
    ]
    for each in checks:
        found = (each.found or {}).get("found", "") if is_device and not each.said else _told(each, is_device)
        lines.append(f"| {each.name} | {each.ranks} | {found} |".replace("\n", " "))
    lines += [
        "",
        "## Table",
        "",
        "Exposed communication: share of a step in which the computation's stream stands in an Action that sends, by",
        "device events; of others it is not known. Syncs: waits of the host in one step, as",
        "`torch.cuda.set_sync_debug_mode` counts them; the loops of others read their loss. Memory: the most that",
        "tensors took on rank 0, and what was reserved.",
        "",
        *table(rows, is_device),
    ]
    profile = next((each.found["profile"] for each in checks if each.found and "profile" in each.found), None)
    if profile and is_device:
        lines += [
            "",
            "## Stage 3 by kernels",
            "",
            "Share of the device's time, calls, name.",
            "",
            "```",
            *profile,
            "```",
        ]
    return "\n".join(lines) + "\n"


def table(rows: Mapping[str, Outcome], has_figures: bool) -> list[str]:
    """A line for each contender; one that failed says so even where there are no figures."""
    lines = list(_HEAD)
    for name, title in CONTENDERS.items():
        each = rows[name]
        if each.found is not None and has_figures:
            lines.append(f"| {title} | {each.ranks} | {' | '.join(_cells(each.found))} |")
        else:
            said = _told(each, has_figures).replace("|", "/").replace("\n", " ")
            lines.append(f"| {title} | {each.ranks} | {said} | | | | | |")
    return lines


def _told(outcome: Outcome, has_figures: bool) -> str:
    """In the place of figures."""
    return outcome.said if has_figures or outcome.said.startswith(_FAILED) else NOT_MEASURED


def _cells(found: Mapping[str, Any]) -> list[str]:
    def text(name: str, form: str, unit: float = 1.0) -> str:
        return "" if found[name] is None else format(found[name] / unit, form)

    gib = float(1 << 30)
    return [
        text("tokens_per_s", ",.0f"), text("mfu", ".3f"), text("exposed", ".1%"), text("syncs", ".0f"),
        text("memory", ".2f", gib), text("reserved", ".2f", gib),
    ]  # fmt: skip


def main() -> None:
    """Run all, print and write the page."""
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="toy models")
    parser.add_argument("--page", type=Path, default=HERE / "README.md")
    parser.add_argument("--only", nargs="*", help="jobs, such as resume row:fsdp2")
    parser.add_argument(
        "--python",
        nargs="*",
        default=[],
        metavar="NAME=PATH",
        help="the Python of a contender, such as deepspeed=...",
    )
    given = parser.parse_args()
    pythons = dict(each.split("=", 1) for each in given.python)
    if unknown := [name for name in pythons if name not in CONTENDERS]:
        raise SystemExit(f"run.py: --python {unknown[0]}: expected one of {', '.join(CONTENDERS)}")
    is_device = given.device == "auto" and torch.accelerator.is_available()
    if not is_device and not given.tiny:
        raise SystemExit("run.py: no accelerator here; --device cpu --tiny runs toy models on the processor")
    devices = torch.accelerator.device_count() if is_device else 4
    begin = time.perf_counter()
    checks: list[Outcome] = []
    one: Sequence[float] | None = None
    for job, wanted in CHECKS:
        if given.only and job not in given.only:
            continue
        ranks = wanted or (devices if is_device else 2)
        if ranks > devices:
            found = Outcome(
                f"{job} {ranks}", ranks, None, f"left out: {ranks} devices wanted, {devices} here"
            )
        else:
            found = run(job, ranks, given.device, given.tiny)
        one = (found.found or {}).get("losses") if job == "one" else one
        checks.append(compared(found, one, 1e-4 if not is_device else 2e-2))
        _say(checks[-1], begin)
    rows: dict[str, Outcome] = {}
    for name in CONTENDERS:
        ranks = devices if is_device else 2
        package = name if name in ("deepspeed", "torchtitan") else "torch"
        if given.only and f"row:{name}" not in given.only:
            rows[name] = Outcome(name, ranks, None, "not asked for")
            continue
        if name not in pythons and importlib.util.find_spec(package) is None:
            rows[name] = Outcome(name, ranks, None, "not installed")
        elif name == "torchtitan":
            rows[name] = Outcome(
                name, ranks, None, "installed; run by its own command, with a model of this size"
            )
        else:
            python = pythons.get(name, sys.executable)
            rows[name] = run(f"row:{name}", ranks, given.device, given.tiny, python)
        _say(rows[name], begin)
    page = written(checks, rows, describe(), is_device)
    given.page.write_text(page, encoding="utf-8")
    print("", *table(rows, True), "", sep="\n")
    if not is_device:
        print(
            "A trial: the figures say that a job runs, nothing else. MFU and syncs are known of a device alone."
        )
    print(f"{given.page}, after {time.perf_counter() - begin:.0f} s")
    if any(each.said.startswith(_FAILED) for each in [*checks, *rows.values()]):
        sys.exit(1)


def _say(outcome: Outcome, begin: float) -> None:
    found = outcome.found or {}
    told = outcome.said or found.get("found") or f"{found.get('tokens_per_s', 0.0):,.0f} tokens/s"
    print(f"{time.perf_counter() - begin:6.0f} s  {outcome.name} on {outcome.ranks}: {told}", flush=True)


if __name__ == "__main__":
    main()
