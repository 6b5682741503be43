"""Every schedule over every number of stages up to 8 and of microbatches up to 16."""

from functools import cache
from typing import NamedTuple

from shardwise.parallel.pipeline.policy import FOLDED, SCHEDULES, SPLIT, ScheduleName
from shardwise.parallel.pipeline.schedules import schedule
from shardwise.plan.dataflow import Lists


class Shape(NamedTuple):
    name: ScheduleName
    ranks: int
    microbatches: int
    virtual_stages: int

    @property
    def folded(self) -> bool:
        return self.name in FOLDED


@cache
def lists_of(shape: Shape) -> Lists:
    """Return the schedule of a shape, which must not be changed: zb_greedy is made of several."""
    return schedule(*shape)


def _virtual_stages(name: ScheduleName, ranks: int) -> range:
    if name in FOLDED:
        return range(2, 3)
    return range(2, 8 // ranks + 1) if name == "interleaved_1f1b" else range(1, 2)


SHAPES = [
    Shape(name, ranks, microbatches, virtual_stages)
    for name in SCHEDULES
    for ranks in range(1, 9)
    for virtual_stages in _virtual_stages(name, ranks)
    for microbatches in range(1, 17, 3 if name == "zb_greedy" else 1)
]
GREEDY = [
    Shape("zb_greedy", ranks, microbatches, 2) for ranks in range(1, 9) for microbatches in range(1, 17)
]
"""All sizes of zb_greedy, of which ``SHAPES`` has every third number of microbatches: each is made of six schedules."""
WHOLE = [shape for shape in SHAPES if shape.name not in SPLIT]
"""Those whose backward passes are not split."""
WIDE = [Shape("interleaved_1f1b", 8, 13, 3), Shape("interleaved_1f1b", 5, 3, 4), Shape("1f1b", 12, 40, 1)]
"""A few beyond."""
