"""Parquet: columns by type, nulls, lists, strings, labels that are none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.base.errors import ConfigError, DataError
from shardwise.data.clicks import (
    CRITEO,
    ClickSchema,
    MalformedRows,
    SparseFeature,
    parquet_schema,
    read_parquet,
)
from shardwise.data.clicks import parquet as module
from shardwise.data.clicks.columns import key_of_text

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


COLUMNS = {
    "label": [1, 0, 1, 0],
    "price": [0.5, None, -2.0, float("nan")],
    "user": pa.array([7, 1 << 40, None, -3]),
    "city": ["Rome", "Oslo", None, "Rome"],
    "seen": pa.array([[1, 2], [], None, [3]]),
    "tags": pa.array([["a"], ["b", "a"], [], None]),
}


def lists(keys: Any) -> list[list[int]]:
    return [keys.values[a:b].tolist() for a, b in zip(keys.offsets[:-1], keys.offsets[1:], strict=True)]


@pytest.mark.parametrize("rows_at_once", [1 << 15, 3, 1])
def test_columns_by_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_at_once: int) -> None:
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", rows_at_once)
    path = write(tmp_path / "x.parquet", COLUMNS, row_group_size=2)
    schema = parquet_schema(path)
    features = (
        SparseFeature("user"),
        SparseFeature("city"),
        SparseFeature("seen", True),
        SparseFeature("tags", True),
    )
    assert schema == ClickSchema(("price",), features)
    blocks = list(read_parquet(path, schema, MalformedRows()))
    assert np.concatenate([rows.labels for rows in blocks]).tolist() == [1, 0, 1, 0]
    price = np.concatenate([rows.dense for rows in blocks])[:, 0]
    assert price[[0, 2]].tolist() == [0.5, -2] and np.isnan(price[[1, 3]]).all()
    rome, oslo, a, b = map(key_of_text, ("Rome", "Oslo", "a", "b"))
    found = [[row for rows in blocks for row in lists(rows.keys[f])] for f in range(4)]
    assert found == [
        [[7], [1 << 40], [], [-3]],
        [[rome], [oslo], [], [rome]],
        [[1, 2], [], [], [3]],
        [[a], [b, a], [], []],
    ]
    assert min(rome, oslo) >= 0 and max(rome, oslo) < 1 << 63


def test_criteos_columns_are_known_by_name(tmp_path: Path) -> None:
    columns = {"label": [0, 1]} | {name: [1, None] for name in CRITEO.dense}
    columns |= {feature.name: [5, None] for feature in CRITEO.features}
    path = write(tmp_path / "x.parquet", columns)
    assert parquet_schema(path) == CRITEO
    (rows,) = read_parquet(path, CRITEO, MalformedRows())
    assert rows.dense[0].tolist() == [1] * 13 and np.isnan(rows.dense[1]).all()


def test_columns_that_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", COLUMNS | {"age": [1, 2, 3, 4]})
    given = ClickSchema(("age",), (SparseFeature("seen"), SparseFeature("user")))
    schema = parquet_schema(path, given=given)
    assert schema == ClickSchema(("age",), (SparseFeature("seen", True), SparseFeature("user")))
    (rows,) = read_parquet(path, schema, MalformedRows())
    assert rows.dense[:, 0].tolist() == [1, 2, 3, 4] and len(rows.keys) == 2


def test_labels_and_numbers_that_are_none(tmp_path: Path) -> None:
    columns = {
        "label": [1.0, None, float("nan"), 0.0, 2.0, 0.0],
        "x": [1.0, 2.0, 3.0, float("inf"), 5.0, 1e300],
        "k": [1, 2, 3, 4, 5, 6],
    }
    path = write(tmp_path / "x.parquet", columns)
    malformed = MalformedRows(5)
    (rows,) = read_parquet(path, parquet_schema(path), malformed)
    assert (rows.labels.tolist(), rows.dense[:, 0].tolist(), lists(rows.keys[0])) == ([1], [1], [[1]])
    assert malformed.count == 5
    assert "x.parquet: row 1: the label is nan; expected 0 or 1" in str(malformed)
    with pytest.raises(DataError, match=r"x\.parquet: row 1: the label is nan; expected 0 or 1"):
        list(read_parquet(path, parquet_schema(path), MalformedRows()))


def test_errors_name_file_and_column(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"label": [0], "t": [b"raw"], "k": ["a"]})
    with pytest.raises(DataError, match=r"column 't' has type binary; expected floats"):
        parquet_schema(path)
    with pytest.raises(DataError, match=r"no column 'click' for the label; its columns are label, t, k"):
        parquet_schema(path, label="click")
    with pytest.raises(DataError, match=r"no column price"):
        list(read_parquet(path, ClickSchema(("price",), ()), MalformedRows()))
    with pytest.raises(DataError, match=r"'k' of type string holds no numbers"):
        list(read_parquet(path, ClickSchema(("k",), ()), MalformedRows()))
    with pytest.raises(DataError, match=r"'k' of type string is no list"):
        list(read_parquet(path, ClickSchema((), (SparseFeature("k", True),)), MalformedRows()))
    nulls = write(tmp_path / "n.parquet", {"label": [0], "k": pa.array([[1, None]])})
    with pytest.raises(DataError, match="nulls inside its lists"):
        list(read_parquet(nulls, parquet_schema(nulls), MalformedRows()))
    part = write(tmp_path / "b.parquet", {"label": [0], "k": [1.5]})
    with pytest.raises(DataError, match="no keys of 64 bits"):
        list(read_parquet(part, ClickSchema((), (SparseFeature("k"),)), MalformedRows()))
    (tmp_path / "torn.parquet").write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="cannot be read as a Parquet file"):
        parquet_schema(tmp_path / "torn.parquet")


def test_types_that_pandas_and_others_write(tmp_path: Path) -> None:
    """Categories, lists of a fixed size, unsigned integers of 64 bits; truth values and gaps where they are named."""
    columns = {
        "label": [True, False, True],
        "color": pa.array(["red", None, "red"]).dictionary_encode(),
        "pair": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2)),
        "hashed": pa.array([1 << 63, 7, (1 << 64) - 1], pa.uint64()),
        "flag": [True, None, False],
        "gaps": [3.0, None, 9007199254740992.0],
        "on": [False, True, True],
    }
    path = write(tmp_path / "x.parquet", columns)
    features = ("color", "pair", "hashed", "flag", "gaps")
    given = ClickSchema(("on",), tuple(SparseFeature(name) for name in features))
    (rows,) = read_parquet(path, parquet_schema(path, given=given), MalformedRows())
    assert rows.labels.tolist() == [1, 0, 1] and rows.dense[:, 0].tolist() == [0, 1, 1]
    red = key_of_text("red")
    assert [lists(keys) for keys in rows.keys] == [
        [[red], [], [red]],
        [[1, 2], [3, 4], [5, 6]],
        [[-(1 << 63)], [7], [-1]],
        [[1], [], [0]],
        [[3], [], [9007199254740992]],
    ]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ([3.0, None, 7.0], "whole numbers with gaps as floating point, as ids do where one is missing"),
        ([3.0, float("nan"), 7.0], "whole numbers with gaps"),
        ([1, 0, 1], "holds 0 and 1 alone, as a second label does"),
        ([True, False, None], "holds true and false, as a second label does"),
        (pa.array([None, None, None], pa.float64()), "has no value in the first rows"),
        (pa.array([None, None, None], pa.string()), "has no value in the first rows"),
    ],
)
def test_what_a_type_does_not_decide_is_refused(tmp_path: Path, column: Any, said: str) -> None:
    """A second label would leak into the features, an id become log(1 + id), and nobody be told."""
    path = write(tmp_path / "x.parquet", {"label": [0, 1, 0], "x": [0.5, 1.5, 2.0], "second": column})
    with pytest.raises(DataError, match=f"column 'second' .*{said}.*data.dense"):
        parquet_schema(path)
    given = ClickSchema(("x",), ())
    assert parquet_schema(path, given=given) == given, "columns in neither list are left out"


def test_a_column_of_weights_is_not_learnt_from_in_silence(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"label": [0, 1], "Weight": [0.5, 1.5], "k": [5, 6]})
    with pytest.raises(DataError, match="'Weight' is called as the weights of samples are"):
        parquet_schema(path)


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    path = write(tmp_path / "x.parquet", {"label": [0], "k": [1]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install pyarrow"):
        parquet_schema(path)
