"""One optimizer on a flat buffer does what torch's does on the parameters one by one."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.optim.flat_cases import AS_MADE, OPTIMIZERS, SIZES, STARTS, TOTAL
from torch import Tensor, optim

from shardwise.base.errors import UsageError
from shardwise.optim.classes import from_policy, from_torch
from shardwise.optim.flat import FlatOptimizer
from shardwise.optim.policy import OptimizerPolicy


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


def test_a_started_optimizer_is_refused() -> None:
    parameter = torch.zeros(2, requires_grad=True)
    given = optim.Adagrad([parameter])
    from_torch(given)  # its state at step 0 is no step
    parameter.grad = torch.ones(2)
    given.step()
    with pytest.raises(UsageError, match="it has stepped already"):
        from_torch(given)
