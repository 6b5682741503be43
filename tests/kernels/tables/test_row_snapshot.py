"""Rows that a save reads while steps change them: those of the step at which the save began, in every layout."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.base.ragged import Ragged
from shardwise.comm.collectives import Group
from shardwise.kernels.tables import index_snapshot, row_snapshot
from shardwise.kernels.tables.kept_rows import KeptRows
from shardwise.kernels.tables.row_snapshot import StoreSnapshot
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import (
    AdmissionPolicy,
    DynamicPolicy,
    EvictionPolicy,
    RowOptimizerPolicy,
    TablePolicy,
)
from shardwise.parallel.embedding.saved import SavedRowRange, StreamedRows
from tests.parallel.embedding.threads import on_ranks

TABLES = ("static", "lru", "lfu", "age", "rare")


def collection_of(placement: str, group: Group) -> EmbeddingCollection:
    def grows(**fields: Any) -> DynamicPolicy:
        return DynamicPolicy(**fields)

    evictions = {
        "lru": grows(capacity=60, eviction=EvictionPolicy(type="lru", pinned=(3,))),
        "lfu": grows(capacity=60, eviction=EvictionPolicy(type="lfu", fraction=0.3)),
        "age": grows(eviction=EvictionPolicy(type="age", max_age_steps=3)),
        "rare": grows(admission=AdmissionPolicy(type="frequency", count=2, forget_steps=4)),
    }
    tables = [TablePolicy(name="static", width=4, rows=2500, placement=placement)]
    tables += [
        TablePolicy(name=name, width=4, dynamic=each, placement=placement) for name, each in evictions.items()
    ]
    collection = EmbeddingCollection(
        tables, RowOptimizerPolicy(type="adagrad", lr=0.1), seed=1, dtype=torch.float64
    )
    collection.place(group)
    return collection


def train(collection: EmbeddingCollection, group: Group, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        keys = ((torch.rand(36, generator=generator) ** 2 * 150).long() + 5 * step)[group.index :: group.size]
        sum(
            out.square().sum() for out in collection(dict.fromkeys(TABLES, Ragged.of_ones(keys))).values()
        ).backward()
        collection.step()


def copied(found: SavedRowRange | None) -> dict[str, Tensor]:
    """Numbers by kind, with the number of the first row in front."""
    if found is None:
        return {}
    rows = found.rows
    kinds = {"weights": rows.weights, **rows.state}
    if rows.scores is not None:
        kinds |= {"key": rows.keys[:, None], "score": rows.scores[:, None]}
    return {
        kind: torch.cat([torch.arange(len(each))[:, None] + found.first, each], 1)
        for kind, each in kinds.items()
    }


def streamed(found: StreamedRows | SavedRowRange | None) -> dict[str, Tensor]:
    """The same of rows that are read in two parts."""
    if found is None:
        return {}
    assert isinstance(found, StreamedRows)
    kinds: dict[str, list[Tensor]] = {kind: [] for kind in found.columns}
    for start, stop in found.ranges:
        for part in ((start, (start + stop) // 2), ((start + stop) // 2, stop)):
            for kind, parts in kinds.items():
                each = found.read(kind, part)
                parts.append(torch.cat([torch.arange(*part)[:, None], each], 1))
    return {kind: torch.cat(parts) for kind, parts in kinds.items() if parts}


def saved_twice(group: Group, placement: str) -> list[tuple[Any, Any]]:
    """What the ranks copy at a step, and what they read of it five steps later."""
    collection = collection_of(placement, group)
    saved = collection.saved
    train(collection, group, 1, 7)
    before = {}
    for name in TABLES:
        before[name] = [copied(each) for each in saved.rows_to_write(name)]
    read = {name: saved.rows_to_stream(name) for name in TABLES}
    train(collection, group, 7, 12)
    found = []
    for name in TABLES:
        assert isinstance(read[name][0], StreamedRows)
        found.append((before[name], [streamed(each) for each in read[name]]))
    saved.close()
    train(collection, group, 12, 13)
    again = saved.rows_to_stream("lru")[0]
    found.append(([copied(saved.rows_to_write("lru")[0])], [streamed(again)]))
    saved.close()
    return found


@pytest.mark.parametrize(
    ("ranks", "placement"), [(1, "auto"), (2, "row"), (4, "row"), (2, "table"), (3, "data_parallel")]
)
def test_what_is_read_later_is_what_was_there(
    ranks: int, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element once over all ranks, in its place, as if it had been copied: rows that were updated since, evicted,
    replaced by other keys in the same line, and keys that were admitted or forgotten."""
    monkeypatch.setattr(row_snapshot, "_CHUNK_ROWS", 7)
    monkeypatch.setattr(index_snapshot, "_CHUNK_ROWS", 11)
    monkeypatch.setattr(index_snapshot, "_SORTED_ROWS", 13)
    results = on_ranks(ranks, saved_twice, placement)
    for table in zip(*results, strict=True):
        for which in range(len(table[0][0])):
            expected, found = (whole([rank[side][which] for rank in table]) for side in range(2))
            pairs = found.pop("pair", None)
            if pairs is not None:
                found = {"key": pairs[:, :2], "score": pairs[:, [0, 2]]}
                expected.pop("weights")
            assert found.keys() == expected.keys()
            for kind, numbers in expected.items():
                assert numbers[:, 0].tolist() == list(range(len(numbers))), "each row once"
                assert torch.equal(found[kind], numbers), kind


def whole(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All ranks' rows of a table, by the number in front."""
    kinds = {kind for part in parts for kind in part}
    joined = {kind: torch.cat([part[kind] for part in parts if kind in part]) for kind in kinds}
    return {kind: each[each[:, 0].argsort()] for kind, each in joined.items()}


def test_a_save_between_a_forward_pass_and_its_step_copies() -> None:
    """The keys of the open step are left out, which a snapshot does not do."""

    def save(group: Group) -> list[int]:
        collection = collection_of("auto", group)
        train(collection, group, 1, 3)
        before = collection.rows_here("lru").keys
        collection({name: Ragged.of_ones(torch.tensor([2400])) for name in TABLES})
        assert collection.saved.rows_to_stream("lru") is None
        assert collection.saved.rows_to_write("lru")[0].rows.keys.equal(before)
        collection.saved.close()
        return []

    on_ranks(1, save)


def test_a_second_reader_waits_for_copies_that_the_first_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(4, 1)
    snapshot = StoreSnapshot([memory], [range(4)], [], [])
    snapshot.keep(torch.tensor([2]))
    memory[2] = 1
    has_taken, go, put = threading.Event(), threading.Event(), KeptRows.put

    def wait_and_put(kept: KeptRows, rows: Tensor, columns: Any, copied: Any) -> None:
        if threading.current_thread().name == "first":
            has_taken.set()
            assert go.wait(20)
        put(kept, rows, columns, copied)

    monkeypatch.setattr(KeptRows, "put", wait_and_put)
    found: dict[str, float] = {}

    def read() -> None:
        found[threading.current_thread().name] = float(snapshot.read(torch.tensor([2]))[0])

    readers = [threading.Thread(target=read, name=name) for name in ("first", "second")]
    readers[0].start()
    assert has_taken.wait(20)
    readers[1].start()
    readers[1].join(0.1)  # without the lock it has read the changed row by now
    go.set()
    for reader in readers:
        reader.join()
    assert found == {"first": 0.0, "second": 0.0}
