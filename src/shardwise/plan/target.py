"""``module:function`` in a configuration: the user's own code, imported and called with keyword arguments."""

import importlib
from typing import Any

from shardwise.plan.errors import ConfigError
from shardwise.plan.policy import nearest


def call_target(key: str, target: str, arguments: dict[str, Any]) -> Any:
    """What the function behind ``target`` returns; ``key`` is where the configuration names it."""
    return load_target(key, target)(**arguments)


def load_target(key: str, target: str) -> Any:
    """The function behind ``target``. Errors: ConfigError where it cannot be found or called."""
    module_name, _, name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # An import that fails inside the user's module is the user's to see as it is.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{key} is {target!r}, but there is no module {error.name!r}; run where it can be imported, or install it"
        ) from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"{key} is {target!r}, but {module_name} has no {name!r}{nearest(part, _public(found))}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{key} is {target!r}, which is a {type(found).__name__}; expected a function")
    return found


def _public(owner: Any) -> list[str]:
    return [name for name in dir(owner) if not name.startswith("_")]
