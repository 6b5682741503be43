"""Tables under the engine: steps on 1, 2 and 4 ranks give the same losses, norms and rows, wherever tables lie.

One model holds a static and a dynamic table for each row optimizer, so that each layout is held to one process in all
of them at a time, beside a dense network under ZeRO.
"""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import (
    ConfigError,
    DataError,
    NonFiniteError,
    ShardwiseError,
    TableFullError,
    UsageError,
)
from shardwise.base.ragged import Ragged
from shardwise.comm.world import World, join
from shardwise.engine.parts import tables as engine_tables
from shardwise.engine.parts.tables import ModelTables
from shardwise.parallel.embedding import ways
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import (
    DynamicPolicy,
    EvictionPolicy,
    RowOptimizerPolicy,
    TablePolicy,
)
from shardwise.parallel.embedding.rows import evict, store
from shardwise.parallel.embedding.rows.dynamic import DynamicIndex
from tests.engine import tables_net, tiers_net
from tests.engine.conformance import Conformance

STEPS, SAMPLES, ROWS = 50, 16, 1500
FEWER = 20
"""Steps of a layout with one placement: those with all four at a time run for longer."""
OPTIMIZERS = {
    "sgd": RowOptimizerPolicy(type="sgd", lr=0.1, weight_decay=0.01),
    "momentum": RowOptimizerPolicy(type="momentum", lr=0.02, nesterov=True),
    "adagrad": RowOptimizerPolicy(type="adagrad", lr=0.05, initial_accumulator=0.01),
    "rowwise_adagrad": RowOptimizerPolicy(type="rowwise_adagrad", lr=0.05, weight_decay=0.01),
    "adam": RowOptimizerPolicy(type="adam", lr=0.01),
    "exact_adam": RowOptimizerPolicy(type="adam", lr=0.01, exact=True, weight_decay=0.1),
    "ftrl": RowOptimizerPolicy(type="ftrl", lr=0.1, l1=1e-4, l2=0.01),
}
PLACEMENTS = ("data_parallel", "table", "row", "column")


class Layout(NamedTuple):
    """One way to run the model."""

    ranks: int
    placement: str
    """Of all tables, or ``mixed``: each of another."""
    exchange: str = "auto"
    stage: int = 0
    microbatches: int = 1
    shares: tuple[int, ...] = ()
    """Samples of each rank; left out, equal ones."""
    precision: str = "fp64"

    def __str__(self) -> str:
        parts = [f"{self.ranks}", self.placement, self.exchange, f"z{self.stage}", f"m{self.microbatches}"]
        return "-".join([*parts, *map(str, self.shares), self.precision])


LAYOUTS = [
    *(
        Layout(ranks, placement, exchange)
        for ranks in (2, 4)
        for placement, exchange in (
            ("data_parallel", "auto"),
            ("column", "auto"),
            ("table", "rows"),
            ("table", "pooled"),
            ("row", "rows"),
            ("row", "pooled"),
            ("mixed", "auto"),
        )
    ),
    Layout(2, "row", stage=1, microbatches=2),
    Layout(4, "mixed", stage=2, microbatches=2),
    Layout(2, "mixed", stage=3),
    Layout(1, "auto", microbatches=4),
    Layout(4, "mixed", shares=(7, 0, 8, 1)),
    Layout(2, "row", shares=(16, 0), microbatches=2),
    Layout(2, "mixed", precision="fp32"),
    Layout(4, "mixed", precision="fp32", microbatches=2),
    Layout(4, "row", precision="fp32"),
    Layout(2, "column", precision="fp32"),
]
IN_SOAK = {  # each of these placements lies on 2 ranks alone, and on 4 among the mixed ones
    Layout(4, "data_parallel"),
    Layout(4, "column"),
    Layout(4, "table", "rows"),
    Layout(4, "table", "pooled"),
    Layout(4, "row", "rows"),
    Layout(4, "row", "pooled"),
    Layout(4, "row", precision="fp32"),
    Layout(4, "mixed", precision="fp32", microbatches=2),
}


class Net(nn.Module):
    """A static and a dynamic table for each optimizer; three features read the static ones, two the others."""

    def __init__(self, layout: Layout):
        super().__init__()
        tables = []
        for number, (name, optimizer) in enumerate(OPTIMIZERS.items()):
            placement = PLACEMENTS[number % 4] if layout.placement == "mixed" else layout.placement
            given: dict[str, Any] = {"optimizer": optimizer, "width": 4, "placement": placement}
            tables.append(
                TablePolicy(name=name, rows=ROWS, exchange=layout.exchange, init_bound=0.3, **given)
            )
            evicts = EvictionPolicy(type="lru", fraction=0.2)
            grows = DynamicPolicy(capacity=60, eviction=evicts, initial_rows=2)
            exchange = layout.exchange if layout.exchange != "pooled" else "auto"
            tables.append(
                TablePolicy(name=f"{name}*", dynamic=grows, exchange=exchange, init_bound=0.3, **given)
            )
        self.tables = EmbeddingCollection(tables, seed=5)
        generator = torch.Generator().manual_seed(1)
        self.hidden = nn.Linear(4 * len(tables), 8)
        self.out = nn.Linear(8, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)

    def forward(self, sparse: Mapping[str, Ragged], labels: Tensor) -> Tensor:
        found = self.tables(sparse)
        joined = torch.cat([found[table.name] for table in self.tables.tables], 1)
        logits = self.out(torch.tanh(self.hidden(joined)))[:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(
            logits, labels.to(logits.dtype), reduction="sum"
        )
        return loss / max(len(labels), 1)


def batch(step: int, names: list[str], start: int, stop: int) -> dict[str, Any]:
    """Samples [start, stop) of a step's global batch: some without a key, a few keys that come often."""
    generator = torch.Generator().manual_seed(step)
    sparse = {}
    for name in names:
        lengths = torch.randint(0, 3, (SAMPLES,), generator=generator)
        keys = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        keys[::2] = keys[::2] % 11
        ends = [0, *lengths.cumsum(0).tolist()]
        lists = [keys[first:last].tolist() for first, last in zip(ends, ends[1:], strict=False)]
        sparse[name] = Ragged.of_lists(lists[start:stop])
    labels = torch.rand(SAMPLES, generator=generator).round()
    return {"sparse": sparse, "labels": labels[start:stop]}


class Found(NamedTuple):
    """What a run did."""

    losses: list[float]
    norms: list[float]
    rows: dict[str, Tensor]
    """What this rank would write of each table: key, weights, optimizer state, score."""
    evicted: int


def run(world: World, layout: Layout, steps: int = STEPS) -> Found:
    """Train one layout."""
    model = Net(layout)
    config = {
        "precision": layout.precision,
        "zero": {"stage": layout.stage},
        "batch": {"accumulation": layout.microbatches},
        "optimizer": {"type": "adamw", "lr": 1e-2},
        "schedule": {"type": "cosine", "warmup_steps": 5, "total_steps": 60},
        "max_grad_norm": 0.1,
        "comm": {"timeout_s": 60},
    }
    engine = shardwise.initialize(model, config, world=world)
    conformance = Conformance(engine)
    names = [table.name for table in model.tables.tables]
    shares = layout.shares or (SAMPLES // world.size,) * world.size
    first, mine = sum(shares[: world.rank]), shares[world.rank]
    cuts = [first + mine * i // layout.microbatches for i in range(layout.microbatches + 1)]
    spans = list(zip(cuts, cuts[1:], strict=False))
    losses, norms = [], []
    for step in range(steps):
        batches = [batch(step, names, *span) for span in spans]
        result = engine.train_step(batches, [float(stop - start) for start, stop in spans])
        losses.append(result.loss)
        norms.append(result.grad_norm)
    assert not conformance.departures
    rows = {name: whole_rows(model.tables, name) for name in names}
    evicted = sum(tally.evicted for tally in engine.table_tallies().values())
    engine.close()
    return Found(losses, norms, rows, evicted)


def whole_rows(collection: EmbeddingCollection, table: str) -> Tensor:
    """Rows that this rank writes: [n, 1 + width + state + 1]."""
    rows = collection.saved.rows_to_write(table)[0].rows
    scores = rows.keys * 0 if rows.scores is None else rows.scores
    columns = [rows.weights, *(rows.state[name] for name in sorted(rows.state))]
    return torch.cat([rows.keys[:, None], *columns, scores[:, None]], 1).double()


def by_key(rows: Tensor) -> Tensor:
    """Ordered by the first column."""
    return rows[rows[:, 0].argsort()]


@cache
def alone(precision: str, steps: int) -> Found:
    """The single process."""
    return run(join(), Layout(1, "auto", precision=precision), steps)


def assert_close(found: list[Found], wanted: Found, bound: float) -> None:
    """Losses, norms and rows within ``bound``, relative."""
    assert wanted.evicted > 0
    for each in found:
        assert torch.tensor(each.losses) == pytest.approx(torch.tensor(wanted.losses), rel=bound)
        assert each.evicted == wanted.evicted
        # The norm near the end is a small difference of large addends: it is held to the largest.
        largest = max(wanted.norms)
        assert each.norms == pytest.approx(wanted.norms, rel=30 * bound, abs=30 * bound * largest)
    for name, rows in wanted.rows.items():
        together = by_key(torch.cat([each.rows[name] for each in found]))
        torch.testing.assert_close(together, by_key(rows), rtol=1e3 * bound, atol=1e3 * bound, msg=name)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=pytest.mark.soak if each in IN_SOAK else ()) for each in LAYOUTS],
    ids=str,
)
def test_equals_one_process(ranks: Any, layout: Layout) -> None:
    steps = STEPS if layout.placement == "mixed" else FEWER
    found = [run(join(), layout, steps)] if layout.ranks == 1 else ranks(layout.ranks).run(run, layout, steps)
    assert_close(found, alone(layout.precision, steps), 1e-12 if layout.precision == "fp64" else 1e-6)


# Bugs, planted on purpose ------------------------------------------------------------------------------------------


def _norm_without_tables(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelTables, "square_sum", lambda self: torch.zeros((), dtype=torch.float64))


def _clip_ignored(patch: pytest.MonkeyPatch) -> None:
    step = ModelTables.step
    patch.setattr(
        ModelTables, "step", lambda self, name, lr_factor, divisor: step(self, name, lr_factor, 1.0)
    )


def _schedule_ignored(patch: pytest.MonkeyPatch) -> None:
    step = ModelTables.step
    patch.setattr(ModelTables, "step", lambda self, name, lr_factor, divisor: step(self, name, 1.0, divisor))


def _copies_counted_by_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        store.RowStore, "square_sum", lambda self: (self._gradients.merged(self._like)[1] ** 2).sum()
    )


def _means_over_own_columns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store.RowStore, "_mean_squares", lambda self, rows, grads, scale: None)


def _start_rows_of_each_rank(patch: pytest.MonkeyPatch) -> None:
    begin = store.RowStore.__init__

    def init(self: Any, tables: Any, group: Any, seed: int, *rest: Any) -> None:
        begin(self, tables, group, seed + group.index, *rest)

    patch.setattr(store.RowStore, "__init__", init)


def _last_microbatch_alone(patch: pytest.MonkeyPatch) -> None:
    add = store.RowStore.add

    def last(self: Any, rows: Tensor, grads: Tensor) -> None:
        self._gradients.clear()
        add(self, rows, grads)

    patch.setattr(store.RowStore, "add", last)


def _each_rank_evicts_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(evict, "lowest", lambda keys, scores, count, group: keys)


def _no_replay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store.RowStore, "catch_up", lambda self, rows, places, for_update=False: None)


def _gradients_stay_at_home(patch: pytest.MonkeyPatch) -> None:
    deliver = ways.GatheredKeysExchange.deliver

    def part(self: Any, asked: Any, into: Any) -> Tensor:
        own = sum(row[0] for row in asked.counts[: self.group.index])
        mine = slice(own, own + asked.counts[self.group.index][0])
        grads = deliver(self, asked, into)
        kept = torch.zeros_like(grads)
        kept[mine] = grads[mine]
        return kept

    patch.setattr(ways.GatheredKeysExchange, "deliver", part)


def _scores_of_the_last_call(patch: pytest.MonkeyPatch) -> None:
    score = DynamicIndex.score

    def last(self: Any, step: int) -> None:
        del self._came[:-1]
        score(self, step)

    patch.setattr(DynamicIndex, "score", last)


BUGS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Layout]] = {
    "the norm leaves tables out": (_norm_without_tables, Layout(2, "row")),
    "clipping passes tables by": (_clip_ignored, Layout(2, "row")),
    "the schedule passes tables by": (_schedule_ignored, Layout(2, "row")),
    "each copy counts in the norm": (_copies_counted_by_all, Layout(2, "data_parallel")),
    "row sums of some columns": (_means_over_own_columns, Layout(2, "column")),
    "start rows depend on the rank": (_start_rows_of_each_rank, Layout(2, "row")),
    "the last microbatch alone": (_last_microbatch_alone, Layout(2, "row", microbatches=2)),
    "each rank evicts alone": (_each_rank_evicts_alone, Layout(2, "row")),
    "skipped steps are not replayed": (_no_replay, Layout(2, "table")),
    "gradients of other ranks are lost": (_gradients_stay_at_home, Layout(2, "data_parallel")),
    "scores of the last microbatch": (_scores_of_the_last_call, Layout(2, "row", microbatches=2)),
}
FEW = 12
"""Steps in which each bug shows."""


def run_with(world: World, name: str) -> Found:
    plant, layout = BUGS[name]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        return run(world, layout, FEW)


@cache
def few_alone() -> Found:
    return run(join(), Layout(1, "auto"), FEW)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_seen(ranks: Any, name: str) -> None:
    found = ranks(2).run(run_with, name)
    with pytest.raises(AssertionError):
        assert_close(found, few_alone(), 1e-12)


def test_without_a_bug_nothing_is_seen(ranks: Any) -> None:
    for layout in dict.fromkeys(layout for _, layout in BUGS.values()):
        assert_close(ranks(2).run(run, layout, FEW), few_alone(), 1e-12)


# What is refused ---------------------------------------------------------------------------------------------------


def small(rows: int = 10, **config: Any) -> Any:
    """An engine of one table and one number."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = EmbeddingCollection([TablePolicy(name="user", rows=rows, width=4)])
            self.out = nn.Linear(4, 1)

        def forward(self, sparse: Mapping[str, Ragged]) -> Tensor:
            return self.out(self.tables(sparse)["user"]).square().mean()

    return shardwise.initialize(Small(), config)


def test_keys_of_tables_need_tables() -> None:
    with pytest.raises(ConfigError, match="no EmbeddingCollection"):
        shardwise.initialize(nn.Linear(2, 2), {"tables": {"memory_bytes": 100}})


def test_a_placement_names_a_table() -> None:
    with pytest.raises(ConfigError, match=r"no table is called 'usr'; did you mean 'user'"):
        small(tables={"placement": {"usr": "row"}})


def test_a_table_without_memory() -> None:
    with pytest.raises(ShardwiseError, match=r"table 'user' .* fits nowhere"):
        small(rows=100_000, tables={"memory_bytes": 1000})


def test_a_used_collection_is_refused() -> None:
    tables = EmbeddingCollection([TablePolicy(name="user", rows=10, width=4)])
    tables({"user": Ragged.of_lists([[1]])})
    with pytest.raises(UsageError, match="before its first batch"):
        shardwise.initialize(nn.ModuleList([nn.Linear(1, 1), tables]), {})


def test_a_key_outside_and_wrong_offsets() -> None:
    engine = small()
    with pytest.raises(DataError, match=r"feature 'user'.*key 10"):
        engine({"sparse": {"user": Ragged.of_lists([[3], [10]])}})
    wrong = Ragged(torch.tensor([1, 2, 3]), torch.tensor([0, 2]))
    with pytest.raises(DataError, match="offsets go from 0 to 2, but there are 3 values"):
        engine({"sparse": {"user": wrong}})
    engine.train_step([{"sparse": {"user": Ragged.of_lists([[3], [9]])}}])


def test_not_a_number_stops_the_step_and_leaves_rows_alone() -> None:
    engine = small()
    before = engine.tables["tables"].rows_here("user").weights
    with torch.no_grad(), engine.full_parameters(write=True) as parameters:
        parameters["out.bias"].fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        engine.train_step([{"sparse": {"user": Ragged.of_lists([[3], [9]])}}])
    assert torch.equal(engine.tables["tables"].rows_here("user").weights, before)


def test_plan_says_where_tables_lie_and_why() -> None:
    engine = small(tables={"placement": {"us*": "row"}})
    assert "user (10 x 4, rowwise_adagrad" in str(engine.plan)
    rows, state = engine.plan.registry.of_kind("table")
    assert (rows.name, rows.shape, rows.label, str(rows.on("dp"))) == ("tables.user", (10, 4), "", "R")
    assert (state.name, state.shape, state.label) == ("tables.user", (10, 1), "row_sum")
    assert engine.state_bytes()["tables"] == 10 * (4 + 1) * 4


class Sizes(nn.Module):
    """Two static tables and a dynamic one of odd sizes: neither rows nor columns divide."""

    def __init__(self, placement: str) -> None:
        super().__init__()
        given: dict[str, Any] = {"width": 5, "placement": placement}
        adam = RowOptimizerPolicy(type="adam", exact=True)
        self.tables = EmbeddingCollection(
            [
                TablePolicy(name="large", rows=1500, **given),
                TablePolicy(name="small", rows=7, optimizer=adam, **given),
                TablePolicy(name="half", rows=1500, dtype="bf16", **given),
                TablePolicy(name="grows", dynamic=DynamicPolicy(capacity=9), **given),
            ]
        )
        self.out = nn.Linear(5, 1)

    def forward(self, sparse: Mapping[str, Ragged]) -> Tensor:
        return sum(self.out(each).square().mean() for each in self.tables(sparse).values())


def held_and_planned(world: World, placement: str) -> tuple[dict[str, int], dict[str, int], list[Any]]:
    engine = shardwise.initialize(Sizes(placement), {"optimizer": {"type": "sgd"}}, world=world)
    plan = engine.plan
    infos = [
        (info.name, info.label, info.shape, str(info.on("dp")), info.grows)
        for info in plan.registry.of_kind("table")
    ]
    held = engine.state_bytes()
    engine.close()
    return held, plan.bytes_per_rank(world.rank), infos


ON = {"data_parallel": "R", "table": "on 0", "row": "H", "column": "S(1)"}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_plan_has_the_bytes_that_are_held(ranks: Any, placement: str, size: int) -> None:
    """Padding and optimizer state included, on each rank: the registry says so, not the planner's mean."""
    run = held_and_planned
    found = [run(join(), placement)] if size == 1 else ranks(size).run(run, placement)
    on = ON[placement] if size > 1 else "R"
    for held, planned, infos in found:
        assert planned["tables"] == held["tables"]
        assert infos[0] == ("tables.large", "", (1500, 5), on, False)
        small = {"S(1)": "R", "on 0": "on 1"}.get(
            on, on
        )  # the step of a row stands beside each of its columns
        assert ("tables.small", "step", (7, 1), small, False) in infos
        assert infos[-2][:3] + infos[-2][4:] == ("tables.grows", "", (9, 5), True)
    tables = [held["tables"] for held, _, _ in found]
    lines = 4 * (1500 * 6 + 7 * 16) + 1500 * (5 * 2 + 4)
    wanted = {
        "data_parallel": [lines] * 2,
        "table": sorted(tables),
        "row": [4 * (1024 * 6 + 512 * 16) + 1024 * (5 * 2 + 4)] * 2,
        "column": [
            4 * (1500 * (columns + 1) + 7 * (3 * columns + 1)) + 1500 * (columns * 2 + 4)
            for columns in (2, 3)
        ],
    }[placement]
    assert sorted(tables) == (wanted if size > 1 else [lines])
    if placement == "table":
        assert sum(tables) == lines


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_learn(precision: str) -> None:
    engine = small(precision=precision, optimizer={"lr": 1e-2})
    losses = [engine.train_step([{"sparse": {"user": Ragged.of_lists([[3], [9]])}}]).loss for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    assert engine.tables["tables"].rows_here("user").weights.dtype == torch.float32


# Ranks that fail, or are given different things, agree ---------------------------------------------------------------


class Capped(nn.Module):
    """One table that may hold four keys."""

    def __init__(self, placement: str) -> None:
        super().__init__()
        full = DynamicPolicy(capacity=4)
        self.tables = EmbeddingCollection(
            [TablePolicy(name="user", width=4, dynamic=full, placement=placement)], seed=2
        )
        self.out = nn.Linear(4, 1)

    def forward(self, sparse: Mapping[str, Ragged]) -> Tensor:
        return self.out(self.tables(sparse)["user"]).square().mean()


def fill_up(world: World, placement: str) -> list[Any]:
    """A step with too many keys among good ones: what was said, the keys and the dense weights around it."""
    engine = shardwise.initialize(
        Capped(placement), {"comm": {"timeout_s": 20}, "batch": {"accumulation": 2}}, world=world
    )

    def step(*keys: int) -> None:
        mine = [[key] for key in keys[world.rank :: world.size]]
        engine.train_step([{"sparse": {"user": Ragged.of_lists([each])}} for each in mine])

    step(1, 2, 3, 1)
    before = engine.state_dict()
    with pytest.raises(TableFullError, match=r"table 'user' would have 5 rows of at most 4.*lfu") as told:
        step(1, 7, 8, 2)
    unchanged = all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    step(3, 2, 4, 1)
    rows = engine.table_tallies()["tables.user"]
    engine.close()
    return [str(told.value), unchanged, rows.rows, rows.inserted, engine.step_count]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_full_table_is_said_on_all_ranks_and_the_run_can_go_on(ranks: Any, placement: str) -> None:
    first, second = ranks(2).run(fill_up, placement)
    assert first == second
    assert first[1:] == [True, 4, 4, 2]


def small_all_reduces(world: World, capacity: int | None, has_tables: bool = True) -> int:
    """Control all-reduces of one step of two microbatches, by the traffic that was counted."""
    model: nn.Module = nn.Linear(4, 1)
    batches: list[Any] = [{"input": torch.ones(1, 4)}] * 2
    if has_tables:
        model = Capped("row")
        table = model.tables.tables[0].model_copy(update={"dynamic": DynamicPolicy(capacity=capacity)})
        model.tables.tables = (table,)
        batches = [{"sparse": {"user": Ragged.of_lists([[key + world.rank]])}} for key in (1, 2)]
    config = {"comm": {"timeout_s": 20}, "batch": {"accumulation": 2}}
    loss = None if has_tables else lambda net, batch: net(batch["input"]).sum()
    engine = shardwise.initialize(model, config, world=world, loss=loss)
    engine.train_step(batches)
    engine.traffic.clear()
    engine.train_step(batches)
    counts = engine.traffic.counts.items()
    calls = sum(count.calls for key, count in counts if key[:2] == ("all_reduce", "control"))
    engine.close()
    return calls


def test_tables_add_no_all_reduce_to_a_step(ranks: Any) -> None:
    """Rows of capped tables, and which passes had a backward pass, ride in the all-reduce that every step has."""
    plain = ranks(2).run(small_all_reduces, None, False)
    assert plain == [1, 1]
    assert ranks(2).run(small_all_reduces, 4) == plain
    assert ranks(2).run(small_all_reduces, None) == plain


def refuse_the_second(world: World) -> int:
    """One rank's second microbatch has a bad key."""
    model = Net(Layout(world.size, "row"))
    engine = shardwise.initialize(
        model, {"batch": {"accumulation": 2}, "comm": {"timeout_s": 20}}, world=world
    )
    names = [table.name for table in model.tables.tables]
    good = [batch(0, names, world.rank, world.rank + 2), batch(0, names, 4 + world.rank, 5 + world.rank)]
    bad = [good[0], {**good[1], "sparse": {**good[1]["sparse"], "sgd": Ragged.of_lists([[ROWS]])}}]
    with pytest.raises(DataError):
        engine.train_step(bad if world.rank == 1 else good)
    steps = engine.train_step(good).step
    engine.close()
    return steps


def test_a_refused_microbatch_ends_the_step_and_the_next_one_runs(ranks: Any) -> None:
    assert ranks(2).run(refuse_the_second) == [1, 1]


def load_different_bags(world: World) -> bool:
    torch.manual_seed(world.rank)
    bag = nn.EmbeddingBag(6, 4)
    model = Capped("row")
    model.tables.tables = (TablePolicy(name="user", width=4, rows=6, placement="row"),)
    model.tables.load_bag("user", bag)
    engine = shardwise.initialize(model, {}, world=world)
    rows = engine.tables["tables"].rows_here("user")
    torch.manual_seed(0)
    first = nn.EmbeddingBag(6, 4).weight.detach()
    engine.close()
    return torch.equal(rows.weights, first[rows.keys])


def test_given_rows_are_the_first_ranks_everywhere(ranks: Any) -> None:
    assert ranks(2).run(load_different_bags) == [True, True]


def with_other_memory(world: World) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engine_tables,
            "_memory_of_a_rank",
            lambda world, *_: engine_tables._TableMemory(400 + 10_000 * world.rank, None),
        )
        model = Capped("auto")
        model.tables.tables = (TablePolicy(name="user", width=4, rows=30),)
        engine = shardwise.initialize(model, {}, world=world)
    engine.train_step([{"sparse": {"user": Ragged.of_lists([[3, world.rank]])}}])
    places = [choice.place.placement for choice in engine.tables["tables"].choices]
    engine.close()
    return places


def test_ranks_plan_for_the_least_memory(ranks: Any) -> None:
    assert ranks(2).run(with_other_memory) == [["row"], ["row"]]


def overflow(world: World, wire: str) -> list[Any]:
    """fp16: a step whose gradients overflow moves no row, no score, no sum, and no key gets a row in it."""
    places, keys = dict.fromkeys(("large", "grows"), "row"), {"precision": "fp16", "tables": {"wire": wire}}
    engine = tables_net.build(world, places, **keys)
    tables_net.train(engine, 3)
    before, scale = tables_net.row_of(engine), engine._parts.loss_scale.scale
    share = tables_net.SAMPLES // world.size
    mine = tables_net.batch(2, share * world.rank, share * (world.rank + 1))
    engine._parts.loss_scale.scale = 2.0**40
    result = engine.train_step([mine])
    engine._parts.loss_scale.scale = scale
    after = tables_net.row_of(engine)
    engine.close()
    return [result.skipped, after == before]


@pytest.mark.parametrize(("size", "wire"), [(1, "fp32"), (2, "fp32"), (2, "fp16"), (2, "int8")])
def test_an_overflow_leaves_rows_and_scores(ranks: Any, size: int, wire: str) -> None:
    found = [overflow(join(), wire)] if size == 1 else ranks(2).run(overflow, wire)
    assert found == [[True, True]] * size


class Refuses(nn.Module):
    """Raises after its lookup where the batch says so, as a bad label would."""

    def __init__(self) -> None:
        super().__init__()
        table = TablePolicy(name="t", width=2, dynamic=DynamicPolicy(capacity=3))
        self.tables = EmbeddingCollection([table])
        self.out = nn.Linear(2, 1)

    def forward(self, keys: Tensor, bad: bool) -> Tensor:
        loss = self.out(self.tables({"t": Ragged.of_ones(keys)})["t"]).square().mean()
        if bad:
            raise ValueError("a bad batch")
        return loss


def test_a_batch_that_is_caught_leaves_the_table_as_it_was() -> None:
    """Else the keys of the bad batch would stay in a full table, and every later step be refused."""
    engine = shardwise.initialize(Refuses(), {"batch": {"global_size": 2}})
    for keys in ([1, 2], [3, 1]):
        engine.train_step([{"keys": torch.tensor(keys), "bad": False}])
    for _ in range(2):
        with pytest.raises(ValueError, match="a bad batch"):
            engine.train_step([{"keys": torch.tensor([4, 5]), "bad": True}])
    engine.train_step([{"keys": torch.tensor([3, 2]), "bad": False}])
    assert engine.table_tallies()["tables.t"].rows == 3
    engine.close()


def exact_life(world: World, placement: str, home: str, reads: bool, steps: range) -> dict[str, Tensor]:
    """Rows after the last of some steps; each rank has batches of its own. ``reads``: with saves and evaluations."""
    engine = tiers_net.build(world, placement, None)
    if steps.start:
        engine.load(home)
    for step in steps:
        if reads and step % 3 == 1:
            engine.evaluate([(tiers_net.batch(900 + step, world.rank, world.size), 1.0)])
        if reads and step % 4 == 2:
            engine.save(home, asynchronous=step % 8 == 2)
        tiers_net.train(engine, step)
    rows = tiers_net.state_of(engine)
    engine.close()
    return rows


@pytest.mark.parametrize("placement", ["data_parallel", "row"])
def test_bits_of_an_exact_adam_do_not_depend_on_reads(ranks: Any, tmp_path: Path, placement: str) -> None:
    """Each rank replays the steps that a row missed when its own batches, a save or an evaluation read the row."""
    home = str(tmp_path)
    plain = ranks(2).run(exact_life, placement, home, False, range(12))
    assert not list(tmp_path.iterdir())
    read = ranks(2).run(exact_life, placement, home, True, range(12))
    resumed = ranks(2).run(exact_life, placement, home, False, range(10, 12))
    for one, other, third in zip(plain, read, resumed, strict=True):
        assert tiers_net.is_same(one, other) and tiers_net.is_same(one, third)
    if placement == "data_parallel":
        assert tiers_net.is_same(*plain), "copies are equal"
