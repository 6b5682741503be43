"""Tables of which only some rows are in memory: the same bits as tables that fit, whatever leaves and comes back."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import PlanError, TableFullError
from shardwise.base.ragged import Ragged
from shardwise.comm.collectives import Group
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import (
    AdmissionPolicy,
    DynamicPolicy,
    EvictionPolicy,
    RowOptimizerPolicy,
    TablePolicy,
)
from shardwise.parallel.embedding.rows.keyed_rows import KeyedRows
from shardwise.tiers.row_tiers import RowTiersPolicy
from tests.parallel.embedding.test_exact import OPTIMIZERS, PLACEMENTS, tables, train
from tests.parallel.embedding.threads import on_ranks

FEW = 70
"""Rows in memory of a table with 3,000: hardly more than a step has."""


def in_tiers(policies: Sequence[TablePolicy], folder: Path, rows: int = FEW) -> list[TablePolicy]:
    """The tables with only some rows in memory."""
    tiers = RowTiersPolicy(host_rows=rows, disk=folder)
    return [policy.model_copy(update={"tiers": tiers}) for policy in policies]


def same_rows(one: KeyedRows, other: KeyedRows) -> bool:
    """Keys, weights, optimizer state and scores, to the bit."""
    return (
        torch.equal(one.keys, other.keys)
        and torch.equal(one.weights, other.weights)
        and one.state.keys() == other.state.keys()
        and all(torch.equal(one.state[name], other.state[name]) for name in one.state)
        and (one.scores is None) == (other.scores is None)
        and (one.scores is None or other.scores is None or torch.equal(one.scores, other.scores))
    )


def check(
    folder: Path,
    size: int,
    placement: str,
    exchange: str,
    dynamic: bool,
    optimizer: str,
    microbatches: int = 1,
) -> None:
    """Losses and rows are those of the tables without tiers, on the same ranks."""
    policies = tables(placement, exchange, dynamic, exchange == "pooled")
    expected = on_ranks(size, train, policies, OPTIMIZERS[optimizer], microbatches)
    found = on_ranks(size, train, in_tiers(policies, folder), OPTIMIZERS[optimizer], microbatches)
    for (losses, rows), (their_losses, their_rows) in zip(found, expected, strict=True):
        assert losses == their_losses
        assert all(same_rows(rows[name], their_rows[name]) for name in their_rows)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(tmp_path: Path, optimizer: str) -> None:
    check(tmp_path, 1, "auto", "auto", optimizer in ("adam", "ftrl"), optimizer)


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_optimizer_on_ranks(tmp_path: Path, optimizer: str, dynamic: bool, size: int) -> None:
    check(tmp_path, size, "row", "rows", dynamic, optimizer)


@pytest.mark.parametrize(("placement", "exchange"), PLACEMENTS)
def test_every_placement(tmp_path: Path, placement: str, exchange: str) -> None:
    check(tmp_path, 2, placement, exchange, exchange == "rows", "rowwise_adagrad", 3)


def clicks(step: int, rows: int, samples: int = 24) -> dict[str, Ragged]:
    """Keys of which a few come often and most come rarely."""
    generator = torch.Generator().manual_seed(step)
    keys = (rows * torch.rand(samples, generator=generator) ** 3).long()
    return {"t": Ragged.of_ones(keys * 7919 % rows)}


def run(
    group: Group,
    tiers: RowTiersPolicy | None,
    optimizer: RowOptimizerPolicy,
    dynamic: DynamicPolicy | None,
    rows: int,
    placement: str = "row",
    steps: int = 25,
) -> tuple[list[Tensor], list[KeyedRows], int]:
    """Train a table whose batches evaluate, drop a step and read all rows in between: vectors, rows, rows on disk."""
    size: dict[str, Any] = {"rows": rows} if dynamic is None else {"dynamic": dynamic}
    table = TablePolicy(name="t", width=3, placement=placement, tiers=tiers, init_bound=0.3, **size)
    collection = EmbeddingCollection([table], optimizer, seed=2)
    collection.place(group, batch=24)
    seen, held = [], []
    for step in range(steps):
        vectors = collection(clicks(step * 2 + group.index, rows))["t"]
        seen.append(vectors.detach().clone())
        (vectors**2).sum().backward()
        if step % 7 == 3:
            collection.drop_gradients()
            continue
        collection.step(1.0 - step / 50, divisor=24)
        if step % 6 == 5:
            collection.eval()
            seen.append(collection(clicks(1000 + step, rows, 40))["t"].clone())
            collection.train()
        if step % 10 == 9:
            held.append(collection.rows_here("t"))
    held.append(collection.rows_here("t"))
    on_disk = 0
    for part in collection.placed.parts:
        if part.store.tiers is not None:
            on_disk = part.store.tiers.below.rows_held()  # type: ignore[attr-defined]
    collection.placed.close()
    return seen, held, on_disk


GROWING = {
    "static": None,
    "grows": DynamicPolicy(),
    "lru": DynamicPolicy(capacity=90, eviction=EvictionPolicy(type="lru")),
    "lfu": DynamicPolicy(
        capacity=90,
        eviction=EvictionPolicy(type="lfu", fraction=0.2, pinned=(0,)),
        admission=AdmissionPolicy(type="frequency", count=2),
    ),
    "age": DynamicPolicy(eviction=EvictionPolicy(type="age", max_age_steps=4)),
}


def compare(
    folder: Path, size: int, kind: str, optimizer: str, rows: int, cache: int, *rest: Any, leaves: bool = True
) -> None:
    """``leaves``: there are more rows than the memory of each rank holds."""
    tiers = RowTiersPolicy(host_rows=cache, disk=folder)
    expected = on_ranks(size, run, None, OPTIMIZERS[optimizer], GROWING[kind], rows, *rest)
    found = on_ranks(size, run, tiers, OPTIMIZERS[optimizer], GROWING[kind], rows, *rest)
    for (seen, held, on_disk), (their_seen, their_held, _) in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(seen, their_seen, strict=True))
        assert all(same_rows(a, b) for a, b in zip(held, their_held, strict=True))
        assert on_disk or not leaves, "rows have left the memory"
        if kind != "static":
            assert on_disk <= their_held[-1].keys.numel(), "rows that went are on no tier"


@pytest.mark.parametrize("kind", GROWING)
def test_steps_evaluations_and_dropped_steps(tmp_path: Path, kind: str) -> None:
    compare(tmp_path, 1, kind, "exact_adam", 600, 30)


@pytest.mark.parametrize(
    ("placement", "kind"), [("row", "lru"), ("data_parallel", "static"), ("column", "lfu")]
)
def test_steps_on_ranks(tmp_path: Path, placement: str, kind: str) -> None:
    compare(tmp_path, 2, kind, "exact_adam", 600, 60, placement)


@pytest.mark.soak
@pytest.mark.parametrize("ratio", [4, 20])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("placement", ["row", "data_parallel", "column", "table"])
@pytest.mark.parametrize("kind", GROWING)
def test_every_layout(tmp_path: Path, size: int, placement: str, kind: str, ratio: int) -> None:
    # Copies on four ranks hold the rows of a step of all of them. Tables that evict never have more than 110 rows.
    cache, leaves = {1: 40, 2: 110, 4: 440}[size], size == 1 and kind in ("static", "grows")
    for number, optimizer in enumerate(OPTIMIZERS):
        folder = tmp_path / str(number)
        folder.mkdir()
        if placement != "column" or size <= 3:
            compare(folder, size, kind, optimizer, cache * ratio, cache, placement, 40, leaves=leaves)


def test_a_step_of_more_rows_than_memory_is_refused(tmp_path: Path) -> None:
    def refused(group: Group) -> tuple[str, Tensor]:
        tiers = RowTiersPolicy(host_rows=8, disk=tmp_path)
        table = TablePolicy(name="t", width=2, rows=100, placement="row", tiers=tiers)
        collection = EmbeddingCollection([table], RowOptimizerPolicy(type="sgd", lr=1.0))
        collection.place(group)

        def learn(keys: Tensor) -> None:
            collection({"t": Ragged.of_ones(keys)})["t"].sum().backward()
            collection.step()

        learn(torch.arange(4))
        before = collection.rows_here("t").weights
        with pytest.raises(TableFullError) as refusal:
            learn(torch.arange(20) + 20 * group.index)
        assert torch.equal(collection.rows_here("t").weights, before)
        learn(torch.arange(4))
        collection.placed.close()
        return str(refusal.value), before

    said = [each for each, _ in on_ranks(2, refused)]
    assert said == [said[0]] * 2 and "32 rows over all ranks" in said[0] and "host_rows" in said[0]


def test_vectors_of_more_rows_than_memory(tmp_path: Path) -> None:
    """An evaluation keeps nothing, so its batches may be of any size."""
    policies = [TablePolicy(name="t", width=2, rows=100)]
    plain, cached = (
        EmbeddingCollection(each, seed=4).eval() for each in (policies, in_tiers(policies, tmp_path, 7))
    )
    keys = {"t": Ragged.of_ones(torch.arange(100).flip(0))}
    assert torch.equal(cached(keys)["t"], plain(keys)["t"])
    cached.placed.close()


@pytest.mark.parametrize("kind", ["static", "lru"])
def test_a_state_dict_goes_between_tables_with_and_without_tiers(tmp_path: Path, kind: str) -> None:
    size: dict[str, Any] = {"rows": 90} if kind == "static" else {"dynamic": GROWING[kind]}
    plain = [TablePolicy(name="t", width=3, **size)]
    learnt = EmbeddingCollection(plain, OPTIMIZERS["exact_adam"])
    for step in range(5):
        learnt(clicks(step, 90))["t"].sum().backward()
        learnt.step()
    cached = EmbeddingCollection(in_tiers(plain, tmp_path, 25), OPTIMIZERS["exact_adam"])
    cached({"t": Ragged.of_ones(torch.arange(9))})["t"].sum().backward()
    cached.step()
    cached.load_state_dict(learnt.state_dict())
    back = EmbeddingCollection(plain, OPTIMIZERS["exact_adam"])
    back.load_state_dict(cached.state_dict())
    for each in (learnt, cached, back):
        each(clicks(9, 90))["t"].sum().backward()
        each.step()
    rows = [each.rows_here("t") for each in (learnt, cached, back)]
    assert same_rows(rows[0], rows[1]) and same_rows(rows[0], rows[2])
    cached.placed.close()


def test_what_tiers_need_is_named(tmp_path: Path) -> None:
    for given, said in [
        ({"disk": tmp_path}, "neither of host and host_rows"),
        ({"host": "4GiB", "host_rows": 7, "disk": tmp_path}, "both of host and host_rows"),
        ({"host": "4 gigs", "disk": tmp_path}, "'4 gigs' is no size"),
        ({"host": "1GiB"}, "disk is missing"),
        ({"host": "1GiB", "device": "1GiB", "disk": tmp_path}, "kept in host memory"),
    ]:
        with pytest.raises(ValueError, match=said):
            RowTiersPolicy.model_validate(given)
    assert RowTiersPolicy(host="1.5KiB", disk=tmp_path).rows_in_memory(None, 64, False, 1) == 24
    assert RowTiersPolicy(host_rows=10, disk=tmp_path).rows_in_memory(8, 64, True, 4) == 2


BEYOND = """
import resource, sys, torch
from pathlib import Path
from shardwise import EmbeddingCollection, Ragged, TablePolicy

def train(rows, tiers):
    tables = EmbeddingCollection([TablePolicy(name="t", width=16, rows=rows, tiers=tiers)])
    for step in range(6):
        keys = torch.randint(0, rows, (20_000,), generator=torch.Generator().manual_seed(step))
        tables({"t": Ragged.of_ones(keys)})["t"].sum().backward()
        tables.step()
    tables.placed.close()

rows, mib, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
tiers = {"host": f"{mib // 8}MiB", "disk": folder}
train(50_000, tiers)
held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
limit = int(held.split()[1]) * 1024 + mib * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
train(rows, tiers)
try:
    train(rows, None)
except MemoryError:
    print("trained")
"""


def beyond(folder: Path, rows: int, mib: int) -> None:
    """Train a table of more bytes than the process may take, in a process with a limit; without tiers it fails."""
    given = [sys.executable, "-c", BEYOND, str(rows), str(mib), str(folder)]
    done = subprocess.run(given, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout == "trained\n", done.stderr


def test_a_table_larger_than_memory(tmp_path: Path) -> None:
    """1.1 GiB of rows in 300 MiB of memory."""
    beyond(tmp_path, 17_000_000, 300)


@pytest.mark.soak
def test_a_table_of_12_gib(tmp_path: Path) -> None:
    beyond(tmp_path, 190_000_000, 3 * 1024)


def test_memory_is_counted_by_the_rows_in_it(tmp_path: Path) -> None:
    """A table of 40 MiB of rows goes where 16 MiB are free, and the choice says what lies where."""
    policies = [TablePolicy(name="t", width=19, rows=1 << 19)]
    with pytest.raises(PlanError, match="fits nowhere"):
        EmbeddingCollection(policies).place(memory_bytes=16 << 20)
    collection = EmbeddingCollection(in_tiers(policies, tmp_path, 1 << 14))
    collection.place(memory_bytes=16 << 20)
    assert "16,384 rows a rank in 1.2 MiB of memory" in collection.describe()
    assert "on disk" in collection.describe()
    collection.placed.close()
