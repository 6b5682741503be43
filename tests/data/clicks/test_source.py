"""Rows as batches: numbers, missing categories, stretches of a log."""

import numpy as np
import pytest
import torch

from shardwise.base.errors import ConfigError, DataError
from shardwise.data.clicks import (
    BatchForm,
    ClickDataset,
    ClickRows,
    ClickSchema,
    FeatureKeys,
    SparseFeature,
    SyntheticClicks,
)

SCHEMA = ClickSchema(("a", "b"), (SparseFeature("user"), SparseFeature("seen", many=True)))
ROWS = ClickRows(
    np.array([1, 0, 1], np.float32),
    np.array([[np.nan, 0], [-3, 7], [1e6, -0.0]], np.float32),
    [
        FeatureKeys.of_ones(np.array([5, 6, 7]), np.array([True, False, True])),
        FeatureKeys(np.array([1, 2, 3]), np.array([0, 2, 2, 3])),
    ],
)


def test_numbers() -> None:
    raw = BatchForm("none").batch(ROWS, SCHEMA)["dense"]
    assert raw.tolist() == [[0, 0], [-3, 7], [1e6, 0]]
    log = BatchForm().batch(ROWS, SCHEMA)["dense"]
    assert torch.allclose(log, raw.sign() * raw.abs().log1p())
    assert np.isnan(ROWS.dense[0, 0]), "the rows are left as they are"


def test_a_missing_category_is_no_key_or_the_one_that_is_given() -> None:
    batch = BatchForm().batch(ROWS, SCHEMA)
    assert list(batch["sparse"]) == ["user", "seen"]
    user, seen = batch["sparse"].values()
    assert (user.values.tolist(), user.offsets.tolist()) == ([6], [0, 0, 1, 1])
    assert (seen.values.tolist(), seen.offsets.tolist()) == ([1, 2, 3], [0, 2, 2, 3])
    user, seen = BatchForm(missing_key=-1).batch(ROWS, SCHEMA)["sparse"].values()
    assert (user.values.tolist(), user.offsets.tolist()) == ([-1, 6, -1], [0, 1, 2, 3])
    assert (seen.values.tolist(), seen.offsets.tolist()) == ([1, 2, -1, 3], [0, 2, 3, 4])
    for name, ragged in batch["sparse"].items():
        ragged.check(name)
    assert batch["labels"].tolist() == [1, 0, 1] and batch["labels"].dtype == torch.float32


def test_a_batch_of_nothing_has_every_part() -> None:
    clicks = ClickDataset(SyntheticClicks(10, (5, 5), dense=3))
    batch = clicks.batch(np.empty(0, np.int64))
    assert batch["dense"].shape == (0, 3) and batch["labels"].shape == (0,)
    assert {name: (r.samples, r.values.numel()) for name, r in batch["sparse"].items()} == {
        "C1": (0, 0),
        "C2": (0, 0),
    }
    for name, ragged in batch["sparse"].items():
        ragged.check(name)


def test_the_end_of_a_log_is_held_out() -> None:
    whole = ClickDataset(SyntheticClicks(100, (5, 5)))
    train, validation = whole.split(0.2)
    assert (len(train), len(validation)) == (80, 20)
    assert torch.equal(validation.batch(np.arange(20))["dense"], whole.batch(np.arange(80, 100))["dense"])
    again, _ = train.split(0.5)
    assert len(again) == 40
    assert len({clicks.fingerprint() for clicks in (whole, train, validation, again)}) == 4
    assert len(whole.split(1e-9)[1]) == 1
    with pytest.raises(IndexError):
        train.batch(np.array([80]))
    with pytest.raises(DataError, match="leaves nothing to learn"):
        whole.split(0.999)
    with pytest.raises(DataError, match=r"rows \[5, 101\) of a click log that holds 100"):
        ClickDataset(SyntheticClicks(100, (5,)), 5, 101)


def test_a_name_stands_for_one_column() -> None:
    with pytest.raises(ConfigError, match="x named more than once"):
        ClickSchema(("x",), (SparseFeature("x"),))
