"""Layouts of the parity suites on the pretended device: equal to one process in fp64, nothing misplaced, no race."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.accelerator.crew import Crew
from tests.accelerator.pretend import Bench, register
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
FEW = {"zero": "zero3-x3-adamw-fp64-torch-ahead2", "model": "pp2-microbatches2"}


def run_suite(_world: Any, name: str, only: str | None) -> list[str]:
    """What went wrong, in a process with the device."""
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


@pytest.mark.soak
@pytest.mark.parametrize("suite", SUITES)
def test_every_layout_equals_one_process_on_a_device(device_process: RankPool, suite: str) -> None:
    [wrong] = device_process.run(run_suite, suite, None, timeout_s=3000.0)
    assert not wrong, "\n".join(wrong)
