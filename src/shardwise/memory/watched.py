"""Parameters that report reads of ``p.data``, the only access to their memory that changes no version counter.

An edit of ``p`` itself changes the parameter's version counter, which is compared at the step. ``p.data`` returns the
same memory with a separate counter, so only the read can be detected. Whether anything was written is found later, by
comparing numbers. The watch is a class of the parameter with a single property, so that operations cost the same as
before.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

_DATA: Any = torch._C.TensorBase.data  # type: ignore[attr-defined]


class WatchedParameter:
    """Mixin for the class of a Parameter whose ``data`` is watched."""

    _plain: type


def watch_data(
    parameters: Sequence[nn.Parameter], seen: Callable[[Tensor], None], classes: dict[type, type]
) -> None:
    """Call ``seen(parameter)`` before each read of ``parameter.data``, until ``unwatch_data``.

    Args:
        parameters: The parameters to watch.
        seen: The callback, which must be the same in every call with the same ``classes``.
        classes: Cache of the classes that were made, by the parameters' own classes.
    """
    for parameter in parameters:
        own = _plain(type(parameter))
        if own not in classes:
            classes[own] = _watching(own, seen)
        parameter.__class__ = classes[own]


def unwatch_data(parameters: Sequence[nn.Parameter]) -> None:
    """Stop watching these parameters."""
    for parameter in parameters:
        parameter.__class__ = _plain(type(parameter))


def _plain(own: type) -> Any:
    """Return the class below a watched class; a class on top of the watched class (passes/absent.py) stays."""
    return vars(own).get("_plain", own)


def _watching(own: type, seen: Callable[[Tensor], None]) -> type:
    def read(self: Tensor) -> Tensor:
        seen(self)
        return cast(Tensor, _DATA.__get__(self))

    def write(self: Tensor, value: Tensor) -> None:
        _DATA.__set__(self, value)

    def deepcopy(self: Tensor, memo: Any) -> Tensor:
        copied = cast(Any, own).__deepcopy__(self, memo)
        copied.__class__ = own
        return cast(Tensor, copied)

    body = {
        "data": property(read, write),
        "__deepcopy__": deepcopy,
        "__module__": own.__module__,
        "__doc__": own.__doc__,
        "_plain": own,
    }
    return type(own.__name__, (own, WatchedParameter), body)
