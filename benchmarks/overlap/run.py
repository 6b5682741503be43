"""How much of the time that gradients and weights travel the computation hides, on a link that delays every byte.

    PYTHONPATH=. python benchmarks/overlap/run.py [--share 0.5] [--layers 16] [--rounds 5]

One process acts as rank 0 of eight whose tensors are all alike; it computes in earnest. Its link is a clock: a
collective begins where it is started, after those before it, takes as long as its bytes, and whoever waits for it
sleeps until then. ``--share`` is the link's time over that of the computation, which therefore could hide all of it but
the first gather and the last reduction.

    exposed    the time slept, over the link's time
"""

import argparse
import statistics
import time
from typing import Any

import torch
from benchmarks.overlap.links import Link, blocks, world_on

import shardwise


def engine_on(link: Link, stage: int, ahead: int, options: argparse.Namespace) -> Any:
    """An engine on that link. ``ahead``: bytes that are gathered before their use, and reductions under way."""
    model, units = blocks(options.layers, options.width)
    zero = {"stage": stage, "units": units, "prefetch_bytes": ahead, "reductions_under_way": ahead}
    return shardwise.initialize(
        model,
        {
            "zero": zero,
            "check_first_step": "off",
            "batch": {"duplicates": "allow"},
            "optimizer": {"type": "sgd", "lr": 1e-9},
        },
        loss=lambda model, batch: model(batch).square().mean(),
        world=world_on(link),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    batch = torch.randn(options.rows, 32)
    print("| stage | under way | compute, s | link, s | exposed |\n|---|---|---|---|---|")
    for stage in (2, 3):
        for ahead in (0, 1):
            link = Link()
            engine = engine_on(link, stage, ahead, options)
            exposed, computes = [], []
            for _ in range(options.rounds):
                link.bytes_per_s = float("inf")
                engine.train_step([batch])
                link.bytes = 0
                began = time.perf_counter()
                engine.train_step([batch])
                computes.append(time.perf_counter() - began)
                link.bytes_per_s = link.bytes / (options.share * computes[-1])
                engine.train_step(
                    [batch]
                )  # what it leaves under way, the first of those that count waits for
                link.busy_s = link.waited_s = 0.0
                for _ in range(2):
                    engine.train_step([batch])
                exposed.append(link.waited_s / link.busy_s)
            compute_s = statistics.median(computes)
            link_s, shown = options.share * compute_s, statistics.median(exposed)
            print(f"| {stage} | {ahead} | {compute_s:.3f} | {link_s:.3f} | {shown:.1%} |")
            engine.close()


if __name__ == "__main__":
    main()
