"""How the blocks lie on the stages of a pipeline, alike for all: equally many on each."""

from __future__ import annotations

from workload import Workload

INTERLEAVE = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2}
"""Stages per rank."""


def starts(work: Workload, stages: int) -> list[int]:
    """The first block of each stage."""
    return [work.layers * stage // stages for stage in range(stages)]
