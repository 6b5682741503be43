"""Exposed communication on a device: events around every wait of the computation for other ranks, by axis.

The pretended device's clock goes on by a second at each event with a time. A late collective is planted: a wait for it
lets the clock go on by 1000 s more. So each wait takes one second, each late one 1001.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import shardwise
from shardwise.comm.collectives import Group
from shardwise.comm.flights import PendingCollective
from shardwise.comm.world import World
from shardwise.models.gpt import GptExperts
from tests.accelerator import budget
from tests.accelerator.crew import Crew, _CrewWire
from tests.accelerator.mirror import mirror_world
from tests.accelerator.pretend import Bench, _Event, register
from tests.accelerator.timelines import WHERE
from tests.ranks import RankPool

_LATE_S = 1000
_MESHES: dict[str, tuple[int, dict[str, Any], Callable[[], nn.Module]]] = {
    "dp_shard": (4, {"zero": {"stage": 3}}, budget.gpt()),
    "dp_replicate": (
        4, {"zero": {"stage": 3}, "mesh": {"dp": {"replicate": 2, "shard": 2}}}, budget.gpt()
    ),
    "tp": (4, {"zero": {"stage": 3}, "mesh": {"tp": 2, "dp": 2}}, budget.gpt()),
    "ep": (2, {"zero": {"stage": 2}, "mesh": {"ep": 2}}, budget.gpt(experts=GptExperts(count=4))),
}  # fmt: skip
"""(ranks, configuration, model) of a mesh with the axis."""


class _LateTransport:
    """A transport whose collectives come 1000 s after the computation begins to wait for them."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def begun(*args: Any) -> PendingCollective:
            pending = method(*args) or PendingCollective()
            self.calls += 1
            return PendingCollective(lambda: _come(pending))

        return begun


def _come(pending: PendingCollective) -> None:
    _Event.recorded += _LATE_S
    pending.wait()


def _engine(world: World, config: dict[str, Any], make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    common = {
        "batch": {"accumulation": 2},
        "optimizer": {"type": "adamw", "lr": 0.01},
        "check_first_step": "off",
    }
    return shardwise.initialize(make(), {**common, **config}, world=world)


def _step(engine: Any, number: int) -> Any:
    return engine.train_step([budget.tokens(2 * number), budget.tokens(2 * number + 1)])


def late_axis(_world: Any, axis: str) -> dict[str, tuple[dict[str, float], int]]:
    """(seconds by axis of the second step, its late collectives), with all axes in time and with ``axis`` late."""
    ranks, config, make = _MESHES[axis]
    device, found = register(), {}
    for late in ("none", axis):
        with Bench() as bench:
            engine = _engine(mirror_world(ranks, device), config, make)
            group: Group = engine._parts.groups[axis]
            transport = _LateTransport(group.transport)
            if late == axis:
                group.transport = transport  # type: ignore[assignment]
            _step(engine, 0)
            assert engine.trace.waits.seconds() == {}, "nobody has asked"
            plain = dict(bench.syncs)
            engine.measure_waits()
            transport.calls = 0
            bench.clear()
            _step(engine, 1)
            calls = transport.calls
            syncs = dict(bench.syncs)
            found[late] = engine.trace.waits.seconds(), calls
            assert dict(bench.syncs) == syncs, "the times are known without a wait of the host"
            assert sum(syncs.values()) <= sum(plain.values()), "the host waits as often as without events"
            engine.close()
    return found


@pytest.mark.parametrize("axis", _MESHES)
def test_a_late_collective_is_exposed_on_its_axis(device_process: RankPool, axis: str) -> None:
    (found,) = device_process.run(late_axis, axis)
    (on_time, _), (late, calls) = found["none"], found[axis]
    assert late.keys() == on_time.keys() and calls > 2
    assert all(seconds < _LATE_S for seconds in on_time.values())
    assert on_time[axis] == pytest.approx(calls), (
        "each collective is waited for once, and its start is no wait"
    )
    assert late[axis] == pytest.approx(calls * (1 + _LATE_S))
    others = set(late) - {axis}
    assert {each: late[each] for each in others} == pytest.approx({each: on_time[each] for each in others})


def behind_the_norm(_world: Any) -> list[dict[str, float]]:
    """Seconds by axis of two steps with Muon, whose matrices go to their owners and back after the norm."""
    device, found = register(), []
    with Bench() as bench:
        engine = _engine(
            mirror_world(2, device),
            {"optimizer": {"type": "muon", "lr": 0.01}, "zero": {"stage": 1}},
            budget.gpt(),
        )
        engine.measure_waits()
        for number in range(2):
            _step(engine, number)
            syncs = dict(bench.syncs)
            found.append(engine.trace.waits.seconds())
            assert dict(bench.syncs) == syncs, "the host does not wait for what runs behind the norm"
        engine.close()
    return found


def test_waits_behind_the_norm_count_in_the_next_step(device_process: RankPool) -> None:
    ((first, second),) = device_process.run(behind_the_norm)
    assert "stage" not in first and second["stage"] >= 2


def messages(world: World) -> tuple[dict[str, float], int]:
    engine = _engine(world, {"mesh": {"pp": 2}}, budget.gpt())
    engine.measure_waits()
    _step(engine, 0)
    found = engine.trace.waits.seconds()
    engine.close()
    return found, world.rank


@contextmanager
def late_messages(rank: int) -> Iterator[None]:
    """Messages come late to one rank."""
    own = _CrewWire.receive

    def receive(self: Any, call: Any, allocate: Any, meanwhile: Any) -> PendingCollective:
        pending = own(self, call, allocate, meanwhile)
        return PendingCollective(lambda: _come(pending)) if WHERE.rank == rank else pending

    with patch.object(_CrewWire, "receive", receive):
        yield


def late_pipeline(_world: Any, rank: int) -> list[list[tuple[dict[str, float], int]]]:
    device, found = register(), []
    with Bench():
        found.append(Crew(2, device).run(messages))
        with late_messages(rank):
            found.append(Crew(2, device).run(messages))
    return found


@pytest.mark.parametrize("rank", (0, 1))
def test_a_late_message_is_exposed_on_pp(device_process: RankPool, rank: int) -> None:
    """Two microbatches: each stage receives two messages. The clock is one, so only the late rank's is looked at."""
    ((on_time, late),) = device_process.run(late_pipeline, rank)
    assert on_time[rank][0]["pp"] < _LATE_S
    after = late[rank][0]
    assert after["pp"] >= 2 * _LATE_S
    assert set(after) == {"pp", "model"} and after["model"] < _LATE_S
