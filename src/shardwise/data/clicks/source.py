"""A click log as a dataset: a range of a source's rows, in the form that a model takes.

>>> clicks = Clicks(PackedClicks("day_0.clicks"))
>>> train, validation = clicks.split(0.1)               # the end of a log is its future
>>> loader = Loader(train, global_batch=4096, micro_batch=2048, dp_index=rank, dp_size=2)
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import DataError
from shardwise.data.batched import BatchedDataset
from shardwise.data.clicks.rows import BatchForm, ClickBatch, ClickRows, ClickSchema


class RowSource(Protocol):
    """Interface of a source of rows by number: packed or synthetic clicks."""

    @property
    def schema(self) -> ClickSchema:
        """Columns of the rows."""
        ...

    def __len__(self) -> int: ...
    def rows(self, samples: npt.NDArray[np.int64]) -> ClickRows:
        """Return these rows in this order."""
        ...

    def fingerprint(self) -> str:
        """Return a digest of the rows."""
        ...


class ClickDataset(BatchedDataset):
    """Rows ``[start, stop)`` of a source, as batches.

    Args:
        source: the source.
        start: first row.
        stop: end of the rows; None takes all.
        form: conversion of rows to a batch.

    Raises:
        DataError: if the range is empty or outside the source.
    """

    def __init__(
        self, source: RowSource, start: int = 0, stop: int | None = None, form: BatchForm | None = None
    ) -> None:
        self.source, self.form = source, form or BatchForm()
        self.start, self.stop = start, len(source) if stop is None else stop
        if not 0 <= self.start < self.stop <= len(source):
            raise DataError(
                f"rows [{self.start}, {self.stop}) of a click log that holds {len(source)}; expected at least one"
            )

    @property
    def schema(self) -> ClickSchema:
        """Columns of the rows."""
        return self.source.schema

    def __len__(self) -> int:
        return self.stop - self.start

    def batch(self, samples: npt.NDArray[np.int64]) -> ClickBatch:
        """Return a batch of these samples in this order; there may be none."""
        if samples.size and not 0 <= samples.min() <= samples.max() < len(self):
            raise IndexError(f"samples {samples.min()} to {samples.max()} of {len(self)}")
        return self.form.batch(self.source.rows(samples + self.start), self.schema)

    def split(self, fraction: float) -> tuple["ClickDataset", "ClickDataset"]:
        """Return the rows to learn from and the last ``fraction`` of the rows, at least one.

        Raises:
            DataError: if no row is left to learn from.
        """
        held_out = max(round(len(self) * fraction), 1)
        if held_out >= len(self):
            raise DataError(
                f"a validation share of {fraction} leaves nothing to learn of {len(self)} rows; give more rows or a "
                "smaller data.validation"
            )
        cut = self.stop - held_out
        return (
            ClickDataset(self.source, self.start, cut, self.form),
            ClickDataset(self.source, cut, self.stop, self.form),
        )

    def fingerprint(self) -> str:
        """Return a digest of the batches, equal on every rank that reads the same rows in the same form."""
        return (
            f"{self.source.fingerprint()}:{self.start}:{self.stop}:{self.form.dense}:{self.form.missing_key}"
        )
