"""What a pipeline's run says of its schedule at the end."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from shardwise.cli.rank import _show_schedule
from shardwise.cli.runs.run_folder import RunFolder
from shardwise.config.run import RunConfig
from shardwise.parallel.pipeline.schedules import schedule
from shardwise.plan.action import Kind
from shardwise.plan.dataflow import timeline_of


def said(folder: Path, rank: int, has_pipeline: bool = True) -> str:
    timeline = timeline_of(schedule("1f1b", 2, 3), lambda action: 1.0 if action.kind is Kind.F else 2.0)
    trainer: Any = SimpleNamespace(
        timelines=(timeline, timeline) if has_pipeline else None,
        world=SimpleNamespace(rank=rank),
        config=RunConfig.parse({"mesh": {"pp": 2}, "batch": {"accumulation": 3}}),
        stages=2,
        engine=SimpleNamespace(step_count=7),
        folder=RunFolder(folder),
    )
    text = io.StringIO()
    _show_schedule(trainer, Console(file=text, width=40))
    return text.getvalue()


def test_rank_0_prints_a_table_and_draws_a_picture(tmp_path: Path) -> None:
    assert said(tmp_path, 0).splitlines() == [
        "1f1b: 2 stages × 3 microbatches, idle 25% as predicted, 25% as measured",
        "pp 0   F0 F1 .. .. B0 == F2 B1 == .. B2 ==",
        "pp 1   .. F0 B0 == F1 B1 == F2 B2 == .. ..",
    ]
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")


def test_other_ranks_and_other_runs_say_nothing(tmp_path: Path) -> None:
    assert said(tmp_path, 1) == ""
    assert said(tmp_path, 0, has_pipeline=False) == ""
    assert not (tmp_path / "schedule.png").exists()
