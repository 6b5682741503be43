"""What a step costs, foreseen and measured: settings of one GPT that take turns, on one rank and on two.

    python benchmarks/offload/price.py FOLDER [--rounds 9] [--layers 6] [--width 256] [--only memory disk]
    shardwise launch --ranks 2 benchmarks/offload/price.py FOLDER ...

Foreseen: ``shardwise.fits`` with the medians of rates that are measured in each round, between the steps. Measured:
medians of steps that take turns, and the best of them, one thread a rank. Absolute seconds depend on what else runs
there; the last two columns are the setting over the first one, foreseen and measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import shardwise
from shardwise.base.hardware import Hardware, Link
from shardwise.comm.world import join
from shardwise.models import Gpt, GptPolicy
from shardwise.simulate.rates import measured_hardware

ONE: dict[str, dict[str, Any]] = {
    "memory": {},
    "recompute: full": {"recompute": "full"},
    "recompute: selective": {"recompute": "selective"},
    "tiles": {"tiles": {"logits": 128, "mlp": 128}},
    "disk": {"offload": {"optimizer": "disk"}},
    "disk, at_end": {"offload": {"optimizer": "disk", "step": "at_end"}},
    "disk, weights too": {"offload": {"optimizer": "disk", "parameters": "disk"}},
    "4 microbatches": {"batch": {"accumulation": 4}},
}
TWO: dict[str, dict[str, Any]] = {
    "zero 0": {"zero": {"stage": 0}},
    "zero 1": {"zero": {"stage": 1}},
    "zero 3": {"zero": {"stage": 3}},
    "zero 3, 4 microbatches": {"zero": {"stage": 3}, "batch": {"accumulation": 4}},
    "tp 2": {"mesh": {"tp": 2}},
    "pp 2, 4 microbatches": {"mesh": {"pp": 2}, "batch": {"accumulation": 4}},
}


def policy(given: argparse.Namespace) -> GptPolicy:
    """Of the model."""
    heads = given.width // 64
    return GptPolicy(
        layers=given.layers, width=given.width, heads=heads, context=given.tokens, vocab=given.vocab
    )


def config(given: argparse.Namespace, setting: dict[str, Any]) -> dict[str, Any]:
    """Of a setting."""
    plain: dict[str, Any] = {
        "optimizer": {"type": "adamw", "lr": 1e-4},
        "tiles": {"logits": "off"},
        "check_first_step": "off",
    }
    found = plain | setting
    found["batch"] = {**found.get("batch", {}), "duplicates": "allow"}
    if "offload" in found:
        found["offload"] = {**found["offload"], "disk_path": str(given.folder)}
    return found


def foreseen(given: argparse.Namespace, setting: dict[str, Any], ranks: int, hardware: Hardware) -> Any:
    """Seconds of a step, by what takes them."""
    ids = torch.empty(given.rows, given.tokens, dtype=torch.int64, device="meta")

    def make() -> torch.nn.Module:
        with torch.device("meta"):
            return Gpt(policy(given))

    example = {"tokens": ids, "targets": ids}
    fit = shardwise.fits(
        make, config(given, setting), {"device": "1 TB"}, example, ranks=ranks, hardware=hardware
    )
    return fit.seconds


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    for name, number in {"layers": 6, "width": 256, "tokens": 256, "rows": 4, "vocab": 2048}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--only", nargs="+", default=[])
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    world = join()
    settings = ONE if world.size == 1 else TWO
    settings = {name: settings[name] for name in given.only or settings}
    engines = {
        name: shardwise.initialize(Gpt(policy(given)), config(given, setting), world=world)
        for name, setting in settings.items()
    }
    torch.manual_seed(0)  # ranks that share a model have the same batches
    ids = torch.randint(0, given.vocab, (given.rows, given.tokens + 1))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    measured: list[Hardware] = []
    for number in range(given.rounds + 1):
        measured.append(measured_hardware(torch.device("cpu"), torch.float32, given.folder))
        for name, engine in engines.items():
            batches = [batch] * engine.accumulation
            engine.train_step(batches)  # what the last turn of another engine left in caches goes
            begin = time.perf_counter()
            engine.train_step(batches)
            if number:
                seconds[name].append(time.perf_counter() - begin)
    if world.rank == 0:
        table(
            given,
            seconds,
            world.size,
            median(measured),
        )
    for engine in engines.values():
        engine.close()


def median(measured: list[Hardware]) -> Hardware:
    """Of each figure."""

    def of(rows: list[Any]) -> Any:
        return {key: statistics.median(row[key] for row in rows) for key in rows[0]}

    links = {
        level: Link(
            statistics.median(each.links[level].bytes_s for each in measured),
            statistics.median(each.links[level].latency_s for each in measured),
        )
        for level in measured[0].links
    }
    peaks, memory = (of([getattr(each, name) for each in measured]) for name in ("peaks", "memory_bytes_s"))
    return dataclasses.replace(measured[0], peaks=peaks, memory_bytes_s=memory, links=links)


def table(given: argparse.Namespace, seconds: dict[str, list[float]], ranks: int, hardware: Hardware) -> None:
    """For people."""
    settings = ONE if ranks == 1 else TWO
    print(
        f"{hardware.flops_s('fp32'):.3g} FLOP/s, {hardware.memory_bytes_s} and {hardware.links} bytes a second"
    )
    heads = ["setting", "foreseen, ms", "measured, ms", "the best", "foreseen / measured", "/ the best"]
    heads += ["over the first: foreseen", "measured"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    first, said = next(iter(seconds)), {}
    for name, found in seconds.items():
        told = foreseen(given, settings[name], ranks, hardware)
        median, best = statistics.median(found), min(found)
        said[name] = told.total
        over = statistics.median(a / b for a, b in zip(found, seconds[first], strict=True))
        parts = ", ".join(f"{part} {1e3 * spent:.0f}" for part, spent in told._asdict().items() if spent)
        columns = [
            f"{1e3 * told.total:.0f} ({parts})",
            f"{1e3 * median:.0f}",
            f"{1e3 * best:.0f}",
            *(
                f"{ratio:.2f}"
                for ratio in (told.total / median, told.total / best, told.total / said[first], over)
            ),
        ]
        print(f"| {name} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
