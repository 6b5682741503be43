"""zb_greedy beside the other schedules in a V, with drawn seconds and limits of live activations."""

import random

import pytest

from shardwise.parallel.pipeline.greedy import zb_greedy
from shardwise.parallel.pipeline.passes import add_communication
from shardwise.parallel.pipeline.schedules import schedule
from shardwise.plan.action import Action, Kind
from shardwise.plan.dataflow import timeline_of
from shardwise.plan.validate_schedule import validate_schedule

SIZES = [(2, 3), (2, 8), (3, 4), (3, 9), (4, 5), (4, 12), (5, 2), (6, 13), (8, 7), (8, 16)]


class Seconds:
    """Seconds of passes, drawn for each Kind and stage."""

    def __init__(self, ranks: int, seed: int):
        draw = random.Random(seed)
        self._drawn = {
            (kind, stage): draw.uniform(0.5, 1.5)
            for stage in range(2 * ranks)
            for kind in (Kind.F, Kind.I, Kind.W)
        }

    def __call__(self, action: Action) -> float:
        return self._drawn.get((action.kind, action.stage), 0.0)


def test_never_above_the_other_schedules_in_a_v_and_shorter_in_the_mean() -> None:
    ratios = []
    for seed, (ranks, microbatches) in enumerate(2 * SIZES):
        seconds = Seconds(ranks, seed)
        others = [
            timeline_of(schedule(name, ranks, microbatches, 2), seconds).makespan_s
            for name in ("zb_v", "dualpipe_v")
        ]
        found = timeline_of(zb_greedy(ranks, microbatches, seconds), seconds).makespan_s
        ratios.append(found / min(others))
    assert max(ratios) <= 1
    assert sum(ratios) / len(ratios) <= 0.98, ratios


@pytest.mark.parametrize("live", [1, 1.5, 2, 3.2])
def test_a_limit_of_live_activations_is_kept(live: float) -> None:
    for seed, (ranks, microbatches) in enumerate(SIZES):
        seconds = Seconds(ranks, seed)
        lists = zb_greedy(ranks, microbatches, seconds, live)
        with_messages = add_communication(lists, ranks, seconds, folded=True)
        validate_schedule(with_messages, ranks, microbatches, folded=True)
        assert max(map(timeline_of(lists, seconds).peak_live, range(ranks))) <= max(2, 2 * live)


def test_a_smaller_limit_takes_longer() -> None:
    seconds = Seconds(4, 1)
    lengths = [timeline_of(zb_greedy(4, 12, seconds, live), seconds).makespan_s for live in (1, 2, 3, None)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > 1.5 * lengths[-1]


def test_microbatches_ascend_on_every_stage_whatever_the_seconds() -> None:
    for row in zb_greedy(4, 9, Seconds(4, 3)).values():
        for kind in (Kind.F, Kind.I, Kind.W):
            for stage in {action.stage for action in row}:
                own = [each.microbatch for each in row if (each.kind, each.stage) == (kind, stage)]
                assert own == list(range(9))
