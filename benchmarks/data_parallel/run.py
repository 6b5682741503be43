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
import random
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from group import ContenderFailed, Group
from machine import describe
from rows import Row, select
from workload import Workload

HERE = Path(__file__).resolve().parent


@dataclasses.dataclass
class Record:
    """What was seen of one contender."""

    row: Row
    samples_s: list[float] = dataclasses.field(default_factory=list)
    before_bytes: list[int] = dataclasses.field(default_factory=list)
    build_peak_bytes: list[int] = dataclasses.field(default_factory=list)
    peak_bytes: list[int] = dataclasses.field(default_factory=list)
    idle_bytes: list[int] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    sent_bytes: list[float] = dataclasses.field(default_factory=list)
    other_bytes: list[float] = dataclasses.field(default_factory=list)
    failure: str | None = None


def prepare(group: Group, record: Record, first_steps: int) -> None:
    """Start, build and run the first steps."""
    group.ask(do="ready")
    record.before_bytes = group.own_bytes()
    group.reset_peaks()
    group.ask(do="build")
    record.build_peak_bytes = growth(group.peak_bytes(), record)
    take_losses(record, group.ask(do="steps", count=first_steps))
    record.peak_bytes = growth(group.peak_bytes(), record)
    group.ask(do="sleep")
    record.idle_bytes = growth(group.own_bytes(), record)


def growth(now_bytes: list[int], record: Record) -> list[int]:
    """Over what each rank held before the model was built."""
    return [now - before for now, before in zip(now_bytes, record.before_bytes, strict=True)]


def take_losses(record: Record, answers: list[dict[str, Any]]) -> None:
    """Losses are means over ranks."""
    record.losses += [statistics.fmean(step) for step in zip(*(a["losses"] for a in answers), strict=True)]


def one_round(group: Group, record: Record, steps: int) -> None:
    """One cold step, then the timed ones."""
    take_losses(record, group.ask(do="steps", count=1))
    answers = group.ask(do="steps", count=steps)
    take_losses(record, answers)
    per_step = [max(step) for step in zip(*(a["seconds"] for a in answers), strict=True)]
    record.samples_s.append(statistics.fmean(per_step))
    record.sent_bytes.append(statistics.fmean(sum(a["sent_bytes"]) for a in answers) / steps)
    record.other_bytes.append(statistics.fmean(a["other_bytes"] for a in answers) / steps)
    record.peak_bytes = growth(group.peak_bytes(), record)
    group.ask(do="sleep")


def interleave(rows: list[Row], dtype: str, ranks: int, arguments: argparse.Namespace) -> list[Record]:
    """All rounds of all contenders of one dtype and number of ranks."""
    records = [Record(row) for row in rows]
    groups: dict[str, Group] = {}
    order = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="data_parallel_") as folder:
        try:
            for record in records:
                name = record.row.name
                say(f"[{dtype}, {ranks} ranks] {name}: start, build, {arguments.first_steps} steps")
                groups[name] = Group(name, dtype, ranks, arguments.workload, Path(folder) / name)
                guard(groups, record, prepare, arguments.first_steps)
            for number in range(arguments.rounds):
                alive = [record for record in records if record.failure is None]
                order.shuffle(alive)
                for record in alive:
                    guard(groups, record, one_round, arguments.steps)
                say(f"[{dtype}, {ranks} ranks] round {number + 1} of {arguments.rounds} done")
        finally:
            for group in groups.values():
                group.stop()
    return records


def guard(groups: dict[str, Group], record: Record, action: Any, *arguments: Any) -> None:
    """One contender's failure is its own: it is recorded and the rest go on."""
    group = groups[record.row.name]
    try:
        action(group, record, *arguments)
    except ContenderFailed as failure:
        record.failure = str(failure)
        say(f"  {record.row.name} failed: {failure}")
        group.stop()


def summary(record: Record, dtype: str, ranks: int) -> dict[str, Any]:
    """One row of the JSON file."""
    facts = record.row.facts[dtype]
    out: dict[str, Any] = {
        "name": record.row.name,
        "stage": record.row.stage,
        "ours": record.row.ours,
        "dtype": dtype,
        "ranks": ranks,
        "grad": facts.grad,
        "wire": facts.wire,
        "fp32_master": facts.master,
        "failure": record.failure,
    }
    if record.failure is not None:
        return out
    samples = record.samples_s
    quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else [float("nan")] * 3
    return out | {
        "step_s": statistics.median(samples) if samples else None,
        "step_s_quartiles": [quartiles[0], quartiles[2]] if len(samples) > 1 else None,
        "step_s_rounds": samples,
        "peak_bytes_per_rank": record.peak_bytes,
        "build_peak_bytes_per_rank": record.build_peak_bytes,
        "idle_bytes_per_rank": record.idle_bytes,
        "loss": record.losses[-1],
        "losses": record.losses,
        "sent_bytes_per_rank_and_step": statistics.median(record.sent_bytes) if samples else None,
        "other_bytes_per_rank_and_step": statistics.median(record.other_bytes) if samples else None,
    }


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


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


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
                records = interleave(turn, dtype, ranks, arguments)
                results += [summary(record, dtype, ranks) for record in records]
                write(arguments.out, header | {"skipped": skipped}, results, append=arguments.append)
    for name, reason in skipped.items():
        say(f"skipped {name}: {reason}")
    say(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
