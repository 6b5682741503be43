"""Draw loss.png and auc.png: the curves of a run, from its records."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.observe.metrics import ClickRecord, Record

TRAIN, VALIDATION, RESUMED = "#3b6ea5", "#d1622b", "#808080"
_APART = 0.03
"""Least share of the axis between two resumes that are both labelled."""


def smoothed(values: Sequence[float]) -> NDArray[np.float64]:
    """Return the values of straight lines fitted around every point by weighted least squares.

    The weights are a bell curve. Unlike a running mean, the result does not lag behind a falling loss, and the ends
    need no special case. A value that is not finite has no weight: one bad step must not blank the rest of the line.
    """
    y = np.asarray(values, dtype=np.float64)
    weight = np.isfinite(y).astype(np.float64)
    y = np.where(weight > 0, y, 0.0)
    width = max(1.0, len(y) / 100)
    reach = min(int(4 * width), max(0, (len(y) - 1) // 2))
    offset = np.arange(-reach, reach + 1, dtype=np.float64)
    bell = np.exp(-0.5 * (offset / width) ** 2)

    def around(power: int, of: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum over the neighbours at ``offset`` of ``bell * offset**power * of``."""
        return np.convolve(of, (bell * offset**power)[::-1], mode="same")

    s0, s1, s2 = (around(power, weight) for power in (0, 1, 2))
    t0, t1 = around(0, y), around(1, y)
    determinant = s0 * s2 - s1**2
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(determinant > 1e-9, (s2 * t0 - s1 * t1) / determinant, t0 / s0)


def draw_loss(records: Sequence[Record], path: str | os.PathLike[str], title: str = "") -> None:
    """Draw training and validation loss over optimizer steps into a PNG file.

    Args:
        records: Records of the run.
        path: The PNG file.
        title: Title of the picture.
    """
    axes = _axes(title)
    steps, losses = [r.step for r in records], [r.loss for r in records]
    lone_point = "o" if len(records) == 1 else None
    axes.plot(steps, losses, color=TRAIN, alpha=0.3, linewidth=0.8)
    axes.plot(
        steps, smoothed(losses), color=TRAIN, linewidth=1.8, marker=lone_point, label="training, smoothed"
    )
    is_clicks = any(isinstance(record, ClickRecord) for record in records)
    evaluated = [(r.step, r.validation) for r in records if r.validation is not None]
    if evaluated:
        digits = 4 if is_clicks else 3
        axes.plot(
            *zip(*evaluated, strict=True),
            color=VALIDATION, marker="o", markersize=5, linewidth=1.2,
            label=f"validation, last {evaluated[-1][1]:.{digits}f}",
        )  # fmt: skip
    _mark_resumes(axes, records)
    axes.set_ylabel("log loss (nats per sample)" if is_clicks else "loss (nats per token)")
    if records:
        axes.legend(frameon=False, loc="upper right")
    write_picture(axes, path)


def draw_auc(
    records: Sequence[Record], path: str | os.PathLike[str], title: str = "", best: float | None = None
) -> None:
    """Draw the AUC of every evaluation into a PNG file.

    Args:
        records: Records of the run.
        path: The PNG file.
        title: Title of the picture.
        best: Best AUC that any model can have, drawn as a line; None: unknown.
    """
    axes = _axes(title)
    evaluated = [(r.step, r.auc) for r in records if isinstance(r, ClickRecord) and r.auc is not None]
    if evaluated:
        axes.plot(
            *zip(*evaluated, strict=True),
            color=VALIDATION, marker="o", markersize=5, linewidth=1.2,
            label=f"validation, last {evaluated[-1][1]:.4f}",
        )  # fmt: skip
    if best is not None:
        axes.axhline(best, color=TRAIN, linewidth=1.2, linestyle="--", label=f"best possible, {best:.4f}")
    _mark_resumes(axes, records)
    axes.set_ylabel("area under the ROC curve")
    if evaluated:
        # Above the axes: inside, its marker would read as one more measurement.
        axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)
    write_picture(axes, path)


def _mark_resumes(axes: Any, records: Sequence[Record]) -> None:
    """Draw a thin dashed line at each step that the run was resumed from, with the step beside it.

    Lines that stand closer than ``_APART`` of the axis to the last labelled one have no label of their own.
    """
    steps = sorted({r.resumed_from for r in records if r.resumed_from is not None})
    span = records[-1].step - records[0].step if records else 0
    labelled: int | None = None
    for step in steps:
        axes.axvline(step, color=RESUMED, linestyle="--", linewidth=0.8, zorder=1)
        if labelled is None or step - labelled >= _APART * span:
            # In points from the line, and at the foot of the axes: the legend has the top.
            axes.annotate(
                f"resumed at {step}", (step, 0.02), xycoords=axes.get_xaxis_transform(), xytext=(2, 0),
                textcoords="offset points", rotation=90, va="bottom", fontsize=7, color=RESUMED,
            )  # fmt: skip
            labelled = step


def _axes(title: str) -> Any:
    """Return empty axes over optimizer steps."""
    from matplotlib.ticker import MaxNLocator

    axes = empty_axes(title, "optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return axes


def empty_axes(title: str, across: str) -> Any:
    """Return empty axes with a title and a label of the horizontal axis."""
    # Imported here, because the import takes half a second. No pyplot: it keeps global state and looks for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel(across)
    axes.margins(x=0.01)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11)
    return axes


def write_picture(axes: Any, path: str | os.PathLike[str]) -> None:
    """Write the picture to a temporary file and rename it, so that a reader sees the old picture or the new one."""
    path = Path(path)
    fresh = path.with_name("." + path.name)
    axes.figure.savefig(fresh, format="png")
    fresh.replace(path)


class LossPicture:
    """Sink that redraws ``loss.png`` after an evaluation, at most once a minute, and at the end."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        title: str = "",
        earlier: Sequence[Record] = (),
        every_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._title, self._every_s, self._clock = Path(path), title, every_s, clock
        self._records = list(earlier)
        self._drawn_at = clock()

    def write(self, record: Record) -> None:
        """Keep the record, and draw if the interval is over."""
        self._records.append(record)
        if record.validation is not None and self._clock() - self._drawn_at >= self._every_s:
            self._draw()
            self._drawn_at = self._clock()

    def _draw(self) -> None:
        draw_loss(self._records, self._path, self._title)

    def close(self) -> None:
        """Draw the whole run."""
        if self._records:
            self._draw()


class AucPicture(LossPicture):
    """Sink that redraws ``auc.png`` after an evaluation, at most once a minute, and at the end."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        title: str = "",
        earlier: Sequence[Record] = (),
        best: float | None = None,
    ) -> None:
        super().__init__(path, title, earlier)
        self._best = best

    def _draw(self) -> None:
        draw_auc(self._records, self._path, self._title, self._best)
