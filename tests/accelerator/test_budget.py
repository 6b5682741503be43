"""One step asks the device for what docs/accelerators.md says, and never for more."""

from collections.abc import Mapping
from importlib.util import find_spec

import pytest

from tests.accelerator import budget
from tests.accelerator.budget import Budget
from tests.ranks import RankPool

QUICK = [
    *("zero 1, fp16, dp 4", "zero 3, bf16, dp 4", "tp 2, dp 2, zero 3, bf16", "pp 2, bf16, both stages"),
    *("dropout, kernels, zero 3, bf16, dp 4", "experts, ep 2, zero 2, bf16", "dynamic tables, dp 2"),
    "evaluation, zero 3, bf16, dp 4",
]
"""A row of each kind; the others are in the soak."""
GROUPS: Mapping[str, list[str]] = {
    "quick": QUICK,
    "the rest": [
        name
        for name in budget.ROWS
        if name not in QUICK and not (name.startswith("transformers") and find_spec("transformers") is None)
    ],
}


@pytest.mark.parametrize("group", ["quick", pytest.param("the rest", marks=pytest.mark.soak)])
def test_no_step_stops_the_host_more_often_than_the_page_says(device_process: RankPool, group: str) -> None:
    [found] = device_process.run(budget.measure_all, GROUPS[group], timeout_s=900.0)
    stands = budget.read_page()
    more = [
        line
        for name, (measured, _) in found.items()
        for line in budget.grown(name, measured, stands.get(name))
    ]
    assert not more, "\n".join(more)
    assert not [line for _, misplaced in found.values() for line in misplaced]
    other = [name for name, (measured, _) in found.items() if measured.syncs != stands[name].syncs]
    assert not other, (
        f"fewer syncs, or in other places, than the page has: run python -m tests.accelerator.budget {other}"
    )


BOUNDED = ["zero 0, dp 4", "zero 3, dp 4"]


@pytest.mark.parametrize(
    "names",
    [BOUNDED, pytest.param(list(budget.BLOCK_ROWS), marks=pytest.mark.soak)],
    ids=["with a bound", "every row"],
)
def test_a_block_takes_no_more_operations_than_the_page_says(
    device_process: RankPool, names: list[str]
) -> None:
    [found] = device_process.run(budget.measure_blocks, names, timeout_s=900.0)
    stands = budget.read_blocks()
    assert list(stands) == list(budget.BLOCK_ROWS)
    assert found == {name: stands[name] for name in names}, (
        "python -m tests.accelerator.budget writes the page anew where nothing grew"
    )
    assert found["zero 0, dp 4"] <= 60 and found["zero 3, dp 4"] <= 70


def test_the_page_has_every_row() -> None:
    assert list(budget.read_page()) == list(budget.ROWS)


def test_a_table_reads_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    stands = budget.read_page()
    assert budget.written(stands) in budget.PAGE.read_text(encoding="utf-8")
    assert budget.written_blocks(budget.read_blocks()) in budget.PAGE.read_text(encoding="utf-8")


def test_what_grew_is_named() -> None:
    stands = Budget({("item", "engine/step/end.py:exchange"): 1}, 10)
    assert not budget.grown("row", stands, stands)
    assert not budget.grown("row", Budget({}, 9), stands)
    assert not budget.grown("row", Budget({("item", "engine/parts/sums.py:read"): 1}, 9), stands), (
        "it only moved"
    )
    assert budget.grown("row", Budget({("item", "engine/step/end.py:exchange"): 3}, 11), stands) == [
        "row: 2 more of item in engine/step/end.py:exchange",
        "row: 11 device operations, at most 10 stand in the table",
    ]
