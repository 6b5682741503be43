"""LAMB, LARS, Lion and Muon on shards, slices and stages equal their formulas on whole tensors of one process, in fp64.

With clipping, groups, accumulation and microbatches of unlike weights. The trace is the Plan's list, Action by Action.
"""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn, optim

import shardwise
from shardwise.base.errors import NonFiniteError, UsageError
from shardwise.comm.collectives import Group
from shardwise.comm.world import join
from shardwise.engine.step.whole_matrices import WholeMatrices
from shardwise.engine.step.whole_norms import WholeNorms
from tests.engine.conformance import Conformance
from tests.engine.nets import seeded
from tests.engine.plain import worst
from tests.engine.state.test_saving import fingerprint
from tests.engine.test_model_parallel import CLIP, Layout, config_of, data, model_of, pieces
from tests.everyday import chosen
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
    steps = [[(data(step), 1.0)] for step in range(STEPS)]  # a mean over the targets of one batch
    layout = Layout(family=family, kv_heads=kv_heads, layers=2)
    return plain_rules.train(model_of(layout), rule_of(kind), steps, lambda model, batch: model(*batch), CLIP)


def run(world: Any, layout: Layout, kind: str, replicate: int = 1) -> float:
    """Largest error of the weights after any step, and of the norms of weights that TRUST_RATIO finds; infinite where a
    step departs from the Plan."""
    config = config_of(layout, "off") | {"optimizer": optimizer_of(kind)}
    if replicate > 1:
        config["mesh"]["dp"] = {"replicate": replicate, "shard": layout.dp // replicate}
    engine = shardwise.initialize(model_of(layout), config, world=world)
    conformance, largest = Conformance(engine), 0.0
    norms = engine._training._end._norms
    state, trust = engine.state_dict(), norms.trust_ratio
    for step, wanted in enumerate(truth(kind, layout.family, layout.kv_heads)):
        before, seen = state, {}

        def looked(seen: dict[str, float] = seen) -> None:
            trust()
            seen |= {name: norms.of(name).weight_norm for name in norms._place}

        with patch.object(norms, "trust_ratio", looked):
            engine.train_step(*pieces(layout, engine.dp_index, step))
        state = engine.state_dict()
        largest = max(largest, worst({name: state[name] for name in wanted}, wanted))
        # Their ratio alone would not tell that both norms of a tensor count twice.
        largest = max([largest, *(abs(norm - float(before[name].norm())) for name, norm in seen.items())])
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
            Layout(tp=2, kv_heads=1, **TWO),
            Layout(pp=2, microbatches=3, **TIED),
        )
    ),
    (Layout(dp=2, stage=3, **TWO), "lamb of the kernel", 1),
    (Layout(dp=2, stage=3, **TWO), "lion", 1),
    (Layout(dp=2, stage=3, **TWO), "muon in bf16", 1),
    (Layout(dp=3, stage=3, **TWO), "lars", 1),
    (Layout(dp=4, stage=3, **TWO), "muon", 2),
    (Layout(dp=2, tp=2, stage=3, microbatches=2, kv_heads=1, **TWO), "muon", 1),
    (Layout(pp=2, dp=2, stage=2, microbatches=2, **TIED), "lamb", 1),
]
MORE = [
    (Layout(dp=3, stage=3, **TWO), "muon", 1),
    (Layout(dp=4, stage=2, **TWO), "lamb", 1),
    (Layout(dp=4, stage=1, **TIED), "lamb", 2),
    (Layout(dp=4, **TWO), "muon", 2),
    (Layout(dp=2, tp=2, stage=3, microbatches=2, kv_heads=1, **TWO), "lamb", 1),
    (Layout(pp=2, dp=2, stage=2, microbatches=2, **TIED), "muon", 1),
    (Layout(pp=2, tp=2, microbatches=2, **TIED), "lamb", 1),
    (Layout(tp=4, kv_heads=2, **TWO), "muon", 1),
]
"""Layout, optimizer, copies of what is cut over dp (HSDP). GPT-2's head is its embedding, also across two stages."""


@pytest.fixture(scope="module")
def measured(
    ranks: Any, request: pytest.FixtureRequest
) -> Callable[[int], dict[tuple[Layout, str, int], float]]:
    """Worst over the ranks; one call per number of ranks."""
    asked = chosen(request, "test_equals_the_formula_on_whole_tensors", "row")

    @cache
    def get(size: int) -> dict[tuple[Layout, str, int], float]:
        rows = [row for (row,) in asked if row[0].size == size]
        by_rank = ranks(size).run(run_all, rows)
        return {row: max(each) for row, *each in zip(rows, *by_rank, strict=True)}

    return get


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[1]}-{row[0]}-{row[2]}")
def test_equals_the_formula_on_whole_tensors(measured: Any, row: tuple[Layout, str, int]) -> None:
    assert measured(row[0].size)[row] <= (1e-5 if row[1] == "muon in bf16" else 1e-9)


@pytest.mark.soak
@pytest.mark.parametrize("row", MORE, ids=lambda row: f"{row[1]}-{row[0]}-{row[2]}")
def test_more_rows_equal_the_formula_on_whole_tensors(ranks: Any, row: tuple[Layout, str, int]) -> None:
    assert max(error for [error] in ranks(row[0].size).run(run_all, [row])) <= 1e-9


# Planted bugs ------------------------------------------------------------------------------------------------------


def norms_of_pieces() -> Any:
    """Each rank takes the norm of its part for that of the tensor."""
    right = WholeNorms.trust_ratio

    def wrong(self: WholeNorms) -> None:
        self._world = Group.alone("world")
        right(self)

    return patch.object(WholeNorms, "trust_ratio", wrong)


def copies_counted_by_all() -> Any:
    """What several ranks hold alike counts on each of them: a tied weight on both its stages."""
    right = WholeNorms._ranges

    def wrong(self: WholeNorms, bucket: Any, counted: Any) -> Any:
        return right(self, bucket, [(0, bucket.owned_elements)])

    return patch.object(WholeNorms, "_ranges", wrong)


def slices_in_one_place() -> Any:
    """The owner takes every slice along tp for its own."""
    return patch.object(WholeMatrices, "_seen_from", lambda self, matrix, place: self._slices)


def matrices_of_pieces() -> Any:
    """Each rank updates by what it has: directions are not made orthogonal."""
    return patch.object(WholeMatrices, "all_to_all", lambda self: None)


BUGS = [
    (norms_of_pieces, Layout(dp=2, stage=3, microbatches=2, **TWO), "lamb"),
    (norms_of_pieces, Layout(tp=2, kv_heads=1, **TWO), "lars"),
    (copies_counted_by_all, Layout(pp=2, microbatches=3, **TIED), "lamb"),
    (slices_in_one_place, Layout(tp=2, kv_heads=1, **TWO), "muon"),
    (matrices_of_pieces, Layout(dp=2, stage=1, **TIED), "muon"),
]


def planted(world: Any) -> list[float]:
    found = []
    for plant, layout, kind in BUGS:
        with plant():
            try:
                found.append(run(world, layout, kind))
            except NonFiniteError:  # directions out of memory that nobody wrote
                found.append(math.inf)
    return found


def test_planted_bugs_show(ranks: Any) -> None:
    by_bug = zip(BUGS, *ranks(2).run(planted), strict=True)
    found = {f"{plant.__name__} {layout}": max(errors) for (plant, layout, _), *errors in by_bug}
    assert min(found.values()) > 1e-6, found
    assert all((layout, kind, 1) in ROWS for _, layout, kind in BUGS), (
        "without the bug it is held to the limit"
    )


# Parameters without a gradient ------------------------------------------------------------------------------------


class Branches(nn.Module):
    """A part that runs where the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, is_long: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.second(x)) if is_long else x).square().mean()


LONG = (False, True, False, True)
"""Steps in which the second layer runs."""


def with_gaps(world: Any, stage: int, kind: str) -> float:
    options = {"weight_decay": 0.1} | {"lamb": {}, "muon": {"ns_dtype": "fp64", "rest_lr": 0.01}}[kind]
    options |= {"type": kind, "lr": 0.02}
    batches = [
        torch.randn(4, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(len(LONG))
    ]
    rules = {
        "lamb": plain_rules.lamb,
        "muon": lambda of: plain_rules.muon(of, lambda n: n.endswith("weight")),
    }
    plain = seeded(Branches)
    wanted = plain_rules.train(
        plain,
        rules[kind](lambda name: options),
        [[((batch, is_long), 1.0)] for batch, is_long in zip(batches, LONG, strict=True)],
        lambda model, batch: model(*batch),
        1e9,
    )
    if kind == "muon":  # no repeated blocks: it is told which
        options["groups"] = [{"match": "*", "matrices": True}]
        options["groups"][0]["lr"] = 0.02
        options["groups"].insert(0, {"match": "*bias", "lr": 0.01})
    engine = shardwise.initialize(
        seeded(Branches), {"optimizer": options, "zero": {"stage": stage}}, world=world
    )
    largest = 0.0
    for batch, is_long, weights in zip(batches, LONG, wanted, strict=True):
        engine.backward(engine(batch.chunk(world.size)[world.rank], is_long))
        engine.step()
        largest = max(largest, worst(engine.state_dict(), weights))
    engine.close()
    return largest


def gaps(world: Any) -> list[float]:
    return [with_gaps(world, stage, kind) for stage in (0, 3) for kind in ("lamb", "muon")]


def test_parameters_without_a_gradient_stand_still(ranks: Any) -> None:
    """Weights, moments and step counts, though their norms and matrices travel with the others."""
    for errors in ranks(2).run(gaps):
        assert max(errors) <= 1e-9


# Checkpoints -------------------------------------------------------------------------------------------------------

ROUTE = (
    Layout(pp=2, microbatches=2, **TIED),
    Layout(dp=2, stage=3, **TIED),
    Layout(tp=2, **TIED),
    Layout(dp=2, stage=1, **TIED),
)


def engine_of(world: Any, layout: Layout, kind: str) -> Any:
    return shardwise.initialize(
        model_of(layout), config_of(layout, "off") | {"optimizer": optimizer_of(kind)}, world=world
    )


def travel(world: Any, folder: str, kind: str) -> list[float]:
    """Load what the layout before has saved, save it, train on; errors of the weights."""
    found = []
    for number, layout in enumerate(ROUTE):
        engine = engine_of(world, layout, kind)
        engine.load(f"{folder}/{number}")
        engine.save(f"{folder}/{number + 1}", asynchronous=False)
        engine.train_step(*pieces(layout, engine.dp_index, 2))
        wanted, state = truth(kind, "gpt2", 4)[2], engine.state_dict()
        found.append(worst({name: state[name] for name in wanted}, wanted))
        engine.close()
    return found


@pytest.mark.parametrize("kind", ["lamb", "muon"])
def test_state_goes_through_other_layouts_without_changing_a_bit(
    ranks: Any, tmp_path: Path, kind: str
) -> None:
    solo, one = join(quiet=True), Layout(**TIED)
    engine = engine_of(solo, one, kind)
    for step in range(2):
        engine.train_step(*pieces(one, 0, step))
    engine.save(tmp_path / "0", asynchronous=False)
    first = fingerprint(engine)
    engine.close()
    moments = {"lamb": {"exp_avg", "exp_avg_sq"}, "muon": {"exp_avg", "exp_avg_sq", "momentum_buffer"}}[kind]
    assert moments <= {name.partition("/")[0] for name in first}
    for errors in ranks(2).run(travel, str(tmp_path), kind):
        assert max(errors) <= 1e-9
    back = engine_of(solo, one, kind)
    back.load(tmp_path / str(len(ROUTE)))
    assert fingerprint(back) == first
    back.close()


# A user's object, messages, refusals ------------------------------------------------------------------------------


def test_other_optimizers_of_whole_tensors_are_refused_by_name() -> None:
    model = Branches()
    with pytest.raises(UsageError, match=r"Adafactor is not known.*Known: .*Lamb, Lars, Lion, Muon"):
        shardwise.initialize(model, optimizer=optim.Adafactor(model.parameters()), world=join(quiet=True))
