"""LAMB, LARS, Lion and Muon on shards, slices and stages equal their formulas on whole tensors of one process, in fp64.

With clipping, groups, accumulation and microbatches of unlike weights. The trace is the Plan's list, Action by Action.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from torch import Tensor

import shardwise
from tests.engine.conformance import Conformance
from tests.engine.plain import worst
from tests.engine.test_model_parallel import CLIP, Layout, config_of, data, model_of, pieces
from tests.optim import plain_rules

STEPS = 3
BASE: dict[str, dict[str, Any]] = {
    "lamb": {"type": "lamb", "lr": 0.02, "weight_decay": 0.1, "trust_bounds": (0.01, 10.0)},
    "lamb of the kernel": {"type": "lamb", "lr": 0.02, "weight_decay": 0.1, "correct": "step"},
    "lars": {"type": "lars", "lr": 5.0, "weight_decay": 0.1},
    "lion": {"type": "lion", "lr": 0.01, "weight_decay": 0.1},
    "muon": {"type": "muon", "lr": 0.02, "weight_decay": 0.1, "rest_lr": 0.01, "ns_dtype": "fp64"},
    "muon in bf16": {"type": "muon", "lr": 0.02, "weight_decay": 0.1},
}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "lamb": {"trust": False, "weight_decay": 0.0},
    "lars": {"trust": False, "lr": 0.05},
}
"""Of norms and biases; else they go without weight decay."""


def is_matrix(name: str) -> bool:
    return name.startswith("blocks.") and name.endswith("weight") and "norm" not in name


def optimizer_of(kind: str) -> dict[str, Any]:
    exception = EXCEPTIONS.get(kind, {"weight_decay": 0.0})
    return {**BASE[kind], "groups": [{"match": "*norm*|*bias", **exception}]}


def rule_of(kind: str) -> plain_rules.Rule:
    def of(name: str) -> dict[str, Any]:
        is_exception = "norm" in name or name.endswith("bias")
        return BASE[kind] | (EXCEPTIONS.get(kind, {"weight_decay": 0.0}) if is_exception else {})

    name = BASE[kind]["type"]
    return plain_rules.muon(of, is_matrix) if name == "muon" else getattr(plain_rules, name)(of)


@cache
def truth(kind: str, family: str, kv_heads: int) -> list[dict[str, Tensor]]:
    steps = []
    for step in range(STEPS):
        tokens, targets = data(step)
        counts = (targets != -100).sum(dim=1).tolist()
        steps.append([((tokens[i : i + 1], targets[i : i + 1]), n) for i, n in enumerate(counts) if n])
    layout = Layout(family=family, kv_heads=kv_heads, layers=2)
    return plain_rules.train(model_of(layout), rule_of(kind), steps, lambda model, batch: model(*batch), CLIP)


def run(world: Any, layout: Layout, kind: str, replicate: int = 1) -> float:
    """Largest error of the weights after any step; infinite where a step departs from the Plan."""
    config = config_of(layout, "off") | {"optimizer": optimizer_of(kind)}
    if replicate > 1:
        config["mesh"]["dp"] = {"replicate": replicate, "shard": layout.dp // replicate}
    engine = shardwise.initialize(model_of(layout), config, world=world)
    conformance, largest = Conformance(engine), 0.0
    for step, wanted in enumerate(truth(kind, layout.family, layout.kv_heads)):
        engine.train_step(*pieces(layout, engine.dp_index, step))
        state = engine.state_dict()
        largest = max(largest, worst({name: state[name] for name in wanted}, wanted))
    departed = conformance.departures
    planned, told = engine.plan.bytes_per_rank(), engine.state_bytes()
    engine.close()
    assert planned == {row: size for row, size in told.items() if size}
    return float("inf") if departed else largest


def run_all(world: Any, rows: list[tuple[Layout, str, int]]) -> list[float]:
    return [run(world, *row) for row in rows]


TWO = {"layers": 2}
TIED: dict[str, Any] = {"family": "gpt2", **TWO}
ROWS = [
    *(
        (layout, kind, 1)
        for kind in ("lamb", "lars", "muon")
        for layout in (
            Layout(dp=2, microbatches=2, **TWO),
            Layout(dp=2, stage=1, **TIED),
            Layout(dp=2, stage=2, **TIED),
            Layout(dp=2, stage=3, microbatches=2, **TWO),
            Layout(tp=2, kv_heads=2, **TWO),
            Layout(pp=2, microbatches=3, **TIED),
        )
    ),
    (Layout(dp=2, stage=3, **TWO), "lamb of the kernel", 1),
    (Layout(dp=2, stage=3, **TWO), "lion", 1),
    (Layout(dp=2, stage=3, **TWO), "muon in bf16", 1),
    (Layout(dp=3, stage=3, **TWO), "lars", 1),
    (Layout(dp=3, stage=3, **TWO), "muon", 1),
    (Layout(dp=4, stage=2, **TWO), "lamb", 1),
    (Layout(dp=4, stage=1, **TIED), "lamb", 2),
    (Layout(dp=4, stage=3, **TWO), "muon", 2),
    (Layout(dp=4, **TWO), "muon", 2),
    *(
        (layout, kind, 1)
        for kind in ("lamb", "muon")
        for layout in (
            Layout(dp=2, tp=2, stage=3, microbatches=2, kv_heads=1, **TWO),
            Layout(pp=2, dp=2, stage=2, microbatches=2, **TIED),
        )
    ),
    (Layout(pp=2, tp=2, microbatches=2, **TIED), "lamb", 1),
    (Layout(tp=4, kv_heads=2, **TWO), "muon", 1),
]
"""Layout, optimizer, copies of what is cut over dp (HSDP). GPT-2's head is its embedding, also across two stages."""


@pytest.fixture(scope="module")
def measured(ranks: Any) -> Callable[[int], dict[tuple[Layout, str, int], float]]:
    """Worst over the ranks; one call per number of ranks."""

    @cache
    def get(size: int) -> dict[tuple[Layout, str, int], float]:
        rows = [row for row in ROWS if row[0].size == size]
        by_rank = ranks(size).run(run_all, rows)
        return {row: max(each) for row, *each in zip(rows, *by_rank, strict=True)}

    return get


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[1]}-{row[0]}-{row[2]}")
def test_equals_the_formula_on_whole_tensors(measured: Any, row: tuple[Layout, str, int]) -> None:
    assert measured(row[0].size)[row] <= (1e-5 if row[1] == "muon in bf16" else 1e-9)
