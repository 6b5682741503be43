"""Criteo text against a plain reader; what is malformed is named by file and line."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from tests.data.clicks.criteo_text import lines, write

from shardwise.base.errors import DataError
from shardwise.data.clicks import CRITEO, ClickRows, MalformedRows, criteo, read_criteo


@pytest.fixture(params=["loop", "numpy"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test reads by the compiled loop, and as without numba."""
    if request.param == "loop":
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(criteo, "is_installed", lambda: False)
    return str(request.param)


def plain(content: list[str]) -> list[tuple[object, ...]]:
    """One row a line, by Python's own means."""
    result: list[tuple[object, ...]] = []
    for line in content:
        parts = line.split("\t")
        numbers = [None if not part else float(np.float32(float(part))) for part in parts[1:14]]
        result.append((float(parts[0]), *numbers, *([int(part, 16)] if part else [] for part in parts[14:])))
    return result


def row_of(blocks: list[ClickRows]) -> list[tuple[object, ...]]:
    result: list[tuple[object, ...]] = []
    for rows in blocks:
        for i in range(rows.labels.size):
            numbers = [None if np.isnan(x) else float(x) for x in rows.dense[i]]
            keys = [k.values[k.offsets[i] : k.offsets[i + 1]].tolist() for k in rows.keys]
            result.append((float(rows.labels[i]), *numbers, *keys))
    return result


def read(path: Path, limit: int = 0) -> tuple[list[tuple[object, ...]], MalformedRows]:
    malformed = MalformedRows(limit)
    return row_of(list(read_criteo(path, malformed))), malformed


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("piece_bytes", [1 << 20, 700, 50])
def test_equals_a_plain_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, piece_bytes: int
) -> None:
    monkeypatch.setattr(criteo, "_PIECE_BYTES", piece_bytes)
    content = lines(60)
    found, malformed = read(write(tmp_path / "log.tsv", content, end))
    assert found == plain(content)
    assert not malformed.count and not str(malformed)


def test_gzip_and_a_last_line_without_an_end(tmp_path: Path) -> None:
    content = lines(30)
    (tmp_path / "day.gz").write_bytes(gzip.compress("\n".join(content).encode()))
    read_bytes: list[int] = []
    blocks = list(read_criteo(tmp_path / "day.gz", MalformedRows(), read_bytes.append))
    assert row_of(blocks) == plain(content)
    assert sum(read_bytes) == len("\n".join(content)) + 1
    (tmp_path / "torn.gz").write_bytes(gzip.compress("\n".join(content).encode())[:-40])
    with pytest.raises(DataError, match=r"torn\.gz cannot be read"):
        list(read_criteo(tmp_path / "torn.gz", MalformedRows()))


def changed(line: str, column: int, text: str) -> str:
    parts = line.split("\t")
    parts[column] = text
    return "\t".join(parts)


def test_decimal_numbers_short_keys_and_empty_lines_are_taken(tmp_path: Path) -> None:
    content = lines(8)
    content[2] = changed(content[2], 3, "0.25")
    content[3] = changed(content[3], 4, "-1e3")
    content[5] = changed(content[5], 20, "ABC")
    content[6] = changed(content[6], 4, "123456789012345678")
    found, malformed = read(write(tmp_path / "log.tsv", [*content[:4], "", *content[4:], ""]))
    assert found == plain(content)
    assert found[2][3] == 0.25 and found[3][4] == -1000 and found[5][20] == [0xABC]
    assert not malformed.count


BAD = [
    (0, "2", "the label is '2'; expected 0 or 1"),
    (0, "", "the label is ''; expected 0 or 1"),
    (0, "nan", "the label is 'nan'; expected 0 or 1"),
    (1, "x7", "I1 is 'x7'; expected a number"),
    (13, "-", "I13 is '-'; expected a number"),
    (5, "inf", "I5 is 'inf'; expected a number"),
    (5, "1_0", "I5 is '1_0'; expected a number"),
    (5, "4" * 40, f"I5 is '{'4' * 40}'; expected a number of fp32"),
    (6, "-1e39", "I6 is '-1e39'; expected a number of fp32"),
    (7, "\u0663", "I7 is '\u0663'; expected a number"),
    (8, " 3", "I8 is ' 3'; expected a number"),
    (14, "68fd1e6g", "C1 is '68fd1e6g'; expected up to 8 hexadecimal digits"),
    (39, "123456789", "C26 is '123456789'; expected up to 8"),
    (20, "\u00ff", "C7 is"),
    (3, "1\t1", "41 columns; expected 40"),
]


@pytest.mark.parametrize(("column", "text", "reason"), BAD, ids=[f"{c}={t!r}" for c, t, _ in BAD])
def test_a_malformed_row_is_an_error_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: int, text: str, reason: str
) -> None:
    monkeypatch.setattr(criteo, "_PIECE_BYTES", 2000)  # the line lies in a later piece
    content = lines(40)
    bad = [*content[:33], changed(content[33], column, text), *content[34:]]
    path = write(tmp_path / "log.tsv", bad)
    with pytest.raises(DataError) as error:
        read(path)
    assert f"log.tsv:34: {reason}" in str(error.value)
    assert "data.malformed_limit" in str(error.value)
    found, malformed = read(path, limit=1)
    assert found == plain(content[:33] + content[34:])
    assert malformed.count == 1 and "log.tsv:34" in str(malformed)


def test_more_than_the_limit_is_an_error_that_shows_examples(tmp_path: Path) -> None:
    content = lines(20)
    for i in (3, 9, 12, 15, 17):
        content[i] = content[i].replace("\t", " ", 1)
    path = write(tmp_path / "log.tsv", content)
    found, malformed = read(path, limit=5)
    assert len(found) == 15 and malformed.count == 5
    with pytest.raises(
        DataError, match=r"3 malformed rows, more than data.malformed_limit, which is 2.*:4: 39 col"
    ):
        read(path, limit=2)


def test_no_text_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo, "_PIECE_BYTES", 1 << 12)
    (tmp_path / "zeros").write_bytes(bytes(100_000))
    with pytest.raises(DataError, match="expected tab-separated rows of 40 columns"):
        read(tmp_path / "zeros")
    with pytest.raises(DataError, match=r"nowhere cannot be read"):
        read(tmp_path / "nowhere")
    (tmp_path / "empty").touch()
    assert read(tmp_path / "empty")[0] == []
    assert len(CRITEO.dense) == 13 and len(CRITEO.features) == 26


def test_the_loop_and_numpy_see_the_same_lines(way: str) -> None:
    """Also on text that is no log at all."""
    if way == "numpy":
        pytest.skip("compares both")
    draw = np.random.default_rng(0)
    for trial in range(200):
        content = lines(4, seed=trial)
        text = bytearray(("\n".join(content) + "\n").encode())
        for at in draw.integers(0, len(text) - 1, 6):
            text[at] = draw.choice(list(b"\t\n\r-0123456789abcdefx\x00\xff/:"))
        piece = np.frombuffer(bytes(text), np.uint8)
        loop, numpy = criteo._by_loop(piece), criteo._by_numpy(piece)
        assert loop.kinds.tolist() == numpy.kinds.tolist(), trial
        assert (loop.starts == numpy.starts).all() and (loop.stops == numpy.stops).all()
        good = loop.kinds == 0
        np.testing.assert_array_equal(loop.numbers[good], numpy.numbers[good])
        np.testing.assert_array_equal(loop.keys[good], numpy.keys[good])
        np.testing.assert_array_equal(loop.missing[good], numpy.missing[good])


REAL = Path("../shared/data/criteo/train.csv")


@pytest.mark.skipif(not REAL.is_file(), reason="the real rows are not there")
def test_real_rows() -> None:
    found, malformed = read(REAL)
    assert found == plain(REAL.read_text().splitlines())
    assert len(found) == 7200 and malformed.count == 0
