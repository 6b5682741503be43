"""The same losses and the same rows on every number of ranks and with every placement, in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.base.ragged import Ragged
from shardwise.comm.collectives import Group
from shardwise.parallel.embedding.batch import SequenceVectors
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import DynamicPolicy, RowOptimizerPolicy, TablePolicy
from tests.parallel.embedding.threads import on_ranks

SAMPLES, STEPS = 12, 4
"""Of the global batch; four ranks have three each."""

OPTIMIZERS = {
    "sgd": RowOptimizerPolicy(type="sgd", lr=0.1, weight_decay=0.01),
    "momentum": RowOptimizerPolicy(type="momentum", lr=0.1),
    "adagrad": RowOptimizerPolicy(type="adagrad", lr=0.1),
    "rowwise_adagrad": RowOptimizerPolicy(type="rowwise_adagrad", lr=0.1, weight_decay=0.01),
    "adam": RowOptimizerPolicy(type="adam", lr=0.05),
    "exact_adam": RowOptimizerPolicy(type="adam", lr=0.05, exact=True, weight_decay=0.1),
    "ftrl": RowOptimizerPolicy(type="ftrl", lr=0.1, l1=0.01, l2=0.01),
}
PLACEMENTS = [
    ("data_parallel", "auto"),
    ("column", "auto"),
    ("table", "rows"),
    ("table", "pooled"),
    ("row", "rows"),
    ("row", "pooled"),
]


def tables(placement: str, exchange: str, dynamic: bool, pooled: bool) -> list[TablePolicy]:
    """Three tables of two widths, features that share one, several poolings where ``pooled`` is not asked for."""
    size: dict[str, Any] = {"dynamic": DynamicPolicy(initial_rows=2)} if dynamic else {"rows": 3000}
    small: dict[str, Any] = {"dynamic": DynamicPolicy()} if dynamic else {"rows": 7}
    poolings = {"a": "sum", "b": "mean"} if pooled else {"a": "max", "b": "mean", "c": "none"}
    return [
        TablePolicy(
            name="large",
            width=6,
            features=("a", "b", "c"),
            pooling=poolings,
            placement=placement,
            exchange=exchange,
            **size,
        ),
        TablePolicy(name="small", width=6, placement=placement, exchange=exchange, init_bound=0.5, **small),
        TablePolicy(name="wide", width=8, features=("d",), placement=placement, exchange=exchange, **size),
    ]


def batch(step: int, ones: bool = False) -> dict[str, Ragged]:
    """The global batch of a step: several keys a sample, none in some, a few keys that always come, weights for b;
    or one key of each feature."""
    generator = torch.Generator().manual_seed(step)
    found = {}
    for name, rows in (("a", 3000), ("b", 3000), ("c", 3000), ("small", 7), ("d", 3000)):
        lengths = torch.randint(0, 4, (SAMPLES,), generator=generator)
        if ones:
            lengths.fill_(1)
        offsets = torch.zeros(SAMPLES + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        values = torch.randint(0, rows, (int(offsets[-1]),), generator=generator)
        values[::3] = values[::3] % 5
        weights = torch.rand(values.shape, generator=generator) + 0.5 if name == "b" else None
        found[name] = Ragged(values, offsets, weights)
    return found


def samples_of(ragged: Ragged, start: int, stop: int) -> Ragged:
    first, last = int(ragged.offsets[start]), int(ragged.offsets[stop])
    weights = None if ragged.weights is None else ragged.weights[first:last]
    return Ragged(ragged.values[first:last], ragged.offsets[start : stop + 1] - first, weights)


def vector_of(out: Any) -> Tensor:
    """One vector a sample, also of a sequence, in which places count."""
    if not isinstance(out, SequenceVectors):
        return out
    values, device = out.values, out.values.device
    scaled = values * torch.linspace(1, 2, values.shape[1], dtype=values.dtype, device=device)
    samples = len(out.offsets) - 1
    bag = torch.arange(samples, device=device).repeat_interleave(out.offsets.diff())
    return values.new_zeros(samples, values.shape[1]).index_add(0, bag, scaled)


def loss_of(vectors: dict[str, Any]) -> Tensor:
    """Sum over samples of something that couples the features."""
    total = sum(vector_of(vectors[name]).sum(1) for name in ("a", "b", "c", "small", "d"))
    squares = sum((vector_of(vectors[name]) ** 2).sum(1) for name in ("a", "c", "d"))
    return (torch.tanh(total) + 0.3 * squares).sum()


def train(
    group: Group,
    policies: list[TablePolicy],
    optimizer: RowOptimizerPolicy,
    microbatches: int = 1,
    max_norm: float | None = None,
    ones: bool = False,
) -> tuple[list[float], dict[str, Any]]:
    """Losses of the global batches, and this rank's rows at the end."""
    collection = EmbeddingCollection(policies, optimizer, seed=3, dtype=torch.float64)
    collection.place(group, batch=SAMPLES)
    losses = []
    each = SAMPLES // group.size // microbatches
    for step in range(STEPS):
        whole = batch(step, ones)
        total = torch.zeros(1, dtype=torch.float64)
        for microbatch in range(microbatches):
            start = (group.index * microbatches + microbatch) * each
            mine = {name: samples_of(ragged, start, start + each) for name, ragged in whole.items()}
            loss = loss_of(collection(mine))
            loss.backward()
            total += loss.detach()
        collection.step(1.0 - 0.1 * step, divisor=SAMPLES, max_norm=max_norm)
        group.all_reduce(total, "the loss").wait()
        losses.append(float(total))
    rows = {table.name: collection.rows_here(table.name) for table in policies}
    return losses, rows


def together(results: list[Any], policies: list[TablePolicy], placement: str) -> dict[str, Any]:
    """The whole tables from what the ranks hold: {table: {key: (weights, state)}}."""
    whole: dict[str, Any] = {}
    for policy in policies:
        parts = [rows[policy.name] for _, rows in results]
        if placement == "column" and len(parts) > 1:
            assert all(torch.equal(part.keys, parts[0].keys) for part in parts)
            weights = torch.cat([part.weights for part in parts], 1)
            state = {
                name: given if name in ("row_sum", "step") else torch.cat([p.state[name] for p in parts], 1)
                for name, given in parts[0].state.items()
            }
            keys = parts[0].keys
        else:
            held = parts[:1] if placement == "data_parallel" else parts
            keys = torch.cat([part.keys for part in held])
            weights = torch.cat([part.weights for part in held])
            state = {name: torch.cat([part.state[name] for part in held]) for name in held[0].state}
        order = keys.argsort()
        assert (keys[order].diff() > 0).all(), "every key has one home"
        whole[policy.name] = (keys[order], weights[order], {n: s[order] for n, s in state.items()})
    return whole


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, (keys, weights, state) in expected.items():
        assert torch.equal(found[name][0], keys), name
        torch.testing.assert_close(found[name][1], weights, rtol=1e-11, atol=1e-12)
        assert found[name][2].keys() == state.keys()
        for which, values in state.items():
            torch.testing.assert_close(found[name][2][which], values, rtol=1e-11, atol=1e-12)


def check(
    size: int,
    placement: str,
    exchange: str,
    dynamic: bool,
    optimizer: str,
    microbatches: int = 1,
    max_norm: float | None = None,
    ones: bool = False,
) -> None:
    pooled = exchange == "pooled" or ones
    policies = tables(placement, exchange, dynamic, pooled)
    alone_policies = tables("auto", "auto", dynamic, pooled)
    alone = on_ranks(1, train, alone_policies, OPTIMIZERS[optimizer], 1, max_norm, ones)
    results = on_ranks(size, train, policies, OPTIMIZERS[optimizer], microbatches, max_norm, ones)
    for losses, _ in results:
        torch.testing.assert_close(losses, alone[0][0], rtol=1e-12, atol=1e-12)
    compare(together(results, policies, placement), together(alone, policies, "row"))


@pytest.mark.parametrize(("placement", "exchange"), PLACEMENTS)
@pytest.mark.parametrize("size", [2, 4])
def test_every_placement(size: int, placement: str, exchange: str) -> None:
    check(size, placement, exchange, False, "rowwise_adagrad")


@pytest.mark.parametrize("placement", ["data_parallel", "column", "table", "row"])
@pytest.mark.parametrize("size", [2, 3])
def test_dynamic_tables(size: int, placement: str) -> None:
    check(size, placement, "auto", True, "rowwise_adagrad")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("placement", ["data_parallel", "column", "row"])
def test_every_optimizer(placement: str, optimizer: str) -> None:
    check(2, placement, "rows" if placement == "row" else "auto", False, optimizer)


@pytest.mark.parametrize(("placement", "exchange"), PLACEMENTS)
def test_accumulation_and_clipping(placement: str, exchange: str) -> None:
    check(2, placement, exchange, False, "adagrad", microbatches=3, max_norm=0.05)


@pytest.mark.parametrize(("placement", "exchange"), PLACEMENTS)
def test_one_key_of_each_feature(placement: str, exchange: str) -> None:
    """Where samples may stand one after another in memory."""
    check(3, placement, exchange, False, "adagrad", ones=True)
