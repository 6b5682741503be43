"""Embedding tables on a device: the numbers of the CPU, and no wait but for what has to come to the host."""

from typing import Any

import torch
from torch import Tensor

from shardwise.parallel.embedding.batch import Sequences
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import DynamicPolicy, RowOptimizerPolicy, TablePolicy
from shardwise.plan.ragged import Ragged
from tests.accelerator.pretend import Bench, on_host, register
from tests.ranks import RankPool

POOLINGS = {"added": "sum", "mean": "mean", "largest": "max", "row": "concat", "sequence": "none"}


def collection() -> EmbeddingCollection:
    """A static table of all ways to pool, one of another width, and a dynamic one."""
    tables = [
        TablePolicy(name="many", rows=50, width=4, features=tuple(POOLINGS), pooling=POOLINGS),
        TablePolicy(name="few", rows=9, width=3, optimizer=RowOptimizerPolicy(type="adam")),
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
            values = [each.values if isinstance(each, Sequences) else each for each in vectors.values()]
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
    assert device_process.run(syncs) == [{("copy to the host", "parallel/embedding/transfer.py:on_host"): 1}]
