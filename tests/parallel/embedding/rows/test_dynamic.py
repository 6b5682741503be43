"""Tables that grow and shrink: the same rows on any number of ranks, and no silent failure."""

from typing import Any

import pytest
import torch

from shardwise.base.errors import PlanError, TableFullError
from shardwise.base.ragged import Ragged
from shardwise.comm.collectives import Group
from shardwise.kernels.tables.hash_index import HashIndex
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import (
    AdmissionPolicy,
    DynamicPolicy,
    EvictionPolicy,
    RowOptimizerPolicy,
    TablePolicy,
)
from shardwise.parallel.embedding.rows.dynamic import _COUNT_BITS, DynamicIndex
from tests.parallel.embedding.grown import collection_of, keys_of, train_on
from tests.parallel.embedding.threads import on_ranks

LARGEST = (1 << 63) - 1


def test_any_key_gets_a_row_and_it_begins_by_its_key() -> None:
    keys = [7, -3, LARGEST, -LARGEST - 1, 0, 7]
    first = train_on(collection_of(DynamicPolicy()), keys)
    other = collection_of(DynamicPolicy(initial_rows=1))
    other_way = train_on(other, [1, 2, *keys[::-1]])[2:].flip(0)
    assert torch.equal(first, other_way), "not by the order of arrival"
    assert first.abs().max() <= 0.01 and first[0].equal(first[5]) and len(set(first[:, 0].tolist())) == 5
    assert keys_of(other) == sorted({1, 2, *keys})


def test_evaluation_inserts_nothing() -> None:
    collection = collection_of(DynamicPolicy())
    train_on(collection, [1, 2])
    collection.eval()
    found = collection({"t": Ragged.of_ones(torch.tensor([1, 9]))})["t"]
    assert found[0].abs().sum() > 0 and found[1].abs().sum() == 0
    assert keys_of(collection) == [1, 2]


def test_a_full_table_is_an_error() -> None:
    collection = collection_of(DynamicPolicy(capacity=3))
    train_on(collection, [1, 2, 3])
    with pytest.raises(TableFullError, match="table 't'.*evict"):
        train_on(collection, [3, 4])
    assert keys_of(collection) == [1, 2, 3]


def test_a_budget_in_bytes() -> None:
    collection = collection_of(DynamicPolicy(budget_bytes=3 * 3 * 8))
    train_on(collection, [1, 2, 3])
    with pytest.raises(TableFullError):
        train_on(collection, [4])


def test_a_budget_below_one_row_is_refused() -> None:
    with pytest.raises(PlanError, match="budget_bytes 23 is below the 24 bytes of one row"):
        train_on(collection_of(DynamicPolicy(budget_bytes=23)), [1])


def test_a_row_that_comes_back_begins_anew() -> None:
    eviction = EvictionPolicy(type="age", max_age_steps=2)
    collection = collection_of(DynamicPolicy(eviction=eviction))
    first = train_on(collection, [1])
    train_on(collection, [2])
    assert keys_of(collection) == [1, 2]
    train_on(collection, [2])
    assert keys_of(collection) == [2]
    assert torch.equal(train_on(collection, [1]), first)


def test_no_row_is_looked_at_before_one_can_be_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    eviction = EvictionPolicy(type="age", max_age_steps=4)
    collection = collection_of(DynamicPolicy(eviction=eviction))
    asked: list[int] = []
    below = HashIndex.below
    monkeypatch.setattr(
        HashIndex, "below", lambda index, score: (asked.append(score), below(index, score))[1]
    )
    for key in (1, 2, 3):
        train_on(collection, [key])
    assert asked == []
    train_on(collection, [4])
    assert asked == [1] and keys_of(collection) == [1, 2, 3, 4]
    train_on(collection, [5])
    assert keys_of(collection) == [2, 3, 4, 5]


def test_admission() -> None:
    often = collection_of(DynamicPolicy(admission=AdmissionPolicy(type="frequency", count=3)))
    for _ in range(2):
        assert train_on(often, [5, 5, 5]).abs().sum() == 0, "a batch counts once"
    assert train_on(often, [5, 6]).abs().sum(1).gt(0).tolist() == [True, False]
    assert keys_of(often) == [5]

    some = collection_of(DynamicPolicy(admission=AdmissionPolicy(type="probability", probability=0.3)))
    train_on(some, list(range(1000)))
    admitted = keys_of(some)
    assert 200 < len(admitted) < 400
    train_on(some, list(range(1000)))
    assert keys_of(some) == admitted, "the same keys every time"


@pytest.mark.parametrize("kind", ["none", "lru", "lfu", "age"])
def test_a_step_that_is_given_up_leaves_no_key_behind(kind: str) -> None:
    """A caller catches what a bad batch raised after its lookup, and goes on: the table is as it was."""
    eviction = EvictionPolicy(type=kind, max_age_steps=50 if kind == "age" else None, fraction=0.5)
    collection = collection_of(DynamicPolicy(capacity=3, eviction=eviction))
    train_on(collection, [1, 2, 3])
    before = collection.rows_here("t")
    for keys in ([4, 5], [6, 1]):
        collection({"t": Ragged.of_ones(torch.tensor(keys))})
        collection.drop_gradients()
    after = collection.rows_here("t")
    assert after.keys.equal(before.keys) and after.scores is not None
    assert after.scores.equal(before.scores) and after.weights.equal(before.weights)
    train_on(collection, [1])
    train_on(collection, [2])
    assert keys_of(collection) == [1, 2, 3]
    tally = collection.tallies["t"]
    assert (tally.rows, tally.inserted, tally.evicted) == (3, 3, 0)


def look_between(group: Group, placement: str, policy: DynamicPolicy | None, is_looking: bool) -> list[Any]:
    """Train a table with momentum; with ``is_looking``, forward passes without a backward pass run around those that
    train. Returns keys, weights, moments, scores, waiting keys and tallies."""
    fields: dict[str, Any] = {"rows": 60} if policy is None else {"dynamic": policy}
    table = TablePolicy(name="t", width=3, placement=placement, **fields)
    adam = RowOptimizerPolicy(type="adam", lr=0.1)
    collection = EmbeddingCollection([table], adam, seed=1, dtype=torch.float64)
    collection.place(group)

    def look(keys: list[int]) -> None:
        if is_looking:
            collection({"t": Ragged.of_ones(torch.tensor(keys) + group.index)})

    for step in range(4):
        look([step, 30 + step])
        for microbatch in range(2):
            keys = torch.tensor([step, step + 2 * microbatch, 9 + group.index])
            out = collection({"t": Ragged.of_ones(keys)})["t"]
            if microbatch or group.index == 0:  # elsewhere zeros are brought
                out.square().sum().backward()
            look([9, 40 + step, 9])
        collection.step()
    look([1, 2])  # alone in its step
    collection.step()
    rows = collection.rows_here("t")
    scores, waiting = rows.scores, rows.candidates
    return [rows.keys, rows.weights, *rows.state.values(), scores, waiting, collection.tallies["t"]]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("placement", ["data_parallel", "column", "table", "row"])
@pytest.mark.parametrize(
    "policy",
    [
        None,
        DynamicPolicy(eviction=EvictionPolicy(type="lfu"), capacity=40),
        DynamicPolicy(capacity=9),
        DynamicPolicy(admission=AdmissionPolicy(type="frequency", count=2)),
    ],
    ids=["static", "lfu", "full", "admission"],
)
def test_a_pass_without_a_backward_pass_is_let_go(
    policy: DynamicPolicy | None, placement: str, ranks: int
) -> None:
    """A user prints the loss of one more batch in training mode: its rows stay, and its keys get none."""
    expected = on_ranks(ranks, look_between, placement, policy, False)
    found = on_ranks(ranks, look_between, placement, policy, True)
    for there, here in zip(expected, found, strict=True):
        for one, other in zip(there, here, strict=True):
            assert one.equal(other) if isinstance(one, torch.Tensor) else one == other


def test_a_step_that_is_given_up_counts_for_nobody_who_waits() -> None:
    """Also where the table was full: a key keeps its place in the queue, and that it came does not count."""
    waits = AdmissionPolicy(type="frequency", count=3)
    collection = collection_of(DynamicPolicy(capacity=1, admission=waits))
    for _ in range(3):
        train_on(collection, [1])
    for _ in range(2):
        train_on(collection, [7])
    before = collection.rows_here("t").candidates
    with pytest.raises(TableFullError):
        train_on(collection, [7, 8])
    collection({"t": Ragged.of_ones(torch.tensor([7, 9]))})
    collection({"t": Ragged.of_ones(torch.tensor([9, 10]))})
    collection.drop_gradients()
    after = collection.rows_here("t").candidates
    assert before is not None and after is not None and after.tolist() == before.tolist()
    assert [key for key, _ in before.tolist()] == [7]


def test_more_pins_than_rows_are_refused() -> None:
    for limit in ({"capacity": 4}, {"budget_bytes": 4 * 3 * 8}):
        policy = DynamicPolicy(eviction=EvictionPolicy(type="lru", pinned=tuple(range(5))), **limit)
        with pytest.raises(PlanError, match="5 pinned keys for at most 4 rows"):
            collection_of(policy).place()


def queue_with_a_limit(group: Group, placement: str) -> list[list[int]]:
    waits = AdmissionPolicy(type="frequency", count=4, max_waiting=10)
    collection = collection_of(DynamicPolicy(admission=waits), placement)
    collection.place(group)
    for step in range(6):
        mine = torch.arange(8 * step, 8 * step + 8)[group.index :: group.size]
        collection({"t": Ragged.of_ones(torch.cat([mine, torch.tensor([-1])]))})["t"].sum().backward()
        collection.step()
    found = collection.rows_here("t").candidates
    assert found is not None and collection.bytes_here > 16 * 10, "they count as memory"
    return found.tolist()


@pytest.mark.parametrize("placement", ["data_parallel", "row"])
def test_the_queue_for_admission_has_an_end(placement: str) -> None:
    """Endless keys that come once: those that came longest ago go first, the same ones on any number of ranks."""
    (alone,) = on_ranks(1, lambda group: queue_with_a_limit(group, placement))
    assert len(alone) == 10 and {key for key, _ in alone} == {*range(40, 48), 39, 38}
    parts = on_ranks(3, lambda group: queue_with_a_limit(group, placement))
    joined = parts[0] if placement == "data_parallel" else sorted(sum(parts, []))
    assert joined == alone


def test_the_largest_count_that_a_key_can_wait_for() -> None:
    """One more would run into the bits of the step, and the key wait for ever."""
    most = (1 << _COUNT_BITS) - 1
    with pytest.raises(ValueError, match=f"less than or equal to {most}"):
        AdmissionPolicy(type="frequency", count=most + 1)
    policy = DynamicPolicy(admission=AdmissionPolicy(type="frequency", count=most))
    table = DynamicIndex("t", policy, 0, 10, None, 0, True)
    key, step = torch.tensor([7]), 9
    table.wait(torch.tensor([[7, ((step - 2) << _COUNT_BITS) + most - 2]]))
    assert table.take(key, step - 1)[0].tolist() == [-1]
    assert table.candidates is not None
    assert table.candidates.tolist() == [[7, ((step - 1) << _COUNT_BITS) + most - 1]]
    assert table.take(key, step)[0].tolist() != [-1]


def test_who_waits_too_long_is_forgotten() -> None:
    admission = AdmissionPolicy(type="frequency", count=3, forget_steps=4)
    collection = collection_of(DynamicPolicy(admission=admission))
    waiting = []
    for step in range(1, 10):
        train_on(collection, [7] if step in (1, 8) else [100 + step])
        candidates = collection.rows_here("t").candidates
        assert candidates is not None
        waiting.append(candidates[:, 0].tolist())
    assert [7 in keys for keys in waiting] == [True] * 4 + [False] * 3 + [True] * 2
    assert waiting[-1] == [7, 106, 107, 109]
    assert keys_of(collection) == []
