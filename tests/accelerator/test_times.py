"""On a device times are those of its events, and asking for them stops nobody: the norm's read stays the only wait.

The pretended device's clock goes on by a second at each event with a time, and says none before the host has waited.
"""

import time
from typing import Any

import torch

import shardwise
from shardwise.memory.device_clock import clock_of
from shardwise.observe.lanes_picture import LaneRecorder
from tests.accelerator import budget
from tests.accelerator.mirror import mirror_world
from tests.accelerator.pretend import Bench, register
from tests.ranks import RankPool

_FAR_S = 10_000.0
"""The host's clock in the test: no event is near it."""


def times_of_a_step(_world: Any) -> None:
    device = register()
    with Bench() as bench:
        config = {
            "batch": {"accumulation": 2},
            "optimizer": {"type": "adamw", "lr": 0.01},
            "zero": {"stage": 3},
            "check_first_step": "off",
        }
        torch.manual_seed(0)
        engine = shardwise.initialize(budget.gpt()(), config, world=mirror_world(4, device))
        lanes = LaneRecorder()
        steps = iter([[budget.tokens(2 * step), budget.tokens(2 * step + 1)] for step in range(3)])
        waits = []
        for batches in engine.prefetch(steps, depth=0, lanes=lanes):
            bench.clear()
            engine.train_step(batches)
            seconds = engine.trace.seconds()  # what a log line asks for
            waits += [where for what, where in bench.syncs if what == "synchronize" or "streams" in where]
            reads = {where: n for (what, where), n in bench.syncs.items() if what == "copy to the host"}
        assert not waits, "nobody waited for a time"
        assert reads == {"engine/parts/sums.py:read": 1}, "the norm's"
        trace = engine.trace
        starts_s, stops_s = trace.starts_s, trace.stops_s
        marks = {start % 1 for start in starts_s} | {stop % 1 for stop in stops_s}
        assert max(marks) - min(marks) < 1e-6, "whole seconds from the anchor: events alone"
        assert all(start_s <= stop_s for start_s, stop_s in zip(starts_s, stops_s, strict=True))
        assert stops_s[-1] - starts_s[0] > len(trace.actions), "seconds of the device, not of the host"
        assert seconds.forward_s >= 2
        assert seconds.backward_s >= 2
        assert seconds.update_s == stops_s[-1] - starts_s[-_ends(trace)], (
            "the step before has as long an update"
        )
        spans = [span for span in lanes.spans if span.lane == "compute"]
        assert [span.step for span in spans] == [1, 2, 3]
        assert all((span.stop_s - span.start_s) > len(trace.actions) for span in spans)
        assert abs(spans[-1].stop_s - time.perf_counter()) < _FAR_S
        engine.close()


def _ends(trace: Any) -> int:
    return sum(action.kind.ends_step for action in trace.actions)


def test_times_are_those_of_events_and_stop_nobody(device_process: RankPool) -> None:
    device_process.run(times_of_a_step)


def test_a_cpu_keeps_the_hosts_clock() -> None:
    clock = clock_of(torch.device("cpu"))
    assert not clock.runs_behind
    before = time.perf_counter()
    assert before <= clock.seconds([clock.mark()])[0] <= time.perf_counter()
