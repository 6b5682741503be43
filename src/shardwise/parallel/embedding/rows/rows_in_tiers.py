"""RowsInTiers: the rows of one store of which only some are in memory, above segments on a disk.

    lend       row -> place in memory, after reading what is missing        FETCH
    bring      the same for all rows with gradients, before NORM            STEP then needs no disk
    begin      places for new rows, whose lines are written
    stored     lines through a window, without a row entering memory        saves, exports, copies
    put        lines from outside, the same way                             loads
    remove     rows that are evicted or drawn anew, on all tiers

Errors of the disk are kept in ``faults`` where the caller tells all ranks (disk_faults.py), and raised elsewhere.

Cost:   tiers/row_cache.py, tiers/row_segments.py; a window of at most 16,384 lines.
Shapes: n rows of one call.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.base.errors import TierError
from shardwise.kernels.tables.index_snapshot import IndexSnapshot
from shardwise.kernels.tables.row_replay import StepHistory
from shardwise.parallel.embedding.rows.disk_faults import DiskFaults
from shardwise.parallel.embedding.rows.row_lines import RowLines
from shardwise.parallel.embedding.rows.tiered_snapshot import TieredSnapshot
from shardwise.tiers.cache_snapshot import Draw
from shardwise.tiers.row_cache import CacheFigures, LinesBelow, Order, RowCache
from shardwise.tiers.row_segments import RowSegments

_log = logging.getLogger(__name__)
WINDOW_ROWS = 1 << 14
"""Largest number of rows that are copied out of the cache, or into it, at once."""


class RowsInTiers:
    """The rows of one store of which only some are in memory.

    Args:
        lines: memory of the rows in the cache.
        window: memory of some lines, for copies of rows that do not enter the cache.
        below: the tier that holds the other rows.
        draw: writes start lines of rows that were never written; None for dynamic tables, whose rows are written first.
        order: returns the number by which each row is sorted before rows are written to the disk together.
        faults: keeps errors of the disk until the other ranks are told.
    """

    def __init__(
        self,
        lines: RowLines,
        window: RowLines,
        below: LinesBelow,
        draw: Draw | None,
        order: Order,
        faults: DiskFaults,
    ) -> None:
        self.below = below
        self._lines, self._window = lines, window
        self._faults = faults
        self._cache: RowCache[RowLines] = RowCache(lines, window, len(lines), below, draw, order)
        self._brought: tuple[Tensor, Tensor] | None = None
        """Rows with gradients that were brought into memory for STEP, and their places."""
        self.snapshot: TieredSnapshot | None = None
        """The rows that a save is reading."""

    def __len__(self) -> int:
        """Return the number of rows that may be in memory."""
        return len(self._lines)

    @property
    def index_bytes(self) -> int:
        """Bytes of memory beside the lines: indexes, marks, the window, and buffers of the segments."""
        found = self._cache.nbytes
        if isinstance(self.below, RowSegments):
            figures = self.below.figures()
            found += figures.index_bytes + figures.buffer_bytes
        return found

    @property
    def disk_bytes(self) -> int:
        """Bytes of the rows on disk."""
        return self.below.figures().disk_bytes if isinstance(self.below, RowSegments) else 0

    # Passes and steps --------------------------------------------------------------------------------------------

    def lend(self, rows: Tensor, *, changes: bool = False, learns: bool = False) -> Tensor:
        """Return the places of rows in memory, which stay there until the next call; see ``RowCache.lend``."""
        return self._cache.lend(rows, changes=changes, learns=learns)

    def read_ahead(self, rows: Tensor, steps: int) -> None:
        """Bring distinct rows into memory for a later step, as far as there is room; may run in another thread."""
        self._cache.read_ahead(rows, steps)

    def begin(self, rows: Tensor, lines: Tensor) -> None:
        """Write the start lines [n, w + state] of distinct new rows."""
        most = len(self._lines)
        for part, of_part in zip(rows.split(most), lines.split(most), strict=True):
            with self._faults.kept():
                self._lines.write(self._cache.begin(part), of_part)

    def bring(self, rows: Tensor) -> None:
        """Bring the distinct rows that STEP will update into memory, where they stay until then.

        If there are more of them than places, or if the disk has failed, the step is refused and nothing is brought.
        """
        if self._faults.is_pending or rows.numel() > len(self):
            return
        with self._faults.deferred(), self._faults.kept():
            self._brought = rows, self._cache.lend(rows, changes=True, learns=True)

    def places_of_step(self, rows: Tensor) -> Tensor:
        """Return the places of the rows that STEP updates, to which ``bring`` has brought them."""
        brought, self._brought = self._brought, None
        if brought is not None and brought[0] is rows:
            return brought[1]
        return self._cache.lend(
            rows, changes=True, learns=True
        )  # there are no gradients, or there was no NORM

    def forget_step(self) -> None:
        """Forget the places that ``bring`` has found, because the step is dropped."""
        self._brought = None

    def end_step(self) -> None:
        """End the running step, whose rows may leave memory now.

        If compaction fails, no row is lost: the next step says so on all ranks.
        """
        try:
            self._cache.end_step()
        except TierError as error:
            _log.warning("%s; the next step is refused", error)
            self._faults.note_for_next(error)

    def remove(self, rows: Tensor) -> None:
        """Forget rows, in memory and on disk; unknown rows are ignored."""
        self._cache.remove(rows)

    def take_figures(self) -> CacheFigures:
        """Return the counts of the cache since the last call, and begin new ones."""
        return self._cache.take_figures()

    def close(self) -> None:
        """Remove the files on the disk."""
        if isinstance(self.below, RowSegments):
            self.below.close()

    # Rows in and out ---------------------------------------------------------------------------------------------

    def stored(
        self, rows: Tensor, history: StepHistory | None, weights_only: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return weights and optimizer state of distinct rows, in whatever tier they are.

        Args:
            rows: the rows.
            history: steps up to which rows are brought, for an exact Adam; None for other optimizers.
            weights_only: True leaves out the optimizer state.
        """
        found = [self._window.stored(rows[:0], weights_only)]
        for part in rows.split(len(self._window)):
            with self._faults.kept():
                self._copy_to_window(part, history)
            found.append(self._window.stored(torch.arange(part.numel()), weights_only))
        weights, states = zip(*found, strict=True)
        return torch.cat(weights), {name: torch.cat([each[name] for each in states]) for name in states[0]}

    def put(self, rows: Tensor, lines: Tensor) -> None:
        """Replace the lines of distinct rows: int64 [n], [n, w + state]."""
        window = self._window
        for part, of_part in zip(rows.split(len(window)), lines.split(len(window)), strict=True):
            places = torch.arange(part.numel())
            window.write(places, of_part)
            with self._faults.kept():
                self._cache.overwrite(part, window, places)

    def begin_save(
        self,
        history: StepHistory | None,
        indexes: Sequence[IndexSnapshot],
        waiting: Sequence[IndexSnapshot | None],
    ) -> TieredSnapshot:
        """Return the rows as they are now for a save, to be read when they are written.

        Steps may change rows meanwhile. Rows of an exact Adam are read as they are after the steps of ``history``.
        """
        self._brought = None  # STEP must announce the rows that it changes to the snapshot
        held, window = self._cache.snapshot(), self._window.like(len(self._window))
        steps = None if history is None else history.frozen()

        def read(rows: Tensor) -> list[Tensor]:
            held.read(rows, window)
            if steps is not None:
                window.catch_up(steps, torch.arange(rows.numel()), None)
            return [each[: rows.numel()] for each in window.tensors]

        self.snapshot = TieredSnapshot(read, len(window), indexes, waiting, held.close)
        return self.snapshot

    def _copy_to_window(self, rows: Tensor, history: StepHistory | None) -> None:
        """Copy the lines of distinct rows to the first places of the window, up to date."""
        self._cache.copy(rows, self._window)
        if history is not None:
            self._window.catch_up(history, torch.arange(rows.numel()), None)
