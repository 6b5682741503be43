"""Run DeepSpeed's own unit tests against this package, file by file, and print a table of what passed.

    python benchmarks/deepspeed/their_tests.py DEEPSPEED_REPOSITORY/tests/unit [FILE ...] [--out results.json]

``import deepspeed`` is compat/deepspeed. FILE is a path below ``tests/unit``, or ``FILE::TEST``; left out, the fourteen
files whose tests pass under DeepSpeed 0.19.8 on a CPU without a compiler. The tests need hjson and pytest-forked beside
pytest. Their rank processes are forked from pytest's, which imports torch once, and return a failed expectation of
pytest as an AssertionError; nothing else of theirs is changed, and nothing of theirs is kept.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "launcher/test_ds_arguments.py",
    "launcher/test_run.py",
    "runtime/pipe/test_pipe_schedule.py",
    "runtime/pipe/test_topology.py",
    "runtime/test_data.py",
    "runtime/test_ds_config_dict.py",
    "runtime/test_ds_config_model.py",
    "runtime/test_ds_initialize.py",
    "runtime/test_lr_schedulers.py",
    "runtime/test_precision_config_dynamic_scale.py",
    "runtime/test_precision_config_loss_scale.py",
    "runtime/zero/test_zero_config.py",
    "utils/test_groups.py",
    "utils/test_partition_balanced.py",
)
_PLUGIN = '''"""Forks the rank processes, whatever start method a test asks for, and returns their failed expectations.

A pool's process ends at pytest's Failed, which is no Exception: the pool would wait for its result for ever.
"""

from multiprocessing import pool

import torch.multiprocessing as mp
from _pytest.outcomes import Failed

own = mp.set_start_method
mp.set_start_method = lambda method, force=False: own("fork", force=force)
starmap = pool.starmapstar


def returned(arguments):
    try:
        return starmap(arguments)
    except Failed as failed:
        raise AssertionError(failed.msg) from None


pool.starmapstar = returned
'''


def environment(folder: Path) -> dict[str, str]:
    """The variables of a run; ``folder`` has the plugin."""
    paths = [
        str(folder),
        str(ROOT / "compat" / "deepspeed"),
        str(ROOT / "src"),
        os.environ.get("PYTHONPATH", ""),
    ]
    return {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "4",
        "DS_DISABLE_REUSE_DIST_ENV": "1",
        "DS_UNITTEST_TIMEOUT": "120",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def run(tests: Path, file: str, limit_s: int) -> dict[str, tuple[str, str]]:
    """Return what became of each test of ``file``, with the last line of its error."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "fork_ranks.py").write_text(_PLUGIN, encoding="utf-8")
        report = folder / "report.xml"
        command = [sys.executable, "-m", "pytest", "-v", "-p", "fork_ranks", "-p", "no:cacheprovider", file]
        command += [f"--junitxml={report}", "-W", "ignore", f"--basetemp={folder / 'tmp'}"]
        try:
            done = subprocess.run(
                command,
                cwd=tests,
                env=environment(folder),
                capture_output=True,
                text=True,
                check=False,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired as over:
            printed = over.stdout.decode() if isinstance(over.stdout, bytes) else over.stdout or ""
            return told(printed) | {"the rest": ("ended", "the time was over")}
        if not report.exists():
            return {file: ("ended", (done.stdout + done.stderr).strip()[-400:])}
        return dict(outcome(case) for case in xml.parse(report).iter("testcase"))


def told(printed: str) -> dict[str, tuple[str, str]]:
    """Return what became of the tests that had ended when the time was over."""
    printed = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    ends = re.findall(r"^\S+?::(\S.*?) (PASSED|FAILED|SKIPPED|ERROR)", printed, re.MULTILINE)
    words = {"PASSED": "passed", "FAILED": "failure", "SKIPPED": "skipped", "ERROR": "error"}
    return {name: (words[end], "") for name, end in ends}


def outcome(case: xml.Element) -> tuple[str, tuple[str, str]]:
    """Return the name of a test, what became of it and why."""
    name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            lines = [line for line in (found.get("message") or found.text or "").splitlines() if line.strip()]
            return name, (kind, " | ".join(lines[:3])[:400])
    return name, ("passed", "")


def main() -> None:
    """Run the files that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", type=Path, help="tests/unit of a DeepSpeed repository")
    parser.add_argument("files", nargs="*", help="files below it")
    parser.add_argument("--limit_s", type=int, default=1800, help="seconds that a file may take")
    parser.add_argument("--out", type=Path, help="a JSON file of every test's outcome")
    given = parser.parse_args()
    found = {}
    print("| file | passed | failed | skipped |\n|---|---|---|---|")
    for file in given.files or FILES:
        found[file] = run(given.tests, file, given.limit_s)
        kinds = [kind for kind, _ in found[file].values()]
        bad = len(kinds) - kinds.count("passed") - kinds.count("skipped")
        print(f"| {file} | {kinds.count('passed')} | {bad} | {kinds.count('skipped')} |", flush=True)
        if given.out:
            given.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    for file, tests in found.items():
        for name, (kind, why) in tests.items():
            if kind not in ("passed", "skipped"):
                print(f"{file} {name}: {kind}: {why}")


if __name__ == "__main__":
    main()
