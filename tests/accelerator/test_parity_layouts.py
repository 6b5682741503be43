"""Layouts of the parity suites on the pretended device: equal to one process in fp64, nothing misplaced, no race."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest

from shardwise.kernels import gated, rms_norm, rotary
from tests.accelerator.crew import Crew
from tests.accelerator.pretend import Bench, is_on_device, register
from tests.engine import test_experts, test_model_parallel, test_parity
from tests.ranks import RankPool


class Suite(NamedTuple):
    """One parity suite."""

    rows: list[tuple[int, Any]]
    """(ranks, layout)."""
    measure: Callable[..., Any]
    """What a rank does with a layout; returns its figures."""


SUITES = {
    "zero": Suite(
        [(size, case) for size in (1, 2, 4) for case in test_parity.cases(size, every=True)],
        test_parity.measure,
    ),
    "model": Suite(
        [(each.size, each) for each in (*test_model_parallel.LAYOUTS, *test_model_parallel.EVERY)],
        test_model_parallel.measure,
    ),
    "experts": Suite([(each.size, each) for each in test_experts.PAIRS], test_experts.measure),
}
FUSED = ["dp2-microbatches2-stage3-recomputeselective", "pp2-microbatches2", "tp2-kv_heads2"]
"""Layouts of the suite "model" that run with the fused forms in the quick suite."""
FEW = {"zero": "zero3-x3-adamw-fp64-torch-ahead2", "model": "pp2-microbatches2"}


@contextmanager
def fused_in_fp64() -> Iterator[None]:
    """The fused forms serve fp64 on the pretended device, which computes their numbers by the plain formulas.

    So all that is around a kernel is held to 1e-10: its inputs, what autograd keeps, and where gradients meet.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (gated, rms_norm, rotary):
            patch.setattr(module, "fused", lambda *tensors: all(map(is_on_device, tensors)))
        yield


def run_suite(_world: Any, name: str, only: str | None, is_fused: bool = False) -> list[str]:
    """What went wrong, in a process with the device."""
    with fused_in_fp64() if is_fused else nullcontext():
        return run_layouts(name, only)


def run_layouts(name: str, only: str | None) -> list[str]:
    """What went wrong in a suite's layouts, or in one of them."""
    device, (rows, measure), wrong, done = register(), SUITES[name], [], 0
    for ranks, layout in rows:
        if only is not None and (str(layout) != only or done):
            continue
        done += 1
        with Bench() as bench:
            try:
                error = max(max(figures) for figures in Crew(ranks, device).run(measure, layout))
                wrong += [f"{layout}: off by {error}"] * (error > (2e-6 if "fp32" in str(layout) else 1e-10))
            except Exception as problem:
                wrong.append(f"{layout}: {type(problem).__name__}: {problem}")
            wrong += [f"{layout}: {line}" for line in (*bench.misplaced, *bench.races)]
    return wrong if done else [f"{name}: no layout {only}"]


@pytest.mark.parametrize("suite", FEW)
def test_a_layout_equals_one_process_on_a_device(device_process: RankPool, suite: str) -> None:
    assert device_process.run(run_suite, suite, FEW[suite]) == [[]]


@pytest.mark.parametrize("layout", [*FUSED, pytest.param(None, marks=pytest.mark.soak)])
def test_fused_forms_equal_one_process_on_a_device(device_process: RankPool, layout: str | None) -> None:
    [wrong] = device_process.run(run_suite, "model", layout, True, timeout_s=3000.0)
    assert not wrong, "\n".join(wrong)


@pytest.mark.soak
@pytest.mark.parametrize("suite", SUITES)
def test_every_layout_equals_one_process_on_a_device(device_process: RankPool, suite: str) -> None:
    [wrong] = device_process.run(run_suite, suite, None, timeout_s=3000.0)
    assert not wrong, "\n".join(wrong)
