"""Tensors are found in whatever holds them."""

from collections import OrderedDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from shardwise.plan.pytree import part_named, tensors_in

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


class Output(NamedTuple):
    logits: int
    loss: int


def test_part_named() -> None:
    """A named tuple's field is no matter of its place."""
    assert part_named(Output(1, 2), "loss") == 2
    assert part_named((1, 2), "loss") == 1
    assert part_named({"loss": 3}, "loss") == 3
