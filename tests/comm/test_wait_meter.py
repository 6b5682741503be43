"""Waits of CPU ranks: a rank that sleeps is waited for on the axis of the collective, and on no other."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from shardwise.comm.collectives import Group
from shardwise.comm.policy import CommPolicy
from shardwise.comm.trace import Traffic
from shardwise.comm.wait_meter import WaitMeter
from shardwise.comm.world import World
from shardwise.plan.mesh import Mesh
from shardwise.plan.trace import Trace
from shardwise.plan.waits import WaitSpan
from tests.ranks import RankPool

_SLEPT_S = 0.2
Ranks = Callable[[int], RankPool]


def groups_of(world: World, transport: str) -> tuple[dict[str, Group], Trace]:
    """Groups along two axes whose waits the trace contains."""
    policy, mesh, traffic = CommPolicy(transport=transport), Mesh(dp_shard=2, tp=2), Traffic()
    clock, trace = world.clock(policy), Trace()
    groups = {axis: world.group(mesh, axis, policy, clock, traffic) for axis in ("dp", "tp")}
    clock.meter = WaitMeter(SimpleNamespace(trace=trace))
    return groups, trace


def sum_on_both(world: World, transport: str) -> tuple[list[WaitSpan], float]:
    """The waits of a sum over each axis, where rank 1 comes late to that over "tp"; the end of its sleep."""
    groups, trace = groups_of(world, transport)
    number = torch.ones(3)
    groups["dp"].all_reduce(number, "a").wait()
    if world.rank == 1:
        time.sleep(_SLEPT_S)
    slept_s = time.perf_counter()
    groups["tp"].all_reduce(number, "b").wait()
    assert number.tolist() == [4.0] * 3
    return list(trace.waits.spans()), slept_s


def messages(world: World) -> tuple[list[WaitSpan], float]:
    """Waits for a message that rank 1 sends late to rank 0; the end of its sleep."""
    policy, mesh, traffic = CommPolicy(), Mesh(pp=2), Traffic()
    clock, trace = world.clock(policy), Trace()
    group = world.group(mesh, "pp", policy, clock, traffic)
    peers = world.peers(group, policy)
    clock.meter = WaitMeter(SimpleNamespace(trace=trace))
    if world.rank == 1:
        time.sleep(_SLEPT_S)
    slept_s = time.perf_counter()
    if world.rank == 1:
        peers.send("", [torch.ones(2)], 0, "late", "activations")
        peers.flush()
    else:
        assert peers.receive(1, "late").tensors[0].tolist() == [1.0, 1.0]
    return list(trace.waits.spans()), slept_s


def left_out(world: World) -> dict[str, Any]:
    """Waits of a thread beside the computation, and of a call that is no part of a step."""
    groups, trace = groups_of(world, "auto")
    clock = groups["dp"].clock
    number = torch.ones(1)
    with clock.meter.beside():  # type: ignore[union-attr]
        groups["dp"].all_reduce(number, "keys").wait()
    with clock.within("engine.save()", meets=True):
        groups["dp"].all_reduce(number, "saved").wait()
    before = trace.waits.seconds()
    with clock.within("engine.agree()"):
        groups["dp"].all_reduce(number, "agreed").wait()
    return {"before": before, "after": sorted(trace.waits.seconds())}


def test_a_late_rank_is_waited_for_on_its_axis(ranks: Ranks) -> None:
    """The clock of the ranks is one, so the wait ends behind the other rank's sleep, whatever the machine does."""
    for transport in ("torch", "auto"):
        found = ranks(4).run(sum_on_both, transport)
        waits, _ = found[0]
        own, slept_s = found[1]
        over_tp, over_dp = ([each for each in waits if each.axis == axis] for axis in ("tp", "dp"))
        assert len(over_tp) + len(over_dp) == len(waits) and over_tp and over_dp
        assert over_tp[-1].stop_s > slept_s, "rank 1 is the other rank of the axis"
        assert sum(each.stop_s - each.start_s for each in over_tp) > slept_s - over_tp[-1].start_s
        assert all(each.stop_s <= over_tp[0].start_s for each in over_dp), "the sleep is in no wait over dp"
        assert all(each.start_s >= slept_s for each in own if each.axis == "tp"), "one's own sleep is no wait"


def test_a_late_message_is_waited_for_on_pp(ranks: Ranks) -> None:
    (received, _), (_, slept_s) = ranks(2).run(messages)
    assert {each.axis for each in received} == {"pp"}
    assert received[-1].stop_s > slept_s


def test_waits_beside_the_computation_and_outside_of_steps_are_left_out(ranks: Ranks) -> None:
    for found in ranks(4).run(left_out):
        assert found == {"before": {}, "after": ["dp"]}
