"""The tensors of one table in a checkpoint whose rows are read when they are written.

Such rows are checked when they are read, as every load checks them. A fault fails the save on all ranks before the step
is committed.
"""

from functools import partial

from torch import Tensor

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint import FlatSlice, TensorPieces
from shardwise.checkpoint.piece import ElementSource, LazySlice
from shardwise.engine.state import table_notes
from shardwise.engine.state.table_notes import KIND, fault_of_buckets, fault_of_scores, fault_of_waiting
from shardwise.parallel.embedding.rows.row_lines import WEIGHTS
from shardwise.parallel.embedding.saved import KEY, PAIR, SCORE, StreamedRows

_KINDS = {WEIGHTS: KIND, KEY: table_notes.KEY, SCORE: table_notes.SCORE, PAIR: table_notes.WAITING}


class StreamedItems:
    """The tensors of one table that this rank writes from rows that are read later.

    Args:
        name: name of the table, for errors.
        eviction: type of the table's eviction; None for static tables.
        steps: number of steps after which the rows are saved.
    """

    def __init__(self, name: str, eviction: str | None, steps: int) -> None:
        self._name, self._eviction, self._steps = name, eviction, steps

    def of(self, rows: StreamedRows) -> list[TensorPieces]:
        """Return the tensors of rows, or of keys that wait for admission."""
        items = []
        for label, (columns, dtype) in rows.columns.items():
            source = ElementSource(partial(self._elements, rows, label, columns), _never_written)
            shape = (rows.total,) if label in (KEY, SCORE) else (rows.total, columns)
            pieces = [
                FlatSlice(
                    start * columns,
                    stop * columns,
                    LazySlice(source, (stop - start) * columns, dtype, start * columns),
                )
                for start, stop in rows.ranges
            ]
            items.append(TensorPieces(_KINDS.get(label, f"{KIND}_{label}"), self._name, shape, dtype, pieces))
        return items

    def _elements(self, rows: StreamedRows, label: str, columns: int, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a tensor, after a check that a load would accept them.

        Raises:
            CheckpointError: if no load would.
        """
        first, last = start // columns, -(-stop // columns)
        found = rows.read(label, (first, last))
        wrong = ""
        if label == KEY:
            wrong = fault_of_buckets(found[:, 0], rows.counts, first)
        elif label == SCORE:
            wrong = fault_of_scores(found[:, 0], self._steps, self._eviction)
        elif label == PAIR:
            wrong = fault_of_waiting(found, rows.counts, first, self._steps)
        if wrong:
            raise CheckpointError(f"table {self._name!r}: {wrong}: a fault of the program, not of the disk")
        return found.contiguous().view(-1)[start - first * columns : stop - first * columns]


def _never_written(start: int, values: Tensor) -> None:
    raise CheckpointError("rows of a save are only read")
