"""Groups count the elements that they send, and say who failed to come."""

import time
from typing import Any

import pytest
import torch

from shardwise.base.errors import DeadlineError
from shardwise.comm.collectives import Group
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.plan.mesh import Mesh

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def group_of(world: World, transport: str, timeout_s: float = 30.0) -> Group:
    clock = StepClock(timeout_s)
    clock.steps_done = 1
    mesh = Mesh(dp_shard=world.size)
    return world.group(mesh, "dp", CommPolicy(transport=transport, timeout_s=timeout_s), clock, Traffic())


def parts(size: int, elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(elements)
    return [(torch.randn(elements, generator=generator) * 8).to(dtype) for _ in range(size)]


def exchange(world: World, transport: str) -> Any:
    group, report = group_of(world, transport), []
    for dtype in DTYPES:
        for shard in (1, 5, 4096):
            given = parts(world.size, shard * world.size, dtype)
            wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
            total = sum((part.to(wide) for part in given[1:]), given[0].to(wide)).to(dtype)
            own = slice(group.index * shard, (group.index + 1) * shard)

            scattered = torch.zeros(shard, dtype=dtype)
            group.reduce_scatter(scattered, given[group.index].clone(), "a test").wait()
            report.append(torch.equal(scattered, total[own]))

            group.reduce_scatter(scattered, given[group.index].clone(), "a test", accumulate=True).wait()
            expected = total[own] + total[own]
            report.append(torch.equal(scattered, expected))

            gathered = torch.zeros(shard * world.size, dtype=dtype)
            group.all_gather(gathered, total[own].clone(), "a test").wait()
            report.append(torch.equal(gathered, total))

            summed = given[group.index].clone()
            group.all_reduce(summed, "a test").wait()
            tolerance = 0.0 if dtype in (torch.int64,) else 2e-2 if dtype == torch.bfloat16 else 1e-6
            report.append(bool((summed - total).abs().max() <= tolerance * total.abs().max()))

            sent = given[group.index].clone()
            group.broadcast(sent, world.size - 1, "a test").wait()
            report.append(torch.equal(sent, given[-1]))
    narrow, wide_out = parts(world.size, 6 * world.size, torch.bfloat16), torch.zeros(6)
    group.reduce_scatter(wide_out, narrow[group.index].clone(), "a test").wait()
    exact = sum((part.float() for part in narrow[1:]), narrow[0].float())
    report.append(torch.equal(wide_out, exact[group.index * 6 : (group.index + 1) * 6]))
    group.barrier()
    return report, dict(group.traffic.counts)


def test_counts_are_the_ring_formulas(ranks: Any) -> None:
    counts = ranks(2).run(exchange, "torch")[0][1]
    elements = len(DTYPES) * (1 + 5 + 4096) * 2
    assert counts["all_gather", "weights", "dp"].elements == elements // 2
    assert counts["reduce_scatter", "gradients", "dp"].elements == 2 * elements // 2 + 6
    assert counts["all_reduce", "gradients", "dp"].elements == elements


def late(world: World, transport: str) -> str:
    group = group_of(world, transport, timeout_s=1.0)
    group.clock.step = 12
    if group.index == 1:
        time.sleep(1.6)
        return ""
    try:
        group.all_reduce(torch.ones(3), "Unit blocks.3").wait()
    except DeadlineError as error:
        return str(error)
    except Exception as error:
        return f"another error: {error}"
    return ""


@pytest.mark.parametrize("transport", ["torch", "shared_memory"])
def test_a_late_rank_is_named_with_operation_unit_and_step(transport: str) -> None:
    from tests.ranks import RankPool

    pool = RankPool(2)  # of its own: its ranks are out of step afterwards
    try:
        text = pool.run(late, transport)[0]
    finally:
        pool.close()
    assert "rank 0: all_reduce of Unit blocks.3 in step 12" in text
    assert "did not arrive within 1 s" in text
    assert "comm.timeout_s" in text
