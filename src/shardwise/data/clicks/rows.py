"""Rows of a click log: a label, numbers, keys by feature; and the batch that a model sees.

    file            Rows                                    batch
    label           labels  fp32 [n]                        "labels"  fp32 [B]
    integers        dense   fp32 [n, D], NaN where missing  "dense"   fp32 [B, D], sign(x) · log(1 + |x|), missing 0
    categories      keys    int64 by feature, offsets       "sparse"  {feature: Ragged}, missing: no key

A missing category is an empty stretch, which pools to zeros, unless ``missing_key`` gives it a row of its own.
Shapes: n rows, B samples of a batch, D numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.plan.errors import ConfigError
from shardwise.plan.ragged import Ragged


class SparseFeature(NamedTuple):
    """A column of keys."""

    name: str
    many: bool = False
    """A row may have any number of keys; else none or one."""


@dataclass(frozen=True)
class Schema:
    """The columns of a click log beside its label."""

    dense: tuple[str, ...]
    features: tuple[SparseFeature, ...]

    def __post_init__(self) -> None:
        names = [*self.dense, *(feature.name for feature in self.features)]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ConfigError(
                f"click columns: {', '.join(doubled)} named more than once; each name stands for one"
            )


CRITEO = Schema(
    tuple(f"I{i}" for i in range(1, 14)),
    tuple(SparseFeature(f"C{i}") for i in range(1, 27)),
)


class Keys(NamedTuple):
    """Keys of one feature."""

    values: npt.NDArray[np.int64]
    """[N]"""
    offsets: npt.NDArray[np.int64]
    """[n + 1]"""

    @classmethod
    def of_ones(cls, values: npt.NDArray[np.int64], missing: npt.NDArray[np.bool_] | None = None) -> "Keys":
        """From one key a row [n], but none where ``missing``."""
        if missing is None or not missing.any():
            return cls(values, np.arange(values.size + 1))
        return cls(values[~missing], np.r_[0, np.cumsum(~missing)])


class ClickRows(NamedTuple):
    """Some rows, column by column."""

    labels: npt.NDArray[np.float32]
    dense: npt.NDArray[np.float32]
    keys: Sequence[Keys]
    """In the order of the schema's features."""


class ClickBatch(TypedDict):
    """What a model and its loss take."""

    dense: Tensor
    sparse: dict[str, Ragged]
    labels: Tensor


class BatchForm(NamedTuple):
    """How rows become a batch."""

    dense: Literal["log", "none"] = "log"
    missing_key: int | None = None
    """The key that stands for a missing category; None: no key."""

    def batch(self, rows: ClickRows, schema: Schema) -> ClickBatch:
        """The batch of these rows."""
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

    def _ragged(self, keys: Keys) -> Ragged:
        values, offsets = keys
        empty = np.diff(offsets) == 0
        if self.missing_key is not None and empty.any():
            values = np.insert(values, offsets[:-1][empty], self.missing_key)
            offsets = offsets + np.r_[0, np.cumsum(empty)]
        return Ragged(torch.from_numpy(values), torch.from_numpy(offsets))
