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


class Shelf:
    """Lines by row."""

    def __init__(self) -> None:
        self.lines: dict[int, Tensor] = {}
        self.before_read: Callable[[Tensor], None] = lambda rows: None
        self.before_write: Callable[[Tensor], None] = lambda rows: None
        self.compacted = 0

    def write(self, rows: Tensor, lines: Tensor) -> None:
        assert len(set(rows.tolist())) == len(rows) == len(lines)
        self.before_write(rows)
        self.lines.update(zip(rows.tolist(), lines.clone(), strict=True))

    def read(self, rows: Tensor, out: Tensor) -> None:
        self.before_read(rows)
        for place, row in enumerate(rows.tolist()):
            out[place] = self.lines[row]

    def holds(self, rows: Tensor) -> Tensor:
        return torch.tensor([row in self.lines for row in rows.tolist()], dtype=torch.bool)

    def remove(self, rows: Tensor) -> None:
        for row in rows.tolist():
            self.lines.pop(row, None)

    def compact(self, most_bytes: int) -> int:
        self.compacted += most_bytes
        return 0
