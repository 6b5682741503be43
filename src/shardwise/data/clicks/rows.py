"""Rows of a click log (a label, numbers, keys by feature) and the batch that a model takes.

    file            Rows                                    batch
    label           labels  fp32 [n]                        "labels"  fp32 [B]
    integers        dense   fp32 [n, D], NaN if missing     "dense"   fp32 [B, D], sign(x) · log(1 + |x|), missing 0
    categories      keys    int64 by feature, offsets       "sparse"  {feature: Ragged}, missing: no key

A missing category is an empty range of keys, which pools to zeros, unless ``missing_key`` gives missing categories a
row.
Shapes: n rows, B samples of a batch, D numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.base.errors import ConfigError
from shardwise.base.ragged import Ragged


class SparseFeature(NamedTuple):
    """Column of keys."""

    name: str
    many: bool = False
    """True if a row may have any number of keys; else a row has none or one."""


@dataclass(frozen=True)
class ClickSchema:
    """Columns of a click log beside its label.

    Args:
        dense: names of the numbers.
        features: the columns of keys.

    Raises:
        ConfigError: if a name is given twice.
    """

    dense: tuple[str, ...]
    features: tuple[SparseFeature, ...]

    def __post_init__(self) -> None:
        names = [*self.dense, *(feature.name for feature in self.features)]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ConfigError(
                f"click columns: {', '.join(doubled)} named more than once; each name stands for one"
            )


CRITEO = ClickSchema(
    tuple(f"I{i}" for i in range(1, 14)),
    tuple(SparseFeature(f"C{i}") for i in range(1, 27)),
)


class FeatureKeys(NamedTuple):
    """Keys of one feature by row."""

    values: npt.NDArray[np.int64]
    """Keys of all rows: [N]."""
    offsets: npt.NDArray[np.int64]
    """Start of each row's keys, and the end: [n + 1]."""

    @classmethod
    def of_ones(
        cls, values: npt.NDArray[np.int64], missing: npt.NDArray[np.bool_] | None = None
    ) -> "FeatureKeys":
        """Build the keys of rows with one key each [n], or none if ``missing``."""
        if missing is None or not missing.any():
            return cls(values, np.arange(values.size + 1))
        return cls(values[~missing], np.r_[0, np.cumsum(~missing)])


class ClickRows(NamedTuple):
    """Rows of a click log, column by column."""

    labels: npt.NDArray[np.float32]
    """Labels, 0 or 1: [n]."""
    dense: npt.NDArray[np.float32]
    """Numbers, NaN if missing: [n, D]."""
    keys: Sequence[FeatureKeys]
    """Keys of each feature, in the order of the schema."""


class ClickBatch(TypedDict):
    """Input of a click-through model and its loss."""

    dense: Tensor
    """Numbers: fp32 [B, D]."""
    sparse: dict[str, Ragged]
    """Keys by feature name."""
    labels: Tensor
    """Labels: fp32 [B]."""


class BatchForm(NamedTuple):
    """Conversion of rows to a batch."""

    dense: Literal["log", "none"] = "log"
    """Transform of the numbers: ``log`` for sign(x) · log(1 + |x|), or ``none``."""
    missing_key: int | None = None
    """Key that replaces a missing category; None: no key."""

    def batch(self, rows: ClickRows, schema: ClickSchema) -> ClickBatch:
        """Return the batch of these rows."""
        dense = torch.from_numpy(rows.dense).nan_to_num(nan=0.0)
        if self.dense == "log":
            dense = dense.abs().log1p_().copysign_(dense)
        return {
            "dense": dense,
            "sparse": {
                feature.name: self._ragged(keys)
                for feature, keys in zip(schema.features, rows.keys, strict=True)
            },
            "labels": torch.from_numpy(rows.labels),
        }

    def _ragged(self, keys: FeatureKeys) -> Ragged:
        values, offsets = keys
        empty = np.diff(offsets) == 0
        if self.missing_key is not None and empty.any():
            values = np.insert(values, offsets[:-1][empty], self.missing_key)
            offsets = offsets + np.r_[0, np.cumsum(empty)]
        return Ragged(torch.from_numpy(values), torch.from_numpy(offsets))
