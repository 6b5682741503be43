"""Values travel as a text and tensors, and come back as they were."""

import gc
import json
import weakref
from typing import Any, NamedTuple

import pytest
import torch

from shardwise.base.errors import PlanError
from shardwise.parallel.pipeline.messages import pack, unpack
from tests.parallel.pipeline.chain import trained

A, B = torch.arange(3.0), torch.tensor([True, False])


@pytest.mark.parametrize(
    "value",
    [
        A,
        (A, None),
        [A, (B, [1, 2.5, "x", True])],
        {"a": {"tensor": A, "list": 3}, "tuple": ()},
        (),
        None,
        {"dict": [{}], "é": (A, A)},
    ],
    ids=str,
)
def test_what_is_packed_comes_back(value: Any) -> None:
    text, tensors = pack(value)
    json.loads(text)
    got = unpack(text, tensors)
    assert got is value if isinstance(value, torch.Tensor) else got == value
    assert type(got) is type(value)


def test_what_travelled_is_let_go_of_at_once() -> None:
    """What called itself inside ``pack`` and ``unpack`` kept a stage's activations until Python looked for cycles."""
    gc.disable()
    try:
        sent = torch.zeros(3)
        packed = pack((sent, {"more": sent}))
        got = unpack(packed.text, [torch.zeros(3)])
        gone = [weakref.ref(sent), weakref.ref(got[0])]
        del sent, packed, got
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


def test_a_tensor_that_occurs_twice_travels_once() -> None:
    x = A.clone().requires_grad_()
    text, tensors = pack((x, {"again": x}, B))
    assert len(tensors) == 2
    one, rest, _ = unpack(text, [tensor.detach().clone() for tensor in tensors])
    assert one is rest["again"] and one.requires_grad
    (one.sum() + (rest["again"] * 3).sum()).backward()
    assert torch.equal(one.grad, torch.full((3,), 4.0))


def test_only_what_was_trained_is_trained_at_the_other_end() -> None:
    x, y = A.clone().requires_grad_(), A.clone()
    value = [y, (x * 2, B), x]
    text, tensors = pack(value)
    got = unpack(text, [tensor.detach() for tensor in tensors])
    assert [t.requires_grad for t in (got[0], got[1][0], got[1][1], got[2])] == [False, True, False, True]
    assert [t.shape for t in trained(value)] == [t.shape for t in trained(got)]
    assert len(trained(got)) == 2


class Named(NamedTuple):
    a: torch.Tensor


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((A, {"x": object()}), r"stage 2's output\[1\]\['x'\]: a builtins.object cannot travel"),
        ({3: A}, "key 3 of a dictionary is no string"),
        ([Named(A)], r"\[0\]: a .*Named cannot travel.*tuples, lists and dictionaries"),
    ],
)
def test_what_cannot_travel_is_named_with_its_place(value: Any, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        pack(value, "stage 2's output")
