"""DeepSpeedConfig: a DeepSpeed configuration as the engine and scripts ask for it, key by key.

    config = DeepSpeedConfig({"train_batch_size": 32}, world_size=2)
    config.value("zero_optimization.stage")      0, the default
    config.train_batch_size                      32, as an attribute; blocks are dictionaries

What the keys do is in config/deepspeed.py, which this asks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.config.deepspeed import from_base64, translate
from shardwise.config.run import read_file
from shardwise.plan.errors import ConfigError


class DeepSpeedConfig:
    """See the module's docstring. ``given``: a dictionary, a path, or url-safe base64 of JSON."""

    def __init__(
        self,
        given: "Mapping[str, Any] | str | Path",
        mpu: Any = None,
        mesh_device: Any = None,
        auto: Mapping[str, Any] | None = None,
    ):
        self.given = read(given)
        # Schedulers are objects here (rate_schedulers.py), whose own arguments are checked as they are made.
        keys = {key: value for key, value in self.given.items() if key != "scheduler"}
        self.translation = translate(keys, _title(given), auto)
        self._changed: dict[str, Any] = {}

    def value(self, path: str) -> Any:
        """The value of a key: changed since, given, or its default; None where it has none."""
        if path in self._changed:
            return self._changed[path]
        values = self.translation.values
        if path in values and not path.startswith("scheduler"):
            return values[path]
        found: Any = self.given
        for step in path.split("."):
            found = found.get(step) if isinstance(found, Mapping) else None
        return found

    def change(self, path: str, value: Any) -> None:
        """Another value from here on: of what the engine has resolved, or was told."""
        self._changed[path] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "translation" not in vars(self):
            raise AttributeError(name)
        return self.value(name)


class DeepSpeedConfigError(ConfigError):
    """DeepSpeed's name for an error in the configuration; ours is ConfigError, which this is one of."""


def read(given: Any) -> dict[str, Any]:
    """The dictionary that ``given`` is, names, or encodes. Errors: ConfigError."""
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, str) and not Path(given).exists():
        found = from_base64(given)
        if found is not None:
            return found
    if isinstance(given, str | Path):
        return read_file(Path(given))
    raise ConfigError(
        f"config: expected a dictionary or the path of a JSON file, given a {type(given).__name__}"
    )


def _title(given: Any) -> str:
    return str(given) if isinstance(given, str | Path) and len(str(given)) < 200 else "config"
