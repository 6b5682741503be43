"""RowLines: the memory that holds the lines of one store's rows, by place.

    one dtype    memory  | weights: w columns | optimizer state: s columns |       a line is one stretch of memory
    others       memory  | weights |    state  | optimizer state |                 the same places in both

    update       one dtype: in place            others: lines widened to fp32, updated, rounded and written back
    bytes        of a line, for another tier: those of the weights, then those of the state

A place is the number of a line in this memory. The store translates rows to places; without tiers the place of a row is
its number. Memory on the CPU is address space that takes memory when a line is first written (kernels/tables/slab.py).
Weights of 16 bits are rounded stochastically after an update (kernels/tables/rounding.py), and to the nearest where
lines are written from outside: start rows, and rows of a checkpoint in fp32. Lines are widened a few thousand at a
time, into memory that stays in a core's cache.

Cost:   a line is read and written once in an update; bytes of a line: ``line_bytes``.
Shapes: U places of one call, w columns of the table that are on this rank, s columns of optimizer state.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.kernels.tables.pooling import gather
from shardwise.kernels.tables.rounding import narrow, widen
from shardwise.kernels.tables.row_optimizers import update
from shardwise.kernels.tables.row_replay import StepHistory, catch_up
from shardwise.kernels.tables.row_rules import Adam, RowOptimizer
from shardwise.kernels.tables.row_snapshot import StoreSnapshot
from shardwise.kernels.tables.slab import reserve
from shardwise.parallel.embedding.rules import ONE_A_ROW, RowDtypes, state_columns

_WIDENED_BYTES = 1 << 18
"""Bytes of lines that an update on the CPU widens at once."""


class Rounding(NamedTuple):
    """Random numbers by which an update rounds lines to 16 bits."""

    ids: Tensor
    """Id of each row, on the device of the lines: int64 [U]."""
    word: int
    """Word of the step, as ``kernels.tables.rounding.word_of`` returns it."""


WEIGHTS = "weights"
"""Name of the weights among the numbers of a line."""


class LineColumns(NamedTuple):
    """Position of the weights, or of one optimizer state, in the memory of lines."""

    memory: int
    """Index of the tensor that holds them."""
    start: int
    stop: int


class RowLines:
    """Lines of rows: weights and optimizer state, by place.

    Args:
        places: number of lines.
        columns: columns of the table that are on this rank.
        width: columns of the whole table.
        optimizer: rule of the optimizer.
        dtype: dtype of gradients and of updates.
        stored: dtypes of the stored weights and optimizer state.
        device: device of the lines.
    """

    def __init__(
        self,
        places: int,
        columns: range,
        width: int,
        optimizer: RowOptimizer,
        dtype: torch.dtype,
        stored: RowDtypes,
        device: torch.device,
    ):
        self.width = len(columns)
        """Columns of weights on this rank, w."""
        self.optimizer = optimizer
        self.dtype = dtype
        self.stored_dtypes = stored
        self.columns = self.width + optimizer.columns(self.width)
        """Numbers of a line, w + s."""
        self._first, self._whole = columns.start, width
        self.state: Tensor | None = None
        """Optimizer state [places, s] if it lies apart from the weights."""
        self.snapshot: StoreSnapshot | None = None
        """Lines that a save is reading while they change."""
        self._wide: Tensor | None = None
        """Memory for widened lines, kept between updates."""
        if stored.is_one:
            self.memory = _memory(places, self.columns, dtype, device)
        else:
            self.memory = _memory(places, self.width, stored.weights, device)
            if self.columns > self.width:
                self.state = _memory(places, self.columns - self.width, stored.state, device)

    def __len__(self) -> int:
        """Return the number of places."""
        return len(self.memory)

    def like(self, places: int) -> "RowLines":
        """Return memory of as many lines of the same kind, for copies."""
        columns = range(self._first, self._first + self.width)
        return RowLines(
            places, columns, self._whole, self.optimizer, self.dtype, self.stored_dtypes, self.device
        )

    @property
    def device(self) -> torch.device:
        """Device of the lines."""
        return self.memory.device

    @property
    def is_rounded(self) -> bool:
        """True if updates round lines, and so need ``Rounding``."""
        return not self.stored_dtypes.is_one

    @property
    def line_bytes(self) -> int:
        """Bytes of a line."""
        return self.stored_dtypes.line_bytes(self.width, self.columns - self.width)

    @property
    def nbytes(self) -> int:
        """Bytes of all places, written or not."""
        return len(self) * self.line_bytes

    @property
    def tensors(self) -> list[Tensor]:
        """All memory of the lines."""
        return [self.memory] if self.state is None else [self.memory, self.state]

    @property
    def positions(self) -> dict[str, LineColumns]:
        """Positions of the weights and of each optimizer state in ``tensors``, by name."""
        found = {WEIGHTS: LineColumns(0, 0, self.width)}
        memory, start = (0, self.width) if self.state is None else (1, 0)
        for name, columns in state_columns(self.optimizer, self.width):
            found[name] = LineColumns(memory, start, start + columns)
            start += columns
        return found

    @property
    def pooled_from(self) -> Tensor:
        """Tensor [places, w or more] whose first w columns are the weights, for pooling without a copy of the rows."""
        return self.memory

    def weights(self, places: Tensor) -> Tensor:
        """Return the weights of lines, of 16 bits in fp32: int64 [U] -> [U, w]."""
        return gather(self.memory, places, self.width)

    def stored(self, places: Tensor, weights_only: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """Return weights [U, w] and optimizer state by name, [U, w] or [U, 1], in their stored dtypes.

        Args:
            places: lines, int64 [U].
            weights_only: True leaves out the optimizer state.
        """
        source, start = (self.memory, self.width) if self.state is None else (self.state, 0)
        state: dict[str, Tensor] = {}
        for name, columns in () if weights_only else state_columns(self.optimizer, self.width):
            state[name] = source[:, start : start + columns].index_select(0, places)
            start += columns
        return self.memory[:, : self.width].index_select(0, places), state

    def update(
        self,
        places: Tensor,
        grads: Tensor,
        *,
        lr: float,
        step: int,
        scale: float,
        mean_squares: Tensor | None,
        rounding: Rounding | None = None,
    ) -> None:
        """Run one optimizer step on lines, each named once; arguments as in ``row_optimizers.update``.

        ``rounding`` is needed if ``is_rounded``.
        """
        self._keep(places)
        if not self.is_rounded:
            update(
                self.optimizer,
                self.memory,
                places,
                grads,
                lr=lr,
                step=step,
                scale=scale,
                mean_squares=mean_squares,
            )
            return
        assert rounding is not None, "lines of 16 bits are rounded"
        count = len(places)
        each = max(1, _WIDENED_BYTES // (self.columns * self.dtype.itemsize))
        each = count if self.device.type != "cpu" else min(each, count)
        if self._wide is None or len(self._wide) < each:
            self._wide = torch.empty(each, self.columns, dtype=self.dtype, device=self.device)
        order = torch.arange(each, device=self.device)
        for start in range(0, count, max(each, 1)):
            part = slice(start, min(start + each, count))
            lines = self._wide[: part.stop - start]
            self._widen(places[part], lines)
            update(
                self.optimizer,
                lines,
                order[: len(lines)],
                grads[part],
                lr=lr,
                step=step,
                scale=scale,
                mean_squares=None if mean_squares is None else mean_squares[part],
            )
            self._narrow(lines, places[part], Rounding(rounding.ids[part], rounding.word))

    def catch_up(
        self, history: StepHistory, places: Tensor, stood: Tensor | None, for_update: bool = False
    ) -> None:
        """Replay the steps that lines missed, for an exact Adam; arguments as in ``row_replay.catch_up``."""
        assert isinstance(self.optimizer, Adam) and not self.is_rounded, "Adam alone replays, in one dtype"
        self._keep(places)
        catch_up(
            history,
            self.optimizer,
            self.memory,
            places,
            self.width,
            stood,
            for_update=for_update,
            are_whole=self.width == self._whole,
        )

    def write(self, places: Tensor | slice, lines: Tensor) -> None:
        """Write lines [U, w + s] from the host at places, rounded to the nearest if they have 16 bits."""
        if isinstance(places, Tensor):  # a slice is written when a table begins anew, which waits for saves
            self._keep(places)
        if self.state is not None:
            _write(self.memory, places, lines[:, : self.width])
            _write(self.state, places, lines[:, self.width :])
        else:
            _write(self.memory, places, lines)

    def to_bytes(self, places: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the bytes of lines on the host: uint8 [U, line_bytes], written into ``out`` if it is given."""
        there = places.to(self.device)
        parts = [each.index_select(0, there).cpu().view(torch.uint8) for each in self.tensors]
        if out is None:
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return torch.cat(parts, 1, out=out)

    def from_bytes(self, places: Tensor, lines: Tensor) -> None:
        """Write lines from the bytes that ``to_bytes`` returned: uint8 [U, line_bytes] at places."""
        if len(self.tensors) == 1:
            _write(self.memory, places, lines.contiguous().view(self.memory.dtype))
            return
        start = 0
        for each in self.tensors:
            stop = start + each.shape[1] * each.itemsize
            # A part of one line counts as contiguous and would stay where it is, at an address of bytes.
            part = lines[:, start:stop].clone(memory_format=torch.contiguous_format)
            _write(each, places, part.view(each.dtype))
            start = stop

    def _keep(self, places: Tensor) -> None:
        """Copy lines that are about to change for the save that reads them, if there is one."""
        snapshot = self.snapshot  # the thread that writes may end the save at any moment
        if snapshot is not None:
            snapshot.keep(places)

    def _widen(self, places: Tensor, lines: Tensor) -> None:
        """Read lines into memory of the dtype of updates: [U] -> [U, w + s]."""
        widen(self.memory, places, lines)
        if self.state is not None:
            widen(self.state, places, lines, self.width)

    def _narrow(self, lines: Tensor, places: Tensor, rounding: Rounding) -> None:
        """Write lines [U, w + s] at places, rounded by the numbers of their columns in the whole table."""
        ids, word = rounding
        narrow(lines, 0, self.memory, places, ids, word, self._first)
        if self.state is None:
            return
        start, column = 0, self._whole
        for name, columns in state_columns(self.optimizer, self.width):
            first = 0 if name in ONE_A_ROW else self._first
            part = self.state[:, start : start + columns]
            narrow(lines, self.width + start, part, places, ids, word, column + first)
            start, column = start + columns, column + (1 if name in ONE_A_ROW else self._whole)


def _memory(places: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros [places, columns], which take memory when they are written if ``device`` is the CPU."""
    if device.type == "cpu":
        return reserve(places, columns, dtype)
    return torch.zeros(places, columns, dtype=dtype, device=device)


def _write(memory: Tensor, places: Tensor | slice, lines: Tensor) -> None:
    if isinstance(places, slice):
        memory[places].copy_(lines)
    else:
        memory[places.to(memory.device)] = lines.to(memory.device, memory.dtype)
