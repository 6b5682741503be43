"""The back end of Ray without Ray: options, places and what is missing."""

import sys

import pytest

from shardwise.base.errors import ConfigError, UsageError
from shardwise.launch.backends.ray import RayLauncher, _needs, _places


def test_places_are_accelerators_or_processors() -> None:
    assert _places({"CPU": 8.0, "GPU": 2.0}) == 2 and _places({"CPU": 8.0}) == 8 and _places({}) == 0
    assert _needs(2, {"CPU": 8.0, "GPU": 2.0}) == {"CPU": 2.0, "GPU": 2.0}
    assert _needs(4, {"CPU": 1.0, "GPU": 4.0}) == {"CPU": 1.0, "GPU": 4.0}
    assert _needs(3, {"CPU": 8.0}) == {"CPU": 3.0}


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="needs Ray, which is not installed"):
        RayLauncher().check()
    with pytest.raises(UsageError, match="--launcher_args: unrecognized arguments: --adress"):
        RayLauncher(["--adress", "x"])
