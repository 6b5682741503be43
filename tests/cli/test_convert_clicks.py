"""``shardwise convert LOG out.clicks``."""

import sys
from pathlib import Path

import pytest
from tests.data.clicks.criteo_text import lines, write

from shardwise.cli.main import main
from shardwise.data.clicks import PackedClicks


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
