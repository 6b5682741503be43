"""How much of the time that activations travel the products of cut layers hide, on a link that delays every byte.

    PYTHONPATH=. python benchmarks/overlap/products.py [--share 1.0] [--pieces 1,2,4,8] [--rounds 9]

One process acts as rank 0 of eight whose tensors are all alike; it computes in earnest. Its link is a clock that counts
this thread's CPU time: whoever waits does not sleep, the clock is put forward. So other work on the machine changes
nothing. ``--share`` is the link's time over that of the product in one piece.

    exposed    the time waited for the link, over the link's time
    compute    the thread's CPU time, over that of one piece
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from benchmarks.overlap.links import RANKS, Link, LinkedTransport
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.comm.flights import PendingCollective
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.parallel.tensor.overlap import (
    ForwardOverlap,
    ProductSite,
    gathered_product,
    product_over_ranks,
)


class ComputeLink(Link):
    """A link whose clock is this thread's CPU time, and what was waited."""

    def carry(self, bytes_: int) -> PendingCollective:
        """A message begins."""
        arrives = self.take(bytes_, self._now())

        def finish() -> None:
            self.waited_s += max(0.0, arrives - self._now())

        return PendingCollective(finish)

    def _now(self) -> float:
        return time.thread_time() + self.waited_s


class ProductTransport(LinkedTransport):
    """Sums that go over the link too."""

    def all_reduce(self, tensor: Tensor, timeout_s: float, what: str) -> PendingCollective:
        tensor.mul_(self._size)
        return self._link.carry(2 * tensor.nbytes * (self._size - 1) // self._size)


def measured(run: Callable[[], Tensor], link: ComputeLink) -> tuple[float, float]:
    """CPU seconds of one product, and seconds that it waited."""
    link.busy_s = link.waited_s = 0.0
    began_s = time.thread_time()
    link.free_at = began_s
    run()
    return time.thread_time() - began_s, link.waited_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--pieces", default="1,2,4,8")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = 4 * options.width // 2
    x = torch.randn(options.samples, options.tokens // RANKS, options.width)
    h = torch.randn(options.samples, options.tokens, hidden)
    up, down = torch.randn(hidden, options.width), torch.randn(options.width, hidden)
    products: dict[str, Callable[[ProductSite], Tensor]] = {
        "gather, product": lambda site: gathered_product(site, x, up, None),
        "product, scatter": lambda site: product_over_ranks(site, h, down, True),
        "product, sum": lambda site: product_over_ranks(site, h, down, False),
    }
    print("| product | pieces | exposed | compute |\n|---|---|---|---|")
    for name, product in products.items():
        link = ComputeLink()
        group = Group(
            "tp", tuple(range(RANKS)), 0, ProductTransport(RANKS, 0, link), StepClock(60.0), Traffic()
        )
        sites = {
            pieces: ProductSite(group, name, ForwardOverlap(pieces))
            for pieces in map(int, options.pieces.split(","))
        }
        found: dict[int, list[tuple[float, float]]] = {pieces: [] for pieces in sites}
        for _ in range(options.rounds):
            link.bytes_per_s, link.bytes = float("inf"), 0
            one_s, _ = measured(lambda: product(sites[1]), link)  # noqa: B023 - runs at once
            link.bytes_per_s = link.bytes / (options.share * one_s)
            for pieces, site in sites.items():
                compute_s, waited_s = measured(lambda: product(site), link)  # noqa: B023 - runs at once
                found[pieces].append((compute_s, waited_s / link.busy_s))
        one_s = statistics.median(compute_s for compute_s, _ in found[1])
        for pieces, rows in found.items():
            compute_s, exposed = (statistics.median(column) for column in zip(*rows, strict=True))
            print(f"| {name} | {pieces} | {exposed:.0%} | {compute_s / one_s:.2f} |")


if __name__ == "__main__":
    main()
