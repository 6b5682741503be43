"""Targets: ``module:function`` in a configuration, found by import and nothing else."""

import importlib
import re
from typing import Any

from shardwise.plan.errors import ConfigError
from shardwise.plan.policy import nearest

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def load_target(where: str, target: str) -> Any:
    """The object that ``target`` names; ``where`` is the key it came from.

    Errors: ConfigError where the text has another form, the module cannot be found, or has no such attribute. What the
    module itself raises while it is imported passes through.
    """
    if not _TARGET.fullmatch(target):
        raise ConfigError(f"{where}: {target!r} is not of the form 'module:function', as in 'my_package.models:build'")
    module_name, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise ConfigError(
            f"{where}: there is no module {error.name!r} (from {target!r}); install it, or start where it can be imported"
        ) from None
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{where}: {module_name!r} has no {path!r}{nearest(part, dir(found))[:200]}")
        found = getattr(found, part)
    return found
