"""A cable that is 1.3 times as slow is named with the phase ``waiting`` within 20 steps: ``make soak``, as root.

Two network namespaces of two ranks; every rank's bytes share its host's cable. The four ranks share the processors of
this machine with each other and with every other program, so a rank may really compute more slowly than the others for
some steps, and is then named, too: what is judged here is what is said of cables.
"""

import random
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from tests.namespaces import call_on, namespaces
from torch import nn

import shardwise
from shardwise.comm.step_clock import StepClock

RATE_MBIT, SLOWER = 100, 1.3
STEPS_TO_NAME, STEPS_BETWEEN = 20, 26
PLANTS = 20


class Named(NamedTuple):
    """A slow rank that the ranks have named."""

    step: int
    rank: int
    phase: str
    words: str


def trained_over_cables(plants: Sequence[int | None]) -> list[Named]:
    """Train while the cable of one host is slower for some steps, again and again; return what was named.

    Args:
        plants: Host whose cable becomes slow, one after the other; None: none does.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = {
        "monitor": {"rank_seconds": True},
        "batch": {"duplicates": "allow"},
        "comm": {"device": "cpu"},
        "check_first_step": "off",
    }
    net = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1))
    engine = shardwise.initialize(net, config, loss=lambda net, x: net(x).square().mean())
    engine.measure_waits()
    found: list[Named] = []
    tell = StepClock.tell_slow

    def told(self: StepClock, rank: int, phase: str, words: str) -> None:
        found.append(Named(engine.step_count, rank, phase, words))
        tell(self, rank, phase, words)

    StepClock.tell_slow = told  # type: ignore[method-assign]
    host, is_first = engine.world.hosts[engine.world.rank], engine.world.local_rank == 0
    batch = torch.ones(8, 512)

    def steps(count: int, slow_host: int | None) -> None:
        engine.world.barrier()
        if is_first:
            _limit(f"cable{host + 1}", RATE_MBIT / (SLOWER if host == slow_host else 1.0))
        engine.world.barrier()
        for _ in range(count):
            engine.train_step([batch])

    steps(STEPS_BETWEEN, None)
    for plant in plants:
        steps(STEPS_TO_NAME + 1, plant)
        steps(STEPS_BETWEEN - 1, None)
    engine.close()
    return found


def _limit(device: str, mbit: float) -> None:
    shape = ["tbf", "rate", f"{mbit * 1000:.0f}kbit", "burst", "64kb", "latency", "50ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", device, "root", *shape], check=True)


def cables_of(found: Sequence[Named]) -> list[Named]:
    """Return the cables that were named, after printing how often a rank was named for its own work."""
    print(f"{sum(each.phase != 'waiting' for each in found)} times a rank was named for its own work")
    return [each for each in found if each.phase == "waiting"]


def cables_named_by_plant(found: Sequence[Named], plants: int) -> list[list[Named]]:
    """Return the cables that were named from each plant on, those before the first plant first."""
    rows: list[list[Named]] = [[] for _ in range(plants + 1)]
    for each in cables_of(found):
        after = each.step - STEPS_BETWEEN - 1
        rows[0 if after < 0 else 1 + after // (STEPS_TO_NAME + STEPS_BETWEEN)].append(each)
    return rows


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_slow_cable_is_named_within_20_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.namespaces._PATIENCE_S", 900.0)
    rng = random.Random(29)
    plants = [rng.randrange(2) for _ in range(PLANTS)]
    with namespaces() as hosts:
        results = call_on(hosts, trained_over_cables, plants, each=2, SHARDWISE_SECRET="of both")
    assert all(each == results[0] and isinstance(each, list) for each in results), results
    before, *rows = cables_named_by_plant(results[0], len(plants))
    print(before, *zip(plants, rows, strict=True), sep="\n")
    right = [
        len(row) == 1
        and row[0].rank // 2 == host
        and row[0].step <= STEPS_BETWEEN + number * (STEPS_TO_NAME + STEPS_BETWEEN) + STEPS_TO_NAME + 1
        for number, (host, row) in enumerate(zip(plants, rows, strict=True))
    ]
    assert not before
    assert sum(right) >= 0.95 * len(plants), rows


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_equal_cables_name_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one false alarm in 10,000 steps: here in 2,000 real ones, and in drawn ones in test_stragglers.py."""
    monkeypatch.setattr("tests.namespaces._PATIENCE_S", 3000.0)
    plants = [None] * (2000 // (STEPS_TO_NAME + STEPS_BETWEEN))
    with namespaces() as hosts:
        results = call_on(hosts, trained_over_cables, plants, each=2, SHARDWISE_SECRET="of both")
    print(results[0])
    assert all(each == results[0] and isinstance(each, list) for each in results), results
    assert not cables_of(results[0])
