"""How much model state trains in how little memory: a GPT on one rank whose weights, masters, moments and gradients lie
on a disk, under a limit on the process's memory (RLIMIT_DATA, which counts what is reserved, touched or not).

    python reach.py FOLDER [--layers 43] [--limit-gib 3] [--steps 2]
    python reach.py FOLDER --kill                                      # killed in the middle of a step, and resumed
    python reach.py FOLDER --resume --layers 12 --width 1280 --precision bf16 --limit-ratio 1.1

It is built on ``meta`` and drawn Unit by Unit, trains, saves into FOLDER/steps at the end or behind step ``--save-at``
and, started again with more steps, goes on from there. Each line has the loss to the bit, and the process's memory. The
last ones hold the most of it in a step against what ``shardwise.foresee`` said before anything was built.

``--kill``: a process saves step 1, trains on to the middle of step 4 and gets SIGKILL there; another one resumes from
step 1, and its steps 2 and 3 have the same losses. ``--resume``: the same without the kill. ``--limit-ratio``: the
limit as a multiple of what ``shardwise.foresee`` said, the process counted, in place of ``--limit-gib``.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import shardwise
from shardwise.models import Gpt, GptPolicy

GIB = 2**30
POLICY = {"width": 1024, "heads": 8, "context": 16, "vocab": 256}


def now() -> tuple[int, int]:
    """Bytes of this process's (data segment, resident pages)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    return found["VmData"], found["VmRSS"]


class Peak:
    """The most of both since ``begin``, looked at every 5 ms."""

    def __init__(self) -> None:
        self.data, self.resident = now()

    def begin(self) -> None:
        """From here on."""
        self.data, self.resident = now()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look inside."""
        end = threading.Event()

        def watch() -> None:
            while not end.wait(0.005):
                data, resident = now()
                self.data, self.resident = max(self.data, data), max(self.resident, resident)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def __str__(self) -> str:
        return f"at most {self.data / GIB:.3f} GiB of data, {self.resident / GIB:.3f} resident"


def meta_model(given: argparse.Namespace) -> Gpt:
    """Return the model on meta."""
    with torch.device("meta"):
        return Gpt(GptPolicy(layers=given.layers, **POLICY | {"width": given.width}))


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Those of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, POLICY["vocab"], (1, POLICY["context"] + 1), generator=generator)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def train(given: argparse.Namespace, peak: Peak) -> None:
    """One process."""
    disk = given.folder / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    config = {
        "zero": {"stage": 3},
        "optimizer": {"type": "adamw", "lr": 1e-4},
        "recompute": "full",
        "precision": given.precision,
        "offload": {"optimizer": "disk", "parameters": given.parameters, "disk_path": str(disk)},
    }
    before = now()
    told = shardwise.foresee(lambda: meta_model(given), config, example=batch_of(0)).step
    assert told is not None, "there is an example"
    planned = sum(size for row, size in told.peak.rows.items() if row not in ("process", "disk"))
    said = sum(size for row, size in told.peak.rows.items() if row != "disk")
    limit = int(given.limit_ratio * said if given.limit_ratio else given.limit_gib * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    print(f"limit: {limit / GIB:.3f} GiB", flush=True)
    print(f"before: {before[0] / GIB:.3f} GiB of data, {before[1] / GIB:.3f} resident", flush=True)
    rows = ", ".join(f"{row} {size / GIB:.3f}" for row, size in sorted(told.peak.rows.items()))
    print(f"foreseen at {told.peak.action} of {told.peak.unit}: {rows} GiB", flush=True)
    model = meta_model(given)
    elements = sum(parameter.numel() for parameter in model.parameters())
    begin = time.perf_counter()
    engine = shardwise.initialize(model, config)
    state = f"{16 * elements / GIB:.1f} GiB of weights, moments and gradients"
    print(f"{elements / 1e6:.0f} M parameters, {state}")
    print(f"built in {time.perf_counter() - begin:.0f} s: {peak}", flush=True)
    if (given.folder / "steps").exists():
        begin = time.perf_counter()
        engine.load(given.folder / "steps")
        print(f"loaded step {engine.step_count} in {time.perf_counter() - begin:.0f} s: {peak}", flush=True)
    peak.begin()
    while engine.step_count < given.steps:
        begin = time.perf_counter()
        print(f"step {engine.step_count + 1} begins", flush=True)
        result = engine.train_step([batch_of(engine.step_count)])
        seconds = time.perf_counter() - begin
        print(f"step {result.step}  loss {result.loss.hex()}  {seconds:.0f} s  {peak}", flush=True)
        if result.step == given.save_at:
            in_steps = peak.data, peak.resident
            save(engine, given.folder / "steps", peak)
            peak.data, peak.resident = in_steps
    for what, most, first in (("data", peak.data, before[0]), ("resident", peak.resident, before[1])):
        foreseen = first + planned
        print(
            f"steps, {what}: {most / GIB:.3f} GiB; foreseen {foreseen / GIB:.3f}, "
            f"of it {first / GIB:.3f} of the process; ratio {most / foreseen:.3f}",
            flush=True,
        )
    if not given.save_at:
        save(engine, given.folder / "steps", peak)
    engine.close(whole=False)  # the whole model would not fit


def save(engine: shardwise.Engine, folder: Path, peak: Peak) -> None:
    """A checkpoint."""
    begin = time.perf_counter()
    engine.save(folder)
    print(f"saved step {engine.step_count} in {time.perf_counter() - begin:.0f} s: {peak}", flush=True)


def kill_and_resume(given: argparse.Namespace) -> None:
    """See the module's docstring."""
    common = [sys.executable, __file__, str(given.folder), "--layers", str(given.layers)]
    common += ["--limit-gib", str(given.limit_gib), "--save-at", "1", "--width", str(given.width)]
    common += ["--precision", given.precision, "--limit-ratio", str(given.limit_ratio)]
    common += ["--parameters", given.parameters]
    losses: list[dict[str, str]] = []
    for steps, wanted in ((5, "step 4 begins") if given.kill else (3, ""), (3, "")):
        process = subprocess.Popen([*common, "--steps", str(steps)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None, "it is a pipe"
        losses.append({})
        seconds = 1.0
        for line in process.stdout:
            print(line, end="", flush=True)
            words = line.split()
            if words[2:3] == ["loss"]:
                losses[-1][words[1]] = words[3]
                seconds = float(words[4])
            if wanted and line.startswith(wanted):
                time.sleep(seconds / 2)
                os.kill(process.pid, signal.SIGKILL)
        print(
            f"ended with {process.wait()}; files on the disk: {len(list((given.folder / 'disk').iterdir()))}"
        )
    assert losses[1].keys() == {"2", "3"}, losses
    assert all(losses[0][step] == loss for step, loss in losses[1].items()), losses
    print(f"resumed, steps {', '.join(losses[1])} have the losses of before, to the bit")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=43)
    parser.add_argument("--limit-gib", type=float, default=3.0)
    parser.add_argument("--limit-ratio", type=float, default=0.0)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--parameters", default="disk", choices=["disk", "device"])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--save-at", type=int, default=0)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    if given.kill or given.resume:
        kill_and_resume(given)
        return
    peak = Peak()
    with peak.watched():
        train(given, peak)


if __name__ == "__main__":
    main()
