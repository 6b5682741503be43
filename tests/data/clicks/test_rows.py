"""Rows of a click log and the batch that a model takes."""

import math

import numpy as np
import pytest
import torch

from shardwise.base.errors import ConfigError
from shardwise.data.clicks.rows import CRITEO, BatchForm, ClickRows, ClickSchema, FeatureKeys, SparseFeature

SCHEMA = ClickSchema(("age",), (SparseFeature("user"), SparseFeature("tags", many=True)))


def rows() -> ClickRows:
    """Three rows; the second has no user and no tags."""
    user = FeatureKeys.of_ones(np.array([7, 0, 9]), np.array([False, True, False]))
    tags = FeatureKeys(np.array([1, 2, 3]), np.array([0, 2, 2, 3]))
    dense = np.array([[3.0], [np.nan], [-1.0]], dtype=np.float32)
    return ClickRows(np.array([1, 0, 1], dtype=np.float32), dense, [user, tags])


def test_a_missing_category_is_an_empty_range() -> None:
    assert rows().keys[0].values.tolist() == [7, 9] and rows().keys[0].offsets.tolist() == [0, 1, 1, 2]
    none_missing = FeatureKeys.of_ones(np.array([7, 8]), np.array([False, False]))
    assert none_missing.offsets.tolist() == [0, 1, 2]
    assert FeatureKeys.of_ones(np.array([7, 8])).values.tolist() == [7, 8]


def test_a_batch_has_logarithms_with_their_sign_and_0_for_what_is_missing() -> None:
    batch = BatchForm().batch(rows(), SCHEMA)
    assert batch["dense"].flatten().tolist() == pytest.approx([math.log(4), 0, -math.log(2)])
    assert BatchForm("none").batch(rows(), SCHEMA)["dense"].flatten().tolist() == [3, 0, -1]
    assert batch["labels"].tolist() == [1, 0, 1]
    assert batch["sparse"]["user"].offsets.tolist() == [0, 1, 1, 2]


def test_a_key_may_stand_for_what_is_missing() -> None:
    sparse = BatchForm(missing_key=5).batch(rows(), SCHEMA)["sparse"]
    assert sparse["user"].values.tolist() == [7, 5, 9] and sparse["user"].offsets.tolist() == [0, 1, 2, 3]
    assert sparse["tags"].values.tolist() == [1, 2, 5, 3] and sparse["tags"].offsets.tolist() == [0, 2, 3, 4]
    assert all(each.values.dtype == torch.int64 for each in sparse.values())


def test_a_name_stands_for_one_column() -> None:
    assert len(CRITEO.dense) == 13 and len(CRITEO.features) == 26
    with pytest.raises(ConfigError, match="age, user named more than once"):
        ClickSchema(("age", "user"), (SparseFeature("user"), SparseFeature("age")))
