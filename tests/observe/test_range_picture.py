"""What a range test says, of losses with a known shape."""

import logging
import math
from pathlib import Path

import pytest

from shardwise.observe.metrics import StepRecord
from shardwise.observe.range_picture import RangePicture, reading

RATES = [1e-4 * 10 ** (step / 50) for step in range(200)]


def losses() -> list[float]:
    """Falls fastest at 1e-3, is lowest near 1e-2, fails beyond."""
    falls = [4 - 2 / (1 + math.exp(-6 * math.log10(rate / 1e-3))) for rate in RATES]
    return [loss + (rate / 0.03) ** 2 for loss, rate in zip(falls, RATES, strict=True)]


def test_the_steepest_fall_and_the_lowest_loss() -> None:
    said = reading(RATES, losses())
    assert said is not None and said.fails is not None
    assert said.steepest == pytest.approx(1e-3, rel=0.2)
    assert 3e-3 < said.lowest < 1e-2 < said.fails < 0.06
    assert "one_cycle may go up to" in str(said)


def test_a_test_that_fails_from_the_start_or_not_at_all() -> None:
    rises = reading(RATES, [rate for rate in RATES])
    assert rises is not None and "did not fall" in str(rises)
    falls = reading(RATES, [1 - rate for rate in RATES])
    assert falls is not None and falls.fails is None and "ended before training failed" in str(falls)
    assert reading(RATES[:5], RATES[:5]) is None


def test_stairs_count_a_rate_once_and_losses_may_end_as_nan() -> None:
    rates = [rate for rate in RATES for _ in range(2)]
    doubled = [loss for loss in losses() for _ in range(2)]
    said = reading(rates[:-4], [*doubled[:-8], *[math.nan] * 4])
    assert said is not None and said.steepest == pytest.approx(1e-3, rel=0.2)


def test_the_picture_and_the_suggestion(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = RangePicture(tmp_path / "lr_range.png")
    for step, (rate, loss) in enumerate(zip(RATES, losses(), strict=True)):
        sink.write(StepRecord(step + 1, loss, lr=rate))
    with caplog.at_level(logging.INFO, logger="shardwise"):
        sink.close()
    assert (tmp_path / "lr_range.png").read_bytes().startswith(b"\x89PNG")
    assert "falls fastest at lr 0.001" in caplog.text or "falls fastest at lr 0.0009" in caplog.text
