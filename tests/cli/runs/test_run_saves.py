"""Saves of a run: none twice, and how many may fail."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.base.errors import CheckpointError
from shardwise.cli.runs.run_saves import RunSaves


class Disk:
    """An engine whose saves fail as often as the test asks."""

    def __init__(self, asynchronous: bool = False, tolerate: int = 1) -> None:
        policy = SimpleNamespace(asynchronous=asynchronous, tolerate_failures=tolerate)
        self.config, self.step_count = SimpleNamespace(checkpoint=policy), 1
        self.failures = self.late_failures = 0
        self.saved: list[tuple[int, Any]] = []

    def save(self, folder: Path, content: dict[str, Any], **more: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise CheckpointError("the disk is full")
        self.saved.append((self.step_count, more["score"]))

    def wait_for_save(self) -> None:
        if self.late_failures:
            self.late_failures -= 1
            raise CheckpointError("the disk was full")


def saves_of(disk: Any) -> RunSaves:
    return RunSaves(disk, Path("steps"), dict, higher_is_better=True)


def test_no_step_is_saved_twice() -> None:
    disk = Disk()
    saves = saves_of(disk)
    saves.save(0.5)
    saves.save(0.5)
    disk.step_count = 2
    saves.save(None)
    assert disk.saved == [(1, 0.5), (2, None)] and saves.step == 2


def test_failures_in_a_row_are_counted_anew_after_a_success() -> None:
    disk = Disk()
    saves = saves_of(disk)
    for _ in range(3):
        disk.failures = 1
        saves.save(None)
        assert saves.step != disk.step_count
        saves.save(None)
        assert saves.step == disk.step_count
        disk.step_count += 1
    disk.failures = 2
    saves.save(None)
    with pytest.raises(CheckpointError):
        saves.save(None)


def test_the_last_save_and_saves_in_the_background_must_not_fail() -> None:
    disk = Disk()
    disk.failures = 1
    with pytest.raises(CheckpointError):
        saves_of(disk).save(None, is_last=True)
    disk = Disk(asynchronous=True)
    disk.failures = 1
    with pytest.raises(CheckpointError):
        saves_of(disk).save(None)


def test_a_save_that_failed_behind_training_is_tried_once_more_at_the_end() -> None:
    disk = Disk()
    saves = saves_of(disk)
    saves.save(None)
    disk.late_failures = 1
    saves.finish(0.25)
    assert disk.saved == [(1, None), (1, 0.25)]
    disk.late_failures = 2
    with pytest.raises(CheckpointError, match="was full"):
        saves.finish(0.25)
    disk.late_failures = disk.failures = 1
    with pytest.raises(CheckpointError, match="is full"):
        saves.finish(0.25)
