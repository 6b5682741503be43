"""Import and call the user's own code, named ``module:function`` in a configuration."""

import importlib
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.base.policy import nearest


def call_target(key: str, target: str, arguments: dict[str, Any]) -> Any:
    """Call the function that ``target`` names with keyword arguments and return its result.

    Args:
        key: Configuration key that names the function, for errors.
        target: ``module:function``.
        arguments: Keyword arguments of the call.

    Raises:
        ConfigError: if the function cannot be found or called.
    """
    return load_target(key, target)(**arguments)


def load_target(key: str, target: str) -> Any:
    """Return the function that ``target`` names.

    Args:
        key: Configuration key that names the function, for errors.
        target: ``module:function``.

    Raises:
        ConfigError: if the function cannot be found or called.
    """
    module_name, _, name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # An import that fails inside the user's own module is raised unchanged, so that the user sees its cause.
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
