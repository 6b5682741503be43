"""Tensors are found in whatever holds them."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from shardwise.base.pytree import part_named, rebuilt, tensors_in

A, B = torch.zeros(1), torch.zeros(2)


@dataclass
class Output:
    logits: Tensor
    rest: Any = None


class Pair(NamedTuple):
    first: Tensor
    second: Any


@pytest.mark.parametrize(
    "value",
    [
        (A, [B]),
        {"a": A, "none": None, "b": (B, "text", 3)},
        MappingProxyType({"a": A, "b": B}),
        OrderedDict(a=Pair(A, [[B]])),
        Output(A, {"b": B}),
        [Output(A), Output, Pair(B, 1.0)],
    ],
    ids=str,
)
def test_in_order(value: Any) -> None:
    assert [id(tensor) for tensor in tensors_in(value)] == [id(A), id(B)]


def test_rebuilt_is_of_its_own_class() -> None:
    """A loss function of a user reads ``model(**batch).loss``: what transformers return came back as a dictionary."""
    counted = Counted(a=A)
    counted.count = 3
    given = [
        Output(A, {"b": B}),
        counted,
        UserDict(a=A),
        OrderedDict(b=Pair(A, [B])),
        Output,
        MappingProxyType({}),
    ]
    found = rebuilt(given, lambda each: rebuilt(each, doubled))
    assert [type(each) for each in found] == [type(each) for each in given]
    assert found[0].logits is not A and found[0].rest is given[0].rest
    assert found[1].count == 3 and found[1]["a"] is not A and counted["a"] is A
    assert found[2]["a"] is not A and given[2]["a"] is A
    assert found[4:] == given[4:]


class Counted(dict[str, Any]):
    """A dictionary with something beside its items."""

    count = 0


def doubled(value: Any) -> Any:
    return value * 2 if isinstance(value, Tensor) else value


class Numbers(NamedTuple):
    logits: int
    loss: int


def test_part_named() -> None:
    """A named tuple's field is no matter of its place."""
    assert part_named(Numbers(1, 2), "loss") == 2
    assert part_named((1, 2), "loss") == 1
    assert part_named({"loss": 3}, "loss") == 3
