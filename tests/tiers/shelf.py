"""A tier below a cache in memory, for tests: a dictionary of lines that fails, or waits, when it is told to."""

from collections.abc import Callable

import torch
from torch import Tensor


class Lines:
    """Memory of lines of int64 numbers, as ``LineMemory`` has it."""

    def __init__(self, places: int, width: int = 2) -> None:
        self.memory = torch.full((places, width), -1, dtype=torch.int64)

    @property
    def line_bytes(self) -> int:
        return self.memory.shape[1] * 8

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def to_bytes(self, places: Tensor) -> Tensor:
        return self.memory[places].view(torch.uint8)

    def from_bytes(self, places: Tensor, lines: Tensor) -> None:
        self.memory[places] = lines.contiguous().view(torch.int64)


class Records:
    """A snapshot of a shelf: records at their positions."""

    def __init__(self, shelf: "Shelf") -> None:
        self._shelf = shelf
        shelf.snapshots += 1

    def positions(self, rows: Tensor) -> Tensor:
        return torch.tensor([self._shelf.where.get(row, -1) for row in rows.tolist()], dtype=torch.int64)

    def read(self, rows: Tensor, positions: Tensor, out: Tensor) -> None:
        self._shelf.before_read(rows)
        for place, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            written, line = self._shelf.records[position]
            assert written == row, "the record of another row"
            out[place] = line

    def close(self) -> None:
        self._shelf.snapshots -= 1


class Shelf:
    """Lines by row, the newest of records that are only appended."""

    def __init__(self) -> None:
        self.lines: dict[int, Tensor] = {}
        self.where: dict[int, int] = {}
        self.records: list[tuple[int, Tensor]] = []
        self.snapshots = 0
        self.before_read: Callable[[Tensor], None] = lambda rows: None
        self.before_write: Callable[[Tensor], None] = lambda rows: None
        self.compacted = 0

    def write(self, rows: Tensor, lines: Tensor) -> None:
        assert len(set(rows.tolist())) == len(rows) == len(lines)
        self.before_write(rows)
        for row, line in zip(rows.tolist(), lines.clone(), strict=True):
            self.lines[row], self.where[row] = line, len(self.records)
            self.records.append((row, line))

    def read(self, rows: Tensor, out: Tensor) -> None:
        self.before_read(rows)
        for place, row in enumerate(rows.tolist()):
            out[place] = self.lines[row]

    def holds(self, rows: Tensor) -> Tensor:
        return torch.tensor([row in self.lines for row in rows.tolist()], dtype=torch.bool)

    def remove(self, rows: Tensor) -> None:
        for row in rows.tolist():
            self.lines.pop(row, None)
            self.where.pop(row, None)

    def snapshot(self) -> Records:
        return Records(self)

    def compact(self, most_bytes: int) -> int:
        self.compacted += most_bytes
        return 0
