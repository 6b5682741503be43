"""The meter of one step's own memory: what its passes keep, work with and receive when the step holds most.

    kept        storages that earlier Actions made and that are still alive, such as what a forward pass keeps for the
                backward pass; the largest microbatch included, unless the step copies its batches to a device
    at work     storages that the running Action has made
    received    storages that RECV has made

The moment is that of the most bytes of storages made in the passes of the step, on the device of the rank. Storages
that the ledger counts in rows of their own (slots, gradient buffers) add to that sum and to none of these rows. The
names and the definitions are those of a foreseen step (simulate/timeline.py), so that both can be put side by side. The
running Action is the walker's, which learns of a Unit's backward pass by its first gradient if its weights are not
gathered; what the pass makes before counts for the Unit before.

A dispatch mode sees the operations of the one step that is measured, some 10 µs each; other steps pay nothing. Memory
that an operation allocates and frees inside itself is not counted.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.base.pytree import tensors_in
from shardwise.engine.parts.parts import EngineParts
from shardwise.memory.ledger import STEP_ROWS, Row
from shardwise.plan.action import Action, Kind
from shardwise.simulate.storages import StorageCounter

_PACKAGE = Path(__file__).resolve().parents[2]
_COUNTED_BY_THE_LEDGER: dict[str, Row] = {
    str(_PACKAGE / "memory" / "slots.py"): "gathered",
    str(_PACKAGE / "memory" / "direct_io.py"): "gathered",
    str(_PACKAGE / "memory" / "gradient_memory.py"): "gradients",
    str(_PACKAGE / "parallel" / "zero" / "gradient.py"): "gradients",
}
"""Rows of the memory that files of this package make; slots of gradients count as those of weights here."""
_TORCH = str(Path(torch.__file__).resolve().parent)
_COUNTERS = str(Path(sys.modules[StorageCounter.__module__].__file__ or ""))


@contextmanager
def measured_memory(parts: EngineParts, batches: Any) -> Iterator[None]:
    """Measure the memory of the step inside the ``with`` block, and give its rows to the ledger.

    Args:
        parts: The parts of the engine.
        batches: The microbatches of the step.
    """
    if parts.config.compile.scope != "none":
        yield
        return
    ledger, kind = parts.site.ledger, parts.device.type
    sizes = [sum(each.nbytes for each in tensors_in(batch) if each.device.type == kind) for batch in batches]
    meter = StepMeter(lambda: parts.walker.under_way, kind, max(sizes, default=0))
    ledger.rows_now = meter.rows_now
    try:
        with meter:
            yield
    finally:
        ledger.rows_now = dict
    ledger.of_a_step = {row: meter.rows[row] for row in STEP_ROWS if row in meter.rows}


class _Origin(NamedTuple):
    """The origin of one storage."""

    action: Action | None
    row: Row | None
    """Row of the ledger that counts it, or ``received``; None for a storage of a pass."""


class StepMeter(StorageCounter):
    """Counts the memory of the step that runs inside its ``with`` block, by row.

    Args:
        under_way: Function that returns the running Action.
        device_type: Type of the device whose storages count.
        batch_bytes: Bytes of the largest microbatch, if it exists before the step and lies on the device.
    """

    def __init__(self, under_way: Callable[[], Action | None], device_type: str, batch_bytes: int = 0):
        super().__init__()
        self._under_way = under_way
        self._device_type = device_type
        self._batch_bytes = batch_bytes
        self._here = 0
        """Bytes of storages on the device that are alive."""
        self._most_here = -1
        self._by_action: dict[Action | None, int] = {}
        self._by_row: dict[Row, int] = {}
        self._at_peak: dict[Row, int] = {}
        self.peak_action: Action | None = None
        """The Action that ran when the step held most."""

    @property
    def rows(self) -> dict[Row, int]:
        """Bytes by row when the step held most; gradient buffers of that moment included."""
        return dict(self._at_peak)

    def rows_now(self) -> dict[Row, int]:
        """Return the bytes by row at this moment."""
        counted = sum(self._by_row.values())
        at_work = self._by_action.get(self._under_way(), 0)
        return {
            "gradients": self._by_row.get("gradients", 0),
            "kept": self._batch_bytes + self._here - counted - at_work,
            "received": self._by_row.get("received", 0),
            "at work": at_work,
        }

    def sees(self, tensor: torch.Tensor) -> bool:
        """Return whether the storage of ``tensor`` counts."""
        return super().sees(tensor) and tensor.device.type == self._device_type

    def created(self, func: Any, storage_bytes: int) -> _Origin:
        """Count a storage, and note the rows if there were never more bytes."""
        action, row = self._under_way(), _row_of_file()
        if row is None and action is not None and action.kind is Kind.RECV:
            row = "received"
        self._count(action, row, storage_bytes)
        ends = (
            action is not None and action.kind.ends_step
        )  # the first step is checked there by another model
        if self._here > self._most_here and not ends:
            self._most_here, self._at_peak, self.peak_action = self._here, self.rows_now(), action
        return _Origin(action, row)

    def ended(self, made: _Origin, storage_bytes: int) -> None:
        """Subtract a storage."""
        self._count(made.action, made.row, -storage_bytes)

    def _count(self, action: Action | None, row: Row | None, change_bytes: int) -> None:
        self._here += change_bytes
        if row is None:
            self._by_action[action] = self._by_action.get(action, 0) + change_bytes
        else:
            self._by_row[row] = self._by_row.get(row, 0) + change_bytes


def _row_of_file() -> Row | None:
    """Return the row of the innermost function outside of torch that makes the storage of the running operation."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, _COUNTERS, __file__)):
        frame = frame.f_back
    return _COUNTED_BY_THE_LEDGER.get(frame.f_code.co_filename)
