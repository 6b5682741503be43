"""Embedding tables on a device: the numbers of the CPU, and no wait but for what has to come to the host."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import PlanError
from shardwise.base.ragged import Ragged
from shardwise.comm.world import World
from shardwise.parallel.embedding.batch import SequenceVectors
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import DynamicPolicy, RowOptimizerPolicy, TablePolicy
from tests.accelerator.crew import Crew
from tests.accelerator.pretend import Bench, is_on_device, on_host, register
from tests.engine import tables_net, test_tables_model_parallel
from tests.engine.step.test_keys_ahead import MIXED
from tests.ranks import RankPool

POOLINGS = {"added": "sum", "mean": "mean", "largest": "max", "row": "concat", "sequence": "none"}


def collection() -> EmbeddingCollection:
    """A static table of all ways to pool, one of another width, and a dynamic one."""
    tables = [
        TablePolicy(name="many", rows=50, width=4, features=tuple(POOLINGS), pooling=POOLINGS),
        TablePolicy(name="few", rows=9, width=3, optimizer=RowOptimizerPolicy(type="adam", exact=True)),
        TablePolicy(name="grows", width=4, dynamic=DynamicPolicy()),
    ]
    return EmbeddingCollection(tables, RowOptimizerPolicy(lr=0.1), dtype=torch.float64)


def features(step: int, weights: Tensor) -> dict[str, Ragged]:
    """Some keys more than once, some samples without any."""
    generator = torch.Generator().manual_seed(step)
    lists = [torch.randint(0, 9, (count,), generator=generator).tolist() for count in (3, 0, 1, 4)]
    given = {name: Ragged.of_lists(lists) for name in ("mean", "largest", "sequence", "few", "grows")}
    given["added"] = Ragged.of_lists(lists)._replace(weights=weights)
    return given | {"row": Ragged.of_lists([[1, 2], [2, 2], [0, 1], [5, 5]])}


def trained(device: torch.device) -> list[Tensor]:
    """Vectors, gradients of weights, and rows with their state, after two steps of two batches."""
    tables, found = collection(), []
    tables.place(device=device)
    for step in range(2):
        for batch in range(2):
            weights = torch.linspace(0.5, 2, 8, dtype=torch.float64, device=device).requires_grad_()
            vectors = tables(features(2 * step + batch, weights))
            values = [each.values if isinstance(each, SequenceVectors) else each for each in vectors.values()]
            assert all(each.device == device for each in (*values, vectors["sequence"].offsets))
            sum((each.sin() * (place + 1)).sum() for place, each in enumerate(values)).backward()
            found += [*values, weights.grad]
        tables.step()
    for table in tables.tables:
        rows = tables.rows_here(table.name)
        found += [rows.weights, *rows.state.values()]
    return [each.detach() for each in found]


def on_both(_world: Any) -> list[float]:
    device = register()
    with Bench() as bench:
        ours = [each if each.device.type == "cpu" else on_host(each) for each in trained(device)]
        assert not bench.misplaced
    expected = trained(torch.device("cpu"))
    assert [each.shape for each in ours] == [each.shape for each in expected]
    return [float((a - b).abs().max()) for a, b in zip(ours, expected, strict=True)]


def syncs(_world: Any) -> dict[Any, int]:
    """Of the second batch, with its step."""
    device, tables = register(), collection()
    with Bench() as bench:
        tables.place(device=device)
        for step in range(2):
            bench.clear()
            vectors = tables(features(step, torch.ones(8, dtype=torch.float64)))
            sum(each.sum() for name, each in vectors.items() if name != "sequence").backward()
            tables.step()
        return dict(bench.syncs)


def test_vectors_and_rows_are_those_of_the_cpu(device_process: RankPool) -> None:
    (differences,) = device_process.run(on_both)
    assert max(differences) < 1e-12, differences


def test_only_the_gradients_of_rows_on_the_host_are_waited_for(device_process: RankPool) -> None:
    assert device_process.run(syncs) == [{("synchronize", "memory/streams.py:wait_for_copies_down"): 1}]


# Memory -----------------------------------------------------------------------------------------------------------


class Scored(nn.Module):
    """A linear layer beside a static table of 400 rows (20 numbers each with an exact Adam's) and one that grows."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        adam = RowOptimizerPolicy(type="adam", exact=True)
        tables = [
            TablePolicy(name="fixed", rows=400, width=6, optimizer=adam),
            TablePolicy(name="grows", width=6, dynamic=DynamicPolicy(capacity=capacity)),
        ]
        self.tables = EmbeddingCollection(tables)
        self.out = nn.Linear(12, 1)

    def forward(self, sparse: dict[str, Ragged]) -> Tensor:
        found = self.tables(sparse)
        return self.out(torch.cat([found["fixed"], found["grows"]], 1)).square().mean()


def engine_of(device: torch.device, free: int, capacity: int = 10_000, **tables: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "get_memory_info", lambda device=None: (free, 1 << 30))
        world = World(0, 1, device=device)
        return shardwise.initialize(Scored(capacity), {"tables": tables} if tables else {}, world=world)


def memories(_world: Any) -> dict[str, Any]:
    device, found = register(), {}
    with Bench():
        engine = engine_of(device, 1 << 30)
        engine.train_step([{"sparse": {name: Ragged.of_lists([[1], [2, 3]]) for name in ("fixed", "grows")}}])
        (collection,) = engine.tables.values()
        stores = [part.store for part in collection.placed.parts]
        found["held"] = engine.held_bytes()
        dense = sum(size for row, size in engine.state_bytes().items() if "tables" not in row)
        found["device"] = sum(each.lines.nbytes for each in stores if is_on_device(each.lines.memory))
        found["host"] = sum(each.nbytes for each in stores if not is_on_device(each.lines.memory))
        found["plan"] = str(engine.plan)
        engine.close()
        engine_of(device, 30_400 + dense).close()
        for name, free, more in (
            ("beside the rest", 30_400 + dense - 1, {}),
            ("device budget", 1 << 30, {"memory_bytes": 30_399}),
            ("host budget", 1 << 30, {"host_memory_bytes": 1000}),
        ):
            try:
                engine_of(device, free, **more).close()
            except PlanError as error:
                found[name] = str(error)
    return found


def test_device_and_host_have_budgets_of_their_own(device_process: RankPool) -> None:
    (found,) = device_process.run(memories)
    held = found["held"]
    assert held["tables"] == found["device"] == 30_400 and held["table steps"] == 4 * 400
    assert held["dynamic tables"] == found["host"] > 0
    assert (
        "tables 29.7 KiB, dynamic tables 273.4 KiB; together 30.2 KiB, and 273.4 KiB in host memory"
        in found["plan"]
    )
    for name, table, memory in (
        ("beside the rest", "fixed", "device memory (tables.memory_bytes)"),
        ("device budget", "fixed", "device memory (tables.memory_bytes)"),
        ("host budget", "grows", "host memory (tables.host_memory_bytes)"),
    ):
        assert f"table {table!r}" in found[name] and f"left of {memory}" in found[name]


# Several ranks -----------------------------------------------------------------------------------------------------


def ahead(world: World, depth: int) -> Any:
    """Losses, norms, rows and how many INPUT_DISTs went ahead, in a world that calls itself NCCL's."""
    world.backend = "nccl"
    engine = tables_net.build(world, MIXED, batch={"accumulation": 2})
    share = tables_net.SAMPLES // world.size

    def halves(step: int) -> list[dict[str, Any]]:
        first = share * world.rank
        cuts = (first, first + share // 2, first + share)
        return [tables_net.batch(step, *span) for span in zip(cuts, cuts[1:], strict=False)]

    found, asked = [], 0
    with engine.prefetch((halves(step) for step in range(3)), depth) as steps:
        for batches in steps:
            result = engine.train_step(batches)
            found.append((result.loss, result.grad_norm))
            asked += len(engine.trace.ahead)
    rows = tables_net.row_of(engine)
    engine.close()
    return (found, rows), asked


def on_and_off(_world: Any, size: int) -> list[str]:
    device, wrong = register(), []
    with Bench() as bench:
        off, on = (Crew(size, device).run(ahead, depth) for depth in (0, 2))
    for rank, ((here, asked), (there, before)) in enumerate(zip(on, off, strict=True)):
        wrong += [f"rank {rank}: another number"] * (here != there)
        wrong += [f"rank {rank}: {asked} INPUT_DISTs ahead, without depth {before}"] * (
            (asked, before) != (6, 0)
        )
    return wrong + bench.misplaced


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_keys_go_ahead_beside_nccl_and_change_no_bit(device_process: RankPool, size: int) -> None:
    assert device_process.run(on_and_off, size) == [[]]


def beside(_world: Any, places: list[int]) -> list[str]:
    """Layouts of the suite of tables beside slices and stages: what differs from one process."""
    device, wrong = register(), []
    wanted = test_tables_model_parallel.run(World(0, 1), test_tables_model_parallel.Layout(1, {}))
    for place in places:
        layout = test_tables_model_parallel.LAYOUTS[place]
        with Bench() as bench:
            try:
                found = Crew(layout.ranks, device).run(test_tables_model_parallel.run, layout)
                found = [each._replace(weights=_there(each.weights)) for each in found]
                test_tables_model_parallel.assert_equal(found, wanted)
            except Exception as problem:
                wrong.append(f"{layout}: {type(problem).__name__}: {problem}")
            wrong += [f"{layout}: {line}" for line in bench.misplaced]
    return wrong


def _there(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: on_host(each) if is_on_device(each) else each for name, each in weights.items()}


STAGES = 1
"""Place of "pp 2" among the layouts."""


@pytest.mark.parametrize(
    "places",
    [
        [STAGES],
        pytest.param(list(range(len(test_tables_model_parallel.LAYOUTS))), marks=pytest.mark.soak),
    ],
    ids=["pp2", "every"],
)
def test_tables_beside_stages_equal_one_process(device_process: RankPool, places: list[int]) -> None:
    assert device_process.run(beside, places, timeout_s=300.0) == [[]]


def trained_on_two(world: World) -> list[float]:
    """Losses of six steps of two microbatches, whose gradients are delivered together."""
    engine = tables_net.build(world, MIXED, batch={"accumulation": 2})
    losses = tables_net.train(engine, 6, microbatches=2)
    engine.close()
    return losses


def two_on_both(_world: Any) -> list[str]:
    device = register()
    with Bench() as bench:
        found = Crew(2, device).run(trained_on_two)
        wrong = list(bench.misplaced)
    losses = trained_on_two(World(0, 1))
    for rank, mine in enumerate(found):
        gap = max(abs(a - b) for a, b in zip(mine, losses, strict=True))
        wrong += [f"rank {rank}: losses differ by {gap}"] * (not gap < 1e-12)
    return wrong


def test_two_ranks_deliver_a_step_at_once_and_equal_one_process(device_process: RankPool) -> None:
    assert device_process.run(two_on_both) == [[]]
