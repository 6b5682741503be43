"""The order of F and B, proved for every size up to 8 stages and 16 microbatches."""

import pytest

from shardwise.base.errors import PlanError
from shardwise.observe.schedule_picture import draw_text
from shardwise.parallel.pipeline import schedules, zero_bubble
from shardwise.parallel.pipeline.passes import add_communication, nominal_s
from shardwise.parallel.pipeline.policy import SPLIT
from shardwise.parallel.pipeline.schedules import forward_only, microbatch_groups, schedule
from shardwise.plan.action import Kind
from shardwise.plan.dataflow import timeline_of
from shardwise.plan.validate_schedule import validate_schedule
from tests.parallel.pipeline.shapes import SHAPES, WIDE, Shape, lists_of


def test_every_schedule_is_proved() -> None:
    for shape in SHAPES + WIDE:
        lists = add_communication(lists_of(shape), shape.ranks, folded=shape.folded)
        validate_schedule(lists, shape.ranks, shape.microbatches, folded=shape.folded)


def test_every_evaluation_is_proved() -> None:
    for ranks, microbatches, virtual_stages, folded in sorted(
        {(*shape[1:], shape.folded) for shape in SHAPES + WIDE}
    ):
        lists = forward_only(ranks, microbatches, virtual_stages, folded)
        lists = add_communication(lists, ranks, folded=folded)
        validate_schedule(lists, ranks, microbatches, forward_only=True, folded=folded)


def test_microbatches_ascend_on_every_stage() -> None:
    """Gradients are summed in one order under every schedule, so that they have the same bits."""
    for shape in SHAPES + WIDE:
        for row in lists_of(shape).values():
            for stage in {action.stage for action in row}:
                for kind in (Kind.F, Kind.I, Kind.W) if shape.name in SPLIT else (Kind.F, Kind.B):
                    own = [a.microbatch for a in row if a.kind is kind and a.stage == stage]
                    assert own == list(range(shape.microbatches)), shape


def test_one_rank_accumulates_gradients() -> None:
    assert [str(action) for action in schedule("1f1b", 1, 2)[0]] == ["F(0,0)", "B(0,0)", "F(0,1)", "B(0,1)"]


@pytest.mark.parametrize("ranks, microbatches", [(4, 4), (4, 7), (4, 9), (3, 16), (5, 2), (1, 5)])
def test_groups_are_even_and_fill_the_ranks(ranks: int, microbatches: int) -> None:
    groups = microbatch_groups(ranks, microbatches)
    assert [i for group in groups for i in group] == list(range(microbatches))
    sizes = sorted(map(len, groups))
    assert sizes[-1] - sizes[0] <= 1
    assert sizes[0] >= min(ranks, microbatches)


@pytest.mark.parametrize(
    "shape",
    [
        Shape("gpipe", 4, 4, 1),
        Shape("1f1b", 4, 4, 1),
        Shape("interleaved_1f1b", 2, 2, 2),
        Shape("zb_h1", 4, 4, 1),
        Shape("zb_v", 2, 3, 2),
        Shape("dualpipe_v", 2, 3, 2),
    ],
    ids=lambda shape: shape.name,
)
def test_the_tables_in_the_docstring_are_what_the_schedules_give(shape: Shape) -> None:
    drawn = draw_text(timeline_of(lists_of(shape), nominal_s))
    documented = [line[24:] for line in f"{schedules.__doc__}{zero_bubble.__doc__}".splitlines()]
    rows = drawn.splitlines()
    assert any(documented[i : i + len(rows)] == rows for i in range(len(documented))), drawn


@pytest.mark.parametrize(
    "ranks, microbatches, virtual_stages, says",
    [(2, 0, 1, "microbatches=0"), (0, 2, 1, "ranks=0"), (2, 2, 2, "use 'interleaved_1f1b'")],
)
def test_errors(ranks: int, microbatches: int, virtual_stages: int, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        schedule("1f1b", ranks, microbatches, virtual_stages)
