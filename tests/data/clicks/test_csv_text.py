"""Text with a header: columns by their texts or their names, keys of text, what is malformed."""

import gzip
import logging
from pathlib import Path

import numpy as np
import pytest
from tests.data.clicks.criteo_text import lines
from tests.data.clicks.criteo_text import write as write_criteo

from shardwise.base.errors import DataError
from shardwise.data.clicks import (
    CRITEO,
    ClickPolicy,
    ClickRows,
    ClickSchema,
    FeatureKeys,
    MalformedRows,
    SparseFeature,
    build_clicks,
)
from shardwise.data.clicks import csv_text as module
from shardwise.data.clicks.columns import key_of_text
from shardwise.data.clicks.csv_text import csv_schema, read_csv

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


def lists(keys: FeatureKeys) -> list[list[int]]:
    return [keys.values[a:b].tolist() for a, b in zip(keys.offsets[:-1], keys.offsets[1:], strict=True)]


def one(
    path: Path, schema: ClickSchema | None = None, separator: str = ",", limit: int = 0
) -> tuple[ClickRows, MalformedRows]:
    malformed = MalformedRows(limit)
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
    assert csv_schema(path, separator) == ClickSchema(
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
    given = ClickSchema(("age",), (SparseFeature("user"),))
    (rows,) = read_csv(path, ",", csv_schema(path, ",", "click", given), MalformedRows(), "click")
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
    schema = ClickSchema(("x",), (SparseFeature("k"),))
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
        list(read_csv(path, ",", csv_schema(path, ","), MalformedRows()))


def test_batches_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = "label,k,x\n" + "".join(f"{i % 2},{i * 7919 % 500},{i / 8}\n" for i in range(3000))
    path = written(tmp_path / "x.csv", content)
    schema = ClickSchema(("x",), (SparseFeature("k"),))
    whole = list(read_csv(path, ",", schema, MalformedRows()))
    monkeypatch.setattr(module, "_PIECE_BYTES", 1000)
    parts = list(read_csv(path, ",", schema, MalformedRows()))
    assert len(parts) > 10 and len(whole) == 1
    assert np.concatenate([each.dense for each in parts]).tolist() == whole[0].dense.tolist()
    assert (
        np.concatenate([each.keys[0].values for each in parts]).tolist() == whole[0].keys[0].values.tolist()
    )


def test_whole_numbers_taken_for_keys_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An age is a whole number as an id is; of two files, and of a second run, nothing is said again."""
    content = "label,user,age,price,city\n" + "".join(
        f"{i % 2},{i + 2},{i + 20},{i / 8},c{i}\n" for i in range(20)
    )
    (tmp_path / "log").mkdir()
    for name in ("a.csv", "b.csv"):
        written(tmp_path / "log" / name, content)
    given = ClickPolicy(source=str(tmp_path / "log"), pattern="*.csv")
    for _ in range(2):
        build_clicks(given, tmp_path / "cache")
    (said,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert "a.csv: whole numbers were taken for keys in user, age; for numbers were taken price." in said
    named = ClickPolicy(source=given.source, pattern="*.csv", dense=["age", "price"], sparse=["user", "city"])
    build_clicks(named, tmp_path / "cache")
    assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) == 1


def test_from_the_keys_of_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A .csv by its name, any text by its separator, Criteo's text by its lines; what types decided is told."""
    caplog.set_level(logging.INFO)
    content = "label,k,x\n" + "".join(f"{i % 2},{i + 2},{i / 8}\n" for i in range(20))
    by_name = build_clicks(ClickPolicy(source=str(written(tmp_path / "a.csv", content))), tmp_path / "cache")
    assert by_name.schema == ClickSchema(("x",), (SparseFeature("k"),)) and len(by_name.train) == 18
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


def _rows_with(changes: dict[int, str], count: int = 2000) -> str:
    """``count`` rows; ``changes`` replaces the key of some, by number of the row from 0."""
    keys = [changes.get(i, f"k{i}") for i in range(count)]
    return "label,k,x\n" + "".join(f"{i % 2},{key},{i / 8}\n" for i, key in enumerate(keys))


SCHEMA = ClickSchema(("x",), (SparseFeature("k"),))


@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz"])
def test_a_stray_quote_takes_no_rows(tmp_path: Path, name: str) -> None:
    """One quote at the beginning of a field took all rows up to the next one into one key."""
    stray = written(tmp_path / name, _rows_with({1000: '"k1000'}))
    with pytest.raises(DataError, match=r"line 1002: a quote does not close in its line"):
        one(stray, SCHEMA)
    with pytest.raises(DataError, match=r"the quote that opens in line 1002 does not close before the end"):
        one(stray, SCHEMA, limit=5000)
    two = written(tmp_path / name, _rows_with({1000: '"k1000', 1499: '"k1499'}))
    with pytest.raises(DataError, match=r"11 malformed rows.*line 1012: a quote does not close of line 1002"):
        one(two, SCHEMA, limit=10)
    # The second stray quote stands at the beginning of a field too: to a reader of RFC 4180 it closes the first.
    rows, malformed = one(two, SCHEMA, limit=500)
    assert rows.labels.size == 1500 and malformed.count == 500


@pytest.mark.parametrize("piece", [64, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_quotes_within_a_line_are_read(
    tmp_path: Path, end: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.data.clicks.whole_rows._PIECE_BYTES", piece)
    keys = ['"a, b"', '"say ""hi"""', '5" pipe', '""', '"a"b', "plain", '"""x"""', '" , "']
    text = f"label,k,x{end}" + "".join(f'1,{key},"{i}.5"{end}' for i, key in enumerate(keys))
    rows, malformed = one(written(tmp_path / "x.csv", text), SCHEMA)
    expected = ["a, b", 'say "hi"', '5" pipe', None, "ab", "plain", '"x"', " , "]
    assert lists(rows.keys[0]) == [[] if key is None else [key_of_text(key)] for key in expected]
    assert rows.dense[:, 0].tolist() == [i + 0.5 for i in range(len(keys))] and not malformed.count


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_field_with_a_line_end_is_malformed(tmp_path: Path, end: str) -> None:
    text = f'label,k,x{end}1,a,1{end}0,"two{end}lines, 7",3{end}1,c,5'
    path = written(tmp_path / "x.csv", text)
    with pytest.raises(DataError, match="line 3: a quote does not close in its line"):
        one(path, SCHEMA)
    rows, malformed = one(path, SCHEMA, limit=2)
    assert rows.dense[:, 0].tolist() == [1, 5] and malformed.count == 2


def test_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.data.clicks.whole_rows._LONGEST_LINE_BYTES", 1000)
    monkeypatch.setattr("shardwise.data.clicks.whole_rows._PIECE_BYTES", 100)
    path = written(tmp_path / "x.csv", "label,k,x\n1,a,1\n0," + "b" * 5000)
    with pytest.raises(DataError, match="line 3 has more than 1000 bytes"):
        one(path, SCHEMA)


def test_a_header_of_many_columns(tmp_path: Path) -> None:
    """Names were counted one by one: 100,000 columns took 40 s."""
    names = [f"c{i}" for i in range(9_000)]
    path = written(tmp_path / "x.csv", ",".join(names) + "\n")
    with pytest.raises(DataError, match="no column 'label'.* c19 and 8980 more") as caught:
        csv_schema(path, ",")
    assert len(str(caught.value)) < 1000
    twice = written(tmp_path / "x.csv", ",".join(["label", *names, *names]) + "\n")
    with pytest.raises(DataError, match="more than one column 'c0'.* and 8980 more"):
        csv_schema(twice, ",")
    many = written(tmp_path / "x.csv", ",".join(["label", *names, *names, *names]) + "\n")
    with pytest.raises(DataError, match="has 27001 columns, and at most 20000 are read"):
        csv_schema(many, ",")


def test_lines_that_are_not_utf8_and_have_other_fields_are_counted(tmp_path: Path) -> None:
    """pyarrow asks about a line with another number of fields in UTF-8 alone, and drops all others."""
    path = tmp_path / "x.csv"
    path.write_bytes(b'label,k,x,note\n1,a,1,caf\xe9\n0,caf\xe9\n1,b,2,ok\n0,"c\xe9\n')
    with pytest.raises(
        DataError, match=r"line 3: another number of fields than 4 in '0,caf.', which is not text"
    ):
        one(path, SCHEMA)
    path.write_bytes(b'label,k,x,note\n1,a,1,caf\xe9\n1,b,2,"caf\xe9, bar"\n')
    rows, malformed = one(path, SCHEMA)
    assert rows.dense[:, 0].tolist() == [1, 2] and not malformed.count, (
        "a column that is not read may be anything"
    )
