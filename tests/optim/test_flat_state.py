"""State of a flat optimizer: its kinds, its bytes, and where it is made."""

from typing import Any

import pytest
import torch
from tests.largest_made import LargestMade
from tests.optim.flat_cases import AS_MADE, OPTIMIZERS, TOTAL
from torch import Tensor, optim

from shardwise.optim import flat_state
from shardwise.optim.classes import from_policy, from_torch, update_rules
from shardwise.optim.flat import FlatOptimizer
from shardwise.optim.policy import OptimizerPolicy
from shardwise.optim.rounding import RoundedPart, StochasticRounding
from shardwise.plan.placement import ContiguousRun
from shardwise.plan.state_form import StateForm, stored_elements


class Counting(optim.Optimizer):
    """Keeps its count beside the weights, as fused and capturable optimizers do, and numbers of other kinds."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("step", torch.zeros((), dtype=torch.int32, device=p.device))
                    state.setdefault("decay", torch.ones((), dtype=torch.float64))
                    state.setdefault("calls", 0)
                    state.setdefault("average", torch.zeros_like(p))
                    state["step"] += 1
                    state["calls"] += 1
                    p.add_(p.grad, alpha=-group["lr"])


def kinds_of(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {
            label: (value.device, value.dtype, value.dim()) if isinstance(value, Tensor) else type(value)
            for label, value in state.items()
        }
        for state in optimizer.state.values()
    ]


@pytest.mark.parametrize(
    ("name", "device"),
    [*((name, "cpu") for name in sorted(OPTIMIZERS)), ("counting", "cpu"), ("counting", "meta")],
)
def test_state_after_a_load_is_of_the_kind_of_the_state_before(name: str, device: str) -> None:
    """A fused Adam whose count came back in host memory read it through a device's pointer and took the process along;
    "meta" stands for the device here."""
    make = OPTIMIZERS.get(name, lambda ps: Counting(ps))
    flat = FlatOptimizer(torch.zeros(TOTAL, device=device), lambda leaves, group: make(leaves), 0)
    flat.step(torch.ones(TOTAL, device=device), 1.0, AS_MADE)
    before = kinds_of(flat.state.optimizer)
    moments = {label: tensor for label, _, _, tensor in flat.state.moments()}
    scalars = dict.fromkeys((label for label, kind in before[0].items() if label not in moments), 3.0)
    flat.state.restore(moments, [(TOTAL, scalars)])
    assert kinds_of(flat.state.optimizer) == before


def test_state_of_one_element_is_told_from_single_numbers() -> None:
    """A segment of one element: its moments have as many elements as its step count."""
    flat = FlatOptimizer(torch.zeros(3), from_torch(optim.NAdam([torch.zeros(1)])), 0)
    flat.step(torch.ones(3), 1.0, AS_MADE, [(1, 2)])
    flat.step(torch.ones(3), 1.0, AS_MADE, [(0, 1)])
    assert {label for label, *_ in flat.state.moments()} == {"exp_avg", "exp_avg_sq"}
    assert all(set(row.scalars) == {"step", "mu_product"} for row in flat.state.scalars())


def test_moments_are_known_before_the_first_step() -> None:
    def names(**policy: Any) -> tuple[str, ...]:
        (rule,) = update_rules(from_policy(OptimizerPolicy(**policy)))
        return rule.moments

    assert names(type="adamw") == ("exp_avg", "exp_avg_sq")
    assert names(type="sgd") == ()
    assert names(type="sgd", momentum=0.9) == ("momentum_buffer",)
    (rule,) = update_rules(from_torch(OPTIMIZERS["rmsprop"]([torch.zeros(1)])))
    assert rule[:2] == (("square_avg", "momentum_buffer", "grad_avg"), "elements")


def bits(tensor: Tensor) -> list[int]:
    return tensor.view(torch.int64 if tensor.itemsize == 8 else torch.int32).tolist()


@pytest.mark.parametrize("name", [*OPTIMIZERS, "fused adamw", "fused sgd", "nesterov"])
def test_state_made_at_build_is_what_the_first_step_would_make(name: str) -> None:
    """To the bit: weights, moments and single numbers, in the first steps and where all gradients are -0."""
    policies = {
        "fused adamw": OptimizerPolicy(type="adamw", lr=0.1),
        "fused sgd": OptimizerPolicy(type="sgd", lr=0.1, momentum=0.9),
        "nesterov": OptimizerPolicy(type="sgd", lr=0.1, momentum=0.9, nesterov=True),
    }
    make = from_policy(policies[name]) if name in policies else from_torch(OPTIMIZERS[name]([torch.zeros(1)]))
    start = torch.tensor([0.0, -0.0, 1.0, -3.0])
    plain, master = start.clone(), start.clone()
    truth, flat = make([plain], 0), FlatOptimizer(master, make, 0)
    moments = [tensor for *_, tensor in flat.state.moments()]
    assert moments, "they are there before the first step"
    for gradient in ([-0.0, -0.0, 0.0, -0.0], [0.3, -0.2, 1e-30, 7.0], [-1.0, 0.0, 2.0, 0.1]):
        plain.grad = torch.tensor(gradient)
        truth.step()
        flat.step(torch.tensor(gradient), 1.0, AS_MADE)
        assert bits(master) == bits(plain)
        assert {label: bits(tensor) for label, _, _, tensor in flat.state.moments()} == {
            label: bits(value) for label, value in truth.state[plain].items() if value.dim() == 1
        }
        (row,) = flat.state.scalars()
        assert row.scalars == {k: float(v) for k, v in truth.state[plain].items() if v.dim() == 0}
    assert {id(tensor) for *_, tensor in flat.state.moments()} == {id(tensor) for tensor in moments}


def test_bytes_of_the_moments() -> None:
    flat = FlatOptimizer(torch.zeros(10), from_policy(OptimizerPolicy()), 0)
    assert flat.state.count_bytes() == 2 * 10 * 4
    flat.step(torch.ones(10), 1.0, AS_MADE)
    assert flat.state.count_bytes() == 2 * 10 * 4


@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad"])
def test_moments_are_made_where_they_are_to_lie(
    name: str, form: StateForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a load in which nothing had stepped too. Beside that memory no more than a chunk is made: a bucket had its
    moments twice."""
    monkeypatch.setattr(flat_state, "_MADE_AT_ONCE", 32)
    make, elements = from_torch(OPTIMIZERS[name]([torch.zeros(1)])), 320
    rounding = StochasticRounding([RoundedPart(0, elements, 1, lambda a, b: [ContiguousRun(0, a, b - a)])])
    master = torch.ones(elements)
    own = FlatOptimizer(master.clone(), make, 0, form, rounding).state
    stored = {label: tensor.dtype for label, _, _, tensor in own.moments()}
    into = {
        label: torch.empty(stored_elements(form, elements), dtype=d).fill_(7) for label, d in stored.items()
    }
    made = LargestMade()
    with made:
        state = FlatOptimizer(master, make, 0, form, rounding, into).state
    for _ in range(2):
        places = {label: tensor.data_ptr() for label, _, _, tensor in state.moments()}
        assert places == {label: tensor.data_ptr() for label, tensor in into.items()}
        assert all(torch.equal(state.read(label), own.read(label)) for label in own.labels)
        with made:
            for tensor in into.values():
                tensor.fill_(7)
            state.restore({} if state.coded else into, [(elements, None)])
    assert 0 < made.largest <= 32 * 8
