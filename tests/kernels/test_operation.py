"""A function as one operation: seen as a whole by torch's function modes, by tools, and without numbers."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.kernels.operation import KIND, device_operation, operation


@operation("fp32")
def doubled(x: Tensor, more: float = 0.0) -> Tensor:
    """Return 2 x + more."""
    return x * 2 + more


class Noted(TorchFunctionMode):
    """Keeps the functions that are called."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


def test_a_tensor_that_overrides_functions_is_given_the_whole_function() -> None:
    class Counted(Tensor):
        seen: list[Any] = []

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            cls.seen.append((function, kwargs))
            return "counted"

    assert doubled(torch.ones(2).as_subclass(Counted), more=1.0) == "counted"
    assert Counted.seen == [(doubled, {"more": 1.0})]


def test_a_mode_sees_the_function_first() -> None:
    x = torch.ones(2)
    with Noted() as mode:
        assert doubled(x).tolist() == [2, 2]
    assert mode.seen[0] is doubled


def test_it_is_the_function_with_its_kind() -> None:
    assert doubled(torch.ones(2), more=1.0).tolist() == [3, 3]
    assert getattr(doubled, KIND) == "fp32" and doubled.__doc__ == "Return 2 x + more."


TURNED = device_operation(
    "test_turned(Tensor x, int by) -> Tensor", lambda x, by: x.new_empty(x.shape[0], by)
)(lambda x, by: x[:, :by].clone())


class Counting(TorchDispatchMode):
    """Keeps the operations that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


def test_an_operation_of_the_dispatcher_is_one_for_tools_and_has_a_shape_without_numbers() -> None:
    x = torch.arange(6.0).view(2, 3)
    with Counting() as counting:
        assert TURNED(x, 2).tolist() == [[0, 1], [3, 4]]
    assert counting.seen == [TURNED]
    assert TURNED(x.to("meta"), 1).shape == (2, 1)
    assert str(TURNED) == "shardwise.test_turned.default"
