"""``shardwise convert LOG out.clicks``."""

import sys
from pathlib import Path

import pytest
from tests.data.clicks.criteo_text import lines, write

from shardwise.cli.main import main
from shardwise.data.clicks import PackedClicks, Schema, SparseFeature


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["shardwise", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out + captured.err


def test_a_log_becomes_packed_clicks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write(tmp_path / "log.tsv", [*lines(20), "broken"])
    out = tmp_path / "log.clicks"
    code, said = call(monkeypatch, capsys, "convert", str(log), str(out))
    assert code != 0 and "log.tsv:21: 1 columns" in said.replace("\n", "")
    assert not out.exists()
    code, said = call(monkeypatch, capsys, "convert", str(log), str(out), "--malformed-limit", "1")
    assert code == 0 and "13 numbers, 26 features" in said and "1 malformed rows skipped" in said
    assert len(PackedClicks(out)) == 20


def test_a_table_becomes_packed_clicks_with_the_columns_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What types leave open is refused until it is named."""
    pytest.importorskip("pyarrow")
    log, out = tmp_path / "log.txt", tmp_path / "log.clicks"
    log.write_text("click;buy;age;user\n1;0;30;u1\n0;1;31;u2\n")
    given = ("convert", str(log), str(out), "--separator", ";", "--label", "click")
    code, said = call(monkeypatch, capsys, *given)
    assert code != 0 and "as a second label does" in " ".join(said.split()) and not out.exists()
    code, said = call(monkeypatch, capsys, *given, "--dense", "age")
    assert code != 0 and "--sparse" in said
    code, said = call(monkeypatch, capsys, *given, "--dense", "age", "--sparse", "user")
    assert code == 0 and "2 rows, 1 numbers, 1 features" in " ".join(said.split()), said
    assert PackedClicks(out).schema == Schema(("age",), (SparseFeature("user"),))
