"""Every schedule over every number of stages up to 8 and of microbatches up to 16."""

from typing import NamedTuple

from shardwise.parallel.pipeline.policy import FOLDED, SCHEDULES, SPLIT, ScheduleName


class Shape(NamedTuple):
    name: ScheduleName
    ranks: int
    microbatches: int
    virtual_stages: int

    @property
    def folded(self) -> bool:
        return self.name in FOLDED


def _virtual_stages(name: ScheduleName, ranks: int) -> range:
    if name in FOLDED:
        return range(2, 3)
    return range(2, 8 // ranks + 1) if name == "interleaved_1f1b" else range(1, 2)


SHAPES = [
    Shape(name, ranks, microbatches, virtual_stages)
    for name in SCHEDULES
    for ranks in range(1, 9)
    for virtual_stages in _virtual_stages(name, ranks)
    for microbatches in range(1, 17)
]
WHOLE = [shape for shape in SHAPES if shape.name not in SPLIT]
"""Those whose backward passes are not split."""
WIDE = [Shape("interleaved_1f1b", 8, 13, 3), Shape("interleaved_1f1b", 5, 3, 4), Shape("1f1b", 12, 40, 1)]
"""A few beyond."""
