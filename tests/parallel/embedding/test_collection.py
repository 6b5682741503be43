"""The module by itself: like torch's EmbeddingBag, plain to use, and kind where it is used wrongly."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.errors import DataError, PlanError, UsageError
from shardwise.base.ragged import Ragged
from shardwise.comm.collectives import Group
from shardwise.parallel.embedding.collection import EmbeddingCollection, SequenceVectors, collections_of
from shardwise.parallel.embedding.policy import DynamicPolicy, RowOptimizerPolicy, TablePolicy
from tests.parallel.embedding.test_exact import SAMPLES, batch, loss_of, samples_of, tables
from tests.parallel.embedding.threads import on_ranks

SGD = RowOptimizerPolicy(type="sgd", lr=0.1)


def one_table(optimizer: RowOptimizerPolicy = SGD, **fields: Any) -> EmbeddingCollection:
    policy = TablePolicy(**({"name": "t", "rows": 50, "width": 4} | fields))
    return EmbeddingCollection([policy], optimizer, dtype=torch.float64)


def ragged(seed: int = 0, rows: int = 50, samples: int = 9) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (samples,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Ragged(torch.randint(0, rows, (int(offsets[-1]),), generator=generator), offsets)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_pools_and_learns_as_an_embedding_bag(mode: str) -> None:
    given = ragged()
    bag = nn.EmbeddingBag(50, 4, mode=mode, include_last_offset=True, dtype=torch.float64)
    collection = one_table(pooling=mode)
    collection.load_bag("t", bag)
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    for step in range(3):
        given = ragged(step)
        ours, theirs = collection({"t": given})["t"], bag(given.values, given.offsets)
        torch.testing.assert_close(ours, theirs)
        (ours**2).sum().backward()
        (theirs**2).sum().backward()
        collection.step()
        optimizer.step()
        optimizer.zero_grad()
    rows = collection.rows_here("t")
    assert rows.keys.tolist() == list(range(50))
    torch.testing.assert_close(rows.weights, bag.weight.detach())


def test_weights_of_keys() -> None:
    given = ragged()
    weights = torch.rand(given.values.shape, dtype=torch.float64)
    bag = nn.EmbeddingBag(50, 4, mode="sum", include_last_offset=True, dtype=torch.float64)
    collection = one_table()
    collection.load_bag("t", bag)
    expected = bag(given.values, given.offsets, per_sample_weights=weights)
    torch.testing.assert_close(collection({"t": given._replace(weights=weights)})["t"], expected)


OPTIMIZERS = {
    "sgd": (
        RowOptimizerPolicy(type="sgd", lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1),
        False,
    ),
    "adagrad": (
        RowOptimizerPolicy(type="adagrad", lr=0.1, eps=1e-10),
        lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-10),
        False,
    ),
    "adam": (
        RowOptimizerPolicy(type="adam", lr=0.05),
        lambda p: torch.optim.SparseAdam(p, lr=0.05),
        True,
    ),
    "exact_adam": (
        RowOptimizerPolicy(type="adam", lr=0.05, exact=True, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
        False,
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_learn_as_torch_has_it(name: str) -> None:
    """Also rows that are not in every batch: touched rows alone for SparseAdam, all rows for AdamW."""
    policy, make, sparse = OPTIMIZERS[name]
    table = nn.Embedding(50, 4, sparse=sparse, dtype=torch.float64)
    collection = one_table(policy, pooling="none")
    collection.load_bag("t", table)
    optimizer = make(list(table.parameters()))
    for step in range(6):
        given = ragged(step)
        ours = collection({"t": given})["t"]
        assert isinstance(ours, SequenceVectors) and torch.equal(ours.offsets, given.offsets)
        theirs = table(given.values)
        torch.testing.assert_close(ours.values, theirs)
        weight = torch.linspace(-1, 2, theirs.numel(), dtype=torch.float64).view_as(theirs)
        torch.tanh(ours.values * weight).sum().backward()
        torch.tanh(theirs * weight).sum().backward()
        collection.step()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(collection.rows_here("t").weights, table.weight.detach())


def test_concat_and_stacked() -> None:
    keys = torch.arange(12).view(4, 3)
    collection = one_table(pooling="concat")
    out = collection({"t": Ragged(keys.flatten(), torch.arange(0, 13, 3))})["t"]
    weights = collection.rows_here("t").weights
    assert torch.equal(out, weights[keys].view(4, 12))
    with pytest.raises(UsageError, match="concat"):
        collection.stacked({"t": Ragged(keys.flatten(), torch.arange(0, 13, 3))})
    with pytest.raises(DataError, match="same number of keys in every sample, here 0 to 5"):
        collection({"t": Ragged(torch.arange(5), torch.tensor([0, 5, 5]))})

    def grads(stacked: bool, ones: bool) -> Tensor:
        two = EmbeddingCollection(
            [TablePolicy(name=name, rows=20, width=4) for name in "ab"], SGD, dtype=torch.float64
        )
        features = {"b": ragged(1, 20), "a": ragged(2, 20)}
        if ones:
            features = {name: Ragged.of_ones(given.values[:9]) for name, given in features.items()}
        vectors = two.stacked(features) if stacked else torch.stack(list(two(features)[n] for n in "ab"), 1)
        assert two.feature_names == ["a", "b"] and vectors.shape == (9, 2, 4)
        (vectors.sum(2).prod(1)).sum().backward()
        two.step()
        return torch.cat([two.rows_here(name).weights for name in "ab"])

    for ones in (True, False):
        assert torch.equal(grads(True, ones), grads(False, ones))


def test_evaluation_keeps_nothing_and_weights_are_no_parameters() -> None:
    collection = one_table()
    before = collection.rows_here("t").weights
    with torch.no_grad():
        collection({"t": ragged()})
    collection.eval()
    collection({"t": ragged()})
    collection.train()
    collection.step()
    assert torch.equal(collection.rows_here("t").weights, before)
    assert not list(collection.parameters()) and collection.bytes_here == 50 * 4 * 8
    assert "t: 50 x 4" in repr(collection)
    model = nn.ModuleDict({"top": nn.Linear(2, 2), "inner": nn.Sequential(collection)})
    assert collections_of(model) == {"inner.0": collection}


def test_a_dropped_step_changes_nothing() -> None:
    collection = one_table()
    before = collection.rows_here("t").weights
    collection({"t": ragged()})["t"].sum().backward()
    collection.drop_gradients()
    collection.step()
    assert torch.equal(collection.rows_here("t").weights, before)


def test_the_same_vectors_twice() -> None:
    out = one_table()({"t": ragged()})["t"].sum()
    out.backward(retain_graph=True)
    with pytest.raises(UsageError, match="second backward"):
        out.backward()


def test_a_prepared_batch_learns_once() -> None:
    collection = one_table()
    prepared = collection.prepare({"t": ragged()})
    with torch.no_grad():
        first = collection(prepared)["t"]
    assert torch.equal(collection(prepared)["t"], first)
    with pytest.raises(UsageError, match="second training forward pass"):
        collection(prepared)


def test_rows_may_come_before_the_tables_have_a_place() -> None:
    bag = nn.EmbeddingBag(50, 4, dtype=torch.float64)
    collection = one_table()
    collection.load_bag("t", bag)
    assert not collection.is_placed
    with pytest.raises(UsageError, match="no table 'tt'"):
        collection.load_bag("tt", bag)
    collection.place()
    assert torch.equal(collection.rows_here("t").weights, bag.weight.detach())


def test_keys_outside() -> None:
    keys = torch.tensor([3, -1, 57])
    with pytest.raises(DataError, match=r"feature 't': key -1 at 1 lies outside .* 0 to 49; 2 of 3"):
        one_table()({"t": Ragged.of_ones(keys)})
    for out_of_range, expected in (("clamp", [3, 0, 49]), ("modulo", [3, 49, 7])):
        collection = one_table(out_of_range=out_of_range)
        found = collection({"t": Ragged.of_ones(keys)})["t"]
        assert torch.equal(found, collection.rows_here("t").weights[expected])
    assert keys.tolist() == [3, -1, 57], "the batch is the caller's"


def test_what_does_not_fit_is_named() -> None:
    collection = EmbeddingCollection([TablePolicy(name=n, rows=9, width=2) for n in ("user", "item")])
    one = Ragged.of_ones(torch.tensor([1, 2]))
    with pytest.raises(DataError, match="feature 'item' of table 'item' is missing; did you mean 'itme'"):
        collection({"user": one, "itme": one})
    with pytest.raises(DataError, match="'user' has 2 samples and 'item' 3"):
        collection({"user": one, "item": Ragged.of_ones(torch.arange(3))})
    with pytest.raises(DataError, match="feature 'item': offsets go from 0 to 3, but there are 2"):
        collection({"user": one, "item": Ragged(torch.arange(2), torch.tensor([0, 1, 3]))})
    with pytest.raises(PlanError, match="feature 'user' is there twice"):
        EmbeddingCollection(
            [*collection.tables[:1], TablePolicy(name="x", rows=1, width=1, features=("user",))]
        )
    with pytest.raises(PlanError, match="no tables"):
        EmbeddingCollection([])
    with pytest.raises(UsageError, match="no table 'usr'; did you mean 'user'"):
        collection.rows_here("usr")
    with pytest.raises(UsageError, match="on 1 rank"):
        collection.place()


# Several ranks -----------------------------------------------------------------------------------------------------


def ahead_of_the_batch(group: Group, ahead: bool) -> list[Any]:
    """Keys of the next batch travel before this one is trained on, or after."""
    collection = EmbeddingCollection(tables("row", "rows", True, False), SGD, dtype=torch.float64)
    collection.place(group)
    each = SAMPLES // group.size
    given = [
        {n: samples_of(r, group.index * each, (group.index + 1) * each) for n, r in batch(s).items()}
        for s in range(4)
    ]
    losses, prepared = [], collection.prepare(given[0])
    for step in range(4):
        if step and not ahead:
            prepared = collection.prepare(given[step])
        now = prepared
        if ahead and step < 3:
            prepared = collection.prepare(given[step + 1])
        loss = loss_of(collection(now))
        loss.backward()
        collection.step()
        losses.append(loss.detach())
    return [torch.stack(losses), *(collection.rows_here(t.name).weights for t in collection.tables)]


def test_keys_may_travel_ahead() -> None:
    for now, before in zip(
        on_ranks(2, ahead_of_the_batch, False), on_ranks(2, ahead_of_the_batch, True), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(now, before, strict=True))


def uneven(group: Group, placement: str, exchange: str) -> list[Tensor]:
    """Rank 1 has no sample at all; the loss of rank 2 does not depend on the vectors."""
    collection = EmbeddingCollection(tables(placement, exchange, False, True), SGD, dtype=torch.float64)
    collection.place(group)
    for step in range(2):
        whole = batch(step)
        start, stop = ((0, 8), (8, 8), (8, 12))[group.index]
        vectors = collection({name: samples_of(given, start, stop) for name, given in whole.items()})
        if group.index < 2:
            loss_of(vectors).backward()
        collection.step()
    return [collection.rows_here(table.name).weights for table in collection.tables]


def alone(group: Group) -> dict[str, Any]:
    collection = EmbeddingCollection(tables("auto", "auto", False, True), SGD, dtype=torch.float64)
    collection.place(group)
    for step in range(2):
        loss_of(collection({n: samples_of(given, 0, 8) for n, given in batch(step).items()})).backward()
        collection.step()
    return {table.name: collection.rows_here(table.name) for table in collection.tables}


def test_ranks_without_samples_or_gradients_join() -> None:
    expected = on_ranks(1, alone)[0]["wide"]
    order = expected.keys.argsort()
    for placement, exchange in (
        ("data_parallel", "auto"),
        ("column", "auto"),
        ("table", "rows"),
        ("table", "pooled"),
    ):
        results = on_ranks(3, uneven, placement, exchange)
        wide = [weights[2] for weights in results if weights[2].numel()]
        found = torch.cat(wide, 1) if placement == "column" else wide[0]
        torch.testing.assert_close(found[order], expected.weights[order])
    on_ranks(3, uneven, "row", "rows")
    on_ranks(3, uneven, "row", "pooled")


def test_weights_of_one_key_a_sample() -> None:
    """Where samples stand one after another, weights do too."""
    collection = one_table(features=("a", "b"))
    keys = torch.arange(6).view(2, 3)
    weights = torch.arange(1.0, 7.0, dtype=torch.float64).view(2, 3)
    given = {n: Ragged.of_ones(keys[i])._replace(weights=weights[i]) for i, n in enumerate("ab")}
    found, rows = collection(given), collection.rows_here("t").weights
    for i, name in enumerate("ab"):
        torch.testing.assert_close(found[name], rows[keys[i]] * weights[i][:, None])


@pytest.mark.parametrize("placement", ["data_parallel", "table", "row", "column"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("grows", [False, True], ids=["static", "dynamic"])
def test_one_key_each_finds_its_own_row_and_moves_it(placement: str, ranks: int, grows: bool) -> None:
    """Vectors stand sample after sample there, while keys may stand feature after feature."""
    size: dict[str, Any] = {"dynamic": DynamicPolicy()} if grows else {"rows": 40}
    given: dict[str, Any] = {"width": 4, "placement": placement, "init_bound": 0.5, "exchange": "rows"} | size

    def run(group: Group) -> None:
        policies = [TablePolicy(name="a", features=("f", "g"), **given), TablePolicy(name="b", **given)]
        collection = EmbeddingCollection(policies, SGD, dtype=torch.float64)
        collection.place(group)
        generator = torch.Generator().manual_seed(group.index)
        keys = torch.randint(0, 40, (3, 7), generator=generator)
        features = {name: Ragged.of_ones(each) for name, each in zip("fgb", keys, strict=True)}
        # What each key's vector is when it is asked for in a batch that is not of one key each.
        uneven = {
            name: Ragged(torch.cat([each.values, each.values[:1]]), torch.tensor([*range(7), 8]))
            for name, each in features.items()
        }
        collection(uneven)
        collection.drop_gradients()
        before = {name: collection(features)[name].detach().clone() for name in "fgb"}
        collection.drop_gradients()
        for name in "fgb":
            torch.testing.assert_close(
                before[name][:6], collection(uneven)[name][:6].detach(), rtol=0, atol=0
            )
            collection.drop_gradients()
        factors = torch.arange(1.0, 4.0, dtype=torch.float64)
        found = collection(features)
        sum(factor * found[name].sum() for factor, name in zip(factors, "fgb", strict=True)).backward()
        collection.step()
        mine = torch.zeros(2, 40, dtype=torch.float64)  # table, key: summed gradient of every element
        for (table, factor), row in zip(((0, 1.0), (0, 2.0), (1, 3.0)), keys, strict=True):
            mine[table].index_add_(0, row, torch.full((7,), factor, dtype=torch.float64))
        group.all_reduce(mine.view(-1), "expected gradients").wait()
        after = collection(features)
        for name, table, row in zip("fgb", (0, 0, 1), keys, strict=True):
            expected = before[name] - 0.1 * mine[table][row][:, None]
            torch.testing.assert_close(after[name].detach(), expected, rtol=1e-12, atol=1e-12)

    on_ranks(ranks, run)


def test_rates_that_no_rule_can_take() -> None:
    with pytest.raises(ValueError, match=r"each lies in \[0, 1\)"):
        RowOptimizerPolicy(type="adam", betas=(1.0, 0.9))
    with pytest.raises(ValueError, match="is 1 or more"):
        RowOptimizerPolicy(type="adam", exact=True, lr=2.0, weight_decay=0.5)
