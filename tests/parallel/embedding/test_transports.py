"""Rank processes over gloo and over shared memory: what threads as ranks show is so."""

from typing import Any

import pytest
import torch

from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.parallel.embedding.collection import EmbeddingCollection
from tests.comm.test_collectives import group_of
from tests.parallel.embedding.test_exact import (
    OPTIMIZERS,
    PLACEMENTS,
    batch,
    loss_of,
    samples_of,
    tables,
    train,
)
from tests.parallel.embedding.threads import on_ranks

STEPS = 50


def losses_on_ranks(world: World, transport: str) -> list[Any]:
    group = group_of(world, transport)
    report = []
    for placement, exchange in PLACEMENTS:
        policies = tables(placement, exchange, False, exchange == "pooled")
        losses, _ = train(group, policies, OPTIMIZERS["rowwise_adagrad"])
        report.append((exchange == "pooled", losses))
    dynamic, _ = train(group, tables("row", "rows", True, False), OPTIMIZERS["rowwise_adagrad"])
    return [report, dynamic]


@pytest.mark.parametrize("transport", ["torch", "shared_memory"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_same_losses(ranks: Any, size: int, transport: str) -> None:
    alone = {
        pooled: on_ranks(1, train, tables("auto", "auto", False, pooled), OPTIMIZERS["rowwise_adagrad"])[0][0]
        for pooled in (False, True)
    }
    for report, dynamic in ranks(size).run(losses_on_ranks, transport):
        for pooled, losses in report:
            torch.testing.assert_close(losses, alone[pooled], rtol=1e-12, atol=1e-12)
        grown = on_ranks(1, train, tables("auto", "auto", True, False), OPTIMIZERS["rowwise_adagrad"])[0][0]
        torch.testing.assert_close(dynamic, grown, rtol=1e-12, atol=1e-12)


def fifty_steps(world: World | None, placement: str) -> list[float]:
    """Mean losses in fp32, of the two ranks' batches together."""
    collection = EmbeddingCollection(tables(placement, "auto", False, False), OPTIMIZERS["adagrad"], seed=3)
    keys_group = group = None
    if world is not None:
        group = group_of(world, "shared_memory")
        clock = StepClock(30.0)
        keys_group = world.group_among(
            tuple(range(world.size)), "tables", CommPolicy(), clock, Traffic(), lane="keys"
        )
    collection.place(group, keys_group)
    losses = []
    for step in range(STEPS):
        whole = batch(step % 7)
        half = (0, 6) if world is None or world.rank == 0 else (6, 12)
        parts = [(0, 12)] if world is None else [half]
        total = torch.zeros(1, dtype=torch.float64)
        for start, stop in parts:
            loss = loss_of(
                collection({name: samples_of(given, start, stop) for name, given in whole.items()})
            )
            loss.backward()
            total += loss.detach().double() / 12
        collection.step(divisor=12)
        if group is not None:
            group.all_reduce(total, "the loss").wait()
        losses.append(float(total))
    return losses


@pytest.mark.parametrize("placement", ["row", "column", "data_parallel", "table"])
def test_fifty_steps_in_fp32(ranks: Any, placement: str) -> None:
    alone = fifty_steps(None, "auto")
    for losses in ranks(2).run(fifty_steps, placement):
        assert max(abs(a - b) for a, b in zip(losses, alone, strict=True)) < 1e-6
    assert alone[-1] < alone[0]
