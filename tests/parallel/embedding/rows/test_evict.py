"""Rows that make room: those with the lowest score go first, alike in every layout."""

from typing import Any

import pytest
import torch

from shardwise.comm.collectives import Group
from shardwise.kernels.tables import hash_index
from shardwise.parallel.embedding.policy import (
    AdmissionPolicy,
    DynamicPolicy,
    EvictionPolicy,
)
from shardwise.parallel.embedding.rows import evict as evict_module
from tests.parallel.embedding.grown import collection_of, keys_of, train_on
from tests.parallel.embedding.threads import on_ranks


@pytest.mark.parametrize(("kind", "left"), [("lru", [2, 4, 5]), ("lfu", [1, 2, 5])])
def test_the_lowest_go_first(kind: str, left: list[int]) -> None:
    eviction = EvictionPolicy(type=kind, fraction=0.25, pinned=(5,))
    collection = collection_of(DynamicPolicy(capacity=4, eviction=eviction))
    for keys in ([1, 5], [1, 1], [1, 2], [3, 2], [2, 2]):
        train_on(collection, keys)
    assert keys_of(collection) == [1, 2, 3, 5], "full, and no more than that"
    train_on(collection, [4, 2])
    assert keys_of(collection) == left


def train_with_eviction(group: Group, placement: str, kind: str, admission: str) -> dict[str, Any]:
    dynamic = DynamicPolicy(
        capacity=40,
        eviction=EvictionPolicy(type=kind, fraction=0.2, pinned=(3, 4)),
        admission=AdmissionPolicy(type=admission, count=2 if admission == "frequency" else 1),
    )
    collection = collection_of(dynamic, placement)
    collection.place(group)
    each = 24 // group.size
    for step in range(12):
        generator = torch.Generator().manual_seed(step)
        keys = (torch.rand(24, generator=generator) ** 3 * 120).long() + step * 2
        mine = keys[group.index * each : (group.index + 1) * each]
        train_on(collection, mine.tolist())
    rows = collection.rows_here("t")
    assert rows.scores is not None
    tally = collection.tallies["t"]
    return {"tally": tally, "keys": rows.keys, "weights": rows.weights, "scores": rows.scores}


@pytest.mark.parametrize("kind", ["lru", "lfu"])
@pytest.mark.parametrize("admission", ["always", "frequency"])
@pytest.mark.parametrize("placement", ["data_parallel", "column", "table", "row"])
def test_every_layout_evicts_the_same(placement: str, admission: str, kind: str) -> None:
    alone = on_ranks(1, train_with_eviction, "auto", kind, admission)[0]
    found = on_ranks(3, train_with_eviction, placement, kind, admission)
    parts = found[:1] if placement in ("data_parallel", "column") else found
    keys = torch.cat([part["keys"] for part in parts])
    scores = torch.cat([part["scores"] for part in parts])
    weights = torch.cat(
        [part["weights"] for part in (found if placement == "column" else parts)], int(placement == "column")
    )
    order, expected = keys.argsort(), alone["keys"].argsort()
    assert 0 < len(keys) <= 40
    sums = [sum(part["tally"][i] for part in found) for i in range(3)]
    assert sums == list(alone["tally"]) and sums[0] == len(keys) == sums[1] - sums[2] and sums[2] > 0
    assert torch.equal(keys[order], alone["keys"][expected])
    assert torch.equal(scores[order], alone["scores"][expected])
    torch.testing.assert_close(weights[order], alone["weights"][expected], rtol=1e-12, atol=1e-14)


def keys_of_step(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return (torch.rand(40, generator=generator) ** 2 * 200).long() + 4 * step


def train_a_few_at_once(group: Group, kind: str) -> list[list[int]]:
    """Keys on this rank after each step of a table that is full from its third step on."""
    eviction = EvictionPolicy(
        type=kind, fraction=0.5, pinned=(3, 4), max_age_steps=5 if kind == "age" else None
    )
    collection = collection_of(
        DynamicPolicy(capacity=None if kind == "age" else 80, eviction=eviction), "row"
    )
    collection.place(group)
    found = []
    for step in range(1, 31):
        train_on(collection, keys_of_step(step)[group.index :: group.size].tolist())
        found.append(keys_of(collection))
    return found


def evicted_by_hand(kind: str) -> list[list[int]]:
    """The same keys in a dictionary from key to score."""
    scores: dict[int, int] = {}
    found = []
    for step in range(1, 31):
        for key in set(keys_of_step(step).tolist()):
            scores[key] = scores.get(key, 0) + 1 if kind == "lfu" else step
        order = sorted((score, key) for key, score in scores.items() if key not in (3, 4))
        surplus, count = len(scores) - 80, 0
        if kind == "age":
            count = sum(score <= step - 5 for score, _ in order)
        elif surplus > 0:
            count = min(len(scores) - 40, max(4 * surplus, surplus + 3))
        for _, key in order[:count]:
            del scores[key]
        found.append(sorted(scores))
    return found


@pytest.mark.parametrize("kind", ["lru", "lfu", "age"])
def test_a_step_evicts_in_proportion_to_what_it_inserts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a dictionary on 1, 2 and 4 ranks, with a search ahead that needs many steps for a pass."""
    monkeypatch.setattr(evict_module, "_FEWEST_AT_ONCE", 3)
    monkeypatch.setattr(hash_index, "_FEWEST_ROWS", 5)
    expected = evicted_by_hand(kind)
    assert max(map(len, expected)) <= 80 or kind == "age"
    for ranks in (1, 2, 4):
        parts = on_ranks(ranks, train_a_few_at_once, kind)
        assert [sorted(sum(keys, [])) for keys in zip(*parts, strict=True)] == expected


def test_candidates_and_scores_are_kept() -> None:
    """A key that has come twice of three times is admitted at its third coming in the run that goes on."""
    dynamic = DynamicPolicy(admission=AdmissionPolicy(type="frequency", count=3))
    before, after = collection_of(dynamic), collection_of(dynamic)
    for keys in ([1, 2], [1, 2], [1]):
        train_on(before, keys)
    after.saved.load_progress(before.saved.progress())
    after.load_rows("t", before.rows_here("t"))
    assert keys_of(after) == [1]
    train_on(after, [2, 3])
    assert keys_of(after) == [1, 2] and after.steps == 4
