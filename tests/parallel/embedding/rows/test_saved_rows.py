"""Rows go out of one layout and into any other, with their optimizer's state, and training goes on the same."""

from typing import Any

import pytest
import torch

from shardwise.base.errors import MismatchError
from shardwise.comm.collectives import Group
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.layout import BUCKETS
from shardwise.parallel.embedding.policy import DynamicPolicy, TablePolicy
from shardwise.parallel.embedding.rows.keyed_rows import KeyedRows
from tests.parallel.embedding.test_exact import (
    OPTIMIZERS,
    SAMPLES,
    batch,
    loss_of,
    samples_of,
    tables,
    together,
)
from tests.parallel.embedding.threads import on_ranks

LAYOUTS = [(1, "auto"), (3, "row"), (2, "column"), (3, "table"), (2, "data_parallel")]


def steps(collection: EmbeddingCollection, group: Group, first: int, last: int) -> None:
    each = SAMPLES // group.size
    for step in range(first, last):
        mine = {
            n: samples_of(r, group.index * each, (group.index + 1) * each) for n, r in batch(step).items()
        }
        loss_of(collection(mine)).backward()
        collection.step(1.0 - 0.1 * step)


def part(
    group: Group, placement: str, dynamic: bool, optimizer: str, saved: Any, first: int, last: int
) -> Any:
    """Steps [first, last) from ``saved``; what it then saves."""
    policies = tables(placement, "auto", dynamic, False)
    collection = EmbeddingCollection(policies, OPTIMIZERS[optimizer], seed=3, dtype=torch.float64)
    collection.place(group)
    if saved is not None:
        progress, pieces = saved
        collection.saved.load_progress(progress)
        for name, of_table in pieces.items():
            for rows in of_table:
                collection.load_rows(name, rows)
    steps(collection, group, first, last)
    return collection.saved.progress(), {table.name: collection.rows_here(table.name) for table in policies}


def joined(results: list[Any], placement: str) -> tuple[Any, dict[str, list[KeyedRows]]]:
    """Pieces of a checkpoint: columns are put together, rows stay in the pieces in which ranks held them."""
    pieces: dict[str, list[KeyedRows]] = {}
    for name in results[0][1]:
        parts = [rows[name] for _, rows in results]
        if placement == "column":
            one = {"row_sum", "step"}
            state = {
                which: given if which in one else torch.cat([p.state[which] for p in parts], 1)
                for which, given in parts[0].state.items()
            }
            weights = torch.cat([p.weights for p in parts], 1)
            pieces[name] = [KeyedRows(parts[0].keys, weights, state, parts[0].scores)]
        else:
            pieces[name] = parts[:1] if placement == "data_parallel" else parts
    return results[0][0], pieces


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "exact_adam"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_from_layout_to_layout(dynamic: bool, optimizer: str) -> None:
    straight = on_ranks(1, part, "auto", dynamic, optimizer, None, 0, 5)
    saved = None
    for first, (size, placement) in enumerate(LAYOUTS):
        results = on_ranks(size, part, placement, dynamic, optimizer, saved, first, first + 1)
        saved = joined(results, placement)
    policies = tables("auto", "auto", dynamic, False)
    expected = together(straight, policies, "row")
    found = together([(None, {n: p[0] for n, p in saved[1].items()})], policies, "row")  # type: ignore[index]
    for name, (keys, weights, state) in expected.items():
        assert torch.equal(found[name][0], keys)
        torch.testing.assert_close(found[name][1], weights, rtol=1e-11, atol=1e-13)
        for which, values in state.items():
            torch.testing.assert_close(found[name][2][which], values, rtol=1e-11, atol=1e-13)


def test_rows_are_ordered_by_bucket() -> None:
    collection = EmbeddingCollection([TablePolicy(name="t", rows=3000, width=1)])
    keys = collection.rows_here("t").keys
    assert keys[:4].tolist() == [0, 1024, 2048, 1]
    grown = EmbeddingCollection([TablePolicy(name="t", dynamic=DynamicPolicy(), width=1)])
    grown.load_rows("t", KeyedRows.of_weights(torch.arange(500), torch.zeros(500, 1)))
    grown.place()
    buckets = grown.saved.buckets("t", grown.rows_here("t").keys)
    assert (buckets.diff() >= 0).all() and buckets[0] >= 0 and buckets[-1] < BUCKETS


def test_rows_of_another_table_are_refused() -> None:
    collection = EmbeddingCollection([TablePolicy(name="t", rows=5, width=4)])
    collection.place()
    with pytest.raises(MismatchError, match="keys 0 to 5; it has 0 to 4"):
        collection.load_rows("t", KeyedRows.of_weights(torch.arange(6), torch.zeros(6, 4)))
    with pytest.raises(MismatchError, match="columns 0 to 2; here are columns 0 to 3"):
        collection.load_rows("t", KeyedRows.of_weights(torch.arange(5), torch.zeros(5, 3)))
    with pytest.raises(MismatchError, match="without optimizer state 'row_sum', but with z"):
        collection.load_rows("t", KeyedRows(torch.arange(5), torch.zeros(5, 4), {"z": torch.zeros(5, 4)}))
