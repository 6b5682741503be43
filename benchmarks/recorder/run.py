"""What the records of a rank cost: processor time of one record of each kind, and the share of a step.

Two CPU ranks train a small GPT. The records of a step are counted in the ring of rank 0, and a step's processor time is
taken without the records' own: the share is

    Σ over kinds (records of the kind in a step · microseconds of one) / processor time of a step

so that neither the other rank nor other programs change the figure.

    python run.py --readme README.md

Cost: about one minute, no network.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import shardwise
from shardwise.comm.watching.recorder import Event, Recorder, RingOwner, ring_path
from shardwise.comm.watching.rings import parse_ring
from shardwise.models import Gpt, GptPolicy
from shardwise.plan.action import F

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "data_parallel"))

from machine import describe  # noqa: E402
from table import insert  # noqa: E402

TURNS, CALLS, STEPS = 7, 50_000, 10
LAYOUTS: dict[str, dict[str, Any]] = {
    "stage 0": {"zero": {"stage": 0}},
    "stage 3": {"zero": {"stage": 3}},
    "tensor parallelism": {"mesh": {"tp": 2}},
    "pipeline, 4 microbatches": {"mesh": {"pp": 2}, "batch": {"accumulation": 4}},
}


def microseconds(call: Callable[[], object]) -> float:
    """Return the least processor time of one call over some turns."""
    times = []
    for _ in range(TURNS):
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        times.append(time.thread_time() - start)
    return min(times) / CALLS * 1e6


def deep(call: Callable[[], object], depth: int) -> object:
    """Call ``call`` under some more frames, as below a module's hooks."""
    return call() if depth == 0 else deep(call, depth - 1)


def costs(folder: Path) -> dict[Event, float]:
    """Return the processor time of one record by kind, in microseconds."""
    made = Recorder(ring_path(folder, 0), RingOwner(0, 2, "host"))
    group, action = made.group("ranks 0,1"), F(0, 1)

    def start() -> object:
        return made.start(group, "all_gather", torch.bfloat16, 1000, "Unit blocks.3")

    place = made.start(group, "all_gather", torch.bfloat16, 1000, "Unit blocks.3")
    return {
        Event.ACTION: microseconds(lambda: made.action(action)),
        Event.START: microseconds(lambda: deep(start, 20)) - microseconds(lambda: deep(lambda: None, 20)),
        Event.WAIT: microseconds(lambda: made.wait("all_gather", "Unit blocks.3", place)),
        Event.WAITED: microseconds(made.waited),
    }


def steps(folder: str, config: dict[str, Any]) -> None:
    """Train some steps, and write the records and the processor time of one on rank 0."""
    torch.set_num_threads(1)
    model = Gpt(GptPolicy(layers=4, width=128, heads=4, context=128, vocab=256))
    engine = shardwise.initialize(model, config)
    tokens = torch.arange(4 * 128).view(4, 128) % 256
    batches = [{"tokens": tokens, "targets": tokens}] * (engine.config.batch.accumulation or 1)
    for _ in range(3):
        engine.train_step(batches)
    start = time.process_time()
    for _ in range(STEPS):
        engine.train_step(batches)
    seconds = (time.process_time() - start) / STEPS
    recorder = engine._parts.site.clock.recorder
    assert recorder is not None
    records = parse_ring(recorder.data(), Path("ring")).records
    ends = [place for place, record in enumerate(records) if record.event is Event.STEP]
    found = Counter(record.event.name for record in records[ends[-2] + 1 : ends[-1]])
    if engine.is_main:
        (Path(folder) / "found.json").write_text(json.dumps({"seconds": seconds, "records": found}))
    engine.close()


def table(each: dict[Event, float], layouts: dict[str, dict[str, Any]], words: str) -> str:
    """Return the figures as Markdown."""
    lines = [f"`{words}`, {about(describe())}", "", "| record | us of processor time |", "|---|---|"]
    lines += [f"| {event.name} | {cost:.2f} |" for event, cost in each.items()]
    lines += ["", "| a step of rank 0 | records | processor time of the step, ms | share of the records |"]
    lines += ["|---|---|---|---|"]
    for name, found in layouts.items():
        spent = sum(each[Event[kind]] * count for kind, count in found["records"].items())
        records = sum(found["records"].values())
        lines.append(
            f"| {name} | {records} | {found['seconds'] * 1e3:.1f} | {spent / 1e6 / found['seconds']:.2%} |"
        )
    return "\n".join(lines)


def about(machine: dict[str, Any]) -> str:
    """Return the machine in one line."""
    return f"{machine['date']}, {machine['machine']}, commit {machine['commit']}, torch {machine['versions']['torch']}"


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, and write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readme", type=Path)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        each, layouts = costs(Path(folder)), {}
        for name, config in LAYOUTS.items():
            given = config | {"comm": {"transport": "torch"}, "check_first_step": "off"}
            given["batch"] = given.get("batch", {}) | {"duplicates": "allow"}
            shardwise.launch(steps, folder, given, ranks=2)
            layouts[name] = json.loads((Path(folder) / "found.json").read_text())
    said = table(each, layouts, " ".join(["python", "run.py", *sys.argv[1:]]))
    print(said)
    if arguments.readme is not None:
        arguments.readme.write_text(insert(arguments.readme.read_text(), said))


if __name__ == "__main__":
    main()
