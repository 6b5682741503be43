"""STEP alone on the host, over the time that its bytes take at the rate of a plain copy, in turns on one thread.

    python benchmarks/offload/step.py [--rounds 15] [--readme benchmarks/offload/README.md]

AdamW on 12 M parameters with gradients and masters in fp32 and a divisor. Figures are medians of the rounds' ratios, by
thread time: cores that others use too make wall time a lottery.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

from shardwise.optim.classes import from_policy
from shardwise.optim.flat import FlatOptimizer
from shardwise.optim.policy import OptimizerPolicy

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "data_parallel"))

from machine import describe  # noqa: E402
from table import insert  # noqa: E402

ELEMENTS = 12 * 2**20
BYTES = {"none": 28, "bf16": 30}
"""A parameter's, read and written, by the weight beside the master: gradient, master and two moments read, 16; master
and moments written, 12; the weight written, 2."""


def measure(rounds: int) -> dict[str, list[float]]:
    """Ratios of the rounds."""
    source, target = torch.randn(ELEMENTS), torch.empty(ELEMENTS)
    master, grad = torch.randn(ELEMENTS), torch.randn(ELEMENTS)
    weights = {"none": None, "bf16": torch.empty(ELEMENTS, dtype=torch.bfloat16)}
    optimizer = FlatOptimizer(master, from_policy(OptimizerPolicy(lr=1e-4)), 0)
    found: dict[str, list[float]] = {name: [] for name in weights}
    for _ in range(rounds + 1):
        for name, weight in weights.items():
            begun = time.thread_time()
            target.copy_(source)
            copied = time.thread_time()
            optimizer.step(grad, 3.0, [{}], (), weight)
            found[name].append((time.thread_time() - copied) / ((copied - begun) * BYTES[name] / 8))
    return {name: ratios[1:] for name, ratios in found.items()}


def render(found: dict[str, list[float]], command: str) -> str:
    """What stands in the README."""
    here = describe()
    lines = [
        f"`{command}`, {here['date']}, {here['machine']}, torch {here['versions']['torch']}.",
        "",
        "| weight beside the master | bytes a parameter | time / (bytes / rate of a copy) (quartiles) |",
        "|---|---|---|",
    ]
    for dtype, ratios in found.items():
        low, middle, high = statistics.quantiles(ratios, n=4)
        lines.append(f"| {dtype} | {BYTES[dtype]} | {middle:.2f} ({low:.2f}-{high:.2f}) |")
    return "\n".join(lines)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--readme", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    text = render(measure(asked.rounds), f"python benchmarks/offload/step.py --rounds {asked.rounds}")
    print(text)
    if asked.readme is not None:
        asked.readme.write_text(insert(asked.readme.read_text(), text))


if __name__ == "__main__":
    main()
