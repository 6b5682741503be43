"""Which engine has a parameter or a module: DeepSpeed's functions (``safe_get_full_grad(parameter)``) are given no
engine, so the ones that live are asked. Engines are known as long as somebody holds them."""

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from torch import nn

from shardwise.plan.errors import UsageError

_ENGINES: "WeakSet[Any]" = WeakSet()


def live(engine: Any) -> None:
    """``engine`` is to be found from here on."""
    _ENGINES.add(engine)


def living() -> Iterator[Any]:
    """The engines that have a model."""
    return (engine for engine in list(_ENGINES) if not engine.ours.is_closed)


def find(parameter: nn.Parameter) -> tuple[Any, str] | None:
    """The engine that has ``parameter``, and its name there; None where no engine does."""
    for engine in living():
        for name, each in engine.module.named_parameters():
            if each is parameter:
                return engine, name
    return None


def engine_of(parameter: nn.Parameter, call: str) -> tuple[Any, str]:
    """As ``find``. Errors: UsageError where no engine has it."""
    found = find(parameter)
    if found is None:
        raise UsageError(
            f"{call}: no engine has this parameter; call deepspeed.initialize on its model first"
        )
    return found
