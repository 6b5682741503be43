"""``shardwise examples``: configurations by name."""

from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError, UsageError
from shardwise.cli.examples import command, found, named


def test_each_example_is_listed_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    command()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*found()]
    assert all(line.endswith(".") and len(line) > 20 for line in lines)


def test_a_copy_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(tmp_path / "mine")
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "mine" / path.name) for path in found().values()
    ]
    name, path = next(iter(found().items()))
    assert (tmp_path / "mine" / f"{name}.yaml").read_bytes() == path.read_bytes()
    with pytest.raises(UsageError, match="is there already"):
        command(tmp_path / "mine")


def test_a_name_is_an_example_a_file_or_nearly_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, path = next(iter(found().items()))
    assert named(name) == str(path)
    assert named(f"{name}.yaml") == f"{name}.yaml" and named("zzzzzzzz") == "zzzzzzzz"
    with pytest.raises(ConfigError, match=f"did you mean '{name}'"):
        named(name[:-1])
    monkeypatch.chdir(tmp_path)
    Path(name).touch()
    assert named(name) == name
