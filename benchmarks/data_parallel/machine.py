"""Where and with what a measurement was taken, in plain words."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import subprocess
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """Date, machine, commit and versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "commit": commit(),
        "versions": {name: version(name) for name in ("torch", "deepspeed", "shardwise")},
    }


def machine() -> str:
    import torch

    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{cores} cores{_model()}, {gib:.0f} GiB, {accelerator}"


def _model() -> str:
    """The processor, as far as the system names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f" ({line.split(':', 1)[1].strip()})"
    return ""


def commit() -> str:
    """The commit, with a + when tracked files differ from it."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/src", ":/benchmarks/**/*.py")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
