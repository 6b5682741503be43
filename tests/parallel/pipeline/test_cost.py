"""Closed forms are held to the simulation, for every size and for several ratios of backward to forward."""

from itertools import accumulate, product

import pytest

from shardwise.parallel.pipeline.passes import add_communication, nominal_s
from shardwise.parallel.pipeline.policy import ScheduleName
from shardwise.parallel.pipeline.schedules import schedule
from shardwise.plan.action import Kind
from shardwise.plan.dataflow import timeline_of
from tests.parallel.pipeline import closed_forms
from tests.parallel.pipeline.shapes import GREEDY, SHAPES, WHOLE, WIDE, Shape, lists_of


@pytest.mark.parametrize("forward_s, backward_s", [(1, 2), (1, 1), (2, 1), (3, 8)])
def test_bubble(forward_s: int, backward_s: int) -> None:
    for shape in WHOLE + WIDE:
        _, ranks, microbatches, virtual_stages = shape
        timeline = timeline_of(
            lists_of(shape), lambda action: forward_s if action.kind is Kind.F else backward_s
        )
        assert timeline.makespan_s == closed_forms.makespan_s(
            ranks, microbatches, virtual_stages, forward_s, backward_s
        ), shape
        bubble = closed_forms.bubble_s(ranks, microbatches, virtual_stages, forward_s, backward_s)
        assert all(timeline.makespan_s - timeline.busy_s(rank) == bubble for rank in range(ranks)), shape
        assert timeline.idle_share == pytest.approx(
            closed_forms.idle_share(ranks, microbatches, virtual_stages)
        ), shape


def test_bubble_of_the_papers() -> None:
    assert closed_forms.bubble_s(4, 12, 1, 1, 2) == 9
    assert closed_forms.bubble_s(4, 12, 3, 1 / 3, 2 / 3) == pytest.approx(3), "interleaving divides it"


def test_peak_live_activations() -> None:
    for shape in WHOLE + WIDE:
        name, ranks, microbatches, virtual_stages = shape
        timeline = timeline_of(lists_of(shape), nominal_s)
        for rank in range(ranks):
            expected = closed_forms.peak_live(name, rank, ranks, microbatches, virtual_stages)
            assert timeline.peak_live(rank) == expected, (shape, rank)


def test_peak_of_the_papers() -> None:
    """Interleaved: (1 + (p - 1) / (p v)) p activations of v stages each."""
    p, v = 4, 3
    assert closed_forms.peak_live("interleaved_1f1b", 0, p, 24, v) == (1 + (p - 1) / (p * v)) * p * v


def test_messages() -> None:
    for shape in SHAPES:
        lists = add_communication(lists_of(shape), shape.ranks, folded=shape.folded)
        sent = sum(action.kind is Kind.SEND for row in lists.values() for action in row)
        assert sent == closed_forms.messages(*shape[1:], shape.folded), shape


@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "dualpipe_v", "zb_greedy"])
def test_length_of_schedules_that_split_backward_passes(name: ScheduleName) -> None:
    _check_length([shape for shape in SHAPES if shape.name == name])


@pytest.mark.soak
def test_length_of_every_greedy_schedule() -> None:
    _check_length(GREEDY)


def _check_length(shapes: list[Shape]) -> None:
    for shape in shapes:
        name, ranks, microbatches, stages = shape
        found = timeline_of(lists_of(shape), lambda action: 1.0)
        wanted = closed_forms.split_length(ranks, microbatches, stages)
        if microbatches >= (2 * ranks - 1 if shape.folded else ranks):
            assert found.makespan_s == wanted, shape
        assert found.makespan_s <= 3 * stages * (microbatches + ranks - 1), f"{shape} is longer than 1f1b"
        live = max(map(found.peak_live, range(ranks)))
        assert live <= closed_forms.split_live(name, ranks), shape


def test_length_and_waiting_microbatches_of_zb_h1_with_a_limit() -> None:
    for ranks, microbatches, delay in product(range(1, 9), range(1, 17), range(8)):
        lists = schedule("zb_h1", ranks, microbatches, wgrad_delay=delay)
        found = timeline_of(lists, lambda action: 1.0)
        shape = ranks, microbatches, delay
        if microbatches >= ranks > delay:
            assert found.makespan_s == closed_forms.delayed_length(*shape), shape
        assert found.makespan_s <= 3 * (microbatches + ranks - 1), f"{shape} is longer than 1f1b"
        for row in lists.values():
            behind = accumulate({Kind.I: 1, Kind.W: -1}.get(action.kind, 0) for action in row)
            assert max(behind) <= min(delay, ranks - 1) + 1, shape


def test_figures_of_the_papers() -> None:
    """Qi et al. 2023: the bubble of ZB-H1 is (p - 1)(F + I - W), a third of that of 1F1B."""
    assert closed_forms.split_length(4, 12) - 3 * 12 == 3
    assert timeline_of(schedule("1f1b", 4, 12), nominal_s).makespan_s - 3 * 12 == 9
    wide = Shape("zb_v", 12, 40, 2)
    assert timeline_of(lists_of(wide), lambda action: 1.0).makespan_s == 6 * 40 + 11
