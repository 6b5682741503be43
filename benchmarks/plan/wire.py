"""What a step sends over gloo, by the kernel's counters, against what is foreseen of it.

Two ranks train in a network namespace of their own, in which nothing else uses the loopback interface. The bytes that
the interface sends in a few steps are those of both ranks, with the headers of TCP and the small messages of the
job's watch.

    python wire.py --readme README.md

Needs Linux, and the right to make a namespace (``unshare --user``). Cost: a minute, two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

import shardwise
from shardwise.engine.fit.foresee import read
from shardwise.models import Gpt, GptPolicy
from shardwise.simulate.sent import sent

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "data_parallel"))

from machine import describe  # noqa: E402

BEGIN, END = "<!-- wire begins -->", "<!-- wire ends -->"
STEPS, CONTEXT, VOCABULARY = 3, 128, 1024
LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO 0": {"zero": {"stage": 0}},
    "ZeRO 2, bf16": {"zero": {"stage": 2}, "precision": "bf16"},
    "ZeRO 3": {"zero": {"stage": 3}},
    "tp=2": {"mesh": {"tp": 2}},
    "tp=2, whole sequences": {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": False}},
    "pp=2, 1f1b": {"mesh": {"pp": 2}, "batch": {"accumulation": 4}},
    "ep=2, blocks": {"mesh": {"ep": 2}, "experts": {"exchange": "blocks"}},
}


def model(name: str) -> nn.Module:
    """A GPT of 2 blocks; with experts for a layout that spreads them."""
    experts = {"count": 4, "hidden": 256, "router": {"capacity": 1.25}} if name.startswith("ep") else None
    shape = {"layers": 2, "width": 256, "heads": 4, "context": CONTEXT, "vocab": VOCABULARY}
    with torch.device("meta"):
        return Gpt(GptPolicy.model_validate(shape | ({"experts": experts} if experts else {})))


def batch() -> dict[str, Tensor]:
    """Tokens of one microbatch."""
    ids = torch.arange(4 * CONTEXT).view(4, CONTEXT) * 7 % VOCABULARY
    return {"tokens": ids, "targets": ids}


def settings(name: str) -> dict[str, Any]:
    """The configuration of a layout, with all exchanges over gloo."""
    given = {"check_first_step": "off", "comm": {"transport": "torch"}, "batch": {}} | LAYOUTS[name]
    return given | {"batch": {"duplicates": "allow"} | given["batch"]}


def sent_by_interface() -> int:
    """Bytes that the loopback interface of this namespace has sent."""
    rows = (line.split(":", 1) for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line)
    counters = {name.strip(): numbers.split() for name, numbers in rows}
    return int(counters["lo"][8])  # behind eight numbers of what was received


def counted(name: str) -> float:
    """Bytes per step of both ranks, by the kernel."""
    engine = shardwise.initialize(model(name), settings(name))
    batches = [batch()] * engine.accumulation
    for _ in range(2):
        engine.train_step(batches)
    engine.world.barrier()
    before = sent_by_interface()
    for _ in range(STEPS):
        engine.train_step(batches)
    engine.world.barrier()
    found = (sent_by_interface() - before) / STEPS
    engine.close()
    return found


def foreseen(name: str) -> int:
    """Bytes of one step of both ranks, as the Plan foresees them."""
    known = read(lambda: model(name), settings(name), 2, torch.device("cpu"), batch())
    plan = known.outlook(known.settings.offload).plan
    return sum(call.bytes for rank in (0, 1) for call in sent(plan, known.passed, rank))


def measure() -> dict[str, list[float]]:
    """By layout: bytes foreseen, and counted by the kernel. Runs inside the namespace."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return {name: [foreseen(name), shardwise.launch(counted, name, ranks=2)] for name in LAYOUTS}


def table(found: dict[str, list[float]]) -> str:
    """The text between the markers."""
    said = describe()
    lines = [
        f"`python wire.py`, {said['date']}, {said['machine']}, one thread per rank, commit {said['commit']}, torch "
        f"{said['versions']['torch']}; bytes of a step, both ranks.",
        "",
        "| layout | foreseen | by the kernel | difference |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {told:,.0f} | {real:,.0f} | {100 * (real / told - 1):+.2f} % |"
        for name, (told, real) in found.items()
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure in a namespace, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readme", type=Path)
    parser.add_argument("--inside", action="store_true", help="this process is in the namespace")
    given = parser.parse_args()
    if given.inside:
        print(json.dumps(measure()))
        return
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, __file__, "--inside"]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    text = table(json.loads(ran.stdout.splitlines()[-1]))
    print(text)
    if given.readme is not None:
        page = given.readme.read_text()
        before, rest = page.split(BEGIN)
        given.readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
