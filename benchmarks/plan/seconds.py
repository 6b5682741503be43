"""Seconds of a step, foreseen and measured: layouts of one and of two ranks that take turns.

    python seconds.py [--hardware FILE] [--rounds 7]
    python seconds.py --collectives [--hardware FILE]

A layout is a model, a configuration and a number of ranks of one thread each. The job of two ranks builds all layouts
of two ranks and runs a step of each in turn, then the job of one rank does the same, so that what else runs on the
machine hits all of them alike. Foreseen is the price of the same job by ``simulate.price.step_seconds``, with the rates
of FILE, of this machine's calibration (``shardwise plan --calibrate``), or measured here in a second. Printed are both
times and the range, the mean error, the rank correlation (Spearman), and the regret: how far the layout that is
foreseen to be the fastest is behind the one that is.

With ``--collectives`` two ranks make collectives and messages of several sizes, other than those that calibration
measures, through shared memory and by gloo, and each is printed beside ``simulate.exchange_price.exchange_s``.

Run it on idle cores. Cost: five minutes, two processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

import shardwise
from shardwise.base.hardware import Hardware
from shardwise.base.hardware_files import read_hardware
from shardwise.comm.world import join
from shardwise.engine.fit.calibration_rank import Channels
from shardwise.engine.fit.foresee import read
from shardwise.models import Gpt, GptPolicy
from shardwise.plan.exchange_calls import ExchangeCall
from shardwise.simulate.calibration import cpu_hardware
from shardwise.simulate.exchange_price import TransportName, exchange_s
from shardwise.simulate.measurements import exchange_repeats, message_repeats
from shardwise.simulate.price import StepSeconds, step_seconds

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "data_parallel"))

from machine import describe  # noqa: E402

CPU = torch.device("cpu")
SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 19, 1 << 21, 1 << 23)
"""Bytes of the full tensors of collectives, and of messages."""
SWEEPS = 4
WARM_STEPS = 2
"""Steps before each one that counts: an engine finds caches of other engines, and memory that the allocator has
returned to the system while they ran, which a step of a training run does not."""
TRANSPORTS: tuple[TransportName, ...] = ("shared_memory", "gloo")


class Layout(NamedTuple):
    """One layout of one model."""

    name: str
    ranks: int
    config: dict[str, Any]
    layers: int
    width: int
    tokens: int
    rows: int
    """Sequences of a microbatch."""
    is_choice: bool = False
    """True if the layout competes with the others of its kind for the same global batch."""


def layouts() -> list[Layout]:
    """All layouts; steps take 20 ms to 2 s on a core of some 50 GFLOP/s."""
    small, middle, large = (2, 128, 64, 4), (4, 256, 128, 4), (6, 512, 256, 4)
    half, quarter = (6, 512, 256, 2), (6, 512, 256, 1)
    return [
        Layout("small", 1, {}, *small),
        Layout("small, zero 3", 2, {"zero": {"stage": 3}}, *small),
        Layout("middle", 1, {}, *middle),
        Layout("middle, 4 microbatches", 1, {"batch": {"accumulation": 4}}, *middle),
        Layout("middle, recompute", 1, {"recompute": "full"}, *middle),
        Layout("middle, tp 2", 2, {"mesh": {"tp": 2}}, *middle),
        Layout("middle, pp 2", 2, {"mesh": {"pp": 2}, "batch": {"accumulation": 4}}, *middle),
        Layout("large", 1, {}, *large),
        Layout("large, tiles", 1, {"tiles": {"logits": 256, "mlp": 256}}, *large),
        Layout("large, zero 0", 2, {"zero": {"stage": 0}}, *half, True),
        Layout("large, zero 1", 2, {"zero": {"stage": 1}}, *half, True),
        Layout("large, zero 3", 2, {"zero": {"stage": 3}}, *half, True),
        Layout("large, zero 3, two", 2, {"zero": {"stage": 3}, "batch": {"accumulation": 2}}, *quarter, True),
        Layout("large, tp 2", 2, {"mesh": {"tp": 2}}, *large, True),
        Layout("large, pp 2", 2, {"mesh": {"pp": 2}, "batch": {"accumulation": 4}}, *quarter, True),
    ]  # fmt: skip


def config(layout: Layout) -> dict[str, Any]:
    """The configuration of a layout."""
    found: dict[str, Any] = {
        "optimizer": {"type": "adamw", "lr": 1e-4},
        "tiles": {"logits": "off"},
        "check_first_step": "off",
    } | layout.config
    return found | {"batch": {**found.get("batch", {}), "duplicates": "allow"}}


def model(layout: Layout) -> nn.Module:
    """The model of a layout."""
    heads = layout.width // 64
    return Gpt(
        GptPolicy(layers=layout.layers, width=layout.width, heads=heads, context=layout.tokens, vocab=2048)
    )


def batch(layout: Layout) -> dict[str, torch.Tensor]:
    """A microbatch, the same on all ranks."""
    torch.manual_seed(0)
    ids = torch.randint(0, 2048, (layout.rows, layout.tokens + 1))
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


def foreseen(layout: Layout, hardware: Hardware) -> StepSeconds:
    """Seconds of a step, by use."""

    def make() -> nn.Module:
        with torch.device("meta"):
            return model(layout)

    known = read(make, config(layout), layout.ranks, CPU, batch(layout))
    plan = known.outlook(known.settings.offload).plan
    return step_seconds(plan, known.policies, known.passed, hardware, "cpu", data_s=0.0)


def run_rank(names: list[str], rounds: int, out: Path) -> None:
    """Run steps of the named layouts in turn, and let rank 0 write the seconds of each."""
    torch.set_num_threads(1)
    world = join()
    chosen = [layout for layout in layouts() if layout.name in names]
    engines = [shardwise.initialize(model(layout), config(layout), world=world) for layout in chosen]
    batches = [[batch(layout)] * engine.accumulation for layout, engine in zip(chosen, engines, strict=True)]
    seconds: dict[str, list[float]] = {layout.name: [] for layout in chosen}
    for _ in range(rounds):
        for layout, engine, given in zip(chosen, engines, batches, strict=True):
            for _ in range(WARM_STEPS):
                engine.train_step(given)
            begin = time.perf_counter()
            engine.train_step(given)
            seconds[layout.name].append(time.perf_counter() - begin)
    for engine in engines:
        engine.close()
    if world.rank == 0:
        out.write_text(json.dumps(seconds))


def measured(chosen: list[Layout], rounds: int) -> dict[str, list[float]]:
    """Seconds of the steps of each layout."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 1):
            names = [layout.name for layout in chosen if layout.ranks == ranks]
            if not names:
                continue
            out = Path(folder) / f"{ranks}.json"
            command = [sys.executable, "-m", "shardwise", "launch", "--ranks", str(ranks), __file__]
            given = ["--rank-of", *names, "--rounds", str(rounds), "--out", str(out)]
            subprocess.run([*command, *given], check=True)
            found |= json.loads(out.read_text())
    return found


def run_collectives(out: Path) -> None:
    """Measure collectives and messages in several sweeps, and let rank 0 write the seconds of each."""
    torch.set_num_threads(1)
    world = join()
    channels = Channels.of(world)
    found: dict[str, list[float]] = {}
    for _ in range(SWEEPS):
        for transport, group, peers in (
            ("shared_memory", channels.group, channels.peers),
            ("gloo", channels.gloo, channels.gloo_peers),
        ):
            every = exchange_repeats(group, SIZES) | {"send": message_repeats(group, peers, SIZES)}
            for operation, rows in every.items():
                for size, repeats in zip(SIZES, rows.values(), strict=True):
                    found.setdefault(f"{transport} {operation} {size}", []).extend(repeats)
    if world.rank == 0:
        out.write_text(json.dumps(found))


def collective_call(operation: str, full_bytes: int, ranks: int) -> ExchangeCall:
    """The call of a collective on a full tensor of fp32, with the elements that a rank sends."""
    elements = full_bytes // 4
    if operation != "send":
        elements = elements * (ranks - 1) // ranks * (2 if operation == "all_reduce" else 1)
    return ExchangeCall(operation, "weights", "dp", elements, 4)  # type: ignore[arg-type]


def report_collectives(hardware: Hardware, found: dict[str, list[float]]) -> str:
    """The table of collectives, and the mean errors, as text."""
    heads = ["operation", "KiB", *(f"{each}: foreseen, us | measured, us | ratio" for each in TRANSPORTS)]
    lines = [f"| {' | '.join(heads)} |", "|---" * (2 + 3 * len(TRANSPORTS)) + "|"]
    errors: dict[str, list[float]] = {each: [] for each in TRANSPORTS}
    for operation in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"):
        for size in SIZES:
            row = [operation, f"{size >> 10:,}"]
            for transport in TRANSPORTS:
                real = statistics.median(found[f"{transport} {operation} {size}"])
                told = exchange_s(collective_call(operation, size, 2), hardware, transport, "host", 2)
                errors[transport].append(abs(told / real - 1))
                row.append(f"{1e6 * told:.0f} | {1e6 * real:.0f} | {told / real:.2f}")
            lines.append(f"| {' | '.join(row)} |")
    said = "; ".join(
        f"{name}: mean error {statistics.mean(each):.1%}, at most {max(each):.1%}"
        for name, each in errors.items()
    )
    return "\n".join([*lines, "", f"{said}."])


def collectives(hardware: Hardware) -> str:
    """The table of collectives that two ranks make now."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "collectives.json"
        command = [sys.executable, "-m", "shardwise", "launch", "-q", "--ranks", "2", __file__]
        subprocess.run([*command, "--collectives", "--out", str(out)], check=True)
        return report_collectives(hardware, json.loads(out.read_text()))


def spearman(first: list[float], second: list[float]) -> float:
    """Rank correlation of two rows of numbers."""

    def places(row: list[float]) -> list[float]:
        return [float(sum(other < each for other in row)) for each in row]

    return statistics.correlation(places(first), places(second))


def regret(chosen: list[Layout], told: dict[str, float], found: dict[str, float]) -> float:
    """How far the layout that is foreseen to be the fastest is behind the fastest, as a share."""
    names = [layout.name for layout in chosen if layout.is_choice]
    if not names:
        return 0.0
    return found[min(names, key=lambda name: told[name])] / min(found[name] for name in names) - 1


def report(chosen: list[Layout], hardware: Hardware, seconds: dict[str, list[float]]) -> str:
    """The table and the figures, as text."""
    told = {layout.name: foreseen(layout, hardware) for layout in chosen}
    found = {name: statistics.median(row) for name, row in seconds.items()}
    heads = ["layout", "ranks", "foreseen, ms", "measured, ms", "foreseen / measured", "range, ms"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    within = every = 0
    for layout in chosen:
        price, real = told[layout.name], found[layout.name]
        within += sum(price.low_s <= each <= price.high_s for each in seconds[layout.name])
        every += len(seconds[layout.name])
        parts = ", ".join(f"{use} {1e3 * spent:.1f}" for use, spent in price.spent.items() if spent > 1e-5)
        lines.append(
            f"| {layout.name} | {layout.ranks} | {1e3 * price.total:.1f} ({parts}) | {1e3 * real:.1f} | "
            f"{price.total / real:.2f} | {1e3 * price.low_s:.1f} to {1e3 * price.high_s:.1f} |"
        )
    totals = {name: price.total for name, price in told.items()}
    names = [layout.name for layout in chosen]
    error = statistics.mean(abs(totals[name] / found[name] - 1) for name in names)
    order = spearman([totals[name] for name in names], [found[name] for name in names])
    lines += [
        "",
        f"Mean error {error:.1%}, rank correlation {order:.3f}, regret {regret(chosen, totals, found):.1%}; "
        f"{within / every:.0%} of {every} steps within the range.",
    ]
    return "\n".join(lines)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hardware", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--collectives", action="store_true")
    parser.add_argument("--rank-of", nargs="+", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        run_rank(given.rank_of, given.rounds, given.out)
        return
    if given.collectives and given.out:
        run_collectives(given.out)
        return
    torch.set_num_threads(1)
    hardware = read_hardware(given.hardware) if given.hardware else cpu_hardware(torch.float32)[0]
    if given.collectives:
        print(f"`python seconds.py --collectives`, {describe()}; medians.\n\n{collectives(hardware)}")
        return
    chosen = [layout for layout in layouts() if not given.only or layout.name in given.only]
    seconds = measured(chosen, given.rounds)
    text = f"`python seconds.py --rounds {given.rounds}`, {describe()}; medians.\n\n{report(chosen, hardware, seconds)}"
    print(text)


if __name__ == "__main__":
    main()
