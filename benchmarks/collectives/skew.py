"""What it gains that a collective begins without waiting and ends later.

A backward pass in small: eight Units, each some matrix products of uneven length and a reduce-scatter of 3.1 M fp32
gradients. Ranks differ in length by a random 15 %. The end of each reduce-scatter is waited for at once, or one Unit
later.

    python benchmarks/collectives/skew.py --ranks 2
"""

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections import deque

import torch
from run import TIMEOUT_S, open_transport

UNITS = 8
ELEMENTS = 3_145_728
STEPS = 12


def step(transport: object, rank: int, seed: int, late: int, grads: list[torch.Tensor]) -> float:
    """Seconds of one pass in which at most ``late`` reduce-scatters are open while the next Unit computes."""
    pace = random.Random(seed * 64 + rank)
    left = torch.ones(384, 384)
    open_ends: deque = deque()  # type: ignore[type-arg]
    transport.barrier(TIMEOUT_S, "start").wait()  # type: ignore[attr-defined]
    start = time.perf_counter()
    for unit, grad in enumerate(grads):
        for _ in range(int(pace.uniform(0.85, 1.15) * 30)):
            left @ left
        shard = grad.view(transport.size, -1)[rank]  # type: ignore[attr-defined]
        open_ends.append(transport.reduce_scatter(shard, grad, TIMEOUT_S, f"unit {unit}"))  # type: ignore[attr-defined]
        while len(open_ends) > late:
            open_ends.popleft().wait()
    while open_ends:
        open_ends.popleft().wait()
    return time.perf_counter() - start


def rank_main(rank: int, size: int, folder: str, pin: bool) -> None:
    """One rank; rank 0 prints."""
    torch.set_num_threads(1)
    if pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    transport = open_transport(rank, size, folder)
    grads = [torch.zeros(ELEMENTS) for _ in range(UNITS)]
    taken: dict[int, list[float]] = {0: [], 1: []}
    for seed in range(STEPS):
        for late in taken:
            every = torch.empty(size, dtype=torch.float64)
            mine = torch.tensor([step(transport, rank, seed, late, grads)], dtype=torch.float64)
            transport.all_gather(every, mine, TIMEOUT_S, "seconds").wait()
            taken[late].append(every.max().item())
    if rank == 0:
        for late, seconds in taken.items():
            low, middle, high = (value * 1e3 for value in statistics.quantiles(seconds, n=4))
            print(f"{size} ranks, {late} open: {middle:.1f} ms ({low:.1f} to {high:.1f})")
    transport.close()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pin", action="store_true", help="give each rank a core of its own")
    arguments = parser.parse_args()
    size = arguments.ranks
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_main, args=(rank, size, folder, arguments.pin))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
