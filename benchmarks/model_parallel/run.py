"""Runs the contenders side by side and writes one JSON file; how, ``data_parallel/rounds.py`` says.

Tensor parallelism takes turns in itself; the schedules take turns with one another and with the single process, once
for each number of microbatches.

    python run.py --contenders 'dtensor*,shardwise-sequence-*' --rounds 10 --steps 3
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import beside  # noqa: F401
from contenders import Contender, select, turns
from group import Group
from machine import describe
from rounds import Record, interleave, measured, say
from workload import Workload

HERE = Path(__file__).resolve().parent


@dataclasses.dataclass
class PipelineRecord(Record):
    """Also the idle share of the pipeline in the last step of each turn."""

    idle: list[tuple[float, float]] = dataclasses.field(default_factory=list)


def take_idle(group: Group, record: Record) -> None:
    """(simulated, measured), the same on every rank."""
    shares = group.ask(do="idle")[0]["idle"]
    if shares is not None:
        assert isinstance(record, PipelineRecord)
        record.idle.append(tuple(shares))


def side_by_side(rows: list[Contender], arguments: argparse.Namespace) -> list[PipelineRecord]:
    """All rounds of contenders that take turns."""
    by_name = {row.name: row for row in rows}
    records = [PipelineRecord(name) for name in by_name]

    def start(record: Record, folder: Path) -> Group:
        ranks = by_name[record.name].ranks
        return Group(record.name, "fp32", ranks, arguments.workload, folder, HERE / "rank.py")

    interleave(
        records,
        start,
        f"{rows[0].microbatches} microbatches",
        first_steps=arguments.first_steps,
        rounds=arguments.rounds,
        steps=arguments.steps,
        after_turn=take_idle,
    )
    return records


def summary(row: Contender, record: PipelineRecord) -> dict[str, Any]:
    """One row of the JSON file."""
    out: dict[str, Any] = {
        "name": row.name,
        "case": row.case,
        "ours": row.ours,
        "ranks": row.ranks,
        "microbatches": row.microbatches,
        "failure": record.failure,
    }
    if record.failure is not None:
        return out
    idle = [statistics.median(shares) for shares in zip(*record.idle, strict=True)]
    return out | measured(record) | {"idle_simulated_and_measured": idle or None}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--contenders", default="", help="names with wildcards, separated by commas; none: all"
    )
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each contender")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per round")
    parser.add_argument("--first-steps", type=int, default=3, help="steps before the rounds begin")
    parser.add_argument("--tiny", action="store_true", help="a toy model, to see that everything runs")
    parser.add_argument("--out", type=Path, default=HERE / "results.json", help="where the JSON goes")
    parser.add_argument("--append", action="store_true", help="keep what the file holds of other contenders")
    arguments = parser.parse_args(argv)
    if arguments.tiny:
        arguments.workload = dataclasses.replace(Workload.tiny(), layers=4, micro_batch=8)
    else:
        arguments.workload = Workload(micro_batch=8)  # sequences of a step, over all microbatches
    return arguments


def write(out: Path, header: dict[str, Any], rows: list[dict[str, Any]], *, append: bool) -> None:
    """Write the file; with ``append`` the rows of other contenders stay."""
    fresh = {row["name"] for row in rows}
    if append and out.exists():
        rows = [row for row in json.loads(out.read_text())["rows"] if row["name"] not in fresh] + rows
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n")


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the ranks and their folder go too
    rows = select([pattern for pattern in arguments.contenders.split(",") if pattern])
    words = ["python", "run.py", *(sys.argv[1:] if argv is None else argv)]
    header = describe() | {"command": " ".join(words), "workload": dataclasses.asdict(arguments.workload)}
    results: list[dict[str, Any]] = []
    for turn in turns(rows):
        records = side_by_side(turn, arguments)
        results += [summary(row, record) for row, record in zip(turn, records, strict=True)]
        write(arguments.out, header, results, append=arguments.append)
    say(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
