"""Runs the parts of this comparison and writes results.json and the table of README.md.

    python run.py lookup end_to_end          # these parts; none: all
    python run.py lookup --cases '*width 64' --rounds 9 --steps 20
    python run.py --tiny                     # toy sizes, nothing written: does everything run?

The contenders of a case take turns (``data_parallel/rounds.py``): each is a group of processes that sleeps while the
others run, and in every round, in an order shuffled anew, it is woken and runs one step that is not timed and then the
timed ones. A contender without its package is skipped by name.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import beside  # noqa: F401
from contender import PARTS, Case, Contender, part
from group import Group
from machine import describe, version
from report import render
from rounds import Record, interleave, measured, say
from table import insert

import kernels

HERE = Path(__file__).resolve().parent
STEPS = {"lookup": 12, "multi_hot": 10, "end_to_end": 10, "vocabulary": 5, "dynamic": 20}
"""Timed steps of a turn."""
ROUNDS = 7
PEERS = ("fbgemm-gpu-cpu", "torchrec", "torch", "numba")


@dataclasses.dataclass
class TableRecord(Record):
    """Also what a contender has come to."""

    state: list[float] = dataclasses.field(default_factory=list)
    notes: dict[str, float] = dataclasses.field(default_factory=dict)
    samples: int = 0


def look(group: Group, record: Record) -> None:
    assert isinstance(record, TableRecord)
    seen = group.ask(do="look")[0]
    record.state, record.notes, record.samples = seen["state"], seen["notes"], seen["samples"]


def side_by_side(case: Case, contenders: list[Contender], rounds: int, steps: int) -> list[dict[str, Any]]:
    """All rounds of one case: a row for each contender."""
    records = [TableRecord(each.name) for each in contenders if each.missing is None]

    def start(record: Record, folder: Path) -> Group:
        return Group(record.name, "fp32", case.ranks, case, folder, HERE / "rank.py")

    interleave(records, start, case.name, first_steps=3, rounds=rounds, steps=steps, after_turn=look)
    by_name = {record.name: record for record in records}
    rows = []
    for each in contenders:
        row: dict[str, Any] = {
            "part": case.part,
            "case": case.name,
            "name": each.name,
            "ours": each.ours,
            "ranks": case.ranks,
            "options": case.options,
            "failure": None if each.missing is None else f"{each.missing}: not installed",
        }
        record = by_name.get(each.name)
        if record is not None and record.failure is not None:
            row["failure"] = record.failure
        elif record is not None:
            row |= measured(record)
            row |= {"state": record.state, "notes": record.notes, "samples": record.samples}
        rows.append(row)
    return rows


def run_part(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one part."""
    if name == "kernels":
        return kernels.rows_of(arguments.tiny)
    rows: list[dict[str, Any]] = []
    for case in part(name).cases(arguments.tiny):
        if not fnmatch.fnmatch(case.name, arguments.cases):
            continue
        contenders = [
            each for each in part(name).contenders(case) if fnmatch.fnmatch(each.name, arguments.contenders)
        ]
        steps = arguments.steps or (2 if arguments.tiny else STEPS[name])
        rows += side_by_side(case, contenders, arguments.rounds or (2 if arguments.tiny else ROUNDS), steps)
    return rows


def write(name: str, rows: list[dict[str, Any]], command: str) -> None:
    """Put the rows of one part in the place of those before, and the table into the README."""
    path, readme = HERE / "results.json", HERE / "README.md"
    results = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    header = describe()
    header["versions"] = {package: version(package) for package in PEERS}
    fresh = {(row["case"], row["name"]) for row in rows}
    before = results["parts"].get(name, {"rows": []})["rows"]
    kept = [row for row in before if (row["case"], row["name"]) not in fresh]
    results["parts"][name] = header | {"command": command, "rows": kept + rows}
    path.write_text(json.dumps(results, indent=1) + "\n")
    readme.write_text(insert(readme.read_text(), render(results)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="none: all of kernels, " + ", ".join(PARTS))
    parser.add_argument("--cases", default="*", help="names with wildcards")
    parser.add_argument("--contenders", default="*", help="names with wildcards")
    parser.add_argument("--rounds", type=int, help=f"default {ROUNDS}")
    parser.add_argument("--steps", type=int, help=f"timed steps of a turn; default {STEPS}")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, nothing is written")
    parser.add_argument("--own-heap", action="store_true", help="the heap as users have it, without mallopt")
    arguments = parser.parse_args()
    if arguments.own_heap:
        os.environ["BENCH_OWN_HEAP"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the contenders go too
    command = " ".join(["python", "run.py", *sys.argv[1:]])
    for name in arguments.parts or ("kernels", *PARTS):
        rows = run_part(name, arguments)
        failed = [row["name"] for row in rows if row.get("failure")]
        say(f"{name}: {len(rows)} rows" + (f", without {', '.join(failed)}" if failed else ""))
        if arguments.tiny:
            print(render({"parts": {name: describe() | {"command": command, "rows": rows, "versions": {}}}}))
        else:
            write(name, rows, command)


if __name__ == "__main__":
    main()
