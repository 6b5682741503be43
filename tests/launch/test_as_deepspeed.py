"""A job in which ``import deepspeed`` imports Shardwise."""

import importlib.metadata
import os
from pathlib import Path

import pytest

from shardwise.launch.as_deepspeed import VERSION, names_of_deepspeed, read_env_file


def test_the_package_is_found_first_with_its_version(tmp_path: Path) -> None:
    variables = names_of_deepspeed(tmp_path, "/before")
    first, rest = variables["PYTHONPATH"].split(os.pathsep)
    assert rest == "/before" and (Path(first) / "deepspeed" / "__init__.py").is_file()
    (found,) = importlib.metadata.distributions(name="deepspeed", path=[first])
    assert found.version == VERSION
    assert names_of_deepspeed(tmp_path / "other", "")["PYTHONPATH"] == str(tmp_path / "other" / "names")


def test_variables_in_a_file_of_this_folder_or_of_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, home = tmp_path / "here", tmp_path / "home"
    for folder in (here, home):
        folder.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    assert read_env_file() == {}
    (home / ".deepspeed_env").write_text("A = 1\n# B=2\n\nC=3=4\nnothing\n=5\nD=\n")
    assert read_env_file() == {"A": "1", "C": "3=4", "D": ""}
    (here / ".deepspeed_env").write_text("A=here")
    assert read_env_file() == {"A": "here"}
