"""``module:function``: found, called, or refused with the reason."""

from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError
from shardwise.base.target import call_target


@pytest.fixture(autouse=True)
def _users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_target.py").write_text(
        "def build(size=2):\n    return list(range(size))\n\n"
        "class Maker:\n    make = staticmethod(build)\n\nnumber = 3\n"
    )
    (tmp_path / "users_broken.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_called_with_arguments() -> None:
    assert call_target("data.target", "users_target:build", {"size": 3}) == [0, 1, 2]
    assert call_target("data.target", "users_target:Maker.make", {}) == [0, 1]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("users_targat:build", "no module 'users_targat'; run where it can be imported"),
        ("users_target.inner:build", "no module 'users_target.inner'"),
        ("users_target:biuld", "did you mean 'build'"),
        ("users_target:number", "which is a int; expected a function"),
    ],
)
def test_what_is_not_there_is_named_with_its_key(target: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"data.target is '{target}'.*{expected}"):
        call_target("data.target", target, {})


def test_an_import_that_fails_inside_is_shown_as_it_is() -> None:
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_missing"):
        call_target("data.target", "users_broken:build", {})
