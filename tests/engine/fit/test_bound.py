"""The bound of a pipeline's step, by hand."""

from dataclasses import replace

import pytest
from tests.simulate.given import hardware

from shardwise.base.hardware import OperationClass
from shardwise.engine.fit.bound import PassWork, even_bound, work_of
from shardwise.parallel.pipeline.policy import FOLDED, ScheduleName
from shardwise.parallel.pipeline.schedules import schedule
from shardwise.plan.action import Kind
from shardwise.plan.dataflow import timeline_of
from shardwise.plan.stage_places import StagePlaces
from shardwise.simulate.bound import pipeline_bound
from shardwise.simulate.passes import MeasuredPass, UnitPass
from shardwise.simulate.work import Work


def walked(seconds: list[float], ranks: int, microbatches: int, name: str, virtual: int) -> float:
    """Seconds of a schedule in which messages take no time, with a third of a stage's work in its forward pass."""
    lists = schedule(name, ranks, microbatches, virtual)  # type: ignore[arg-type]
    ended: dict[tuple[Kind, int, int], float] = {}
    clock, at = dict.fromkeys(lists, 0.0), dict.fromkeys(lists, 0)
    last = len(seconds) - 1
    while any(at[place] < len(row) for place, row in lists.items()):
        for place, row in lists.items():
            while at[place] < len(row):
                action = row[at[place]]
                stage, is_forward = action.stage, action.kind is Kind.F
                needs = (Kind.F, stage - 1) if is_forward else (Kind.B, stage + 1)
                key = (*needs, action.microbatch)
                free = (is_forward and stage == 0) or (not is_forward and stage == last)
                if not free and key not in ended:
                    break
                begin = max(clock[place], 0.0 if free else ended[key])
                clock[place] = begin + seconds[stage] * (1 / 3 if is_forward else 2 / 3)
                ended[action.kind, stage, action.microbatch] = clock[place]
                at[place] += 1
    return max(clock.values())


@pytest.mark.parametrize(("name", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2)])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize("uneven", [0.0, 0.5])
def test_no_schedule_is_faster_than_the_bound(
    name: str, virtual: int, ranks: int, microbatches: int, uneven: float
) -> None:
    seconds = [1 + uneven * (stage % 3) for stage in range(ranks * virtual)]
    bound, step = (
        pipeline_bound(seconds, StagePlaces(ranks), microbatches),
        walked(seconds, ranks, microbatches, name, virtual),
    )
    assert bound <= step * (1 + 1e-12)
    if virtual == 1 and not uneven:
        assert bound == pytest.approx(microbatches + ranks - 1) == pytest.approx(step), "and it is reached"


def test_work_of_another_size_is_less_than_in_proportion() -> None:
    work = PassWork(100.0, 50.0).scaled(2.0)
    assert (work.product_s, work.touched_s) == (196.0, 90.0)


def test_the_work_of_a_pass_is_no_more_than_its_price_where_classes_are_faster_than_memory() -> None:
    others: dict[tuple[OperationClass, int], int] = {("arithmetic", 100): 3, ("copy", 50): 2}
    share = UnitPass(0, 0, 0, 400, work=Work(others=others))
    passed = MeasuredPass({(Kind.F, "u"): share}, 0)
    rates = replace(
        hardware(host_bytes_s=10.0), operations={"arithmetic": ((1.0, 40.0),), "update": ((1.0, 1e9),)}
    )
    price = share.work.seconds(rates, share.touched_bytes, "host")
    assert price == pytest.approx(300 / 40 + 100 / 10)
    bound = work_of(passed, rates, True).seconds
    assert bound == pytest.approx(400 / 40) and bound <= price


@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "dualpipe_v", "zb_greedy"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 3), (4, 9)])
def test_no_schedule_that_splits_backward_passes_is_faster_than_the_bound(
    name: ScheduleName, ranks: int, microbatches: int
) -> None:
    folded = name in FOLDED
    seconds = [1 + 0.5 * (stage % 3) for stage in range(ranks * (1 + folded))]
    whole = timeline_of(
        schedule(name, ranks, microbatches, 1 + folded), lambda action: seconds[action.stage] / 3
    ).makespan_s
    bound = pipeline_bound(seconds, StagePlaces(ranks, folded), microbatches, splits_backward=True)
    assert 0.7 * whole < bound <= whole * (1 + 1e-12) or microbatches < ranks
    assert even_bound(sum(seconds), ranks, 2, microbatches) <= whole
