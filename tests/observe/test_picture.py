import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.observe import picture
from shardwise.observe.metrics import ClickRecord, StepRecord
from shardwise.observe.picture import AucPicture, LossPicture, draw_auc, draw_loss, smoothed


def test_a_straight_line_is_left_as_it_is_up_to_its_ends() -> None:
    line = np.linspace(5, 1, 400)
    assert np.abs(smoothed(line) - line).max() < 1e-12


def test_noise_is_removed() -> None:
    noise = np.random.default_rng(0).normal(size=1000)
    assert smoothed(noise).std() < 0.5 * noise.std()


def test_one_bad_value_does_not_blank_its_neighbours() -> None:
    curve = [3.0, 2.9, math.nan, 2.7, math.inf, 2.5]
    assert np.isfinite(smoothed(curve)).all()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_shortest_runs_are_drawn(tmp_path: Path, size: int) -> None:
    draw_loss(
        [StepRecord(i, 1.0 / i, 1.0 if i == size else None) for i in range(1, size + 1)],
        tmp_path / "loss.png",
    )
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_resumes_are_marked_with_their_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(picture, "write_picture", lambda axes, path: drawn.append(axes))
    resumed = {31: 30, 33: 32, 61: 60}
    draw_loss([StepRecord(i, 1.0 / i, resumed_from=resumed.get(i)) for i in range(1, 101)], tmp_path / "a")
    clicks = [ClickRecord(i, 0.5, auc=0.7, resumed_from=resumed.get(i)) for i in range(1, 101)]
    draw_auc(clicks, tmp_path / "b", best=0.8)
    for axes in drawn:
        dashed = [line.get_xdata() for line in axes.lines if line.get_color() == picture.RESUMED]
        assert [list(across) for across in dashed] == [[30, 30], [32, 32], [60, 60]]
        assert [text.get_text() for text in axes.texts] == ["resumed at 30", "resumed at 60"]


def test_the_picture_is_drawn_after_an_evaluation_once_a_minute_and_at_the_end(tmp_path: Path) -> None:
    now = 0.0
    path = tmp_path / "loss.png"
    sink = LossPicture(path, clock=lambda: now)
    sink.write(StepRecord(1, 1.0, 1.0))
    assert not path.exists(), "the first minute is not over"
    now = 61.0
    sink.write(StepRecord(2, 1.0))
    assert not path.exists(), "this step evaluates nothing"
    sink.write(StepRecord(3, 1.0, 1.0))
    assert path.exists()
    path.unlink()
    sink.close()
    assert path.exists()


def test_a_run_without_steps_leaves_no_picture(tmp_path: Path) -> None:
    LossPicture(tmp_path / "loss.png").close()
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.parametrize("best", [None, 0.8])
@pytest.mark.parametrize("size", [0, 1, 5])
def test_the_auc_is_drawn_with_and_without_the_best(tmp_path: Path, size: int, best: float | None) -> None:
    records = [ClickRecord(i, 0.5, 0.5, 0.7 if i % 2 else None) for i in range(1, size + 1)]
    draw_auc(records, tmp_path / "auc.png", "run", best)
    assert (tmp_path / "auc.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_the_auc_is_drawn_at_the_end(tmp_path: Path) -> None:
    sink = AucPicture(tmp_path / "auc.png", "run", [ClickRecord(1, 0.6, 0.55, 0.7)], 0.8)
    sink.write(ClickRecord(2, 0.5))
    assert not list(tmp_path.iterdir())
    sink.close()
    assert [path.name for path in tmp_path.iterdir()] == ["auc.png"]
