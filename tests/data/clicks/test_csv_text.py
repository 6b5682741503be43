"""Text with a header: columns by their texts or their names, keys of text, what is malformed."""

import gzip
import logging
from pathlib import Path

import numpy as np
import pytest
from tests.data.clicks.criteo_text import lines
from tests.data.clicks.criteo_text import write as write_criteo

from shardwise.data.clicks import (
    CRITEO,
    ClickPolicy,
    ClickRows,
    Keys,
    Malformed,
    Schema,
    SparseFeature,
    build_clicks,
)
from shardwise.data.clicks import csv_text as module
from shardwise.data.clicks.columns import key_of_text
from shardwise.data.clicks.csv_text import csv_schema, read_csv
from shardwise.plan.errors import DataError

pytest.importorskip("pyarrow")

TEXT = """user,price,city,label,code
17,0.5,Rome,1,007
-3,,"Oslo, N",0,68fd1e64
,1e-2,,1,007
9223372036854775808,-2.5,Rome,0,
"""


def written(path: Path, text: str) -> Path:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def lists(keys: Keys) -> list[list[int]]:
    return [keys.values[a:b].tolist() for a, b in zip(keys.offsets[:-1], keys.offsets[1:], strict=True)]


def one(
    path: Path, schema: Schema | None = None, separator: str = ",", limit: int = 0
) -> tuple[ClickRows, Malformed]:
    malformed = Malformed(limit)
    found = list(read_csv(path, separator, schema or csv_schema(path, separator), malformed))
    return ClickRows(
        np.concatenate([rows.labels for rows in found]),
        np.concatenate([rows.dense for rows in found]),
        found[0].keys,
    ), malformed


@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz", "x.tsv"])
def test_columns_by_their_texts(tmp_path: Path, name: str) -> None:
    separator = "\t" if "tsv" in name else ","
    text = TEXT.replace(",", separator).replace(f"Oslo{separator}", "Oslo,")
    path = written(tmp_path / name, "\ufeff" + text)
    assert csv_schema(path, separator) == Schema(
        ("price",), (SparseFeature("user"), SparseFeature("city"), SparseFeature("code"))
    )
    rows, malformed = one(path, separator=separator)
    assert rows.labels.tolist() == [1, 0, 1, 0] and not malformed.count
    assert rows.dense[[0, 2, 3], 0].tolist() == [0.5, np.float32(0.01), -2.5] and np.isnan(rows.dense[1, 0])
    text_key = key_of_text
    assert [lists(keys) for keys in rows.keys] == [
        [[17], [-3], [], [text_key("9223372036854775808")]],
        [[text_key("Rome")], [text_key("Oslo, N")], [], [text_key("Rome")]],
        [[text_key("007")], [text_key("68fd1e64")], [text_key("007")], []],
    ]


def test_columns_that_are_named(tmp_path: Path) -> None:
    # What pandas writes of an id in a column that lacks another: 6.0 is 6.
    path = written(tmp_path / "x.csv", "click,age,user\n1,30,5\n0,,6.0\n")
    given = Schema(("age",), (SparseFeature("user"),))
    (rows,) = read_csv(path, ",", csv_schema(path, ",", "click", given), Malformed(), "click")
    assert rows.dense[0].tolist() == [30] and np.isnan(rows.dense[1, 0]) and lists(rows.keys[0]) == [[5], [6]]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ("1\n0\n1", "holds 0 and 1 alone, as a second label does"),
        ("3.0\n\n7.0", "holds whole numbers with gaps"),
        ("\n\n", "has no value in the first rows"),
    ],
)
def test_what_texts_do_not_decide_is_refused(tmp_path: Path, column: str, said: str) -> None:
    rows = "\n".join(f"{i % 2},{each}" for i, each in enumerate(column.split("\n")))
    path = written(tmp_path / "x.csv", f"label,second\n{rows}\n")
    with pytest.raises(DataError, match=f"'second' {said}"):
        csv_schema(path, ",")


def test_rows_that_are_malformed_are_named_and_counted(tmp_path: Path) -> None:
    bad = "2,0.5,a\n0,1_0,b\n0,0.25\n1,inf,c\n0,1e39,c\nx,1,d\n"
    content = f"label,x,k\n1,0.5,a\n{bad}1,0.75,e\n0,\u0663,f\n"
    path = written(tmp_path / "x.csv", content)
    schema = Schema(("x",), (SparseFeature("k"),))
    rows, malformed = one(path, schema, limit=7)
    assert rows.labels.tolist() == [1, 1] and rows.dense[:, 0].tolist() == [0.5, 0.75]
    assert malformed.count == 7
    for line, said in (
        ("2,0.5,a", "row 0: the label is 2"),
        ("0,1_0,b", "row 0: x is '1_0'; expected a number"),
    ):
        bad = written(tmp_path / "bad.csv", f"label,x,k\n{line}\n")
        with pytest.raises(DataError, match=said):
            one(bad, schema)
    with pytest.raises(DataError, match="2 fields in '0,1'; expected 3"):
        one(written(tmp_path / "bad.csv", "label,x,k\n1,2,3\n0,1\n"), schema)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "does not name every column"),
        ("label,,k\n", "does not name every column"),
        ("1,2,3\n", "holds numbers; expected a header"),
        ("a;b;label\n1;2;3\n", "no column 'label'.*a;b;label"),
        ("label,k,k\n", "more than one column 'k'"),
        ("label,k\n", "a header and no rows"),
        ("label,k\n1,\udcff\n", "cannot be read"),
    ],
)
def test_tables_that_are_none(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=said):
        list(read_csv(path, ",", csv_schema(path, ","), Malformed()))


def test_batches_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = "label,k,x\n" + "".join(f"{i % 2},{i * 7919 % 500},{i / 8}\n" for i in range(3000))
    path = written(tmp_path / "x.csv", content)
    schema = Schema(("x",), (SparseFeature("k"),))
    whole = list(read_csv(path, ",", schema, Malformed()))
    monkeypatch.setattr(module, "_PIECE_BYTES", 1000)
    parts = list(read_csv(path, ",", schema, Malformed()))
    assert len(parts) > 10 and len(whole) == 1
    assert np.concatenate([each.dense for each in parts]).tolist() == whole[0].dense.tolist()
    assert (
        np.concatenate([each.keys[0].values for each in parts]).tolist() == whole[0].keys[0].values.tolist()
    )


def test_from_the_keys_of_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A .csv by its name, any text by its separator, Criteo's text by its lines; what types decided is told."""
    caplog.set_level(logging.INFO)
    content = "label,k,x\n" + "".join(f"{i % 2},{i + 2},{i / 8}\n" for i in range(20))
    by_name = build_clicks(ClickPolicy(source=str(written(tmp_path / "a.csv", content))), tmp_path / "cache")
    assert by_name.schema == Schema(("x",), (SparseFeature("k"),)) and len(by_name.train) == 18
    assert "label label; numbers x; keys k. Types decided that" in caplog.text
    semicolons = written(tmp_path / "a.txt", content.replace(",", ";"))
    given = ClickPolicy(source=str(semicolons), separator=";", dense=["x"], sparse=["k"])
    named = build_clicks(given, tmp_path / "cache")
    assert named.fingerprint() == by_name.fingerprint() and caplog.text.count("Types decided") == 1
    with pytest.raises(DataError, match="ends in .csv or .tsv, or has data.separator"):
        build_clicks(ClickPolicy(source=str(semicolons)), tmp_path / "cache")
    criteo = write_criteo(tmp_path / "day.tsv", lines(20))
    assert build_clicks(ClickPolicy(source=str(criteo)), tmp_path / "cache").schema == CRITEO
    headed = written(tmp_path / "headed.txt", "\t".join(["label", *"x" * 39]) + "\n")
    with pytest.raises(DataError, match="the label is 'label'; expected 0 or 1; text with a header"):
        build_clicks(ClickPolicy(source=str(headed)), tmp_path / "cache")
