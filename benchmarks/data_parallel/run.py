"""Runs the contenders side by side and writes one JSON file.

Each contender is a group of rank processes that is started once and sleeps. In every round each contender, in
an order shuffled anew, is woken, runs one step that is not timed (it finds its memory and caches cold) and
then the timed steps, while all others sleep: whatever disturbs the machine disturbs all alike. A round's
sample is the time of a step on the slowest rank, averaged over the round's timed steps; the table shows
median and quartiles over rounds. Memory is the kernel's high-water mark over all of it, read from outside.

Contenders of one ZeRO stage, which are what is compared, take turns with one another; ``--interleave all`` lets
all of them, where their state fits in memory together (about 0.7 GiB per rank and contender).

    python run.py --contenders 'ddp,fsdp2-*' --dtype fp32,bf16 --ranks 2 --rounds 10 --steps 3
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import signal
import sys
from pathlib import Path
from typing import Any

from group import Group
from machine import describe
from rounds import Record, interleave, measured, say
from rows import Row, select
from workload import Workload

HERE = Path(__file__).resolve().parent


def interleave_rows(rows: list[Row], dtype: str, ranks: int, arguments: argparse.Namespace) -> list[Record]:
    """All rounds of all contenders of one dtype and number of ranks."""
    records = [Record(row.name) for row in rows]
    interleave(
        records,
        lambda record, folder: Group(record.name, dtype, ranks, arguments.workload, folder),
        f"{dtype}, {ranks} ranks",
        first_steps=arguments.first_steps,
        rounds=arguments.rounds,
        steps=arguments.steps,
    )
    return records


def summary(row: Row, record: Record, dtype: str, ranks: int) -> dict[str, Any]:
    """One row of the JSON file."""
    facts = row.facts[dtype]
    out: dict[str, Any] = {
        "name": row.name,
        "stage": row.stage,
        "ours": row.ours,
        "dtype": dtype,
        "ranks": ranks,
        "grad": facts.grad,
        "wire": facts.wire,
        "fp32_master": facts.master,
        "failure": record.failure,
    }
    if record.failure is not None:
        return out
    return out | measured(record)


def turns(rows: list[Row], interleave_by: str) -> list[list[Row]]:
    """The rows that run side by side, one list after the other."""
    if interleave_by == "all":
        return [rows] if rows else []
    return [[row for row in rows if row.stage == stage] for stage in sorted({row.stage for row in rows})]


def absent(rows: list[Row]) -> dict[str, str]:
    """Rows that cannot run here, with the reason."""
    return {
        row.name: f"package {row.package!r} is not installed"
        for row in rows
        if importlib.util.find_spec(row.package) is None
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--contenders", default="", help="names with wildcards, separated by commas; none: all"
    )
    parser.add_argument("--dtype", default="fp32,bf16", help="fp32, bf16 or both")
    parser.add_argument("--ranks", default="2", help="numbers of ranks, separated by commas")
    parser.add_argument("--stages", default="0,1,2,3", help="only rows of these stages")
    parser.add_argument("--interleave", choices=("stage", "all"), default="stage", help="who takes turns")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each contender")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per round")
    parser.add_argument("--first-steps", type=int, default=3, help="steps before the rounds begin")
    parser.add_argument("--tiny", action="store_true", help="a toy model, to see that everything runs")
    parser.add_argument("--out", type=Path, default=HERE / "results.json", help="where the JSON goes")
    parser.add_argument(
        "--append", action="store_true", help="keep what the file holds of other (dtype, ranks)"
    )
    arguments = parser.parse_args(argv)
    arguments.workload = Workload.tiny() if arguments.tiny else Workload()
    return arguments


def write(out: Path, header: dict[str, Any], rows: list[dict[str, Any]], *, append: bool) -> None:
    """Write the file; with ``append`` rows of other (dtype, ranks, name) stay."""
    fresh = {(row["dtype"], row["ranks"], row["name"]) for row in rows}
    if append and out.exists():
        kept = json.loads(out.read_text())["rows"]
        rows = [row for row in kept if (row["dtype"], row["ranks"], row["name"]) not in fresh] + rows
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n")


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the ranks and their folder go too
    patterns = [pattern for pattern in arguments.contenders.split(",") if pattern]
    stages = {int(stage) for stage in arguments.stages.split(",")}
    results: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    words = ["python", "run.py", *(sys.argv[1:] if argv is None else argv)]
    header = describe() | {"command": " ".join(words), "workload": dataclasses.asdict(arguments.workload)}
    for ranks in (int(number) for number in arguments.ranks.split(",")):
        for dtype in arguments.dtype.split(","):
            rows = [row for row in select(patterns, dtype) if row.stage in stages]
            skipped |= absent(rows)
            present = [row for row in rows if row.name not in skipped]
            for turn in turns(present, arguments.interleave):
                records = interleave_rows(turn, dtype, ranks, arguments)
                results += [
                    summary(row, record, dtype, ranks) for row, record in zip(turn, records, strict=True)
                ]
                write(arguments.out, header | {"skipped": skipped}, results, append=arguments.append)
    for name, reason in skipped.items():
        say(f"skipped {name}: {reason}")
    say(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
