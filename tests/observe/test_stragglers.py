"""A rank of 1.3 times is named within 20 steps with its phase, and drawn times of equal ranks name nobody."""

import random

import pytest

from shardwise.observe.stragglers import RankWork, SlowestRank, StragglerWatch

STEPS_TO_NAME = 20


def drawn(rng: random.Random, spread: float, reading: float = 0.1, computing: float = 0.9) -> RankWork:
    """The seconds of a rank, which vary by ``spread``."""
    return RankWork(
        reading * rng.lognormvariate(0, 2 * spread),
        computing * rng.lognormvariate(0, spread),
        0.2 * rng.random(),
    )


def drawn_over_cables(rng: random.Random, spread: float, slow_host: int | None = None) -> list[RankWork]:
    """The seconds of two ranks on each of two hosts whose ranks send 10 MB; ``slow_host`` sends 1.3 times as long."""
    paces = [4e-8 * rng.lognormvariate(0, spread) * (1.3 if host == slow_host else 1.0) for host in range(2)]
    slowest_s = 1e7 * max(paces)
    return [
        drawn(rng, spread)._replace(waiting=slowest_s, sent_bytes=5e6, sending=1e7 * paces[rank // 2])
        for rank in range(4)
    ]


@pytest.mark.parametrize("slow_host", [0, 1])
def test_a_slow_cable_is_named_within_20_steps(slow_host: int) -> None:
    right = 0
    for seed in range(60):
        rng, watch = random.Random(seed), StragglerWatch([0] * 4, [0, 0, 1, 1])
        looks = (watch.look(drawn_over_cables(rng, 0.05, slow_host)) for _ in range(STEPS_TO_NAME))
        found = [each for each in looks if each is not None]
        right += [(each.rank // 2, each.phase) for each in found] == [(slow_host, "waiting")]
        assert all(1.15 <= each.ratio <= 1.5 and 0.02 < each.more_s < 0.3 for each in found)
    assert right >= 57


def test_equal_cables_name_nobody_in_10000_steps() -> None:
    rng, watch = random.Random(29), StragglerWatch([0] * 4, [0, 0, 1, 1])
    assert sum(watch.look(drawn_over_cables(rng, 0.08)) is not None for _ in range(10_000)) <= 1


def test_a_slow_cable_that_costs_little_is_not_named() -> None:
    """A few bytes take long for each of them, and no step waits for that."""
    watch = StragglerWatch([0, 0], [0, 1])
    many = RankWork(0.1, 0.9, 0.2, 1e7, 0.2)
    few = RankWork(0.1, 0.9, 0.2, 1e3, 0.05)
    assert not any(watch.look([many, few]) for _ in range(30))


def test_hosts_with_unlike_numbers_of_ranks_are_compared_as_a_whole() -> None:
    """Two ranks that share a cable send at half its pace each."""
    watch = StragglerWatch([0, 0, 0], [0, 0, 1])
    half, whole = RankWork(0.1, 0.9, 0.5, 5e6, 0.4), RankWork(0.1, 0.9, 0.5, 1e7, 0.4)
    assert not any(watch.look([half, half, whole]) for _ in range(30))


def test_a_rank_that_is_slow_itself_is_named_before_a_cable() -> None:
    watch = StragglerWatch([0, 0], [0, 1])
    late, slow = RankWork(0.1, 2.0, 0.0, 1e7, 0.2), RankWork(0.1, 0.9, 1.0, 1e7, 0.8)
    found = [each for each in (watch.look([late, slow]) for _ in range(30)) if each is not None]
    assert [(each.rank, each.phase) for each in found] == [(0, "computing"), (1, "waiting")]


def named_within(seed: int, ranks: int, spread: float, phase: str) -> SlowestRank | None:
    """The first straggler that is named, of which rank 1 works 1.3 times as long by more of ``phase``."""
    rng, watch = random.Random(seed), StragglerWatch([0] * ranks)
    for _ in range(STEPS_TO_NAME):
        works = [drawn(rng, spread) for _ in range(ranks)]
        late = works[1]
        more = 0.3 * late.own
        works[1] = late._replace(**{phase: getattr(late, phase) + more})
        found = watch.look(works)
        if found is not None:
            return found
    return None


@pytest.mark.parametrize("phase", ["reading", "computing"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_straggler_is_named_within_20_steps(ranks: int, phase: str) -> None:
    found = [named_within(seed, ranks, 0.05, phase) for seed in range(60)]
    right = [each for each in found if each is not None and (each.rank, each.phase) == (1, phase)]
    assert len(right) >= 57
    assert all(1.15 <= each.ratio <= 1.5 and each.more_s > 0 for each in right)


@pytest.mark.parametrize(("ranks", "spread"), [(2, 0.05), (8, 0.08)])
def test_equal_ranks_name_nobody_in_10000_steps(ranks: int, spread: float) -> None:
    rng, watch = random.Random(29), StragglerWatch([0] * ranks)
    alarms = sum(watch.look([drawn(rng, spread) for _ in range(ranks)]) is not None for _ in range(10_000))
    assert alarms <= 1


def test_a_straggler_is_named_once_until_it_recovers() -> None:
    watch = StragglerWatch([0, 0, 0])
    even, late = RankWork(0.1, 0.9, 0.0), RankWork(0.1, 1.4, 0.0)

    def alarms(work: RankWork, steps: int) -> int:
        return sum(watch.look([even, even, work]) is not None for _ in range(steps))

    assert alarms(late, 50) == 1
    assert alarms(even, 30) == 0
    assert alarms(late, 50) == 1


def test_stages_of_a_pipeline_are_compared_with_their_own_kind() -> None:
    """The last stage computes more: that is the cut of the model, and no straggler."""
    watch = StragglerWatch([0, 0, 1, 1])
    first, last = RankWork(0.0, 1.0, 0.5), RankWork(0.0, 2.0, 0.0)
    assert not any(watch.look([first, first, last, last]) for _ in range(30))
    found = [watch.look([first, first, last, last._replace(computing=3.0)]) for _ in range(30)]
    assert [each.rank for each in found if each is not None] == [3]
    alone = StragglerWatch([0, 1])
    assert not any(alone.look([first, last]) for _ in range(30)) and alone.slowest is None


def test_the_slowest_of_each_step() -> None:
    watch = StragglerWatch([0, 0])
    watch.look([RankWork(0.5, 1.0, 0.0), RankWork(0.0, 1.0, 0.5)])
    assert watch.slowest is not None and watch.slowest[:2] == (0, "reading")
    watch.look([RankWork(0.0, 1.0, 0.4), RankWork(0.0, 1.0, 0.5)])
    assert watch.slowest is not None and watch.slowest[:2] == (1, "waiting")
    watch.look([RankWork(0.0, 1.01, 0.0), RankWork(0.0, 1.0, 0.01)])
    assert watch.slowest is not None and watch.slowest[:2] == (0, "computing")
