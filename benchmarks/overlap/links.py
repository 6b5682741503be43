"""Links that are clocks: a message takes as long as its bytes, and the ranks that it goes to are all alike.

    Link       one message after another; it begins where it is started, and whoever waits sleeps until it is there
    world_on   this process as rank 0 of eight that hold and compute the same, with such a link between them
    blocks     a model of equal blocks, each a Unit

So one process on one core finds what of the links' time its computation hides: no second rank takes part of the core,
and the time of a link is said, not found.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from tests.accelerator.mirror import mirror_world
from torch import Tensor, nn

from shardwise.comm.flights import DONE, PendingCollective
from shardwise.comm.policy import CommPolicy
from shardwise.comm.world import World

RANKS = 8


class Link:
    """A serial one: bytes a second, and how long somebody waited for it."""

    def __init__(self) -> None:
        self.bytes_per_s = float("inf")
        self.free_at = self.busy_s = self.waited_s = 0.0
        self.bytes = 0

    def take(self, bytes_: int, begun: float) -> float:
        """The link is taken by a message that was started at ``begun``; when it arrives."""
        takes = bytes_ / self.bytes_per_s
        self.free_at = max(self.free_at, begun) + takes
        self.busy_s += takes
        self.bytes += bytes_
        return self.free_at

    def carry(self, bytes_: int) -> PendingCollective:
        """A message begins."""
        arrives = self.take(bytes_, time.perf_counter())

        def finish() -> None:
            left = arrives - time.perf_counter()
            if left > 0:
                self.waited_s += left
                time.sleep(left)

        return PendingCollective(finish)


class LinkedTransport:
    """Collectives among ranks that are all alike, over ``link``; small ones are free."""

    def __init__(self, size: int, index: int, link: Link):
        self._size, self._index, self._link = size, index, link

    def _sent(self, tensor: Tensor) -> PendingCollective:
        return self._link.carry(tensor.nbytes * (self._size - 1) // self._size)

    def all_gather(self, output: Tensor, shard: Tensor, timeout_s: float, what: str) -> PendingCollective:
        output.view(self._size, -1).copy_(shard.clone().expand(self._size, -1))
        return self._sent(output)

    def reduce_scatter(
        self, shard_out: Tensor, full: Tensor, timeout_s: float, what: str, accumulate: bool = False
    ) -> PendingCollective:
        own = full.view(self._size, -1)[self._index].to(shard_out.dtype)
        torch.add(shard_out if accumulate else torch.zeros_like(own), own, alpha=self._size, out=shard_out)
        return self._sent(full)

    def all_reduce(self, tensor: Tensor, timeout_s: float, what: str) -> PendingCollective:
        tensor.mul_(self._size)
        return DONE  # the norm, alone

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float, what: str) -> PendingCollective:
        return DONE

    def all_to_all(
        self, output: Tensor, sent: Tensor, counts: Sequence[Sequence[int]], timeout_s: float, what: str
    ) -> PendingCollective:
        raise NotImplementedError("nothing here sends rows")

    def barrier(self, timeout_s: float, what: str) -> PendingCollective:
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


def world_on(link: Link) -> World:
    """This process among ``RANKS``."""
    world = mirror_world(RANKS, torch.device("cpu"))
    world.links = Links(link)  # type: ignore[assignment]
    return world


def blocks(layers: int, width: int) -> tuple[nn.Module, list[str]]:
    """Blocks of one size, ``layers`` of them, between a small embedding and head; and the Units of the blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, width),
        *(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        ),
        nn.Linear(width, 32),
    )
    return model, [str(place) for place in range(1, layers + 1)]
