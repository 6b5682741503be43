"""Updates in two halves, with a look at the whole tensor in between."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.optim import two_pass
from shardwise.optim.two_pass import TwoPass, WholeTensor


class ByNorm(TwoPass):
    """The direction is the sum of all gradients; a step is as long as the weights' norm."""

    needs = "norm"
    moments = ("total",)
    counts = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})
        self.parts: list[int] = []

    def direct_part(
        self, group: Mapping[str, Any], weights: Tensor, gradient: Tensor, state: dict[str, Any]
    ) -> None:
        self.parts.append(weights.numel())
        state["total"] += gradient
        gradient.copy_(state["total"])

    def factor(self, group: Mapping[str, Any], whole: WholeTensor) -> float:
        return whole.weight_norm / whole.direction_norm * len(whole.shape)

    def apply_part(
        self, group: Mapping[str, Any], weights: Tensor, direction: Tensor, state: dict[str, Any]
    ) -> None:
        weights.sub_(direction, alpha=float(state["step"]))


def parameters() -> list[nn.Parameter]:
    return [
        nn.Parameter(torch.tensor([3.0, 4.0])),
        nn.Parameter(torch.ones(1, 1)),
        nn.Parameter(torch.ones(2)),
    ]


def test_directions_are_scaled_by_what_the_look_found() -> None:
    flat, matrix, unused = parameters()
    optimizer = ByNorm([flat, matrix, unused])
    for step in (1, 2):
        flat.grad, matrix.grad = torch.tensor([0.0, 1.0]), torch.full((1, 1), 2.0)
        before = flat.detach().clone(), matrix.detach().clone()
        optimizer.step()
        # The direction of step 2 is the sum over both: its norm is that of 1 step, twice.
        assert torch.allclose(flat, before[0] - step * before[0].norm() * torch.tensor([0.0, 1.0]))
        assert torch.allclose(matrix, before[1] - step * 2 * before[1].norm())
    assert unused.tolist() == [1, 1] and not optimizer.state[unused]
    assert optimizer.state[flat]["step"] == 2


def test_flat_tensors_are_directed_in_parts_that_stay_in_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(7))
    one, other = ByNorm([whole]), ByNorm([parts])
    for parameter, optimizer, chunk in ((whole, one, 100), (parts, other, 3)):
        monkeypatch.setattr(two_pass, "_CHUNK", chunk)
        parameter.grad = torch.arange(7.0)
        optimizer.step()
    assert torch.equal(whole, parts) and one.parts == [7] and other.parts == [3, 3, 1]
    assert torch.equal(one.state[whole]["total"], other.state[parts]["total"])


def test_a_closure_is_called_with_gradients() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))

    def loss() -> float:
        value = (weight * 2).sum()
        value.backward()
        return float(value.detach())

    assert ByNorm([weight]).step(loss) == 14.0
    assert weight.tolist() != [3.0, 4.0]
