"""Every rank learns how long all ranks took for the parts of a step, with the numbers that NORM sums."""

import time
from typing import Any

import pytest
import torch

import shardwise
from shardwise.comm.world import World
from shardwise.engine.parts.rank_phases import RankPhases
from shardwise.models import Gpt, GptPolicy
from shardwise.plan.norm_numbers import NUMBERS_OF_ROW, LinkUse, PhaseSeconds, count_phase_numbers
from shardwise.plan.trace import Trace

SLOW_S = 0.05
STEPS = 5


class Slow(Gpt):
    """A language model whose forward pass takes longer on one rank."""

    def __init__(self, seconds: float) -> None:
        torch.manual_seed(0)
        super().__init__(GptPolicy(layers=2, width=16, heads=2, context=8, vocab=32))
        self.seconds = seconds

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.seconds)
        return super().forward(*args, **kwargs)


def trained(world: World, mesh: dict[str, int], wants: bool) -> tuple[list[PhaseSeconds], float]:
    """Phases of all ranks after a few steps of which rank 1 is late, and the last gradient norm."""
    given: dict[str, Any] = {"mesh": mesh, "monitor": {"csv": False, "rank_seconds": wants}}
    given |= {"batch": {"duplicates": "allow"}, "check_first_step": "off"}
    engine = shardwise.initialize(Slow(SLOW_S * (world.rank == 1)), given, world=world)
    if wants:
        engine.measure_waits()
    tokens = torch.arange(16).view(2, 8)
    norm = 0.0
    for _ in range(STEPS):
        engine.count_seconds("data", 0.001 * (world.rank + 1))
        norm = engine.train_step([{"tokens": tokens, "targets": tokens}]).grad_norm
    found = engine.rank_seconds()
    assert engine.measured_steps == (STEPS - 2 if wants else 0)
    engine.close()
    return found, norm


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}], ids=str)
def test_all_ranks_know_the_phases_of_all(ranks: Any, mesh: dict[str, int]) -> None:
    (first, norm), (second, _) = ranks(2).run(trained, mesh, True)
    assert first == second and len(first) == 2
    assert first[1].compute >= SLOW_S, "it slept inside of every forward pass"
    assert [row.data for row in first] == pytest.approx([0.001, 0.002])
    (nothing, without), _ = ranks(2).run(trained, mesh, False)
    assert nothing == [] and without == norm


def test_beyond_512_ranks_consecutive_ranks_share_a_row() -> None:
    ranks, late = 1025, 700
    phases = [RankPhases(rank, ranks) for rank in (0, 1, 2, late)]
    assert len(phases[0].numbers()) == count_phase_numbers(ranks) == 11 * 342
    assert [list(each.ranks_of(rank)) for each, rank in zip(phases, (0, 1, 2, 1024), strict=True)] == [
        [0, 1, 2],
        [0, 1, 2],
        [0, 1, 2],
        [1023, 1024],
    ]
    sums: list[float] = []
    for number in range(342):
        shared = len(phases[0].ranks_of(3 * number))
        sums += PhaseSeconds(compute=shared * (9.0 if number == late // 3 else 1.0))
        sums += LinkUse()
    found = [each for each in (phases[0].settle(sums) for _ in range(12)) if each is not None]
    assert [(each.rank, each.phase) for each in found] == [(late // 3 * 3, "computing")]
    means = phases[0].mean()
    assert len(means) == ranks and means[late].compute == 9.0 and means[0].compute == 1.0


def test_seconds_of_a_rank_add_up_to_its_time() -> None:
    phases = RankPhases(0, 1)
    phases.end_step(Trace())
    phases.count("save", 0.01)
    begin = time.perf_counter()
    time.sleep(0.02)
    phases.end_step(Trace())
    took = time.perf_counter() - begin
    phases.settle(phases.numbers())
    (mean,) = phases.mean()
    assert mean.save == pytest.approx(0.01)
    assert 0.02 <= mean.total <= took + 0.01 and phases.steps == 1


def test_what_a_rank_sends_to_other_hosts_reaches_all_ranks() -> None:
    """The bytes of the first step of a process belong to no measured step."""
    sends = [[LinkUse(1e9, 5e5), *[LinkUse(1e6, left)] * 13] for left in (0.0, 1e5)]
    phases = [RankPhases(rank, 2, hosts=(0, 1), link=iter(sends[rank]).__next__) for rank in range(2)]
    found = []
    for step in range(14):
        rows = [sum(both) for both in zip(*(each.numbers() for each in phases), strict=True)]
        assert any(rows) == (step > 1)
        if any(rows):
            rows[PhaseSeconds._fields.index("dp")] = rows[NUMBERS_OF_ROW + 2] = 1.0  # both wait
        named = [each.settle(rows) for each in phases]
        assert named[0] == named[1]
        found += [each for each in named[:1] if each is not None]
        for each in phases:
            each.end_step(Trace())
    assert [(each.rank, each.phase) for each in found] == [(1, "waiting")]
    assert found[0].more_s == pytest.approx(0.1) and phases[0].slowest == found[0]
