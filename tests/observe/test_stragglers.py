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


def drawn_over_cables(
    rng: random.Random, slow_host: int | None = None, often: float = 0.65, alone: float = 0.02
) -> list[RankWork]:
    """The seconds of two ranks on each of two hosts.

    The ranks of ``slow_host`` have bytes left in a share ``often`` of the steps, and any host by chance in ``alone``.
    """
    works = []
    for rank in range(4):
        share = 1 - (1 - (often if rank // 2 == slow_host else alone)) ** 0.5
        left = rng.uniform(2e4, 2e5) if rng.random() < share else rng.uniform(0, 3e3)
        work = drawn(rng, 0.05)
        works.append(work._replace(waiting=0.4 * rng.lognormvariate(0, 0.1), sent_bytes=5e5, left_bytes=left))
    return works


@pytest.mark.parametrize("slow_host", [0, 1])
def test_a_slow_cable_is_named_within_20_steps(slow_host: int) -> None:
    right = 0
    for seed in range(60):
        rng, watch = random.Random(seed), StragglerWatch([0] * 4, [0, 0, 1, 1])
        looks = (watch.look(drawn_over_cables(rng, slow_host)) for _ in range(STEPS_TO_NAME))
        found = [each for each in looks if each is not None]
        right += [(each.rank // 2, each.phase) for each in found] == [(slow_host, "waiting")]
        assert all(0 < each.more_s < 0.5 for each in found)
    assert right >= 57


def test_equal_cables_name_nobody_in_10000_steps() -> None:
    rng, watch = random.Random(29), StragglerWatch([0] * 4, [0, 0, 1, 1])
    assert sum(watch.look(drawn_over_cables(rng)) is not None for _ in range(10_000)) <= 1


def over_two_hosts(left: float, other: float, waiting: float = 0.4) -> list[RankWork]:
    """The seconds of a rank on each of two hosts, which have bytes left."""
    return [RankWork(0.1, 0.9, waiting, 1e6, left), RankWork(0.1, 0.9, waiting, 1e6, other)]


@pytest.mark.parametrize(
    "works",
    [over_two_hosts(1e5, 5e4), over_two_hosts(1e4, 0.0), over_two_hosts(1e5, 0.0, waiting=0.05)],
    ids=["both hosts", "a few bytes", "an exchange that takes no time"],
)
def test_no_cable_is_named_for(works: list[RankWork]) -> None:
    watch = StragglerWatch([0, 0], [0, 1])
    assert not any(watch.look(works) for _ in range(30))


def test_a_rank_that_is_slow_itself_is_named_before_a_cable() -> None:
    watch = StragglerWatch([0, 0], [0, 1])
    works = [RankWork(0.1, 2.0, 0.5, 1e7, 0.0), RankWork(0.1, 0.9, 1.0, 1e7, 1e5)]
    late, even = [works[0]._replace(waiting=0.0), works[1]._replace(left_bytes=0.0)], works
    found = [each for each in (watch.look(late) for _ in range(20)) if each is not None]
    found += [each for each in (watch.look(even) for _ in range(20)) if each is not None]
    assert [(each.rank, each.phase) for each in found] == [(0, "computing"), (1, "waiting")]


def test_the_rank_of_a_slow_cable_is_the_slowest_of_its_step() -> None:
    watch = StragglerWatch([0, 0], [0, 1])
    watch.look(over_two_hosts(0.0, 1e5))
    assert watch.slowest is not None and watch.slowest[:2] == (1, "waiting")
    assert watch.slowest.more_s == pytest.approx(0.4 * 0.1)


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
