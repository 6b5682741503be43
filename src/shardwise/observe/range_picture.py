"""lr_range.png: the loss over a growing learning rate, and the learning rate that the curve suggests.

    u = ln lr;  s(u) the smoothed loss;  lowest = argmin s;  steepest = argmin ds/du up to there

Below ``steepest`` training is slower than necessary, beyond ``lowest`` it begins to fail. A cycle may go up to a rate
between the two; a rate that is kept for long should be near ``steepest``.

Paper: Smith 2018, arXiv:1803.09820.
"""

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardwise.observe.metrics import Record
from shardwise.observe.picture import TRAIN, VALIDATION, empty_axes, smoothed, write_picture

_log = logging.getLogger(__name__)
_FEWEST = 8
"""Fewest different rates from which a result is derived."""


class RangeReading(NamedTuple):
    """Result of a range test: learning rates."""

    steepest: float
    """Learning rate at which the loss falls fastest."""
    lowest: float
    """Learning rate at which the loss is lowest."""
    fails: float | None
    """First rate beyond ``lowest`` with a loss above that of the start; None if the test ended before."""

    def __str__(self) -> str:
        end = (
            f"above {self.fails:.2g} training fails"
            if self.fails
            else "the test ended before training failed"
        )
        if self.steepest >= self.lowest:
            return f"the loss did not fall: begin with a lower rate than {self.steepest:.2g}"
        return (
            f"the loss falls fastest at lr {self.steepest:.2g} and is lowest at {self.lowest:.2g}; {end}. Train with "
            f"about {self.steepest:.2g}; one_cycle may go up to {math.sqrt(self.steepest * self.lowest):.2g}"
        )


def reading(lrs: Sequence[float], losses: Sequence[float]) -> RangeReading | None:
    """Return the result of a range test; None for too few rates.

    Args:
        lrs: Learning rate of each step.
        losses: Loss of each step.
    """
    by_rate: dict[float, list[float]] = {}
    for lr, loss in zip(lrs, losses, strict=True):
        by_rate.setdefault(lr, []).append(loss)
    rates = sorted(rate for rate in by_rate if rate > 0)
    if len(rates) < _FEWEST:
        return None
    found = smoothed([sum(by_rate[rate]) / len(by_rate[rate]) for rate in rates])
    found = np.where(np.isfinite(found), found, np.inf)
    lowest = int(np.argmin(found))
    slopes = np.diff(found[: lowest + 1]) / np.diff(np.log(rates[: lowest + 1]))
    steepest = int(np.argmin(slopes)) if lowest else 0
    fails = next((rates[i] for i in range(lowest, len(rates)) if found[i] > found[0]), None)
    return RangeReading(rates[steepest], rates[lowest], fails)


def draw_range(
    records: Sequence[Record], path: str | os.PathLike[str], title: str = ""
) -> RangeReading | None:
    """Draw the loss over the learning rate into a PNG file and return the result of the range test.

    Args:
        records: Records of the run.
        path: The PNG file.
        title: Title of the picture.
    """
    known = [(r.lr, r.loss) for r in records if r.lr]
    lrs, losses = [lr for lr, _ in known], [loss for _, loss in known]
    said = reading(lrs, losses)
    axes = empty_axes(title, "learning rate")
    axes.set_xscale("log")
    axes.plot(lrs, losses, color=TRAIN, alpha=0.3, linewidth=0.8)
    axes.plot(lrs, smoothed(losses), color=TRAIN, linewidth=1.8, label="training, smoothed")
    start = losses[0] if losses and math.isfinite(losses[0]) else 1.0
    lowest = min((loss for loss in losses if math.isfinite(loss)), default=start)
    spread = max(start - lowest, 1e-3)
    axes.set_ylim(lowest - 0.2 * spread, start + 0.6 * spread)  # a failing loss runs out of the picture
    if said is not None:
        for rate, style, what in ((said.steepest, "-", "falls fastest"), (said.lowest, "--", "lowest")):
            axes.axvline(rate, color=VALIDATION, linestyle=style, linewidth=1.2, label=f"{what}, {rate:.2g}")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False, loc="upper left")
    write_picture(axes, path)
    return said


class RangePicture:
    """Sink that draws ``lr_range.png`` at the end, also of a run that failed, and logs the result."""

    def __init__(self, path: str | os.PathLike[str], title: str = "", earlier: Sequence[Record] = ()) -> None:
        self._path, self._title = Path(path), title
        self._records = list(earlier)

    def write(self, record: Record) -> None:
        """Keep the record of the step."""
        self._records.append(record)

    def close(self) -> None:
        """Draw the picture and log the result."""
        if self._records:
            said = draw_range(self._records, self._path, self._title)
            _log.info("range test: %s", said or f"fewer than {_FEWEST} learning rates; let it run longer")
