"""The longest sequence of a GPT that fits a memory, by what is foreseen, and whether it trains in it.

    python benchmarks/offload/context.py FOLDER [--memory 850MiB] [--layers 16] [--width 256] [--only plain recompute]

For each row, in a process of its own, ``shardwise.longest`` finds the context; another process then takes two steps
with it under RLIMIT_DATA of that memory, and says how much it held at the peak of the second one. Its allocator gives
back what is freed (MALLOC_MMAP_THRESHOLD_): glibc's own keeps holes of up to 32 MiB, which nobody foresees; --holes
leaves it so.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import shardwise
from shardwise.engine.fit.fits import budget
from shardwise.models import Gpt, GptPolicy

ROWS: dict[str, dict[str, Any]] = {
    "plain": {"tiles": {"logits": "off"}},
    "tiles of logits": {},
    "and recompute": {"recompute": "full"},
    "and tiles of mlp": {"recompute": "full", "tiles": {"mlp": "auto"}},
    "and state on disk": {
        "recompute": "full",
        "tiles": {"mlp": "auto"},
        "offload": {"optimizer": "disk", "parameters": "disk"},
    },
}


def policy(given: argparse.Namespace, tokens: int) -> GptPolicy:
    """Of the model."""
    return GptPolicy(
        layers=given.layers, width=given.width, heads=given.width // 64, context=tokens, vocab=given.vocab
    )


def make(given: argparse.Namespace, tokens: int) -> torch.nn.Module:
    """On meta."""
    with torch.device("meta"):
        return Gpt(policy(given, tokens))


def config(given: argparse.Namespace, row: str) -> dict[str, Any]:
    """Of a row."""
    found = {"optimizer": {"type": "adamw", "lr": 1e-4}, "precision": given.precision} | ROWS[row]
    if "offload" in found:
        found["offload"] = found["offload"] | {"disk_path": str(given.folder)}
    return found


def status(field: str) -> int:
    """Bytes of a row of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


class Watched:
    """The most of the data segment, looked at every few milliseconds."""

    def __enter__(self) -> Watched:
        self.most, self._over = 0, False
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over:
            self.most = max(self.most, status("VmData"))
            time.sleep(0.003)

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()


def train(given: argparse.Namespace) -> None:
    """Two steps; prints what was held."""
    limit = budget({"device": given.memory})["device"]
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    tokens = torch.arange(given.train).remainder(given.vocab).view(1, -1)
    engine = shardwise.initialize(make(given, given.train), config(given, given.row))
    before = status("VmData")
    engine.train_step([{"tokens": tokens, "targets": tokens}])
    Path("/proc/self/clear_refs").write_text("5")
    begin = time.perf_counter()
    with Watched() as watched:
        result = engine.train_step([{"tokens": tokens, "targets": tokens}])
    seconds = time.perf_counter() - begin
    peak = {"data": watched.most, "resident": status("VmHWM"), "before": before}
    engine.close(whole=False)
    print(json.dumps({**peak, "loss": result.loss, "seconds": seconds}))


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    for name, default in (("memory", "850MiB"), ("precision", "fp32"), ("row", ""), ("threads", "1")):
        parser.add_argument(f"--{name}", default=default)
    for name, size in (("layers", 16), ("width", 256), ("vocab", 8192), ("train", 0)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--holes", action="store_true")
    parser.add_argument("--only", nargs="*", default=list(ROWS))
    given = parser.parse_args()
    torch.set_num_threads(int(given.threads))
    if given.train:
        train(given)
        return
    if len(given.only) > 1:
        print(
            "| row | context | foreseen, MiB | data, MiB | resident, MiB | resident / foreseen | s a step |"
        )
        print("|---|---|---|---|---|---|---|", flush=True)
        first = sys.argv[1 : sys.argv.index("--only")] if "--only" in sys.argv else sys.argv[1:]
        for row in given.only:
            subprocess.run([sys.executable, __file__, *first, "--only", row], check=True)
    else:
        search(given, given.only[0])


def search(given: argparse.Namespace, row: str) -> None:
    """Prints a row of the table."""

    def example(tokens: int) -> dict[str, torch.Tensor]:
        ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
        return {"tokens": ids, "targets": ids}

    memory = {"device": given.memory, "disk": "1 TB"}
    found = shardwise.longest(lambda tokens: make(given, tokens), config(given, row), memory, example)
    step = found.outlook.step
    assert step is not None
    need = step.bytes_by_tier["device"]
    words = [sys.executable, __file__, *sys.argv[1:], "--row", row, "--train", str(found.tokens)]
    kept = {} if given.holes else {"MALLOC_MMAP_THRESHOLD_": "1048576"}
    run = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **kept})
    if run.returncode:
        print(
            f"| {row} | {found.tokens:,} | {need >> 20} | failed: {run.stderr.splitlines()[-1]} |", flush=True
        )
        return
    got = json.loads(run.stdout.splitlines()[-1])
    print(
        f"| {row} | {found.tokens:,} | {need >> 20} | {got['data'] >> 20} | {got['resident'] >> 20} | "
        f"{got['resident'] / need:.2f} | {got['seconds']:.1f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
