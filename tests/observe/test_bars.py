"""Bars over time as a picture."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from PIL import Image

from shardwise.observe.bars import IDLE, PALETTE, PicturePanel, SpanBar, _draw, draw_bars


def test_bars_take_their_share_and_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path, asked = tmp_path / "x.png", []
    path.write_bytes(b"old")
    bars = [SpanBar(0, 0, 5, PALETTE[0], ""), SpanBar(1, 5, 7.5, PALETTE[1], "")]
    draw_bars([PicturePanel("rank", ["0", "1"], 10.0, bars)], path, "steps", "s", 0.4, add_key=asked.append)
    assert [*tmp_path.iterdir()] == [path] and len(asked) == 1
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    colours = [np.array([round(255 * part) for part in to_rgb(each)]) for each in (*PALETTE[:2], IDLE)]
    counted = [int((np.abs(pixels - colour).max(-1) <= 2).sum()) for colour in colours]
    assert abs(counted[0] / sum(counted) - 0.25) < 0.02 and abs(counted[1] / sum(counted) - 0.125) < 0.02


class Axes:
    """Notes what is drawn."""

    def __init__(self, *bars: SpanBar) -> None:
        self.bars: list[tuple[float, float]] = []
        self.texts: list[tuple[str, str, Any]] = []
        _draw(self, PicturePanel("", ["0", "1"], 10.0, bars), 10.0)

    def broken_barh(self, spans: list[tuple[float, float]], lies: tuple[float, float], **more: Any) -> None:
        low, height = lies
        self.bars += [(round(low + height / 2, 2), round(height, 2))] * len(spans)

    def text(self, at: float, middle: float, label: str, ha: str, color: Any, **more: Any) -> None:
        self.texts.append((label, ha, color))


def test_bars_that_share_a_row_lie_above_one_another() -> None:
    shared = (SpanBar(1, 0, 5, PALETTE[0], "", part=(place, 2)) for place in (0, 1))
    assert Axes(SpanBar(0, 0, 5, PALETTE[0], ""), *shared).bars == [(0, 0.84), (0.79, 0.42), (1.21, 0.42)]


def test_a_label_stands_in_its_bar_or_beside_it_or_nowhere() -> None:
    blue = PALETTE[0]
    wide, narrow = SpanBar(0, 0, 5, blue, "LABEL", ink="black"), SpanBar(0, 0, 0.1, blue, "LABEL")
    assert Axes(wide).texts == [("LABEL", "center", "black")]
    assert Axes(narrow).texts == [("LABEL", "left", blue)]
    assert Axes(narrow, SpanBar(0, 0.2, 5, blue, "")).texts == [("", "center", "white")], "no room beside"
    assert Axes(SpanBar(0, 0, 0.01, blue, "LABEL")).texts == [], "too short to be seen"
