"""How much of the time that gradients and weights travel the computation hides, on a link that delays every byte.

    python benchmarks/overlap/run.py [--share 0.5] [--layers 16] [--rounds 5]

One process acts as rank 0 of eight whose tensors are all alike; it computes in earnest. Its link is a clock: a
collective begins where it is started, after those before it, takes as long as its bytes, and whoever waits for it
sleeps until then. ``--share`` is the link's time over that of the computation, which therefore could hide all of it but
the first gather and the last reduction.

    exposed    the time slept, over the link's time
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from tests.accelerator.mirror import mirror_world
from torch import Tensor, nn

import shardwise
from shardwise.comm.collectives import DONE, Pending
from shardwise.comm.policy import CommPolicy

RANKS = 8


class Link:
    """A serial one: bytes a second, and how long somebody waited for it."""

    def __init__(self) -> None:
        self.bytes_per_s = float("inf")
        self.free_at = self.busy_s = self.waited_s = 0.0
        self.bytes = 0

    def carry(self, bytes_: int) -> Pending:
        """A message begins."""
        self.bytes += bytes_
        takes = bytes_ / self.bytes_per_s
        self.free_at = max(self.free_at, time.perf_counter()) + takes
        self.busy_s += takes
        arrives = self.free_at

        def finish() -> None:
            left = arrives - time.perf_counter()
            if left > 0:
                self.waited_s += left
                time.sleep(left)

        return Pending(finish)


class LinkedTransport:
    """Collectives among ranks that are all alike, over ``link``; small ones are free."""

    def __init__(self, size: int, index: int, link: Link):
        self._size, self._index, self._link = size, index, link

    def _sent(self, tensor: Tensor) -> Pending:
        return self._link.carry(tensor.nbytes * (self._size - 1) // self._size)

    def all_gather(self, output: Tensor, shard: Tensor, timeout_s: float, what: str) -> Pending:
        output.view(self._size, -1).copy_(shard.clone().expand(self._size, -1))
        return self._sent(output)

    def reduce_scatter(
        self, shard_out: Tensor, full: Tensor, timeout_s: float, what: str, accumulate: bool = False
    ) -> Pending:
        own = full.view(self._size, -1)[self._index].to(shard_out.dtype)
        torch.add(shard_out if accumulate else torch.zeros_like(own), own, alpha=self._size, out=shard_out)
        return self._sent(full)

    def all_reduce(self, tensor: Tensor, timeout_s: float, what: str) -> Pending:
        tensor.mul_(self._size)
        return DONE  # the norm, alone

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float, what: str) -> Pending:
        return DONE

    def all_to_all(
        self, output: Tensor, sent: Tensor, counts: Sequence[Sequence[int]], timeout_s: float, what: str
    ) -> Pending:
        raise NotImplementedError("nothing here sends rows")

    def barrier(self, timeout_s: float, what: str) -> Pending:
        return DONE


class Links:
    """What ``World.links`` makes of real ranks."""

    ring_bytes = 0

    def __init__(self, link: Link) -> None:
        self._link = link
        self.transports: dict[Any, Any] = {}

    def transport(
        self, ranks: tuple[int, ...], kin: Sequence[tuple[int, ...]], policy: CommPolicy, lane: str
    ) -> LinkedTransport | None:
        return (
            LinkedTransport(len(ranks), ranks.index(0), self._link) if len(ranks) > 1 and 0 in ranks else None
        )

    def barrier(self) -> None:
        pass

    def release(self) -> None:
        pass


def engine_on(link: Link, stage: int, ahead: int, options: argparse.Namespace) -> Any:
    """Blocks of one size, ``layers`` of them, between a small embedding and head."""
    torch.manual_seed(0)
    width = options.width
    model = nn.Sequential(
        nn.Linear(32, width),
        *(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(options.layers)
        ),
        nn.Linear(width, 32),
    )
    world = mirror_world(RANKS, torch.device("cpu"))
    world.links = Links(link)  # type: ignore[assignment]
    units = [str(place) for place in range(1, options.layers + 1)]
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
        world=world,
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
