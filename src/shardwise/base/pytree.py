"""Values made of tensors: what models take and return."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def part_named(output: Any, name: str) -> Any:
    """Return one part of a model's output: an entry, an attribute (a named tuple's too), or the first of a tuple.

    Args:
        output: Output of a model. A tensor is returned as it is.
        name: Name of the part.

    Returns:
        The part, or None if there is none.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get(name)
    if isinstance(output, tuple | list) and name not in getattr(output, "_fields", ()):
        return output[0] if output else None
    return getattr(output, name, None)


class Laden(ABC):
    """A mapping with state besides its items, which its class rebuilds by itself."""

    @abstractmethod
    def carried(self) -> Iterable[Any]:
        """Return the values besides the items."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in tuples, lists, mappings and dataclasses, in order.

    A mapping's items come first, then the values that a ``Laden`` mapping carries.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from tensors_in(inner)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
        if isinstance(value, Laden):
            for inner in value.carried():
                yield from tensors_in(inner)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def tensors_by_path(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a model's output with its path: ``hidden_states[1]``, or ``logits``.

    A path names the same tensor in two models of which one returns less; a position in ``tensors_in`` does not.
    """
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_by_path(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, tuple | list):
        for i, inner in enumerate(value):
            yield from tensors_by_path(inner, f"{path}[{i}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            inner = getattr(value, field.name)
            yield from tensors_by_path(inner, f"{path}.{field.name}" if path else field.name)


def rebuilt(value: Any, of: Callable[[Any], Any]) -> Any:
    """Return a tuple, list, mapping or dataclass of the same class whose parts are replaced by ``of(part)``.

    Anything else is returned as it is, and so are mappings that cannot be written.

    Args:
        value: The value.
        of: Function that returns the new part.
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(of, value))
    if isinstance(value, tuple | list):
        return type(value)(map(of, value))
    if type(value) is dict:
        return {key: of(inner) for key, inner in value.items()}
    if isinstance(value, MutableMapping) and not isinstance(value, Laden):
        made = copy(
            value
        )  # a class of its own may hold more than its items, as the outputs of transformers do
        for key, inner in value.items():
            made[key] = of(inner)
        return made
    if is_dataclass(value) and not isinstance(value, type | Laden):
        same = copy(value)
        for field in fields(value):
            object.__setattr__(same, field.name, of(getattr(value, field.name)))
        return same
    return value
