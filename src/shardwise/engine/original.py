"""Original: what the modules of a model held before ``initialize``, put back when the engine closes.

    what                       who replaces it                               put back
    attribute ``forward``      recompute, compile, synchronized batch norm   as it was, or none
    attribute ``attention``    selective recompute                           as it was, or none
    a method                   zero.methods                                  as it was, or none
    child ``nn.Dropout``       keyed dropout                                 the same module, with share and mode
                                                                             of its replacement

Whoever hangs a hook on a module removes it. What the user's own code has changed since stays as it is.

Cost: one look at the attributes of every module, twice, when the engine is built.
"""

from typing import Any, NamedTuple

from torch import nn

_NOTHING = object()
_TORCHS_OWN = frozenset(vars(nn.Module()))
"""Attributes that torch keeps in every module: hooks, parameters, buffers, children, mode."""


class _Replaced(NamedTuple):
    held: dict[str, Any]
    """Attributes or children of a module, where the replacement stands."""
    key: str
    ours: Any
    own: Any
    """``_NOTHING`` where there was none."""


class Original:
    """Of one model. Made before anything of it is replaced; ``compare`` follows when all is."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [(held, dict(held)) for module in model.modules() for held in _held_by(module)]
        self._replaced: list[_Replaced] = []

    def compare(self) -> None:
        """Note what has been replaced since."""
        self._replaced = [
            _Replaced(held, key, held.get(key, _NOTHING), before.get(key, _NOTHING))
            for held, before in self._before
            for key in {**before, **held}
            if key not in _TORCHS_OWN and held.get(key, _NOTHING) is not before.get(key, _NOTHING)
        ]
        self._before = []

    def put_back(self) -> None:
        """Every module holds what it held, but where something else than ours stands by now."""
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
