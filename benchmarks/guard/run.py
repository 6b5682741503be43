"""What the guard costs: two engines in turn, one with the guard and one without, on one and two ranks.

    python run.py --readme README.md

Both engines train the same GPT on the same batches, and take turns step by step, so that whatever else the machine does
meets both. The difference of the two in one step is the guard's. Every tenth step is compared, so that compared steps
are many; the cost at ``every: 50`` is the median difference of ordinary steps, which do nothing for the guard, and a
fiftieth of what a compared step and the one behind it take more than ordinary ones. The ranks meet before each step.

Cost: three minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import shardwise
from shardwise.models import Gpt, GptPolicy

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "data_parallel"))

from machine import describe  # noqa: E402

BEGIN, END = "<!-- table begins -->", "<!-- table ends -->"
MEASURED, EVERY, CYCLES, SAMPLES = 10, 50, 20, 4
SHAPE = {"layers": 4, "width": 128, "heads": 4, "context": 128, "vocab": 1024}
ROWS: list[tuple[str, int, dict[str, Any], bool]] = [
    ("1 rank, at rest", 1, {}, True),
    ("2 ranks, ZeRO 0, between ranks", 2, {"zero": {"stage": 0}}, False),
    ("2 ranks, ZeRO 0, and at rest", 2, {"zero": {"stage": 0}}, True),
    ("2 ranks, ZeRO 3, at rest", 2, {"zero": {"stage": 3}}, True),
]


class GuardCost(NamedTuple):
    """Median seconds of steps, and of what the guard adds to them."""

    step_s: float
    ordinary_s: float
    """Added to a step without a comparison."""
    compared_s: float
    """Added to a compared step and the step behind it, beyond what is added to ordinary steps."""

    @property
    def share(self) -> float:
        """Part of a step that the guard costs in the mean over a cycle of ``EVERY`` steps."""
        return (self.ordinary_s + self.compared_s / EVERY) / self.step_s


def measure(given: dict[str, Any], at_rest: bool, cycles: int) -> GuardCost:
    """Train both engines in turn on the ranks of this job, and return the medians of rank 0."""
    torch.set_num_threads(1)
    config = given | {"check_first_step": "off", "optimizer": {"type": "adamw"}, "max_grad_norm": 1.0}
    engines = []
    for guard in (None, {"every": MEASURED, "at_rest": at_rest}):
        torch.manual_seed(0)
        more = {} if guard is None else {"guard": guard}
        engines.append(shardwise.initialize(Gpt(GptPolicy.model_validate(SHAPE)), config | more))
    rank = dist.get_rank() if dist.is_initialized() else 0
    draws = torch.Generator().manual_seed(rank)
    plain: list[float] = []
    added: list[list[float]] = [[] for _ in range(MEASURED)]
    """Differences of the two engines, by the steps since a compared one."""
    for step in range(1, cycles * MEASURED + 3):
        tokens = torch.randint(0, SHAPE["vocab"], (SAMPLES, SHAPE["context"] + 1), generator=draws)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        order = (0, 1) if step % 2 else (1, 0)
        losses, seconds = [0.0, 0.0], [0.0, 0.0]
        for which in order:
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            losses[which] = engines[which].train_step([batch]).loss
            seconds[which] = time.perf_counter() - start
        if step > 2:
            plain.append(seconds[0])
            added[step % MEASURED].append(seconds[1] - seconds[0])
        if losses[0] != losses[1]:
            raise RuntimeError(f"the guard changes the loss of step {step}: {losses}")
    for engine in engines:
        engine.close()
    ordinary_s = statistics.median(each for place in added[2:] for each in place)
    compared_s = sum(statistics.median(place) - ordinary_s for place in added[:2])
    return GuardCost(statistics.median(plain), ordinary_s, compared_s)


def main() -> None:
    """Measure the rows, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=CYCLES)
    parser.add_argument("--readme", type=Path)
    given = parser.parse_args()
    lines = [
        "| job | step, ms | added to ordinary steps | added to a compared step, ms | in the mean at `every: 50` |",
        "|---|---|---|---|---|",
    ]
    for name, ranks, config, at_rest in ROWS:
        if ranks == 1:
            cost = measure(config, at_rest, given.cycles)
        else:
            cost = shardwise.launch(measure, config, at_rest, given.cycles, ranks=ranks)
        row = (
            f"{1000 * cost.step_s:.1f}",
            f"{100 * cost.ordinary_s / cost.step_s:+.2f} %",
            f"{1000 * cost.compared_s:.1f}",
            f"{100 * cost.share:+.2f} %",
        )
        lines.append(f"| {name} | {' | '.join(row)} |")
        print(lines[-1], flush=True)
    if given.readme is not None:
        said, text = describe(), given.readme.read_text()
        head = (
            f"{BEGIN}\n`python run.py --cycles {given.cycles}`, {said['date']}, {said['machine']}, one thread per "
            f"rank, commit {said['commit']}, torch {said['versions']['torch']}.\n\n"
        )
        table = "\n".join(lines)
        given.readme.write_text(text[: text.index(BEGIN)] + head + table + "\n" + text[text.index(END) :])


if __name__ == "__main__":
    main()
