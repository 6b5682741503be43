"""Every schedule over every number of stages up to 8 and of microbatches up to 16."""

from typing import NamedTuple

from shardwise.parallel.pipeline.policy import SCHEDULES, ScheduleName


class Shape(NamedTuple):
    name: ScheduleName
    ranks: int
    microbatches: int
    virtual_stages: int


SHAPES = [
    Shape(name, ranks, microbatches, virtual_stages)
    for name in SCHEDULES
    for ranks in range(1, 9)
    for virtual_stages in ([1] if name != "interleaved_1f1b" else range(2, 8 // ranks + 1))
    for microbatches in range(1, 17)
]
WIDE = [Shape("interleaved_1f1b", 8, 13, 3), Shape("interleaved_1f1b", 5, 3, 4), Shape("1f1b", 12, 40, 1)]
"""A few beyond."""
