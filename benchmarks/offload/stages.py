"""What the ranks of a pipeline, or with experts, hold at the peak of a step: foreseen, and resident.

    python benchmarks/offload/stages.py [--layers 8] [--width 256] [--only SETTING ...]

Each setting trains two steps on two CPU ranks of its own, whose allocators give back what is freed
(MALLOC_MMAP_THRESHOLD_). The process itself is what each rank held when it asked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import shardwise
from shardwise.comm.world import join
from shardwise.models import Gpt, GptPolicy

EXPERTS = {"count": 8, "hidden": 256, "router": {"capacity": 1.25}}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pp 2, 1f1b": ({}, {"mesh": {"pp": 2}, "batch": {"accumulation": 4}}),
    "pp 2, gpipe": (
        {},
        {"mesh": {"pp": 2}, "batch": {"accumulation": 4}, "pipeline": {"schedule": "gpipe"}},
    ),
    "pp 2, interleaved": (
        {},
        {
            "mesh": {"pp": 2},
            "batch": {"accumulation": 4},
            "pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2},
        },
    ),
    "pp 2, recompute: full": (
        {},
        {"mesh": {"pp": 2}, "batch": {"accumulation": 4}, "recompute": "full"},
    ),
    "experts, ep 2": ({"experts": EXPERTS}, {"mesh": {"ep": 2}}),
    "experts, ep 2, blocks": ({"experts": EXPERTS}, {"mesh": {"ep": 2}, "experts": {"exchange": "blocks"}}),
    "experts, ep 2, rows 1024": ({"experts": EXPERTS}, {"mesh": {"ep": 2}, "experts": {"rows": 1024}}),
    "experts, tp 2": ({"experts": EXPERTS}, {"mesh": {"tp": 2}}),
}


def resident(key: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) << 10


def run(given: argparse.Namespace) -> None:
    """One setting, on this rank."""
    torch.set_num_threads(1)
    world = join(quiet=True)
    model, settings = SETTINGS[given.rank_of]
    config = {"optimizer": {"type": "adamw", "lr": 1e-4}, "tiles": {"logits": "off"}} | settings
    config["batch"] = config.get("batch", {}) | {"duplicates": "allow"}
    config["check_first_step"] = "off"
    policy = GptPolicy.model_validate(
        {
            "layers": given.layers,
            "width": given.width,
            "heads": given.width // 64,
            "context": given.tokens,
            "vocab": given.vocab,
        }
        | model
    )

    def make() -> torch.nn.Module:
        with torch.device("meta"):
            return Gpt(policy)

    torch.manual_seed(0)  # ranks that share a model have the same batches
    ids = torch.randint(0, given.vocab, (given.rows, given.tokens))
    batch = {"tokens": ids, "targets": ids}
    outlook = shardwise.foresee(make, config, world.size, example=batch)
    steps = outlook.steps
    step = steps[world.rank] if len(steps) > 1 else steps[0]
    engine = shardwise.initialize(make(), config, world=world)
    batches = [batch] * engine.accumulation
    engine.train_step(batches)
    Path("/proc/self/clear_refs").write_text("5")
    engine.train_step(batches)
    most, told = resident("VmHWM"), step.bytes_by_tier["device"]
    engine.close()
    print("FOUND " + json.dumps([world.rank, told, most, step.peak.rows["process"]]), flush=True)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, number in {"layers": 8, "width": 256, "tokens": 256, "rows": 16, "vocab": 2048}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--only", nargs="+", default=list(SETTINGS))
    parser.add_argument("--rank-of", default="")
    given = parser.parse_args()
    if given.rank_of:
        run(given)
        return
    print("| setting | rank | foreseen, MiB | of the step alone | resident, MiB | resident / foreseen |")
    print("|---|---|---|---|---|---|")
    for name in given.only:
        words = [sys.executable, "-m", "shardwise", "launch", "--ranks", "2", __file__, *sys.argv[1:]]
        ended = subprocess.run(
            [*words, "--rank-of", name],
            capture_output=True,
            text=True,
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "1048576", "OMP_NUM_THREADS": "1"},
        )
        found = [line.partition("FOUND ")[2] for line in ended.stdout.splitlines() if "FOUND " in line]
        if ended.returncode or len(found) != 2:
            print(f"| {name} | failed: {(ended.stderr or ended.stdout)[-300:]} |")
            continue
        for rank, told, most, process in sorted(map(json.loads, found)):
            columns = [told >> 20, (told - process) >> 20, most >> 20, f"{most / told:.2f}"]
            print(f"| {name} | {rank} | {' | '.join(map(str, columns))} |", flush=True)


if __name__ == "__main__":
    main()
