"""Mirror ranks: one process that acts as if all ranks of the job were itself, so that any world size takes one.

    gather, broadcast   every rank brings what this one brings
    sum                 N times what this one brings
    all_to_all          each rank sends this one what it would send itself
    texts               every rank writes what this one writes

What a rank does, and on which tensors, is as on a real mesh; its numbers are not. Collectives on host tensors are
counted as syncs: they go over a host network while the device waits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.board import MessageBoard
from shardwise.comm.flights import DONE, PendingCollective
from shardwise.comm.policy import CommPolicy
from shardwise.comm.world import World
from tests.accelerator.pretend import Bench, is_on_device
from tests.accelerator.timelines import run_all


class MirrorTransport:
    """See the module's docstring. ``index``: this rank's place among the ``size`` ranks."""

    def __init__(self, size: int, index: int):
        self._size = size
        self._index = index

    def all_gather(self, output: Tensor, shard: Tensor, timeout_s: float, what: str) -> PendingCollective:
        with _collective("all_gather", output, shard):
            own = shard.clone()
            for part in output.view(self._size, -1):
                part.copy_(own)
        return DONE

    def reduce_scatter(
        self, shard_out: Tensor, full: Tensor, timeout_s: float, what: str, accumulate: bool = False
    ) -> PendingCollective:
        with _collective("reduce_scatter", shard_out, full):
            total = full.view(self._size, -1)[self._index].to(shard_out.dtype) * self._size
            if accumulate:
                shard_out.add_(total)
            else:
                shard_out.copy_(total)
        return DONE

    def all_reduce(self, tensor: Tensor, timeout_s: float, what: str) -> PendingCollective:
        with _collective("all_reduce", tensor):
            tensor.mul_(self._size)
        return DONE

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float, what: str) -> PendingCollective:
        with _collective("broadcast", tensor):
            return DONE

    def all_to_all(
        self, output: Tensor, sent: Tensor, counts: Sequence[Sequence[int]], timeout_s: float, what: str
    ) -> PendingCollective:
        with _collective("all_to_all", output, sent):
            own = sent.split(list(counts[self._index]))[self._index]
            for part in output.split([row[self._index] for row in counts]):
                part.copy_(own[: part.numel()] if own.numel() >= part.numel() else torch.zeros_like(part))
        return DONE

    def barrier(self, timeout_s: float, what: str) -> PendingCollective:
        return DONE


class _collective:  # noqa: N801
    """Counted as one operation, whatever it takes here."""

    def __init__(self, name: str, *tensors: Tensor):
        bench = Bench.current
        assert bench is not None, "mirror ranks run under a Bench"
        sides = {is_on_device(tensor) for tensor in tensors}
        if len(sides) == 2:
            bench.misplaced.append(f"{name}: tensors on both sides")
        if True in sides:
            run_all(bench.line.mark())  # copies that the current stream has waited for may fill these tensors
            bench.operation(name)
        else:
            bench.sync(f"{name} of the host")
        self._paused = bench.paused()

    def __enter__(self) -> None:
        self._paused.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._paused.__exit__(*error)


class _MirrorBoard(MessageBoard):
    """Every rank writes what this one writes."""

    def __init__(self, rank: int):
        super().__init__(rank)
        self._texts: dict[str, str] = {}

    def part(self, rank: int, name: str, members: Sequence[int]) -> MessageBoard:
        return _MirrorBoard(rank)

    def post(self, key: str, index: int, text: str) -> None:
        self._texts[key] = text

    def collect(
        self, key: str, size: int, timeout_s: float, what: str = "", ranks: Sequence[int] | None = None
    ) -> list[str]:
        return [self._texts[key]] * size

    def forget(self, key: str, size: int) -> None:
        self._texts.pop(key, None)


class _MirrorLinks:
    """What ``WorldLinks`` makes of real ranks."""

    ring_bytes = 0

    def __init__(self, rank: int):
        self._rank = rank
        self.transports: dict[Any, MirrorTransport] = {}

    def transport(
        self,
        ranks: tuple[int, ...],
        kin: Sequence[tuple[int, ...]],
        policy: CommPolicy,
        lane: str,
        hosts: Sequence[int] = (),
    ) -> MirrorTransport | None:
        if len(ranks) < 2 or self._rank not in ranks:
            return None
        return self.transports.setdefault((ranks, lane), MirrorTransport(len(ranks), ranks.index(self._rank)))

    def barrier(self) -> None:
        pass

    def release(self) -> None:
        self.transports.clear()


def mirror_world(size: int, device: torch.device, rank: int = 0) -> World:
    """A World of ``size`` ranks that are all this one."""
    world = World(rank, size, rank, size, "mirror", device, board=_MirrorBoard(rank))
    world.links = _MirrorLinks(rank)  # type: ignore[assignment]
    return world
