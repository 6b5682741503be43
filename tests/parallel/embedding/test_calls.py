"""What tables send is a closed form of the keys of a batch; tests/simulate/test_sent.py holds it to real steps."""

from typing import Any

import pytest
import torch

from shardwise.kernels.tables.wire import RowWire, WireName
from shardwise.parallel.embedding.calls import GroupLoad, calls_of, keys_of_pass, keys_of_step
from shardwise.parallel.embedding.cost import TableLoad, bytes_sent
from shardwise.parallel.embedding.group import TableGroup, group_tables
from shardwise.parallel.embedding.layout import TablePlacement
from shardwise.parallel.embedding.policy import RowOptimizerPolicy, TablePolicy

RANKS, WIDTH, LOAD = 4, 8, TableLoad(96, 64, 48)
FP32 = RowWire("fp32", torch.float32)
PLACES = {
    "data_parallel": TablePlacement("data_parallel"),
    "column": TablePlacement("column"),
    "row": TablePlacement("row"),
    "sums": TablePlacement("row", exchange="pooled"),
    "table": TablePlacement("table", owner=1),
}


def group(place: TablePlacement, optimizer: str = "sgd") -> TableGroup:
    table = TablePolicy(name="a", rows=4096, width=WIDTH)
    (found,) = group_tables([table], {"a": place}, RowOptimizerPolicy(type=optimizer), RANKS)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", PLACES)
def test_bytes_of_vectors_and_gradients_are_those_of_the_cost(name: str, wire: WireName) -> None:
    """As a mean over the ranks; the owner of a table sends what the others receive."""
    form = RowWire(wire, torch.float32)
    load = GroupLoad(group(PLACES[name]), (LOAD,), form)
    calls = [calls_of([load], rank, RANKS) for rank in range(RANKS)]
    told = bytes_sent(PLACES[name], LOAD, WIDTH, form, RANKS)
    for of, wanted in (("fetched", told.vectors), ("delivered", told.gradients)):
        found = [sum(call.bytes for call in getattr(each, of)) for each in calls]
        assert sum(found) / RANKS == pytest.approx(wanted)
    assert [len(each.fetched) for each in calls] == [name != "data_parallel"] * RANKS


def test_keys_of_all_microbatches_go_in_one_message() -> None:
    (call,) = keys_of_step([GroupLoad(group(PLACES["row"]), (LOAD,), FP32)], 2, RANKS)
    slot = 64  # 2 microbatches of 64 / 4 keys for each rank, a quarter more, rounded up to 64
    assert (call.operation, call.purpose, call.calls) == ("all_to_all", "keys", 1)
    assert call.elements == (RANKS - 1) * (1 + RANKS * 2 + slot)


def test_keys_of_few_owners_go_in_a_second_message() -> None:
    """Slots of equal size would be empty for all ranks but the owner."""
    first, second = keys_of_step([GroupLoad(group(PLACES["table"]), (LOAD,), FP32)], 1, RANKS)
    assert first.elements == (RANKS - 1) * (1 + RANKS)
    assert second.elements == 64 * (RANKS - 1) // RANKS


def test_a_pass_on_its_own_counts_first() -> None:
    calls = keys_of_pass([GroupLoad(group(PLACES["column"]), (LOAD,), FP32)], RANKS)
    assert [(call.operation, call.purpose) for call in calls] == [
        ("all_gather", "control"),
        ("all_gather", "keys"),
    ]
    assert calls[1].elements == 64 * (RANKS - 1)


@pytest.mark.parametrize(("optimizer", "number"), [("sgd", 0), ("rowwise_adagrad", 1)])
def test_squares_of_rows_that_are_cut_are_summed(optimizer: str, number: int) -> None:
    load = GroupLoad(group(PLACES["column"], optimizer), (LOAD,), FP32)
    assert len(calls_of([load], 0, RANKS).stepped) == number


def test_one_rank_sends_nothing() -> None:
    load: Any = [GroupLoad(group(PLACES["row"]), (LOAD,), FP32)]
    assert calls_of(load, 0, 1) == ((), (), ()) and keys_of_step(load, 1, 1) == keys_of_pass(load, 1) == ()
