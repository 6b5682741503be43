"""How much model state trains in how little memory: a GPT on one rank whose weights, masters, moments and gradients lie
on a disk, under a limit on the process's memory (RLIMIT_DATA, which counts what is reserved, touched or not).

    python reach.py FOLDER [--layers 43] [--limit-gib 3] [--steps 2]

It is built on ``meta`` and drawn Unit by Unit, trains, saves into FOLDER/steps and, started again with more steps, goes
on from there. Each line has the loss to the bit, and the process's memory.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import torch

import shardwise
from shardwise.models import Gpt, GptPolicy

GIB = 2**30
POLICY = {"width": 1024, "heads": 8, "context": 16, "vocab": 256}


def memory() -> str:
    """Of this process, in GiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) / 2**20 for line in lines if line.endswith("kB")}
    return f"data {found['VmData']:.2f} GiB, resident at most {found['VmHWM']:.2f} GiB"


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=43)
    parser.add_argument("--limit-gib", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=2)
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (int(given.limit_gib * GIB),) * 2)
    disk = given.folder / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = Gpt(GptPolicy(layers=given.layers, **POLICY))
    elements = sum(parameter.numel() for parameter in model.parameters())
    print(f"before: {memory()}", flush=True)
    config = {
        "zero": {"stage": 3},
        "optimizer": {"type": "adamw", "lr": 1e-4},
        "recompute": "full",
        "offload": {"optimizer": "disk", "parameters": "disk", "disk_path": str(disk)},
    }
    begin = time.perf_counter()
    engine = shardwise.initialize(model, config)
    print(
        f"{elements / 1e6:.0f} M parameters, {16 * elements / GIB:.1f} GiB of weights, moments and gradients"
    )
    print(f"built in {time.perf_counter() - begin:.0f} s: {memory()}", flush=True)
    if (given.folder / "steps").exists():
        engine.load(given.folder / "steps")
        print(f"loaded step {engine.step_count}: {memory()}", flush=True)
    while engine.step_count < given.steps:
        begin = time.perf_counter()
        generator = torch.Generator().manual_seed(engine.step_count)
        tokens = torch.randint(0, POLICY["vocab"], (1, POLICY["context"] + 1), generator=generator)
        result = engine.train_step([{"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}])
        seconds = time.perf_counter() - begin
        print(f"step {result.step}  loss {result.loss.hex()}  {seconds:.0f} s  {memory()}", flush=True)
    engine.save(given.folder / "steps")
    print(f"saved: {memory()}", flush=True)
    engine.close(whole=False)  # the whole model would not fit


if __name__ == "__main__":
    main()
