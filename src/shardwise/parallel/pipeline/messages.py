"""Messages: what passes between two stages, as a text and a list of tensors.

    pack({"x": a, "skip": (a, None, 3)})  =  '{"x": {"tensor": 0}, ...}', [a]

Tensors in tuples, lists and dictionaries with string keys, beside numbers, strings and None. The text is JSON and is
parsed as JSON: nothing in a message is ever run or imported. A tensor that occurs twice travels once and is one tensor
again, so that its gradients are summed where they belong.

A gradient's message is the list of gradients of the tensors that ask for one, in their order, zeros for those that had
no part in the loss, and what else is said of the microbatch, a number [] (executor.py). Its text is empty.

Between devices what is known on both ends goes without the text and without shapes (comm/agreed.py): ``likeness`` of a
microbatch is what both ends know.

A stage that cannot run says so in the place of its next message to each neighbour, and they say it to theirs:

    refused: PlanError: stage 1 of 2: ...          the same error on every rank; a user's own exception is told as a
                                                   UsageError, and stays what it is on the rank that met it
"""

import hashlib
import json
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from shardwise.plan import errors
from shardwise.plan.errors import PlanError, ShardwiseError

REFUSED = "refused: "
"""Begins a message that holds nothing but why there is nothing. JSON never begins so."""
_TENSOR, _TUPLE, _LIST, _DICT = "tensor", "tuple", "list", "dict"


class Packed(NamedTuple):
    """A value as it travels."""

    text: str
    tensors: list[Tensor]


def pack(value: Any, where: str = "a stage's output") -> Packed:
    """``where`` names the value in errors: PlanError for what cannot travel."""
    tensors: list[Tensor] = []
    return Packed(json.dumps(_written(value, where, tensors, {})), tensors)


# No function inside another that calls itself: what it has to do with lives until Python looks for cycles.
def _written(part: Any, path: str, tensors: list[Tensor], places: dict[int, int]) -> Any:
    """``part`` as JSON has it; its tensors join ``tensors``, by identity in ``places``."""
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
    """Whether a text says where tensors stand and holds nothing that another message of its kind may have otherwise."""

    def check(part: Any) -> bool:
        if not isinstance(part, dict):
            return part is None
        ((kind, inner), *_) = part.items()
        if kind == _TENSOR:
            return True
        return all(map(check, inner.values() if kind == _DICT else inner))

    return not text or check(json.loads(text))


def likeness(batch: Any, *more: Any) -> int | None:
    """A number that is equal for batches of the same structure, shapes, dtypes and plain values; None where a batch
    holds what nobody can compare. ``more`` plain values distinguish further."""
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
    """The text that tells of ``error``, which ``rank`` met."""
    if isinstance(error, ShardwiseError):
        return f"{REFUSED}{type(error).__name__}: {error}"
    said = f"rank {rank} ended the pass with {type(error).__name__}: {error}; its own traceback says where"
    return f"{REFUSED}UsageError: {said}"


def is_refusal(text: str) -> bool:
    """Whether a message holds nothing but why there is nothing."""
    return text.startswith(REFUSED)


def check_refusal(text: str) -> None:
    """Errors: the sender's own, where a message says that it has given up."""
    if not is_refusal(text):
        return
    kind, _, said = text.removeprefix(REFUSED).partition(": ")
    known = getattr(errors, kind, None)
    raise (known if isinstance(known, type) and issubclass(known, ShardwiseError) else PlanError)(said)


def unpack(text: str, tensors: list[Tensor]) -> Any:
    """The value again; tensors that had a gradient at the sender have one here."""
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
