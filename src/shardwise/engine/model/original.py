"""Original: the attributes of a model's modules before ``initialize``, restored when the engine closes.

    what                       who replaces it                               restored
    attribute ``forward``      recompute, compile, synchronized batch norm   as it was, or removed
    attribute ``attention``    selective recompute                           as it was, or removed
    a method                   zero.forward_methods                          as it was, or removed
    child ``nn.Dropout``       keyed dropout                                 the same module, with share and mode
                                                                             of its replacement
    forward hooks              the head of a foreign model whose logits are  removed
                               computed by tiles

Parts of the engine that live as long as the engine remove their hooks themselves, before. Attributes that the user's
own code has changed since stay as they are.

Cost: one look at the attributes of every module, twice, when the engine is built.
"""

from typing import Any, NamedTuple

from torch import nn

_NOTHING = object()
_TORCHS_OWN = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name in _TORCHS_OWN if name.startswith(("_forward_hooks", "_forward_pre_hooks")))
"""Attributes that hold a module's forward hooks, and flags of hooks, by number."""
"""Attributes that torch keeps in every module: hooks, parameters, buffers, children, mode."""


class _ReplacedAttribute(NamedTuple):
    held: dict[str, Any]
    """Attributes or children of a module, which contain the replacement."""
    key: str
    ours: Any
    own: Any
    """The original value; ``_NOTHING`` if the module had none."""


class OriginalAttributes:
    """The original attributes of one model.

    Make it before any attribute is replaced, and call ``compare`` after all are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = [(held, dict(held)) for module in model.modules() for held in _held_by(module)]
        self._hooks_before = [(held, set(held)) for module in model.modules() for held in _hooks_of(module)]
        self._replaced: list[_ReplacedAttribute] = []
        self._hooked: list[tuple[dict[int, Any], set[int]]] = []
        """Hooks of a module by number, with the numbers of those that were registered since the start."""

    def compare(self) -> None:
        """Record the attributes, children and hooks that have been replaced or registered since the start."""
        self._replaced = [
            _ReplacedAttribute(held, key, held.get(key, _NOTHING), before.get(key, _NOTHING))
            for held, before in self._before
            for key in {**before, **held}
            if key not in _TORCHS_OWN and held.get(key, _NOTHING) is not before.get(key, _NOTHING)
        ]
        self._before = []
        self._hooked = [
            (held, new)
            for held, before in self._hooks_before
            if (new := {number for number in held.keys() - before if _is_ours(held[number])})
        ]
        self._hooks_before = []

    def put_back(self) -> None:
        """Remove the recorded hooks, and restore every attribute and child that still is the engine's replacement."""
        for held_hooks, numbers in self._hooked:
            for number in numbers:
                held_hooks.pop(number, None)
        self._hooked = []
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


def _hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    return [vars(module)[name] for name in _HOOKS if name in vars(module)]


def _is_ours(hook: Any) -> bool:
    """Return True for a hook of this package; flags of hooks are True themselves and of no use without their hook."""
    return hook is True or str(getattr(hook, "__module__", "")).startswith("shardwise.")
