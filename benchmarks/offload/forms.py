"""Moments in 16 and 8 bits beside fp32: what a small GPT has learned after as many steps, what a step takes, and the
update alone.

    python forms.py [--steps 400] [--rounds 15]

The engines take turns on the same batches of bytes of Python's standard library, in one process and on one thread; two
more in fp32 start from other seeds, for what chance makes. Losses are those of pieces that none was trained on. Times
are ratios over fp32, medians over steps or rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shardwise
from shardwise.kernels.philox import key_of
from shardwise.models import Gpt, GptPolicy
from shardwise.optim.classes import from_policy
from shardwise.optim.flat import FlatOptimizer
from shardwise.optim.policy import OptimizerPolicy
from shardwise.optim.rounding import RoundedPart, StochasticRounding
from shardwise.plan.placement import ContiguousRun
from shardwise.plan.state_form import StateForm

POLICY = GptPolicy(layers=3, width=128, heads=4, context=128, vocab=256)
SAMPLES = 8
ELEMENTS = 1 << 24
RUNS: dict[str, tuple[StateForm, int]] = {
    "fp32": ("fp32", 0),
    "fp32, seed 1": ("fp32", 1),
    "fp32, seed 2": ("fp32", 2),
    "bf16": ("bf16", 0),
    "int8": ("int8", 0),
}


def text() -> Tensor:
    """Bytes of the standard library's modules, in the order of their names."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def pieces(source: Tensor, number: int, trains: bool) -> dict[str, Tensor]:
    """Batch ``number`` of the first nine tenths, or of the rest."""
    cut = len(source) * 9 // 10
    part = source[:cut] if trains else source[cut:]
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(part) - POLICY.context - 1, (SAMPLES,), generator=generator).tolist()
    tokens = torch.stack([part[start : start + POLICY.context + 1] for start in starts]).long()
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def engine_of(form: StateForm, seed: int, steps: int) -> Any:
    config = {
        "optimizer": {"type": "adamw", "lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
        "schedule": {"type": "cosine", "warmup_steps": 20, "total_steps": steps, "min_ratio": 0.1},
        "max_grad_norm": 1.0,
        "offload": {"state": form},
    }
    return shardwise.initialize(Gpt(POLICY, seed=seed), config)


def trained(steps: int) -> None:
    """Prints what each run has learned, and takes for a step."""
    source = text()
    engines = {name: engine_of(*run, steps) for name, run in RUNS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in RUNS}
    for number in range(steps):
        batch = pieces(source, number, trains=True)
        for name, engine in engines.items():
            begin = time.perf_counter()
            engine.train_step([batch])
            seconds[name].append(time.perf_counter() - begin)
    print("| moments | bytes of them | loss on unseen text | step over fp32 |\n|---|---|---|---|")
    for name, engine in engines.items():
        with torch.no_grad():
            losses = [float(engine.module(**pieces(source, number, trains=False))) for number in range(80)]
        ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["fp32"], strict=True))
        size = engine.state_bytes()["moments"]
        print(f"| {name} | {size:,} | {statistics.mean(losses):.4f} | {ratio:.2f} |")


def updater(form: StateForm) -> Callable[[int], float]:
    """Seconds of an update of one flat tensor from gradients in bf16, with a bf16 weight."""
    rounding = StochasticRounding(
        [RoundedPart(0, ELEMENTS, key_of(0, "w"), lambda a, b: [ContiguousRun(a, a, b - a)])]
    )
    master, policy = torch.randn(ELEMENTS), from_policy(OptimizerPolicy(lr=1e-4))
    optimizer = FlatOptimizer(master, policy, 0, form, rounding)
    grad, weight = torch.randn(ELEMENTS).bfloat16(), torch.empty(ELEMENTS, dtype=torch.bfloat16)

    def update(number: int) -> float:
        begin = time.perf_counter()
        optimizer.step(grad, 2.0, [{}], weight=weight, steps=number)
        return time.perf_counter() - begin

    return update


def updated(rounds: int) -> None:
    """Prints what an update takes."""
    forms: tuple[StateForm, ...] = ("fp32", "bf16", "int8")
    updates = {form: updater(form) for form in forms}
    found = [{form: update(number) for form, update in updates.items()} for number in range(rounds + 1)][1:]
    print("| moments | ns an element | update over fp32 (quartiles) |\n|---|---|---|")
    for form in updates:
        low, middle, high = statistics.quantiles([each[form] / each["fp32"] for each in found], n=4)
        ns = 1e9 / ELEMENTS * statistics.median(each[form] for each in found)
        print(f"| {form} | {ns:.1f} | {middle:.2f} ({low:.2f}-{high:.2f}) |")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    trained(given.steps)
    updated(given.rounds)


if __name__ == "__main__":
    main()
