"""Messages between two stages: a text and a list of tensors.

    pack({"x": a, "skip": (a, None, 3)})  =  '{"x": {"tensor": 0}, ...}', [a]

A message contains tensors in tuples, lists and dictionaries with string keys, beside numbers, strings and None. The
text is JSON and is parsed as JSON: nothing in a message is ever run or imported. A tensor that occurs twice is sent
once and is a single tensor again at the receiver, so that its gradients are summed.

The message of a gradient is the list of gradients of the tensors that require one, in their order, with zeros for
tensors that had no part in the loss, followed by an optional number [] about the microbatch (executor.py). Its text is
empty.

Between devices the text and the shapes are left out if both ends have stored them before (comm/agreed.py), under the
``likeness`` of the microbatch, which both ends compute.

A stage that cannot run sends the reason in place of its next message to each neighbour, which passes it on:

    refused: PlanError: stage 1 of 2: ...          the same error on every rank; a user's own exception becomes a
                                                   UsageError on the other ranks and stays as it is on the rank that
                                                   raised it
"""

import hashlib
import json
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from shardwise.base import errors
from shardwise.base.errors import PlanError, ShardwiseError

REFUSED = "refused: "
"""Prefix of a message that contains only the reason for a missing value. JSON never begins with it."""
_TENSOR, _TUPLE, _LIST, _DICT = "tensor", "tuple", "list", "dict"


class PackedValue(NamedTuple):
    """A value in the form in which it is sent."""

    text: str
    tensors: list[Tensor]


def pack(value: Any, where: str = "a stage's output") -> PackedValue:
    """Return a value as text and tensors.

    Args:
        value: The value: any pytree that a message may contain.
        where: Name of the value in errors.

    Returns:
        The packed value.

    Raises:
        PlanError: If the value contains something that cannot be sent.
    """
    tensors: list[Tensor] = []
    return PackedValue(json.dumps(_written(value, where, tensors, {})), tensors)


# A module-level function: a nested function that calls itself is a reference cycle, which keeps the tensors alive until
# Python collects cycles.
def _written(part: Any, path: str, tensors: list[Tensor], places: dict[int, int]) -> Any:
    """Return ``part`` as JSON values, and append its tensors to ``tensors``, each once."""
    if part is None or isinstance(part, bool | int | float | str):
        return part
    if isinstance(part, Tensor):
        if id(part) not in places:
            places[id(part)] = len(tensors)
            tensors.append(part)
        return {_TENSOR: places[id(part)], "trained": part.requires_grad}
    if type(part) in (tuple, torch.Size, list):
        written = [_written(each, f"{path}[{i}]", tensors, places) for i, each in enumerate(part)]
        return {_LIST if type(part) is list else _TUPLE: written}
    if type(part) is dict:
        for key in part:
            if not isinstance(key, str):
                raise PlanError(f"{path}: key {key!r} of a dictionary is no string; make it one")
        return {
            _DICT: {key: _written(each, f"{path}[{key!r}]", tensors, places) for key, each in part.items()}
        }
    raise PlanError(
        f"{path}: a {type(part).__module__}.{type(part).__qualname__} cannot travel between stages; "
        "a block may return tensors, None, numbers and strings, in tuples, lists and dictionaries"
    )


def is_lasting(text: str) -> bool:
    """Return True if a text contains only positions of tensors, which are the same in later messages of its kind."""

    def check(part: Any) -> bool:
        if not isinstance(part, dict):
            return part is None
        ((kind, inner), *_) = part.items()
        if kind == _TENSOR:
            return True
        return all(map(check, inner.values() if kind == _DICT else inner))

    return not text or check(json.loads(text))


def likeness(batch: Any, *more: Any) -> int | None:
    """Return a number that is equal for batches of the same structure, shapes, dtypes and plain values.

    Args:
        batch: The batch.
        *more: Plain values that distinguish further.

    Returns:
        The number, or None if the batch contains objects that cannot be compared.
    """
    leaves, structure = tree_flatten(batch)
    kinds: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            kinds.append((str(leaf.dtype), tuple(leaf.shape), leaf.requires_grad))
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            kinds.append(leaf)
        else:
            return None
    told = repr((kinds, str(structure), more))
    return int.from_bytes(hashlib.sha256(told.encode()).digest()[:8], "big")


def refusal(error: Exception, rank: int) -> str:
    """Return the text that reports ``error``, which was raised on ``rank``."""
    if isinstance(error, ShardwiseError):
        return f"{REFUSED}{type(error).__name__}: {error}"
    said = f"rank {rank} ended the pass with {type(error).__name__}: {error}; its own traceback says where"
    return f"{REFUSED}UsageError: {said}"


def is_refusal(text: str) -> bool:
    """Return True if a message contains only the reason for a missing value."""
    return text.startswith(REFUSED)


def check_refusal(text: str) -> None:
    """Raise the sender's error if the text of a message reports one.

    Args:
        text: Text of the message.

    Raises:
        ShardwiseError: The error of the class that the sender names, or PlanError for an unknown class.
    """
    if not is_refusal(text):
        return
    kind, _, said = text.removeprefix(REFUSED).partition(": ")
    known = getattr(errors, kind, None)
    raise (known if isinstance(known, type) and issubclass(known, ShardwiseError) else PlanError)(said)


def unpack(text: str, tensors: list[Tensor]) -> Any:
    """Return the value of a message; tensors that required gradients at the sender require gradients again.

    Args:
        text: Text of the message.
        tensors: Tensors of the message.

    Returns:
        The value.

    Raises:
        ShardwiseError: If the message reports the sender's error.
    """
    check_refusal(text)

    return _read(json.loads(text), tensors)


def _read(part: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(part, dict):
        return part
    if _TENSOR in part:
        tensor = tensors[part[_TENSOR]]
        return tensor.requires_grad_() if part["trained"] else tensor
    if _TUPLE in part:
        return tuple(_read(each, tensors) for each in part[_TUPLE])
    if _LIST in part:
        return [_read(each, tensors) for each in part[_LIST]]
    return {key: _read(each, tensors) for key, each in part[_DICT].items()}
