"""RowLines: the memory that holds the lines of one store's rows, by place.

    line     | weights: w columns | optimizer state: columns of row_rules.py |
    memory   [places, w + state]   one stretch of memory a row, so that an update touches one stretch

A place is the number of a line in this memory. The store translates rows to places; without tiers the place of a row is
its number. Memory on the CPU is address space that takes memory when a line is first written (kernels/tables/slab.py).

Cost:   a line is read and written once in an update; bytes of a line: ``line_bytes``.
Shapes: U places of one call, w columns of the table that are on this rank.
"""

import torch
from torch import Tensor

from shardwise.kernels.tables.pooling import gather
from shardwise.kernels.tables.row_optimizers import update
from shardwise.kernels.tables.row_replay import StepHistory, catch_up
from shardwise.kernels.tables.row_rules import Adam, RowOptimizer
from shardwise.kernels.tables.slab import reserve
from shardwise.parallel.embedding.rules import state_columns


class RowLines:
    """Lines of rows: weights and optimizer state, by place.

    Args:
        places: number of lines.
        width: columns of weights on this rank, w.
        optimizer: rule of the optimizer.
        dtype: dtype of weights, gradients and optimizer state.
        device: device of the lines.
    """

    def __init__(
        self, places: int, width: int, optimizer: RowOptimizer, dtype: torch.dtype, device: torch.device
    ):
        self.width = width
        self.optimizer = optimizer
        self.dtype = dtype
        self.columns = width + optimizer.columns(width)
        """Numbers of a line."""
        if device.type == "cpu":
            self.memory = reserve(places, self.columns, dtype)
        else:
            self.memory = torch.zeros(places, self.columns, dtype=dtype, device=device)

    def __len__(self) -> int:
        """Return the number of places."""
        return len(self.memory)

    @property
    def device(self) -> torch.device:
        """Device of the lines."""
        return self.memory.device

    @property
    def line_bytes(self) -> int:
        """Bytes of a line."""
        return self.columns * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all places, written or not."""
        return self.memory.nbytes

    @property
    def pooled_from(self) -> Tensor:
        """Tensor [places, w or more] whose first w columns are the weights, for pooling without a copy of the rows."""
        return self.memory

    def weights(self, places: Tensor) -> Tensor:
        """Return the weights of lines: int64 [U] -> [U, w]."""
        return gather(self.memory, places, self.width)

    def stored(self, places: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return weights [U, w] and optimizer state by name, [U, w] or [U, 1], as they are stored."""
        state, start = {}, self.width
        for name, columns in state_columns(self.optimizer, self.width):
            state[name] = self.memory[:, start : start + columns].index_select(0, places)
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
    ) -> None:
        """Run one optimizer step on lines, each named once; arguments as in ``row_optimizers.update``."""
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

    def catch_up(self, history: StepHistory, places: Tensor, stood: Tensor | None) -> None:
        """Replay the steps that lines missed, for an exact Adam; arguments as in ``row_replay.catch_up``."""
        assert isinstance(self.optimizer, Adam), "Adam alone replays"
        catch_up(history, self.optimizer, self.memory, places, self.width, stood)

    def write(self, places: Tensor | slice, lines: Tensor) -> None:
        """Write lines [U, w + state] from the host at places."""
        if isinstance(places, slice):
            self.memory[places].copy_(lines)
        else:
            self.memory[places.to(self.device)] = lines.to(self.device)

    def to_bytes(self, places: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the bytes of lines on the host: uint8 [U, line_bytes], written into ``out`` if it is given."""
        found = self.memory.index_select(0, places.to(self.device)).cpu().view(torch.uint8)
        return found if out is None else out.copy_(found)

    def from_bytes(self, places: Tensor, lines: Tensor) -> None:
        """Write lines from the bytes that ``to_bytes`` returned: uint8 [U, line_bytes] at places."""
        self.write(places, lines.contiguous().view(self.dtype))
