"""Ranges of a profile with the names of Actions: where they begin and end, and that nothing of them stays."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.ranks import RankPool
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

import shardwise
from shardwise.comm.world import World
from shardwise.engine.step.end import StepResult
from shardwise.observe import action_ranges as module
from shardwise.observe.action_ranges import action_ranges, has_nvtx
from shardwise.plan.action import B, F, Kind
from shardwise.plan.trace import Trace
from shardwise.plan.walker import Walker

CPU = torch.device("cpu")


class Net(nn.Module):
    """Two blocks, which are Units, and a head, which belongs to the root's Unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x).square().mean()


def engine_of(net: nn.Module, stage: int, world: World | None = None) -> shardwise.Engine:
    config = {
        "batch": {"micro_size": 2, "accumulation": 2},
        "zero": {"stage": stage, "units": ["blocks.*"]},
        "optimizer": {"lr": 0.1},
    }
    return shardwise.initialize(copy.deepcopy(net), config=config, world=world or World(0, 1))


def walker_of(engine: shardwise.Engine) -> Walker:
    return engine._parts.walker


def profiled(engine: shardwise.Engine, batches: list[torch.Tensor]) -> tuple[StepResult, list[FunctionEvent]]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, engine.action_ranges():
        result = engine.train_step(batches)
    return result, list(profiler.events())


def names_of(engine: shardwise.Engine) -> set[str]:
    """The names of the Actions that ran in the last step."""
    units = engine._parts.program.plan.own.units
    return {
        f"{action} Unit {action.unit} '{units[action.unit].title}'" if action.unit >= 0 else str(action)
        for action in engine.trace.actions
    }


def profiled_run(world: World, stage: int) -> tuple[set[str], list[str], list[str]]:
    """The Actions that ran, the names of the profile's events, and what is wrong beside."""
    torch.manual_seed(0)
    net, batches = Net(), [torch.randn(2, 4) + world.rank for _ in range(2)]
    plain, named = engine_of(net, stage, world), engine_of(net, stage, world)
    walker, wrong = walker_of(named), []
    handlers, attributes = dict(walker.handlers), set(vars(walker))
    events: list[FunctionEvent] = []
    for step in range(3):
        expected = plain.train_step(batches)
        if step == 1:
            result, events = profiled(named, batches)
        else:
            result = named.train_step(batches)
        if (result.loss, result.grad_norm) != (expected.loss, expected.grad_norm):
            wrong.append(f"step {step} gave {result} and not {expected}")
    if dict(walker.handlers) != handlers or set(vars(walker)) != attributes:
        wrong.append("something of the ranges is left on the walker")
    if named.trace.divergences:
        wrong.append(f"divergences: {named.trace.divergences}")
    wrong += overlaps(events)
    block = next(event for event in events if event.name == "F(u1,0) Unit 1 'blocks.0'")
    if (
        "aten::linear" not in {child.name for child in block.cpu_children}
        or block.cpu_parent.name != "F(0,0)"
    ):
        wrong.append("the block does not compute inside its range, or its range is not inside the stage's")
    ran = names_of(named)
    plain.close()
    named.close()
    return ran, [event.name for event in events], wrong


def overlaps(events: list[FunctionEvent]) -> list[str]:
    """Pairs of events of one thread of which neither lies inside the other: a picture shows one of them only."""
    spans = sorted(
        (event.thread, event.time_range.start, -event.time_range.end, event.name) for event in events
    )
    found: list[str] = []
    open_: list[tuple[int, float, str]] = []
    for thread, start, negative, name in spans:
        while open_ and (open_[-1][0] != thread or open_[-1][1] <= start):
            open_.pop()
        if open_ and -negative > open_[-1][1]:
            found.append(f"{name} and {open_[-1][2]} overlap")
        open_.append((thread, -negative, name))
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_a_profile_names_the_actions_that_ran_and_changes_no_loss(stage: int) -> None:
    ran, events, wrong = profiled_run(World(0, 1), stage)
    # No hook announces the backward pass of a Unit whose weights are never released.
    assert {name for name in ran if not name.startswith("B(u")} <= set(events) and not wrong
    assert len([name for name in events if name.startswith("F(u")]) == 2 * 3


def test_cut_weights_show_their_gathers_and_where_backward_passes_begin(
    ranks: Callable[[int], RankPool],
) -> None:
    for ran, events, wrong in ranks(2).run(profiled_run, 3):
        assert ran <= set(events) and not wrong
        assert "UNSHARD(u2,1) Unit 2 'blocks.1'" in events and "B(u2,1) Unit 2 'blocks.1'" in events


@contextmanager
def listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of ranges in the order in which they begin, each followed by "end" where it ends."""
    said: list[str] = []

    class Range:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            said.append(self.name)

        def __exit__(self, *error: Any) -> None:
            said.append("end")

    monkeypatch.setattr(module, "record_function", Range)
    yield said


def test_a_pass_that_an_exception_ends_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    walker = Walker({}, Trace())
    walker.begin([F(-1, 0), B(-1, 0)])
    with listed(monkeypatch) as said, pytest.raises(ValueError), action_ranges(walker, (), CPU):
        walker.enter(Kind.F, 0)
        raise ValueError
    assert said == ["F(0)", "end"] and "enter" not in vars(walker)


def test_ranges_inside_ranges_are_removed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    walker = Walker({}, Trace())
    walker.begin([F(-1, 0), B(-1, 0)])
    with listed(monkeypatch) as said, action_ranges(walker, (), CPU):
        with action_ranges(walker, (), CPU):
            pass
        walker.enter(Kind.F, 0)
        walker.finish_pass()
        assert said == ["F(0)", "end"]
    assert not {"enter", "run_to", "finish_pass"} & set(vars(walker))


def test_a_thread_does_not_end_the_range_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with listed(monkeypatch) as said:
        held = module._OpenRange(lambda name: module._Range(name, nvtx=False))
        held.open("first")
        for act in (held.close, lambda: held.open("second")):
            run_in_thread(act)
        assert said == ["first"]
        held.close()
        held.open("third")
        held.drop()
    assert said == ["first", "end", "third", "end"]


def run_in_thread(act: Callable[[], None]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def test_nvtx_ranges_are_pushed_and_popped_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for NVTX; torch's own raises a RuntimeError in a build without it."""
    said: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("pop"))
    assert not has_nvtx(CPU) and not said
    walker = Walker({}, Trace())
    walker.begin([F(-1, 0), B(-1, 0)])
    with action_ranges(walker, (), torch.device("cuda")):
        said.clear()
        walker.enter(Kind.F, 0)
        walker.finish_pass()
    assert said == ["F(0)", "pop"]

    def fail(name: str) -> None:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", fail)
    assert not has_nvtx(torch.device("cuda"))
