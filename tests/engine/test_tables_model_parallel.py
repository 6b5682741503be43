"""Tables beside slices and stages: the same losses, norms, weights and rows as one process, and checkpoints between."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import ShardwiseError
from shardwise.base.ragged import Ragged
from shardwise.comm.world import World, join
from shardwise.engine.parts.tables import ModelTables
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import (
    AdmissionPolicy,
    DynamicPolicy,
    EvictionPolicy,
    RowOptimizerPolicy,
    TablePolicy,
)
from shardwise.parallel.embedding.rows.row_gradients import RowGradients
from tests.engine.conformance import Conformance, evaluation_departures
from tests.ranks import RanksError

SAMPLES, WIDTH, STEPS = 8, 4, 5
FEATURES = ("static", "wide", "grows", "rare")


class Block(nn.Module):
    """x + down(tanh(up(x)))"""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    """Features, two blocks, a logit. ``place``: of all tables."""

    def __init__(self, place: str = "auto", stacked: bool = False):
        super().__init__()
        self.stacked = stacked
        given: dict[str, Any] = {"width": WIDTH, "placement": place, "init_bound": 0.3}
        evicts = EvictionPolicy(type="lfu", fraction=0.2)
        waits = AdmissionPolicy(type="frequency", count=2)
        adam = RowOptimizerPolicy(type="adam", lr=0.02, exact=True)
        self.tables = EmbeddingCollection(
            [
                TablePolicy(name="static", rows=1500, **given),
                TablePolicy(name="wide", rows=300, optimizer=adam, **given),
                TablePolicy(name="grows", dynamic=DynamicPolicy(capacity=25, eviction=evicts), **given),
                TablePolicy(name="rare", dynamic=DynamicPolicy(admission=waits), **given),
            ],
            RowOptimizerPolicy(lr=0.05),
            seed=5,
        )
        width = WIDTH * len(FEATURES)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.out = nn.Linear(width, 1)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)

    def tensor_table(self) -> dict[str, str]:
        return {"blocks.*.up": "column", "blocks.*.down": "row", "out": "replicate"}

    def forward(self, sparse: Mapping[str, Ragged], labels: Tensor) -> Tensor:
        if self.stacked:
            x = self.tables.stacked(sparse).flatten(1)
        else:
            found = self.tables(sparse)
            x = torch.cat([found[name] for name in FEATURES], 1)
        for block in self.blocks:
            x = block(x)
        return nn.functional.binary_cross_entropy_with_logits(self.out(x)[:, 0], labels.to(x.dtype))


def batch(step: int, start: int, stop: int) -> dict[str, Any]:
    """Samples [start, stop) of a step's global batch: bags of 0 to 2 keys, some of which come often."""
    generator = torch.Generator().manual_seed(step)
    sparse = {}
    for name in FEATURES:
        lengths = torch.randint(0, 3, (SAMPLES,), generator=generator).tolist()
        lists = [torch.randint(0, 300, (size,), generator=generator).tolist() for size in lengths]
        lists = [[key % 9 if place % 2 else key for key in keys] for place, keys in enumerate(lists)]
        sparse[name] = Ragged.of_lists(lists[start:stop])
    return {"sparse": sparse, "labels": torch.rand(SAMPLES, generator=generator).round()[start:stop]}


class Layout(NamedTuple):
    """A mesh over ``ranks``, and where all tables lie."""

    ranks: int
    mesh: dict[str, int]
    place: str = "auto"
    stacked: bool = False
    stage: int = 0
    more: dict[str, Any] = {}

    def __str__(self) -> str:
        return "-".join(
            [*(f"{axis}{size}" for axis, size in self.mesh.items()), self.place, f"z{self.stage}"]
        )


def build(world: World, layout: Layout, model: nn.Module | None = None, **more: Any) -> Any:
    config = {
        "precision": "fp64",
        "mesh": layout.mesh,
        "zero": {"stage": layout.stage},
        "batch": {"accumulation": 2},
        "tensor": {"sequence_parallel": False},
        "optimizer": {"type": "adamw", "lr": 1e-2},
        "max_grad_norm": 0.05,
        "comm": {"timeout_s": 30},
        **layout.more,
        **more,
    }
    return shardwise.initialize(model or Tower(layout.place, layout.stacked), config, world=world)


class Found(NamedTuple):
    """What a run did."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    rows: dict[str, dict[int, list[float]]]
    """What this rank holds of each table by key: columns, state, scores."""
    tallies: dict[str, Any]


def train(engine: Any, steps: int = STEPS) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for _ in range(steps):
        dp = engine._parts.groups["dp"]
        size = SAMPLES // dp.size // 2
        spans = [(SAMPLES // dp.size * dp.index + i * size, size) for i in range(2)]
        batches = [batch(engine.step_count, first, first + size) for first, size in spans]
        result = engine.train_step(batches)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return losses, norms


def look(engine: Any) -> tuple[dict[str, Tensor], dict[str, dict[int, list[float]]], dict[str, Any]]:
    rows: dict[str, dict[int, list[float]]] = {}
    for collection in engine.tables.values():
        for table in collection.tables:
            here = collection.rows_here(table.name)
            columns = [here.weights, *(here.state[name] for name in sorted(here.state))]
            if here.scores is not None:
                columns.append(here.scores[:, None].double())
            lines = torch.cat(columns, 1).tolist()
            rows[table.name] = dict(zip(here.keys.tolist(), lines, strict=True))
    weights = {name: tensor for name, tensor in engine.state_dict().items() if isinstance(tensor, Tensor)}
    return weights, rows, engine.table_tallies()


def run(world: World, layout: Layout) -> Found:
    engine = build(world, layout)
    conformance = Conformance(engine)
    losses, norms = train(engine)
    share = SAMPLES // 2 // engine._parts.dp.size
    held_out = [
        batch(STEPS + i, engine._parts.dp.index * share, (engine._parts.dp.index + 1) * share)
        for i in range(3)
    ]
    assert not conformance.departures and not evaluation_departures(engine, held_out)
    weights, rows, tallies = look(engine)
    engine.close()
    return Found(losses, norms, weights, rows, tallies)


@cache
def alone() -> Found:
    return run(join(), Layout(1, {}))


def assert_equal(found: list[Found], wanted: Found) -> None:
    """Relative 1e-10. Each key is on as many ranks as hold it, with one value."""
    assert sum(tally.evicted for tally in wanted.tallies.values()) > 0
    for each in found:
        assert each.losses == pytest.approx(wanted.losses, rel=1e-10)
        assert each.norms == pytest.approx(wanted.norms, rel=1e-10)
        assert each.tallies.keys() == wanted.tallies.keys()
        assert [t.rows for t in each.tallies.values()] == [t.rows for t in wanted.tallies.values()]
        assert [t.evicted for t in each.tallies.values()] == [t.evicted for t in wanted.tallies.values()]
        for name, tensor in wanted.weights.items():
            torch.testing.assert_close(each.weights[name], tensor, rtol=1e-10, atol=1e-12)
    for name, rows in wanted.rows.items():
        held = [each.rows[name] for each in found if name in each.rows]
        assert set().union(*held) == rows.keys(), name
        for part in held:
            mine = torch.tensor([part[key] for key in part], dtype=torch.float64)
            theirs = torch.tensor([rows[key] for key in part], dtype=torch.float64)
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12, msg=name)


LAYOUTS = [
    Layout(2, {"tp": 2}),
    Layout(2, {"pp": 2}, stacked=True),
    Layout(4, {"tp": 2, "pp": 2}),
    Layout(4, {"dp": 2, "tp": 2}, "row", stage=3),
    Layout(4, {"dp": 2, "pp": 2}, "table", stage=1),
    Layout(4, {"dp": 2, "tp": 2}, "data_parallel", stage=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tables_beside_slices_and_stages_equal_one_process(ranks: Any, layout: Layout) -> None:
    assert_equal(ranks(layout.ranks).run(run, layout), alone())


# Bugs, planted on purpose ------------------------------------------------------------------------------------------


def _counted_by_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelTables, "is_first_copy", property(lambda self: True))


def _counted_by_none(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelTables, "square_sum", lambda self: torch.zeros((), dtype=torch.float64))


def _gradient_twice(patch: pytest.MonkeyPatch) -> None:
    add = RowGradients.add
    patch.setattr(RowGradients, "add", lambda self, rows, grads: add(self, rows, 2 * grads))


def _rows_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Of several gradients of a row the first alone."""
    merged = RowGradients.merged

    def first(self: Any, like: Tensor) -> tuple[Tensor, Tensor]:
        self._waiting = self._waiting[:1]
        return merged(self, like)

    patch.setattr(RowGradients, "merged", first)


BUGS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Layout]] = {
    "each rank along tp counts in the norm": (_counted_by_all, LAYOUTS[0]),
    "the stage of the tables counts for nothing": (_counted_by_none, LAYOUTS[1]),
    "gradients count twice": (_gradient_twice, LAYOUTS[1]),
    "rows of microbatches are not summed": (_rows_not_summed, LAYOUTS[0]),
}


def run_with(world: World, name: str) -> Found:
    plant, layout = BUGS[name]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        return run(world, layout)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_seen(ranks: Any, name: str) -> None:
    found = ranks(2).run(run_with, name)
    with pytest.raises(AssertionError):
        assert_equal(found, alone())


# Checkpoints -------------------------------------------------------------------------------------------------------


def save(world: World, layout: Layout, folder: str) -> None:
    engine = build(world, layout)
    train(engine, 3)
    engine.save(folder, asynchronous=False)
    engine.close()


def go_on(world: World, layout: Layout, folder: str) -> Found:
    engine = build(world, layout)
    engine.load(folder)
    losses, norms = train(engine, STEPS - 3)
    weights, rows, tallies = look(engine)
    engine.close()
    return Found(losses, norms, weights, rows, tallies)


def test_saved_on_one_mesh_loaded_on_another(ranks: Any, tmp_path: Path) -> None:
    """Rank 0 writes what is noted of tables, wherever they lie; of copies along tp the first one writes."""
    wanted = alone()
    layouts = [LAYOUTS[1], LAYOUTS[0]._replace(place="row"), Layout(1, {}), LAYOUTS[1]]
    for i, (source, target) in enumerate(zip(layouts, layouts[1:], strict=False)):
        folder = str(tmp_path / str(i))
        for layout, function in ((source, save), (target, go_on)):
            if layout.ranks == 1:
                found = [function(join(), layout, folder)]
            else:
                found = ranks(layout.ranks).run(function, layout, folder)
        for each in found:
            assert each.losses == pytest.approx(wanted.losses[3:], rel=1e-10)
            for name, tensor in wanted.weights.items():
                torch.testing.assert_close(each.weights[name], tensor, rtol=1e-10, atol=1e-12)
        rows = {name: {} for name in wanted.rows}
        for each in found:
            for name, part in each.rows.items():
                rows[name] |= part
        for name, lines in wanted.rows.items():
            assert rows[name].keys() == lines.keys()
            for key, line in lines.items():
                assert rows[name][key] == pytest.approx(line, rel=1e-10, abs=1e-12)


# Bytes, and what is refused ----------------------------------------------------------------------------------------


def held_and_planned(world: World, layout: Layout) -> tuple[int, int, list[int]]:
    engine = build(world, layout)
    plan = engine.plan
    stages = [stage for info in plan.registry.of_kind("table") for stage in info.stages]
    found = engine.state_bytes()["tables"], plan.bytes_per_rank(world.rank)["tables"], stages
    engine.close()
    return found


def test_only_the_stage_of_the_tables_holds_them(ranks: Any) -> None:
    (first, planned, stages), second = ranks(2).run(held_and_planned, LAYOUTS[1])
    assert first == planned > 0 and second[:2] == (0, 0)
    assert set(stages) == set(second[2]) == {0}


class Odd(nn.Module):
    """A table in front of two blocks, used where a test wants it."""

    def __init__(self, use: str):
        super().__init__()
        self.use = use
        self.tables = EmbeddingCollection(
            [TablePolicy(name="t", width=4, dynamic=DynamicPolicy(capacity=4), init_bound=0.3)]
        )
        self.start = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block(4) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def tensor_table(self) -> dict[str, str]:
        return {"blocks.*.up": "column", "blocks.*.down": "row", "start": "replicate", "head": "replicate"}

    def forward(self, sparse: Mapping[str, Ragged]) -> Tensor:
        vectors = self.tables(sparse)["t"]
        x = self.start(vectors)
        for block in self.blocks:
            x = block(x)
        if self.use == "behind":
            x = x + vectors
        if self.use == "in a slice":
            shared = self.blocks[0].up(vectors.detach())
            x = x + (shared[:, :4] * vectors).sum()
        return self.head(x).square().mean()


def refused(world: World, axis: str, use: str, keys: list[int]) -> str:
    layout = Layout(2, {axis: 2})
    model = Odd(use)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    engine = build(world, layout, model, batch={"accumulation": 1})
    engine.train_step([{"sparse": {"t": Ragged.of_lists([[1], [2]])}}])
    error = ""
    try:
        engine.train_step([{"sparse": {"t": Ragged.of_lists([[key] for key in keys])}}])
    except ShardwiseError as caught:
        error = f"{type(caught).__name__}: {caught}"
    engine.train_step([{"sparse": {"t": Ragged.of_lists([[1], [2]])}}])
    rows = [tally.rows for tally in engine.table_tallies().values()]
    engine.close()
    return f"{rows} {error}"


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_a_full_table_ends_the_step_on_every_rank_that_shares_the_model(ranks: Any, axis: str) -> None:
    for told in ranks(2).run(refused, axis, "", [3, 4, 5]):
        assert told.startswith("[2] TableFullError: ")


@pytest.mark.parametrize(("axis", "use"), [("pp", "behind"), ("tp", "in a slice")])
def test_a_use_that_cannot_be_served_is_named(ranks: Any, axis: str, use: str) -> None:
    with pytest.raises(RanksError) as told:
        ranks(2).run(refused, axis, use, [1, 2])
    wanted = {
        "pp": "vectors of 'tables', which lives on another stage",
        "tp": "different gradients of the vectors",
    }
    assert wanted[axis] in str(told.value)


def test_a_cut_sequence_is_refused(ranks: Any) -> None:
    with pytest.raises(
        RanksError, match="tensor.sequence_parallel: the vectors of embedding tables hold whole"
    ):
        ranks(2).run(cut_sequence)


def cut_sequence(world: World) -> None:
    build(world, LAYOUTS[0], tensor={"sequence_parallel": True})
