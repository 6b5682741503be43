"""What users do around tables: wrong inputs, copies, state_dict, weights that learn, loops of their own."""

import copy
import io
import math
import pickle
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import shardwise
from shardwise.base.errors import DataError, MismatchError, PlanError, UsageError
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
from shardwise.parallel.embedding.rows import dynamic as dynamic_module
from tests.parallel.embedding.threads import on_ranks

DYNAMIC = DynamicPolicy()


def one(**fields: Any) -> EmbeddingCollection:
    given: dict[str, Any] = {"name": "t", "width": 3, "rows": 10} | fields
    if "dynamic" in given:
        del given["rows"]
    return EmbeddingCollection([TablePolicy(**given)], RowOptimizerPolicy(lr=0.1), dtype=torch.float64)


# Inputs ------------------------------------------------------------------------------------------------------------

KEYS = torch.tensor([1, 2, 3])
OFFSETS = torch.tensor([0, 2, 3])


@pytest.mark.parametrize(
    ("features", "said"),
    [
        (KEYS, "the features are a Tensor; expected a mapping"),
        ({"t": KEYS}, "feature 't' is a Tensor.*Ragged.of_ones"),
        ({"t": (KEYS, OFFSETS)}, "feature 't' is a tuple; expected Ragged"),
        ({"t": Ragged([1, 2, 3], OFFSETS)}, "values are a list; expected a tensor"),  # type: ignore[arg-type]
        ({"t": Ragged(KEYS, None)}, "offsets are a NoneType"),  # type: ignore[arg-type]
        ({"t": Ragged(KEYS[None], OFFSETS)}, r"values are int64 \[1, 3\]"),
        ({"t": Ragged(KEYS.int(), OFFSETS)}, r"values are int32 \[3\]"),
        ({"t": Ragged(KEYS, OFFSETS.int())}, r"offsets are int32 \[3\]"),
        ({"t": Ragged(KEYS, torch.arange(4).int())}, r"offsets are int32 \[4\]"),
        ({"t": Ragged(KEYS, OFFSETS, torch.ones(2))}, r"weights are float32 \[2\]"),
        ({"t": Ragged(KEYS, OFFSETS, torch.ones(3, dtype=torch.int64))}, r"weights are int64 \[3\]"),
        ({"typo": Ragged(KEYS, OFFSETS)}, "feature 't' of table 't' is missing"),
    ],
)
def test_other_inputs_are_refused_by_name(features: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        one()(features)


@pytest.mark.parametrize("pooling", ["max", "none", "concat"])
def test_weights_that_would_be_ignored_are_refused(pooling: str) -> None:
    keys = Ragged(KEYS, torch.arange(4), torch.tensor([1.0, 2.0, 3.0]))
    with pytest.raises(DataError, match=f"pooling {pooling} has no use for them"):
        one(pooling=pooling)({"t": keys})


class Jagged:
    """What TorchRec's KeyedJaggedTensor has."""

    def keys(self) -> list[str]:
        return ["u", "v"]

    def values(self) -> Tensor:
        return torch.tensor([5, 6, 7, 8, 9], dtype=torch.int32)

    def offsets(self) -> Tensor:
        return torch.tensor([0, 2, 2, 3, 3, 4, 5], dtype=torch.int32)

    def weights_or_none(self) -> Tensor:
        return torch.arange(5.0)


def test_a_jagged_tensor_with_keys() -> None:
    found = Ragged.of(Jagged())
    assert found["u"].values.tolist() == [5, 6, 7] and found["u"].offsets.tolist() == [0, 2, 2, 3]
    assert found["v"].values.tolist() == [8, 9] and found["v"].offsets.tolist() == [0, 0, 1, 2]
    assert found["v"].weights is not None and found["v"].weights.tolist() == [3.0, 4.0]
    for name, ragged in found.items():
        ragged.check(name)
    with pytest.raises(DataError, match="Ragged.of"):
        one()(Jagged())  # type: ignore[arg-type]
    with pytest.raises(DataError, match="is no jagged tensor"):
        Ragged.of(KEYS)


# Weights that learn ------------------------------------------------------------------------------------------------


def weighted(group: Group | None, placement: str, pooling: str, kind: str) -> list[Tensor]:
    """Gradients of position weights and rows after three steps of a weighted bag, of this rank's samples."""
    fields: dict[str, Any] = {"dynamic": DYNAMIC, "init_bound": 0.5} if kind == "dynamic" else {"rows": 40}
    policies = [
        TablePolicy(name="a", width=3, features=("f", "g"), pooling=pooling, placement=placement, **fields),
        TablePolicy(name="b", width=3, pooling="max", placement=placement, **fields),
    ]
    tables = EmbeddingCollection(policies, RowOptimizerPolicy(type="sgd", lr=0.1), dtype=torch.float64)
    tables.place(group)
    size, index = (group.size, group.index) if group else (1, 0)
    generator = torch.Generator().manual_seed(3)
    position = torch.rand(4, generator=generator, dtype=torch.float64, requires_grad=True)
    found = []
    for _ in range(3):
        lists = torch.randint(0, 40, (8, 4), generator=generator)
        scale = torch.rand(8, 3, generator=generator, dtype=torch.float64)
        lengths = torch.randint(1, 5, (8,), generator=generator)
        mine = range(8 * index // size, 8 * (index + 1) // size)
        bags = [lists[b, : lengths[b]] for b in mine]
        weights = torch.cat([position[: lengths[b]] for b in mine])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[list(mine)].cumsum(0)])
        ragged = Ragged(torch.cat(bags), offsets)
        out = tables({"f": ragged._replace(weights=weights), "g": ragged, "b": ragged})
        loss = ((out["f"] + 2 * out["g"] + out["b"]) * scale[list(mine)]).square().sum()
        loss.backward()
        tables.step()
        assert position.grad is not None
        found.append(position.grad.clone())
    gradients = torch.stack(found)
    if group is not None:
        group.all_reduce(gradients.view(-1), "gradients of all samples").wait()
    return [gradients]


def by_torch(pooling: str, table: Mapping[str, Tensor]) -> Tensor:
    """The same with whole tables as parameters."""
    weights = {name: nn.Parameter(rows.clone()) for name, rows in table.items()}
    generator = torch.Generator().manual_seed(3)
    position = torch.rand(4, generator=generator, dtype=torch.float64, requires_grad=True)
    found = []
    for _ in range(3):
        lists = torch.randint(0, 40, (8, 4), generator=generator)
        scale = torch.rand(8, 3, generator=generator, dtype=torch.float64)
        lengths = torch.randint(1, 5, (8,), generator=generator)
        loss = torch.zeros((), dtype=torch.float64)
        for b in range(8):
            keys, own = lists[b, : lengths[b]], position[: lengths[b]]
            rows, other = weights["a"][keys], weights["b"][keys]
            f, g = (rows * own[:, None]).sum(0), rows.sum(0)
            if pooling == "mean":
                f, g = f / own.sum(), g / len(keys)
            loss = loss + ((f + 2 * g + other.amax(0)) * scale[b]).square().sum()
        loss.backward()
        assert position.grad is not None
        found.append(position.grad.clone())
        with torch.no_grad():
            for each in weights.values():
                assert each.grad is not None
                each -= 0.1 * each.grad
                each.grad = None
    return torch.stack(found)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("placement", ["data_parallel", "table", "row", "column"])
def test_weights_of_keys_learn(placement: str, pooling: str, kind: str) -> None:
    """Position-weighted bags: d w = <gradient of the bag, row>, as autograd has it of whole tables."""
    fields: dict[str, Any] = {"dynamic": DYNAMIC, "init_bound": 0.5} if kind == "dynamic" else {"rows": 40}
    start = EmbeddingCollection(
        [TablePolicy(name=name, width=3, **fields) for name in "ab"], dtype=torch.float64
    )
    start({name: Ragged.of_ones(torch.arange(40)) for name in "ab"})
    rows = {}
    for name in "ab":
        here = start.rows_here(name)
        rows[name] = here.weights[here.keys.argsort()]
    expected = by_torch(pooling, rows)
    for ranks in (1, 2):
        for (found,) in on_ranks(ranks, lambda group: weighted(group, placement, pooling, kind)):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_weights_learn_through_a_table_in_evaluation_mode() -> None:
    tables = one().eval()
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    out = tables({"t": Ragged(KEYS, OFFSETS, weights)})["t"]
    out[1].sum().backward()
    assert weights.grad is not None and weights.grad[:2].tolist() == [0, 0] and weights.grad[2] != 0


def test_weights_that_cannot_learn_are_refused() -> None:
    def run(group: Group) -> None:
        tables = one(placement="row", exchange="pooled")
        tables.place(group)
        weights = torch.ones(3, requires_grad=True)
        with pytest.raises(
            DataError, match="want gradients, and this table exchanges pooled vectors.*exchange: rows"
        ):
            tables({"t": Ragged(KEYS, OFFSETS, weights)})

    on_ranks(2, run)


# Copies ------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.tables = one(**fields)
        self.out = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, keys: Tensor) -> Tensor:
        out: Tensor = self.out(self.tables({"t": Ragged.of_ones(keys)})["t"])
        return out

    def learn(self, keys: list[int]) -> None:
        self(torch.tensor(keys)).square().sum().backward()
        self.tables.step()


@pytest.mark.parametrize("fields", [{}, {"dynamic": DYNAMIC}, {"dynamic": DynamicPolicy(capacity=1000)}])
def test_tables_with_rows_are_not_copied(fields: dict[str, Any]) -> None:
    """A copy would hold address space of all rows that there may ever be, and an average of weights miss the tables."""
    net = Net(**fields)
    before = copy.deepcopy(net)
    net.learn([1, 2])
    for make in (copy.deepcopy, pickle.dumps, AveragedModel, lambda each: torch.save(each, io.BytesIO())):
        with pytest.raises(UsageError, match=r"not copied or pickled.*state_dict.*AveragedModel"):
            make(net)
    with (
        torch.no_grad(),
        pytest.raises(UsageError, match="a copy that has learnt nothing while its original did"),
    ):
        before.eval()(torch.tensor([1]))
    before.train().learn([1, 2])  # as a model of its own it is as good as the original
    assert before.tables.rows_here("t").weights.equal(net.tables.rows_here("t").weights)


def test_an_average_of_weights_does_not_leave_tables_out_in_silence() -> None:
    net = Net()
    average = AveragedModel(net)
    net.learn([1, 2])
    average.update_parameters(net)
    with torch.no_grad(), pytest.raises(UsageError, match="AveragedModel"):
        average.eval()(torch.tensor([1]))


FULL = DynamicPolicy(
    capacity=6,
    eviction=EvictionPolicy(type="lfu", fraction=0.5, pinned=(7,)),
    admission=AdmissionPolicy(type="frequency", count=2),
)


def states_are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.equal(other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(states_are_equal(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("fields", [{}, {"dynamic": FULL}], ids=["static", "dynamic"])
def test_a_state_dict_carries_the_tables(fields: dict[str, Any], is_used: bool) -> None:
    """torch.save(model.state_dict()) and back go on as if nothing had been, whether the model has rows yet or not."""
    net = Net(**fields)
    for keys in ([1, 2, 7], [2, 7, 5], [2, 5, 3], [1, 7, 3]):
        net.learn(keys)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = Net(**fields)
    if is_used:
        for keys in ([8, 9], [8, 9], [9, 4]):
            other.learn(keys)
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    for each in (net, other):
        for keys in ([6, 2], [6, 3], [6, 6], [5, 4], [4, 1]):
            each.learn(keys)
    assert states_are_equal(net.state_dict(), other.state_dict())
    assert net.tables.rows_here("t").keys.numel() > 2


def test_a_state_dict_without_the_rows_is_refused() -> None:
    net = Net()
    unused = net.state_dict()
    net.learn([1, 2])
    other = Net(rows=11)
    with pytest.raises(MismatchError, match="static, 10 x 3 there and 11 x 3 here"):
        other.load_state_dict(net.state_dict())
    del (without := net.state_dict())["tables._extra_state"]
    with pytest.raises(RuntimeError, match="Missing key.*tables._extra_state"):
        Net().load_state_dict(without)
    net.load_state_dict(unused)
    fresh = Net()
    fresh.tables.place()
    assert net.tables.rows_here("t").weights.equal(fresh.tables.rows_here("t").weights)

    def run(group: Group) -> Any:
        tables = one()
        tables.place(group)
        return tables.state_dict()

    spread, _ = on_ranks(2, run)
    with pytest.raises(MismatchError, match="taken of tables on 2 ranks"):
        one().load_state_dict(spread)


def test_an_engine_takes_the_weights_of_a_state_dict() -> None:
    """Its steps and its optimizer begin anew, that of the tables too."""
    net = Net()
    net.learn([1, 2])
    other = Net()
    other.load_state_dict(net.state_dict())
    engine = shardwise.initialize(other, {"precision": "fp64"})
    mine, theirs = other.tables.rows_here("t"), net.tables.rows_here("t")
    assert mine.weights.equal(theirs.weights) and other.tables.steps == 0
    assert bool(theirs.state["row_sum"].any()) and not mine.state["row_sum"].any()
    engine.close()


def test_a_state_dict_goes_to_any_number_of_ranks() -> None:
    net = Net()
    net.learn([1, 2])
    state = net.tables.state_dict()

    def run(group: Group, early: bool) -> list[list[float]]:
        tables = one(placement="row")
        if early:
            tables.load_state_dict(state)
        tables.place(group)
        if not early:
            tables.load_state_dict(state)
        rows = tables.rows_here("t")
        return [[key, *row] for key, row in zip(rows.keys.tolist(), rows.weights.tolist(), strict=True)]

    whole = net.tables.rows_here("t")
    expected = [[key, *row] for key, row in zip(whole.keys.tolist(), whole.weights.tolist(), strict=True)]
    for early in (True, False):
        assert sorted(sum(on_ranks(3, lambda group, e=early: run(group, e)), [])) == sorted(expected)


# Loops, memory, time -----------------------------------------------------------------------------------------------


def test_a_loop_that_never_steps_the_tables_is_told() -> None:
    net = Net()
    with pytest.warns(UserWarning, match=r"64 training forward passes without a step\(\)"):
        for _ in range(64):
            net(torch.tensor([1])).sum().backward()
    with warnings.catch_warnings(), pytest.raises(UsageError, match=r"call tables.step\(\)"):
        warnings.simplefilter("ignore")
        for _ in range(4096):
            net(torch.tensor([1]))
    net.tables.step()
    net.learn([1])


def test_rows_of_sixteen_bits_are_refused() -> None:
    tables = EmbeddingCollection([TablePolicy(name="t", width=2, rows=3)], dtype=torch.bfloat16)
    with pytest.raises(PlanError, match="would lose everything below 1/256"):
        tables.place()
    tables = EmbeddingCollection([TablePolicy(name="t", width=2, rows=3)], dtype=torch.bfloat16)
    engine = shardwise.initialize(nn.ModuleList([tables, nn.Linear(2, 2)]), {"precision": "bf16"})
    assert tables.dtype == torch.float32
    engine.close()


def test_many_tables_share_the_addresses_of_a_large_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of 2 TiB: 60 empty tables that may each grow to all of it would need more addresses than there are."""
    real = dynamic_module.os.sysconf
    pages = (2 << 40) // real("SC_PAGE_SIZE")
    monkeypatch.setattr(
        dynamic_module.os, "sysconf", lambda name: pages if name == "SC_PHYS_PAGES" else real(name)
    )
    policies = [TablePolicy(name=f"t{i}", width=16, dynamic=DYNAMIC) for i in range(60)]
    tables = EmbeddingCollection(policies)
    tables({f"t{i}": Ragged.of_ones(torch.tensor([i])) for i in range(60)})
    assert tables.placed.parts[0].store.lines.nbytes > 1 << 44
    few = EmbeddingCollection(policies[:3])
    few.place()
    assert few.placed.parts[0].store.lines.nbytes > 0.99 * 3 * (2 << 40), (
        "a few may still have the whole host each"
    )


def test_an_index_cannot_be_flooded() -> None:
    """Two indexes put the same keys into other slots, and give them the same rows."""
    keys = torch.arange(0, 1000, 7)
    one, other = HashIndex(), HashIndex()
    assert one.find_or_insert(keys)[0].equal(other.find_or_insert(keys)[0])
    for index in (one, other):
        if not hasattr(index._places, "_pairs"):
            pytest.skip("without numba there are no slots")
    assert (one._places._pairs != other._places._pairs).any()  # type: ignore[attr-defined]


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(weight: float) -> None:
    """Without an engine, which looks at what comes of them, one such weight would ruin the row of its key."""
    collection = one()
    given = Ragged.of_ones(torch.arange(3))._replace(weights=torch.tensor([1.0, weight, 1.0]))
    with pytest.raises(
        DataError, match=rf"feature 't': the weight of the key at 1 is {weight}; expected finite"
    ):
        collection({"t": given})
    assert collection.rows_here("t").weights.isfinite().all()


def test_features_that_no_table_reads_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """A misspelt name stands beside the right one, and would be left out without a word."""
    collection, keys = one(), Ragged.of_ones(torch.arange(3))
    collection({"t": keys})
    assert not caplog.records
    collection = one()
    copy.deepcopy(collection)({"t": keys, "typo": keys})
    assert not caplog.records, "a copy leaves it to the original"
    for _ in range(3):
        collection({"t": keys, "typo": keys})
    (record,) = caplog.records
    assert "no table reads 'typo' of the batch; the tables read 't'" in record.getMessage()
    other = one()
    other.note_read_elsewhere(["typo"])
    other({"t": keys, "typo": keys})
    assert len(caplog.records) == 1, "an engine knows what the model's other collections read"
