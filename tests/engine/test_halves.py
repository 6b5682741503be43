"""Backward passes in two parts equal one process: I gives the gradients of inputs, W later those of weights."""

from typing import Any

import pytest

from tests.engine.halves import in_halves
from tests.engine.test_model_parallel import Figures, Layout, measure

LAYOUTS = [
    (Layout(pp=2, microbatches=3), 1),
    (Layout(pp=2, microbatches=1), 0),
    (Layout(pp=2, microbatches=3, recompute="full"), 1),
    (Layout(pp=2, dp=2, stage=3, microbatches=3), 1),
    (Layout(pp=2, dp=2, stage=2, microbatches=3), 1),
    (Layout(pp=2, tp=2, microbatches=3), 1),
    (Layout(pp=2, tp=2, microbatches=3, sequence=False, family="gpt2"), 1),
    (Layout(pp=2, microbatches=4, schedule="zb_h1"), -1),
    (Layout(pp=2, microbatches=4, schedule="zb_v", recompute="full"), -1),
    (Layout(pp=2, dp=2, stage=3, microbatches=3, schedule="zb_v", recompute="full"), -1),
    (Layout(pp=2, dp=2, stage=2, microbatches=2, schedule="dualpipe_v"), -1),
    (Layout(pp=2, tp=2, microbatches=5, schedule="zb_h1", recompute="selective"), -1),
    (Layout(pp=4, microbatches=5, schedule="zb_h1", family="gpt2"), -1),
]


def measure_halves(world: Any, layouts: list[tuple[Layout, int]]) -> list[Figures]:
    found = []
    for layout, delay in layouts:
        with in_halves(delay):
            found.append(measure(world, layout))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_halves_equal_one_process(ranks: Any, size: int) -> None:
    table = [each for each in LAYOUTS if each[0].size == size]
    by_rank = ranks(size).run(measure_halves, table, timeout_s=250.0)
    worst = {
        str(layout): Figures(*(max(column) for column in zip(*rows, strict=True)))
        for (layout, _), *rows in zip(table, *by_rank, strict=True)
    }
    assert all(max(figures) <= 1e-10 for figures in worst.values()), worst
