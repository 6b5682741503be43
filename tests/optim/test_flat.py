"""One optimizer on a flat buffer does what torch's does on the parameters one by one."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.largest_made import LargestMade
from torch import Tensor, optim

from shardwise.base.errors import UsageError
from shardwise.optim import flat_state
from shardwise.optim.classes import from_policy, from_torch, update_rules
from shardwise.optim.flat import FlatOptimizer
from shardwise.optim.lion import Lion
from shardwise.optim.policy import OptimizerPolicy
from shardwise.optim.rounding import RoundedPart, Rounding
from shardwise.plan.placement import Run
from shardwise.plan.state_form import StateForm, stored_elements

SIZES = (3, 1, 4, 2)
"""Parameters; the flat buffer has two elements of padding behind each."""
STARTS = [sum(SIZES[:i]) + 2 * i for i in range(len(SIZES))]
TOTAL = sum(SIZES) + 2 * len(SIZES)

AS_MADE: list[dict[str, Any]] = [{}]
"""Numbers of the only group: those that the optimizer was made with."""
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda ps: optim.AdamW(ps, lr=0.1, weight_decay=0.3),
    "amsgrad": lambda ps: optim.Adam(ps, lr=0.1, amsgrad=True),
    "sgd": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nadam": lambda ps: optim.NAdam(ps, lr=0.1),
    "rmsprop": lambda ps: optim.RMSprop(ps, lr=0.1, centered=True, momentum=0.5),
    "adagrad": lambda ps: optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.5),
    "asgd": lambda ps: optim.ASGD(ps, lr=0.1),
    "adadelta": lambda ps: optim.Adadelta(ps, lr=0.1),
    "adamax": lambda ps: optim.Adamax(ps, lr=0.1),
    "radam": lambda ps: optim.RAdam(ps, lr=0.1),
    "rprop": lambda ps: optim.Rprop(ps, lr=0.1),
    "lion": lambda ps: Lion(ps, lr=0.1, weight_decay=0.3),
}


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


def flat_of(parts: list[Tensor]) -> Tensor:
    flat = torch.zeros(TOTAL, dtype=torch.float64)
    for start, part in zip(STARTS, parts, strict=True):
        flat[start : start + len(part)] = part
    return flat


def draw(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in SIZES]


def ranges(absent: set[int]) -> list[tuple[int, int]]:
    return [(STARTS[i], STARTS[i] + SIZES[i]) for i in sorted(absent)]


@settings(max_examples=25)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    absent=st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=5),
    saved=st.integers(0, 4),
)
def test_equals_torch_on_single_parameters(name: str, absent: list[set[int]], saved: int) -> None:
    """Also where parameters have no gradient in some steps, and across a checkpoint in between."""
    make = OPTIMIZERS[name]
    singles = [part.clone().requires_grad_() for part in draw(0)]
    truth = make(singles)
    master = flat_of([part.detach() for part in singles])
    shape = from_torch(make([torch.zeros(1)]))
    flat = FlatOptimizer(master, shape, 0)
    for step, missing in enumerate(absent):
        gradients = draw(step + 1)
        for i, (single, gradient) in enumerate(zip(singles, gradients, strict=True)):
            single.grad = None if i in missing else gradient.clone()
        truth.step()
        flat.step(flat_of(gradients) * 8.0, 8.0, AS_MADE, ranges(missing))
        torch.testing.assert_close(master, flat_of([s.detach() for s in singles]), rtol=1e-12, atol=1e-14)
        if step == saved:
            flat = reloaded(flat, master, shape)


def reloaded(old: FlatOptimizer, master: Tensor, make: Any) -> FlatOptimizer:
    """A new optimizer that gets the old one's state the way a checkpoint brings it: per parameter."""
    moments: dict[str, Tensor] = {}
    for label, start, stop, tensor in old.state.moments():
        moments.setdefault(label, torch.zeros(TOTAL, dtype=torch.float64))[start:stop] = tensor
    rows = old.state.scalars()
    ends = []
    for start, size in zip(STARTS, SIZES, strict=True):
        row = next(row for row in rows if row.start <= start < row.stop)
        ends.append((start + size, row.scalars if row.has_state else None))
    new = FlatOptimizer(master, make, 0)
    new.state.restore(moments, ends)
    return new


def test_a_split_segment_stays_a_view() -> None:
    master = torch.zeros(8)
    flat = FlatOptimizer(master, from_policy(OptimizerPolicy(type="adamw", lr=1.0)), 0)
    flat.step(torch.ones(8), 1.0, AS_MADE)
    flat.step(torch.ones(8), 1.0, AS_MADE, [(2, 5)])
    assert [(row.start, row.stop, row.scalars["step"]) for row in flat.state.scalars()] == [
        (0, 2, 2.0),
        (2, 5, 1.0),
        (5, 8, 2.0),
    ]
    assert [(label, start, stop) for label, start, stop, _ in flat.state.moments()] == [
        (label, start, stop)
        for start, stop in ((0, 2), (2, 5), (5, 8))
        for label in ("exp_avg", "exp_avg_sq")
    ]
    assert master[:2].tolist() == master[5:7].tolist() != master[2:4].tolist()
    # A range across several segments, and one that is there already.
    flat.step(torch.ones(8), 1.0, AS_MADE, [(1, 6), (2, 5)])
    assert [(row.start, row.stop, row.scalars["step"]) for row in flat.state.scalars()] == [
        (0, 1, 3.0),
        (1, 2, 2.0),
        (2, 5, 1.0),
        (5, 6, 2.0),
        (6, 8, 3.0),
    ]


def test_state_of_one_element_is_told_from_single_numbers() -> None:
    """A segment of one element: its moments have as many elements as its step count."""
    flat = FlatOptimizer(torch.zeros(3), from_torch(optim.NAdam([torch.zeros(1)])), 0)
    flat.step(torch.ones(3), 1.0, AS_MADE, [(1, 2)])
    flat.step(torch.ones(3), 1.0, AS_MADE, [(0, 1)])
    assert {label for label, *_ in flat.state.moments()} == {"exp_avg", "exp_avg_sq"}
    assert all(set(row.scalars) == {"step", "mu_product"} for row in flat.state.scalars())


def test_each_step_works_with_the_numbers_it_is_given() -> None:
    master = torch.zeros(2)
    flat = FlatOptimizer(master, from_policy(OptimizerPolicy(type="sgd", lr=0.5)), 0)
    flat.step(torch.ones(2), 1.0, [{"lr": 0.25}])
    assert master.tolist() == [-0.25, -0.25]
    flat.step(torch.ones(2), 1.0, [{"lr": 0.5}])
    assert master.tolist() == [-0.75, -0.75]


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_divisor_is_applied_once(kind: Any, dtype: torch.dtype) -> None:
    policy = OptimizerPolicy(type=kind, lr=0.1, eps=None if kind == "sgd" else 1e-3)
    results = []
    for divisor in (1.0, 1536.0):
        master = torch.ones(64, dtype=dtype)
        flat = FlatOptimizer(master, from_policy(policy), 0)
        for _ in range(2):
            flat.step(torch.linspace(0.1, 1, 64, dtype=dtype) * divisor, divisor, AS_MADE)
        results.append(master)
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=0)


def test_gradients_of_another_dtype() -> None:
    master = torch.zeros(4)
    FlatOptimizer(master, from_policy(OptimizerPolicy(type="sgd", lr=1.0)), 0).step(
        torch.ones(4, dtype=torch.bfloat16), 2.0, AS_MADE
    )
    assert master.tolist() == [-0.5] * 4


def test_moments_are_known_before_the_first_step() -> None:
    def names(**policy: Any) -> tuple[str, ...]:
        (rule,) = update_rules(from_policy(OptimizerPolicy(**policy)))
        return rule.moments

    assert names(type="adamw") == ("exp_avg", "exp_avg_sq")
    assert names(type="sgd") == ()
    assert names(type="sgd", momentum=0.9) == ("momentum_buffer",)
    (rule,) = update_rules(from_torch(OPTIMIZERS["rmsprop"]([torch.zeros(1)])))
    assert rule == (("square_avg", "momentum_buffer", "grad_avg"), "elements")


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


def test_a_part_that_was_never_stepped_has_no_state_to_save() -> None:
    flat = FlatOptimizer(torch.zeros(4), from_policy(OptimizerPolicy()), 0)
    assert [row.has_state for row in flat.state.scalars()] == [False]
    flat.step(torch.ones(4), 1.0, AS_MADE, [(1, 3)])
    assert [row.has_state for row in flat.state.scalars()] == [True, False, True]
    held = {label: torch.full((4,), 9.0) for label in ("exp_avg", "exp_avg_sq")}
    flat.state.restore(held, [(1, {"step": 1.0}), (3, None), (4, {"step": 1.0})])
    assert [row.has_state for row in flat.state.scalars()] == [True, False, True]
    assert held["exp_avg"].tolist() == [9.0, 0.0, 0.0, 9.0], "it starts anew, in the memory of the others"
    assert flat.state.count_bytes() == 2 * 4 * 4


def test_bytes_of_the_moments() -> None:
    flat = FlatOptimizer(torch.zeros(10), from_policy(OptimizerPolicy()), 0)
    assert flat.state.count_bytes() == 2 * 10 * 4
    flat.step(torch.ones(10), 1.0, AS_MADE)
    assert flat.state.count_bytes() == 2 * 10 * 4


def test_a_started_optimizer_is_refused() -> None:
    parameter = torch.zeros(2, requires_grad=True)
    given = optim.Adagrad([parameter])
    from_torch(given)  # its state at step 0 is no step
    parameter.grad = torch.ones(2)
    given.step()
    with pytest.raises(UsageError, match="it has stepped already"):
        from_torch(given)


@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad"])
def test_moments_are_made_where_they_are_to_lie(
    name: str, form: StateForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a load in which nothing had stepped too. Beside that memory no more than a chunk is made: a bucket had its
    moments twice."""
    monkeypatch.setattr(flat_state, "_MADE_AT_ONCE", 32)
    make, elements = from_torch(OPTIMIZERS[name]([torch.zeros(1)])), 320
    rounding = Rounding([RoundedPart(0, elements, 1, lambda a, b: [Run(0, a, b - a)])])
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
