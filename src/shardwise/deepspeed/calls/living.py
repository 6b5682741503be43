"""A lookup of the engine that has a parameter or a module.

DeepSpeed's functions (``safe_get_full_grad(parameter)``) take no engine, so this module searches the open engines.
The set of engines holds weak references: an engine stays in the set as long as some other object refers to it.
"""

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from torch import nn

from shardwise.base.errors import UsageError

_ENGINES: "WeakSet[Any]" = WeakSet()


def live(engine: Any) -> None:
    """Add ``engine`` to the engines that ``find`` searches."""
    _ENGINES.add(engine)


def living() -> Iterator[Any]:
    """Yield the engines that are not closed."""
    return (engine for engine in list(_ENGINES) if not engine.ours.is_closed)


def find(parameter: nn.Parameter) -> tuple[Any, str] | None:
    """Return the engine that has ``parameter`` and the parameter's name in its model; None if no engine has it."""
    for engine in living():
        for name, each in engine.module.named_parameters():
            if each is parameter:
                return engine, name
    return None


def engine_of(parameter: nn.Parameter, call: str) -> tuple[Any, str]:
    """Return the engine that has ``parameter`` and the parameter's name in its model.

    Args:
        parameter: A parameter of a model that ``initialize`` was called on.
        call: The name of the calling function, for the error.

    Raises:
        UsageError: if no engine has the parameter.
    """
    found = find(parameter)
    if found is None:
        raise UsageError(
            f"{call}: no engine has this parameter; call deepspeed.initialize on its model first"
        )
    return found
