"""How the blocks lie on the stages of a pipeline, alike for all: equally many on each."""

from __future__ import annotations

from workload import Workload

INTERLEAVE = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zb_h1": 1, "zb_v": 2}
"""Stages per rank."""


def stages_of(schedule: str, rank: int, ranks: int) -> list[int]:
    """The stages of one rank: round robin, or in a V."""
    if schedule == "zb_v":
        return [rank, 2 * ranks - 1 - rank]
    return list(range(rank, ranks * INTERLEAVE[schedule], ranks))


def starts(work: Workload, stages: int) -> list[int]:
    """The first block of each stage."""
    return [work.layers * stage // stages for stage in range(stages)]
