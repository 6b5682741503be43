"""What a rank starts on its communicators, in an order that all ranks can follow.

Kernels of several communicators share a device. NCCL starts them in the order of the calls
(NCCL_LAUNCH_ORDER_IMPLICIT), on some drivers one after the other; then two ranks wait for one another as soon as one
calls a before b and the other b before a, or three of them in a ring. So all orders together must have no cycle, though
nobody waited between two calls.
"""

from collections import Counter
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.comm import transports
from shardwise.comm.peers import TorchWire
from shardwise.comm.world import World
from tests.ranks import RankPool

Operation = tuple[str, tuple[int, ...], int]
"""Name, ranks (a message's in its direction), how many there were before."""


def started(world: World, config: dict[str, Any]) -> list[Operation]:
    """What this rank starts in three steps."""
    log: list[Operation] = []
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def note(name: str, ranks: tuple[int, ...]) -> None:
        log.append((name, ranks, counts[name, ranks]))
        counts[name, ranks] += 1

    with pytest.MonkeyPatch.context() as patch:

        def tap(name: str) -> None:
            call = getattr(dist, name)

            def noted(*args: Any, **kwargs: Any) -> Any:
                here = dist.get_rank()
                if name == "isend":
                    note("message", (here, kwargs["dst"]))
                elif name == "irecv":
                    note("message", (kwargs["src"], here))
                else:
                    note(name, tuple(dist.get_process_group_ranks(kwargs["group"] or dist.group.WORLD)))
                return call(*args, **kwargs)

            patch.setattr(dist, name, noted)

        build = TorchWire.__init__  # as between devices: receives are posted ahead from the second step on
        patch.setattr(TorchWire, "__init__", lambda self, *a, **k: build(self, *a, agrees=True))
        gather, scatter = transports._gather_call().__name__, transports._scatter_call().__name__
        for name in ("isend", "irecv", "all_reduce", "broadcast", "all_to_all_single", gather, scatter):
            tap(name)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(8)))
        engine = shardwise.initialize(
            net, config, loss=lambda net, x: net(x).square().mean(), world=world.among(range(world.size))
        )
        log.clear()
        counts.clear()
        for _ in range(3):
            engine.train_step([torch.ones(2, 4)] * (engine.config.batch.accumulation or 1))
        engine.close()
    return log


def cycle_in(logs: list[list[Operation]]) -> list[Operation]:
    """Operations that wait for one another, if all ranks do one after the other; empty where there are none."""
    graph: dict[Operation, set[Operation]] = {}
    for log in logs:
        for before, after in zip(log, log[1:], strict=False):
            graph.setdefault(after, set()).add(before)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[Operation] = error.args[1]
        return found
    return []


CONFIGS = [
    {
        "mesh": {"pp": 4},
        "pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2},
        "batch": {"accumulation": 4},
    },
    {"mesh": {"pp": 2}, "zero": {"stage": 3}, "batch": {"accumulation": 4}},
]


@pytest.mark.parametrize("config", CONFIGS, ids=["interleaved", "pp 2 x dp 2, stage 3"])
def test_calls_of_all_ranks_fit_one_order(ranks: Callable[[int], RankPool], config: dict[str, Any]) -> None:
    logs = ranks(4).run(started, {**config, "comm": {"transport": "torch"}})
    assert all(len(log) > 40 for log in logs)
    assert not cycle_in(logs)
    assert cycle_in([logs[0], logs[1][::-1], *logs[2:]]), "a rank with another order is seen"
