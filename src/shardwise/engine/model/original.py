"""Original: the attributes of a model's modules before ``initialize``, restored when the engine closes.

    what                       who replaces it                               restored
    attribute ``forward``      recompute, compile, synchronized batch norm   as it was, or removed
    attribute ``attention``    selective recompute                           as it was, or removed
    a method                   zero.forward_methods                          as it was, or removed
    child ``nn.Dropout``       keyed dropout                                 the same module, with share and mode
                                                                             of its replacement

Code that registers a hook on a module removes the hook itself. Attributes that the user's own code has changed since
stay as they are.

Cost: one look at the attributes of every module, twice, when the engine is built.
"""

from typing import Any, NamedTuple

from torch import nn

_NOTHING = object()
_TORCHS_OWN = frozenset(vars(nn.Module()))
"""Attributes that torch keeps in every module: hooks, parameters, buffers, children, mode."""


class _Replaced(NamedTuple):
    held: dict[str, Any]
    """Attributes or children of a module, which contain the replacement."""
    key: str
    ours: Any
    own: Any
    """The original value; ``_NOTHING`` if the module had none."""


class Original:
    """The original attributes of one model.

    Make it before any attribute is replaced, and call ``compare`` after all are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = [(held, dict(held)) for module in model.modules() for held in _held_by(module)]
        self._replaced: list[_Replaced] = []

    def compare(self) -> None:
        """Record the attributes and children that have been replaced since the start."""
        self._replaced = [
            _Replaced(held, key, held.get(key, _NOTHING), before.get(key, _NOTHING))
            for held, before in self._before
            for key in {**before, **held}
            if key not in _TORCHS_OWN and held.get(key, _NOTHING) is not before.get(key, _NOTHING)
        ]
        self._before = []

    def put_back(self) -> None:
        """Restore every attribute and child that still is the engine's replacement."""
        for held, key, ours, own in self._replaced:
            if held.get(key, ours) is not ours:
                continue
            if own is _NOTHING:
                held.pop(key, None)
                continue
            held[key] = own
            if isinstance(own, nn.Dropout) and isinstance(ours, nn.Module):
                own.p = ours.p  # type: ignore[assignment]
                own.train(ours.training)
        self._replaced = []


def _held_by(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return vars(module), module._modules
