"""The planner says why, obeys, refuses; and what it computes is what is sent."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise.base.errors import PlanError
from shardwise.base.hardware import ASSUMED_HARDWARE
from shardwise.base.ragged import Ragged
from shardwise.comm.collectives import Group
from shardwise.kernels.tables.wire import RowWire, WireName
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.cost import TableLoad, bytes_held, bytes_sent, collectives, rows_touched
from shardwise.parallel.embedding.layout import TablePlacement
from shardwise.parallel.embedding.planner import PlacementChoice, load_of, measured, plan_tables
from shardwise.parallel.embedding.policy import DynamicPolicy, RowOptimizerPolicy, TablePolicy
from tests.parallel.embedding.threads import on_ranks

FP32 = RowWire("fp32", torch.float32)
ROWWISE = RowOptimizerPolicy(type="rowwise_adagrad")
MIB = 1 << 20


def plan(
    *tables: TablePolicy,
    ranks: int = 4,
    batch: int = 1000,
    memory: float | None = None,
    host: float | None = None,
) -> list[PlacementChoice]:
    return plan_tables(tables, ROWWISE, ranks, batch, torch.float32, memory, host)


def test_every_table_has_a_reason() -> None:
    choices = plan(
        TablePolicy(name="user", rows=1_000_000, width=16),
        TablePolicy(name="words", rows=1_000_000, width=16, keys_per_sample=50, distinct_ratio=0.9),
        TablePolicy(name="asked", rows=1000, width=16, placement="column"),
        TablePolicy(name="new", dynamic=DynamicPolicy(), width=16),
    )
    assert [choice.table for choice in choices] == ["user", "words", "asked", "new"]
    text = "\n".join(map(str, choices))
    assert "user (1,000,000 x 16, rowwise_adagrad, 64.8 MiB): row, exchanges rows" in text
    assert choices[1].place.exchange == "pooled", "many distinct keys in a bag: sums are fewer bytes"
    assert "asked (1,000 x 16" in text and "column, as asked" in text
    assert all("ms and" in str(choice) for choice in choices) and "others, ms" in str(choices[0])
    assert plan(TablePolicy(name="t", rows=9, width=1), ranks=1)[0].why == "one rank holds everything"


def test_figures_of_a_batch() -> None:
    tables = [
        TablePolicy(name="t", rows=100, width=4, features=("a", "b")),
        TablePolicy(name="c", rows=9, width=4),
    ]
    given = {
        "a": Ragged.of_lists([[1, 2], [3, 1]]),
        "b": Ragged.of_lists([[1], [9]]),
        "c": Ragged.of_lists([[], []]),
    }
    first, second = measured(tables, given)
    assert first.keys_per_sample == 1.5 and first.distinct_ratio == pytest.approx(4 / 6)
    assert second == tables[1]


def test_dynamic_tables_have_the_hosts_memory() -> None:
    """Apart from the device's, whichever of the two is the smaller; on a CPU they share one."""
    rows = TablePolicy(name="rows", rows=100_000, width=16)
    grows = TablePolicy(name="grows", width=16, dynamic=DynamicPolicy(capacity=100_000))  # 6.5 MiB each
    assert len(plan(rows, grows, ranks=1, memory=7 * MIB, host=7 * MIB)) == 2
    refused = r"fits nowhere: data_parallel needs 6.5 MiB; left of {} on the ranks: {}"
    for memory, host, said in (
        (7, 6, refused.format(r"host memory \(tables.host_memory_bytes\)", "6.0 MiB")),
        (6, 7, refused.format(r"device memory \(tables.memory_bytes\)", "6.0 MiB")),
        (12, None, refused.format(r"memory \(tables.memory_bytes\)", "5.5 MiB")),
    ):
        with pytest.raises(PlanError, match=said):
            plan(rows, grows, ranks=1, memory=memory * MIB, host=None if host is None else host * MIB)


def test_memory_moves_a_table_and_refuses_it() -> None:
    large = TablePolicy(name="large", rows=1_000_000, width=16, placement="data_parallel")
    with pytest.raises(
        PlanError, match=r"'large' .* fits nowhere: data_parallel needs 64.8 MiB; left .* 20.0 MiB"
    ):
        plan(large, memory=20 * MIB)
    free = large.model_copy(update={"placement": "auto"})
    choice = plan(free, memory=20 * MIB)[0]
    assert choice.place.placement in ("row", "column") and "no room: data_parallel needs 64.8" in str(choice)
    with pytest.raises(PlanError, match="fits nowhere.*row needs 16.2 MiB"):
        plan(free, memory=10 * MIB)
    several = [TablePolicy(name=str(i), rows=100_000, width=16, placement="table") for i in range(8)]
    owners = [choice.place.owner for choice in plan(*several, memory=13 * MIB + 1)]
    assert sorted(owners) == [0, 0, 1, 1, 2, 2, 3, 3]
    with pytest.raises(PlanError, match="fits nowhere"):
        plan(*several, memory=12 * MIB)


def test_rates_of_the_hardware_decide() -> None:
    """Copies of a table send nothing forward, but every rank updates the rows of all ranks."""
    table = TablePolicy(name="t", rows=1000, width=64)
    chosen = {}
    slow = {"host": ASSUMED_HARDWARE.links["host"]._replace(latency_s=1.0)}
    for name, hardware in {
        "slow memory": replace(ASSUMED_HARDWARE, row_bytes_s=1e8),
        "slow messages": replace(ASSUMED_HARDWARE, links=slow),
    }.items():
        choice = plan_tables([table], ROWWISE, 4, 1000, torch.float32, hardware=hardware)[0]
        chosen[name] = choice.place.placement
    assert chosen["slow memory"] != "data_parallel" and chosen["slow messages"] == "data_parallel"


def test_all_ranks_assume_the_same_figures() -> None:
    """Placements of a saved run must not move, so these figures are those of the first release."""
    link = ASSUMED_HARDWARE.links["host"]
    assert (link.bytes_s, link.latency_s, ASSUMED_HARDWARE.row_bytes_s) == (1.5e9, 1e-4, 4e9)
    table = TablePolicy(name="t", rows=1000, width=64, placement="column")
    choice = plan_tables([table], ROWWISE, 4, 1000, torch.float32)[0]
    sent = bytes_sent(choice.place, load_of(table, 1000), 64, FP32, 4).total
    rows = rows_touched(choice.place, load_of(table, 1000), 4) * 2 * (64 + 1) * 4
    seconds = sent / 1.5e9 + rows / 4e9 + collectives(choice.place) * 1e-4
    assert f"{seconds * 1e3:.2f} ms" in choice.why


def test_impossible_wishes() -> None:
    with pytest.raises(PlanError, match="gives each of 4 ranks a column, but the width is 3"):
        plan(TablePolicy(name="t", rows=10, width=3, placement="column"))
    assert plan(TablePolicy(name="t", rows=10, width=3))[0].place.placement != "column"
    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "neither of rows and dynamic"),
        ({"rows": 3, "dynamic": {}}, "both of rows and dynamic"),
        ({"rows": 3, "pooling": {"x": "sum"}}, "feature 'x', which is none of its features"),
        ({"rows": 3, "exchange": "pooled", "pooling": "max"}, "pooled needs pooling sum or mean"),
        ({"rows": 3, "exchange": "pooled", "placement": "column"}, "for placements table and row"),
        ({"dynamic": {}, "exchange": "pooled"}, "a dynamic table has exchange: rows"),
        ({"dynamic": {"eviction": {"type": "lru"}}}, "needs capacity or budget_bytes"),
        ({"dynamic": {"eviction": {"type": "age"}}}, "go together"),
        ({"rows": 3, "optimizer": {"type": "sgd", "exact": True}}, "exact is for adam"),
        ({"rows": 3, "optimizer": {"type": "sgd", "l1": 0.1}}, "are FTRL's"),
        ({"rows": 3, "widht": 4}, "did you mean 'width'"),
    ]
    for fields, says in bad:
        with pytest.raises(ValueError, match=says):
            TablePolicy(**{"name": "t", "width": 4, **fields})


def traffic_of(group: Group, placement: str, exchange: str, wire: WireName) -> dict[str, int]:
    """Every rank asks for as many keys of every rank as every other."""
    table = TablePolicy(name="t", rows=64, width=8, placement=placement, exchange=exchange)
    collection = EmbeddingCollection([table], ROWWISE)
    collection.place(group, wire=wire)
    group.traffic.clear()
    keys = torch.arange(16).repeat(3)  # 48 keys, 16 distinct, 24 bags of two
    collection({"t": Ragged(keys, torch.arange(0, 49, 2))})["t"].sum().backward()
    collection.step()
    return {kind: group.traffic.total(kind).bytes for kind in ("keys", "activations", "gradients")}  # type: ignore[arg-type]


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(
    ("placement", "exchange"),
    [
        ("data_parallel", "auto"),
        ("column", "auto"),
        ("row", "rows"),
        ("row", "pooled"),
        ("table", "rows"),
        ("table", "pooled"),
    ],
)
def test_bytes_are_those_of_the_formula(placement: Any, exchange: Any, wire: WireName) -> None:
    place = TablePlacement(placement, exchange="pooled" if exchange == "pooled" else "rows")
    expected = bytes_sent(place, TableLoad(48, 16, 24), 8, RowWire(wire, torch.float32), 4)
    found = on_ranks(4, traffic_of, placement, exchange, wire)
    means = [sum(each[kind] for each in found) / 4 for kind in ("keys", "activations", "gradients")]
    gradients = means[2] - (
        24 * 4 if placement == "column" else 0
    )  # squares of whole rows, for row-wise Adagrad
    assert means[:2] == [expected.keys, expected.vectors] and gradients == expected.gradients
    assert bytes_held("row", 64, 36, 4) == 64 * 36 / 4
    whole = bytes_sent(place, TableLoad(48, 16, 24), 8, FP32, 4)
    if wire == "bf16":
        assert expected.vectors == whole.vectors / 2 and expected.gradients == whole.gradients / 2
    elif wire == "int8" and placement != "column":  # a scale of four bytes for each row of eight numbers
        assert expected.gradients == whole.gradients / 4 * (8 + 4) / 8


def test_the_collection_prints_the_plan() -> None:
    collection = EmbeddingCollection([TablePolicy(name="t", rows=10, width=4)])
    assert (
        collection.describe()
        == "t (10 x 4, rowwise_adagrad, 200 B): data_parallel, one rank holds everything"
    )
